"""How near training comes to what a GPU can do: one command, one JSON, one record. `python -m benchmarks.gpu`."""

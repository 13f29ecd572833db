"""Flight recorder: each rank keeps a small file of what it is doing, to explain why a run hangs."""

"""Start the processes of a run and number its ranks."""

"""Parameters, memory, FLOPs and seconds of a run, from its sizes alone."""

"""Parameters, memory and FLOPs, from sizes alone."""

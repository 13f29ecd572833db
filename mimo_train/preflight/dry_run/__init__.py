"""One rank of any cluster in one process: the program's own set-up, steps, evaluation and save on fake process groups
and fake tensors, which take no memory (`mimo-train check CONFIG --dry-run`)."""

"""Runs one rank of any cluster in one process (`mimo-train check CONFIG --dry-run`): set-up, steps, and evaluation
on fake process groups and fake tensors, which take no memory."""

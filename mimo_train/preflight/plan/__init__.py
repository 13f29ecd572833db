"""The planner: searches the legal layouts of a run for the shortest predicted step on a number of GPUs."""

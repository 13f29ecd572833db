"""The planner: searches the legal layouts of a run on a number of GPUs for the shortest predicted step."""

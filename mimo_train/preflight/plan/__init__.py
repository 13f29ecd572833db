"""The planner: legal layouts of a run for so many GPUs, by the time of a step that is predicted for each."""

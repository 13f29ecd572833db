"""The parts of one step: microbatches, forward steps, losses, the schedule."""

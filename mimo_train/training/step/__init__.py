"""What happens in one step: microbatches, forward steps, losses, the schedule."""

"""The training program: set-up, the loop, forward steps, losses, evaluation, exit."""

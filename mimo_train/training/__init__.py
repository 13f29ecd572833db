"""The training program: set-up, the one loop, forward steps, losses, evaluation, exit."""

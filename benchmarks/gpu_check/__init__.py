"""What a machine with a GPU does, in one table. Started by scripts/gpu_check.sh."""


class Missing(Exception):
    """Something that a job needs is not on this machine; the message names it."""

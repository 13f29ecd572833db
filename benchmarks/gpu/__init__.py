"""What a machine with a GPU computes, and how near training comes to its peak: one table. See scripts/gpu_check.sh."""

"""The optimizer and learning-rate schedule of every module."""

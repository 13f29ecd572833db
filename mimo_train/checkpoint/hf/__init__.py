"""Directories as `transformers` saves them: weights read by each rank, and written from a checkpoint."""

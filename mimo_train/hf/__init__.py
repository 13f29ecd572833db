"""Directories as `transformers` saves them, and files of PEFT: read by each rank, and written from a checkpoint."""

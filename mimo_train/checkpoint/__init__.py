"""Checkpoints: one folder per step under `run.dir`/checkpoints, complete or absent, readable at any layout."""

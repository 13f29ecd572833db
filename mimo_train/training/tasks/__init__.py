"""Tasks: what a run learns from its samples."""

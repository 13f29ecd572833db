"""Checks before a run starts: config and data, layout search, dry run."""

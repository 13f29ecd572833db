"""What can be known before a run starts: check, layout search, dry run."""

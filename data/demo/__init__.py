"""Demo shards, made locally without a download."""

"""Demo shards that are made on this machine, without a download."""

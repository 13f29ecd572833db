"""Shards that cannot be indexed, read from their beginning to their end (`data.stream`)."""

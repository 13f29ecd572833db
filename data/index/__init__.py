"""Shards: finding them, and indexes of their content."""

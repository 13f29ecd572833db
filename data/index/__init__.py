"""Shards: where they are, and what is in each of them without reading it again."""

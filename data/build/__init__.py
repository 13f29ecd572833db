"""Shards from JSON, tables, folders and datasets."""

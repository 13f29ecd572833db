"""The catalogue of a run: indexes of all its shards, in one file for each folder."""

"""Reading and writing files: byte ranges of shards, atomic replacement."""

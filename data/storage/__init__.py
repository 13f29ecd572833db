"""Reading and writing files: byte ranges of shards, replacing a file in one piece."""

"""One sample: its metadata from the index, its tokens and its media."""

"""One sample: its metadata from the index, and its tokens and media."""

"""What carries features of an encoder into the language model's embedding space."""

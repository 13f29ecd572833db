"""Projectors of encoder features into the language model's embedding space."""

"""Families of language models of `transformers`, as data: a file says how config.json and tensors spell its models."""

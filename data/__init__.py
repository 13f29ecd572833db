"""The data path: WebDataset shards in, exact batches out.

One stage per file; nothing here knows of models or process groups.
"""

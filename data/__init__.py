"""The data path: WebDataset shards in, exact batches out.

One stage per file; nothing here depends on models or process groups.
"""

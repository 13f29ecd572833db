"""The data path: WebDataset shards in, exact batches out. It is independent of models and process groups."""

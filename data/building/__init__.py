"""Shards from what people have: tables, JSON and folders of media, tars. See `data.build`."""

"""Encoders and their projectors. Each family has a folder with its sizes (`spec`) and its code (`model`); `registry`
lists the families. Nothing here depends on training: layouts and process groups are passed in."""

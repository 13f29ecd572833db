"""Encoders whose layers are built here, a folder for each family."""

"""Encoders of modalities and their projectors: what they are made of (`spec`), and how to build them (`registry`).

Nothing here knows about training; layouts and process groups are handed in.
"""

"""Encoders of modalities and their projectors: a folder for each family, with what it is made of (`spec`) and its code
(`model`); `registry` names the families.

Nothing here knows about training; layouts and process groups are handed in.
"""

"""Encoders of modalities and their projectors: a folder for each family, with its sizes (`spec`) and its code
(`model`); `registry` lists the families.

Nothing here depends on training; layouts and process groups are passed in.
"""

"""Text from a trained model on one process: prompts with media, a cache of keys and values, sampling, conversations.

Where a model comes from is `source.py` alone; everything else takes a built one.
"""

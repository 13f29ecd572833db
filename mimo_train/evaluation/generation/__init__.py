"""Text from a trained model: prompts with media, a cache of keys and values, sampling, conversations.

Only `source.py` knows where a model comes from; the other modules take a built one.
"""

"""Pieces of a transformer layer. A block owns all that depends on it: `spec.py` imports no torch and has its keys,
counts, limits and names of weights; `module.py` builds it."""

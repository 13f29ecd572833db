"""Sizes and settings from the directory of a pretrained model, as `transformers` saves it."""

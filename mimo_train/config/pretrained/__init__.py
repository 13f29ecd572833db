"""Sizes and settings from a Hugging Face directory of a pretrained model."""

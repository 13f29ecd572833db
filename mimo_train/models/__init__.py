"""Builds modules from the config: language model, encoders with projectors, freezing, data-parallel wrapping."""

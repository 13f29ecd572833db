"""Config -> modules: the language model, the encoders with their projectors, freezing, data-parallel wrapping."""

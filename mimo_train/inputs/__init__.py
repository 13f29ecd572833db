"""Build the tokenizer and the datasets of a run from its config."""

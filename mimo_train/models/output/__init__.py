"""The end of a language model: its output layer, and the losses of tokens with and without logits."""

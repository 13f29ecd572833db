"""Tokenized texts: the .bin and .idx files of Megatron-LM's `preprocess_data.py`."""

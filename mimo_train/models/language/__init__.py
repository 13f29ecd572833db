"""Language models: what families have beyond a plain decoder, and their Hugging Face weights."""

"""Audio transformers of the shape of Whisper's encoder."""

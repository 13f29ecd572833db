"""Audio transformers with the architecture of Whisper's encoder."""

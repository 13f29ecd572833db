"""The audio transformer of Qwen2-Audio: Whisper's encoder, its frames averaged in pairs."""

"""Low-rank adapters next to linear layers (LoRA, rsLoRA, DoRA)."""

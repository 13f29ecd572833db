"""Low-rank adapters, and the quantized weights next to them."""

"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464)."""

"""Vision towers of CLIP."""

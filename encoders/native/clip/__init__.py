"""Vision towers of CLIP, SigLIP and SigLIP 2."""

"""Vision towers of SigLIP and SigLIP 2."""

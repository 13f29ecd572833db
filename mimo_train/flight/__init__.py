"""Flight recorder: what each rank is doing, in a small file of its own, for whoever asks why a run hangs."""

"""Arithmetic before a run: layouts, placement, batches, memory, FLOPs."""

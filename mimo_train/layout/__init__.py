"""Arithmetic before a run: layouts, placement, batches, memory, FLOPs. Imports no torch."""

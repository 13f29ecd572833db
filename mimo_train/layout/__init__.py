"""Ranks, edges, placement, batch arithmetic and legality of the modules of a run."""

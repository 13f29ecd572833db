"""Which samples a step has: the global order, mixtures, packing, and each rank's share."""

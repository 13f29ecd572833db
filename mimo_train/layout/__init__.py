"""Which rank does what: modules, edges, placement, batch arithmetic, legality."""

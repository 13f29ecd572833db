"""The teacher of `train.task=distill`: a frozen model of its own, next to the modules of the run."""

"""Where the numbers of a run go, one file per place."""

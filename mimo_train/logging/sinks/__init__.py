"""Sinks of a run's numbers, one module per format."""

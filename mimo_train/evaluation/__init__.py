"""Evaluation on held-out samples: loss, exact match, predictions."""

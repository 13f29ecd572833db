"""Optimizer and learning-rate schedule of every module."""

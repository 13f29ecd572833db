"""Measure a run and write the numbers to files, TensorBoard, W&B, the console and the report.

Only `runtime` imports torch, so reports are written without it.
"""

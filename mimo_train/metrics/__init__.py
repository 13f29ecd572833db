"""What a run measures and where the numbers go: files, TensorBoard, W&B, the console, the report. Imports no torch."""

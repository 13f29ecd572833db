"""What a run measures and where the numbers go: files, TensorBoard, W&B, the console, the report.

`runtime` imports torch; nothing else here does, so that a report is read and written without it.
"""

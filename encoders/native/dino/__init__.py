"""DINOv2 and DINOv3 encoders."""

"""File format of checkpoints: plain safetensors and JSON, no pickle."""

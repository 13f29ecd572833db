"""The files of a checkpoint: plain safetensors, JSON, no pickle."""

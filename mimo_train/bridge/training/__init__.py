"""Modules with the names and contents of `megatron.bridge.training`."""

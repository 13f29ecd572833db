"""Functions with the names and signatures of Megatron-Bridge: thin wrappers over the native interface.

docs/training-api.md lists them and the differences. Programs written for mimo-train use `mimo_train.training`.
"""

"""Functions with the names and signatures that users of Megatron-Bridge know, thin, over the native interface.

docs/training-api.md lists them, with what differs. Programs that are written for mimo-train use `mimo_train.training`.
"""

"""The training API of Megatron-Bridge at its own module paths: thin wrappers over `mimo_train.training`.

`sed s/megatron.bridge/mimo_train.bridge/` ports the imports of a program. docs/training-api.md lists the names and the
differences.
"""

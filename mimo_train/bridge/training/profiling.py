"""The type of a capture of nsys, at the path that Megatron-Bridge gives it."""

from mimo_train.debug.profiling import NsysCapture as TNvtxContext

__all__ = ["TNvtxContext"]

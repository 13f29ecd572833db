"""The type of an nsys capture, at Megatron-Bridge's path."""

from mimo_train.debug.profiling import NsysCapture as TNvtxContext

__all__ = ["TNvtxContext"]

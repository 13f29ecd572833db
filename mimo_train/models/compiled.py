"""Transformer layers that are compiled one by one (`train.compile`).

Compiled is what is in front of core attention and what is behind it in a `DenseLayer`; layers of equal sizes have one
graph. Attention itself has kernels of its own, and asks on the host where documents end.
"""

import logging
import math
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import torch

from mimo_train.config.errors import UserError
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.kernels import compiled_modules

_logger = logging.getLogger(__name__)

BACKEND = "inductor"
"""Of torch.compile."""

MANY = 16
"""Graphs of a module that are worth a remark: it has two functions, trained or not, of one row or several."""

MOST = 256
"""Graphs of one function of all modules, behind which torch would end the run; 8 by default."""


def require_compiler(cfg: ConfigContainer, kind: str) -> None:
    """Refuse what would fail in the first step.

    Raises:
        UserError: layers are to be compiled, and what compiles for the device is not here.
    """
    if not compiled_modules(cfg) or BACKEND != "inductor":
        return
    why = "torch.compile needs triton, which is not installed" if not find_spec("triton") else ""
    if kind == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
            why = ""
        except (InvalidCxxCompiler, FileNotFoundError):
            why = "torch.compile needs a C++ compiler, such as g++, on a CPU"
    if why:
        raise UserError(f"train.compile: is layers, and {why}: install it, or set train.compile=none")


def compile_layers(chunks: Iterable[torch.nn.Module], cfg: ConfigContainer, name: str, kind: str) -> None:
    """Compile the layers of this rank's chunks of a module, if they are to be, at their first passes.

    Args:
        kind: of device, cuda or cpu.

    Raises:
        UserError: they are none that can be.
    """
    if name not in compiled_modules(cfg):
        return
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST
    compiler = _Compiler(f"modules.{name}", eager=kind == "cpu")
    layers: list[Any] = [part for chunk in chunks for part in chunk.modules() if hasattr(part, "_dense")]
    for layer in layers:
        if layer._dense is None:
            raise UserError(
                f"modules.{name}.compile: is layers, and its layers are not torch's in plain calls (they have "
                f"{type(layer.self_attention.linear_qkv).__name__}): set it to none"
            )
        layer._dense.compile(compiler)


class _Compiler:
    """Compiles functions of the layers of one module, and counts the graphs.

    Attributes:
        graphs: made so far.
    """

    def __init__(self, key: str, *, eager: bool):
        """
        Args:
            key: of the module.
            eager: whether everything else that is compiled runs eagerly, see `parallel.cuda_stand_in`.
        """
        self._key, self._eager, self.graphs = key, eager, 0

    def __call__(self, function: Callable) -> Callable:
        # Texts and pictures have any length: sizes are symbols from the start, and a graph serves all of them.
        compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=self._backend)
        if not self._eager:
            return compiled

        def call(*tensors: torch.Tensor) -> Any:
            with torch.compiler.set_stance("default"):
                return compiled(*tensors)

        return call

    def _backend(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        if self.graphs >= MANY and math.log2(self.graphs).is_integer():
            _logger.warning(
                "%s: its layers have been compiled %d times, each time for inputs of another kind: steps wait for it; "
                "set %s.compile=none if it goes on",
                self._key,
                self.graphs,
                self._key,
            )
        return lookup_backend(BACKEND)(graph, inputs)

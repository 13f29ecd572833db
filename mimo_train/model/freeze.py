"""Freezing: which parameters of a module are not trained."""

from fnmatch import fnmatchcase

import torch

_PARTS = {"encoder": "encoders.*", "projector": "input_projections.*", "llm": "*"}
"""What the names in `modules.<name>.freeze` stand for, as patterns of parameter names inside the module."""


def freeze(module: torch.nn.Module, patterns: list[str], key: str) -> None:
    """Stop gradients of every parameter whose name matches one of `patterns`.

    Args:
        module: one module before data-parallel wrapping.
        patterns: `encoder`, `projector`, `llm`, or shell patterns of parameter names.
        key: config key, for the message.

    Raises:
        ValueError: a pattern matches no parameter of this module.
    """
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        shell = _PARTS.get(pattern, pattern)
        matched = [name for name in names if fnmatchcase(name, shell)]
        if not matched and pattern not in _PARTS:
            raise ValueError(f"{key}: {pattern!r} matches no parameter; names look like {', '.join(names[:3])}")
        for name in matched:
            module.get_parameter(name).requires_grad_(False)

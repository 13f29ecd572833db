"""Transformer Engine's layers on tensors without memory, where it is not installed or has no GPU to run on.

A stand-in for the package, put in its place before Megatron-Core is imported. It has what Megatron-Core 0.19.2 extends
(extensions/transformer_engine.py): constructors with keywords of version 2.20.2, which the extra `gpu` installs, and no
others, so that one that is not there is refused, and passes that give the right shapes and send the right messages.
Numbers of operations are those of torch's own layers; memory is about theirs, since what the real kernels keep is not
known here. Attention over context-parallel ranks sends nothing, and in packed rows it counts the whole row.
"""

import importlib.machinery
import sys
import types
from typing import Any

VERSION = "2.20.2"
"""Megatron-Core takes its branches by it."""


def install() -> None:
    """Put the stand-in into the place of `transformer_engine`, for the rest of this process.

    Raises:
        AssertionError: Megatron-Core has been imported, and has looked for it.
    """
    assert "megatron.core" not in sys.modules, "Megatron-Core has been imported"
    from mimo_train.preflight.dry_run import fake_engine_layers as layers
    from mimo_train.preflight.dry_run import fake_fp8

    def package(name: str, **members: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None, is_package=True), []
        for key, member in members.items():
            setattr(module, key, member)
        sys.modules[name] = module
        return module

    recipes = ("Format", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    recipe = package(
        "transformer_engine.common.recipe",
        DelayedScaling=layers.NotHere,
        **{name: getattr(fake_fp8, name) for name in recipes},
    )
    common = package("transformer_engine.common", recipe=recipe)
    fp8 = package(
        "transformer_engine.pytorch.fp8",
        FP8GlobalStateManager=layers.NotHere,
        fp8_autocast=fake_fp8.fp8_autocast,
        fp8_model_init=layers.NotHere,
        **dict.fromkeys(
            ("check_fp8_support", "check_fp8_block_scaling_support", "check_mxfp8_support"), fake_fp8.supported
        ),
    )
    package("transformer_engine.pytorch.tensor", QuantizedTensor=layers.NotHere)
    package("transformer_engine.pytorch.float8_tensor", Float8Tensor=layers.NotHere)
    distributed = package(
        "transformer_engine.pytorch.distributed",
        CudaRNGStatesTracker=layers.NotHere,
        activation_recompute_forward=layers.NotHere,
        checkpoint=layers.checkpoint,
    )
    # Megatron-Core imports them by name from version 2.7 on; routers are torch's without `moe_router_fusion`.
    fused = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    package("transformer_engine.pytorch.router", **dict.fromkeys(fused, layers.NotHere))
    names = ("Linear", "LayerNormLinear", "LayerNorm", "RMSNorm", "DotProductAttention", "GroupedLinear")
    pytorch = package(
        "transformer_engine.pytorch",
        fp8=fp8,
        fp8_autocast=fake_fp8.fp8_autocast,
        distributed=distributed,
        Fp8Padding=fake_fp8.Fp8Padding,
        Fp8Unpadding=fake_fp8.Fp8Unpadding,
        **{name: getattr(layers, name) for name in names},
    )
    package("transformer_engine", common=common, pytorch=pytorch, __version__=VERSION)

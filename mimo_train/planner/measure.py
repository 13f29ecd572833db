"""Measures one layer of each module on the device at hand: seconds forward and backward, at tp 1.

The program's own modules are built, with one layer each, on one process and with initial weights; no data is read.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from encoders.joined.model import JoinedEncoder
from encoders.plain.spec import PlainSpec
from encoders.spec import encoders_in
from encoders.staged import StagedEncoder
from mimo_train.config.fault import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import LogConfig, ProfilingConfig
from mimo_train.config.schema_modules import FeatureCacheConfig, LayoutConfig, LoraConfig, ModuleConfig
from mimo_train.config.schema_placement import PlacementConfig
from mimo_train.model.names import modules_of
from mimo_train.parallel import device as devices
from mimo_train.plan.run import resolve
from mimo_train.planner.profile import LayerCost, Profile
from mimo_train.planner.work import Work, module_work
from mimo_train.training.setup import build_parts, start_processes

_WARM_UP, _TIMED = 2, 5
"""Calls that are not timed, and those of which the median counts."""


def measure(cfg: ConfigContainer, vocab: int) -> Profile:
    """Costs of a layer of each module of a run, for the samples of its microbatches.

    Args:
        vocab: rows of the embedding.

    Raises:
        UserError: an encoder of plain torch, which has no layers.
    """
    for name, module in cfg.encoders.items():
        if isinstance(module.encoder, PlainSpec):
            raise UserError(
                f"--measure: modules.{name}.encoder.family {module.encoder.family} is a plain torch module, of whose "
                "layers nothing is known: plan without --profile"
            )
    small = _of_one_layer(cfg)
    kind, device = start_processes(small)
    parts = build_parts(resolve(small), kind, device)
    samples, costs = cfg.train.micro_batch_size, []
    for name, (chunk, *_) in modules_of(parts.pipeline.model).items():
        module = unwrap_model(chunk)
        calls = _language_calls(small, module) if name == LANGUAGE else _encoder_calls(small, name, module)
        tokens, passes = 0, []
        for inputs, layers in calls:
            tokens += math.prod(inputs.shape[:-1])
            passes.append(_timed(layers, inputs))
        work = module_work(small, name, vocab, 1.0).layers[0]
        costs.append(_cost(name, tokens, work, samples, passes))
    return Profile(devices.name(device) or "the CPU", cfg.train.precision, tuple(costs))


def _cost(name: str, tokens: int, work: Work, samples: int, passes: list[tuple[float, float]]) -> LayerCost:
    flops = samples * (work.products + work.attention), samples * (work.products_back + work.attention_back)
    forward, backward = (sum(each) for each in zip(*passes, strict=True))
    return LayerCost(name, 1, tokens, *flops, forward, backward)


def _of_one_layer(cfg: ConfigContainer) -> ConfigContainer:
    """The run with one layer in each module, all trained, on one process."""
    return replace(
        cfg,
        modules={name: _with_one_layer(name, module) for name, module in cfg.modules.items()},
        pretrained="",
        placement=PlacementConfig(mode="shared"),
        data=replace(cfg.data, tokenizer="bytes", chat_template="auto"),
        train=replace(cfg.train, global_batch_size=cfg.train.micro_batch_size, rampup_batch_size=[], recompute="none"),
        checkpoint=replace(cfg.checkpoint, load_modules={}),
        log=LogConfig(),
        profiling=ProfilingConfig(),
    )


def _with_one_layer(name: str, module: ModuleConfig) -> ModuleConfig:
    bare = replace(
        module,
        layout=LayoutConfig(),
        freeze=[],
        freeze_until={},
        lora=LoraConfig(),
        pretrained="",
        recompute="",
        feature_cache=FeatureCacheConfig(),
        prefetch_microbatches=0,
    )
    if name == LANGUAGE:
        assert module.llm is not None, "the language model has its llm"
        return replace(bare, llm=replace(module.llm, num_layers=1))
    encoder = module.encoder
    if len(parts := encoders_in(encoder)) > 1:
        return replace(bare, encoder=replace(encoder, **{part: _one_layer(own) for part, own in parts.items()}))
    return replace(bare, encoder=_one_layer(encoder))


def _one_layer(encoder: Any) -> Any:
    """The encoder with its first layer alone."""
    kept = {"num_layers": 1, "feature_layer": -1, "full_attention": [0], "deepstack": []}
    named = {field.name for field in fields(encoder)}
    return replace(encoder, **{key: value for key, value in kept.items() if key in named})


_Call = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""Hidden states, and what takes them through the layers."""


def _language_calls(cfg: ConfigContainer, gpt: Any) -> list[_Call]:
    """The decoder, with the arguments that the model itself gives it."""
    seen: dict[str, Any] = {}

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)

    handle = gpt.decoder.register_forward_pre_hook(note, with_kwargs=True)
    device = next(gpt.parameters()).device
    shape = cfg.train.micro_batch_size, cfg.data.sequence_length
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    positions = torch.arange(shape[1], device=device).expand(shape)
    with torch.no_grad():
        gpt(input_ids=ids, position_ids=positions, attention_mask=None, labels=ids)
    handle.remove()
    hidden = torch.randn_like(seen.pop("hidden_states"))
    return [(hidden, lambda states: gpt.decoder(hidden_states=states, **seen))]


def _encoder_calls(cfg: ConfigContainer, name: str, module: torch.nn.Module) -> list[_Call]:
    """The layers of each encoder of a module, over media of the largest size."""
    encoder, projector = cfg.modules[name].encoder, cfg.modules[name].projector
    parameter = next(module.parameters())
    area = getattr(encoder, "largest_area", 0) or getattr(encoder, "image_size", 0) ** 2
    extent = (math.isqrt(area),) * 2 if encoder.kind == "image" else (encoder.max_samples, encoder.sample_rate)
    sizes = [encoder.input_size(*extent, merge=projector.merge)] * cfg.train.micro_batch_size
    calls: list[_Call] = []
    for staged in (each for each in module.modules() if isinstance(each, StagedEncoder)):
        if isinstance(staged, JoinedEncoder):  # it has no layers but those of its parts
            continue
        shape = staged.rows_of(sizes), staged.spec.hidden_size
        hidden_RH = torch.randn(shape, dtype=parameter.dtype, device=parameter.device)
        calls.append((hidden_RH, lambda states, staged=staged: staged.through_layers(states, sizes)))  # type: ignore[misc]
    return calls


def _timed(layers: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass."""
    found = []
    for number in range(_WARM_UP + _TIMED):
        hidden = inputs.detach().requires_grad_()
        begin = _now()
        output = layers(hidden)
        between = _now()
        output.backward(torch.ones_like(output))
        if number >= _WARM_UP:
            found.append((between - begin, _now() - between))
    forward, backward = zip(*found, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _now() -> float:
    if devices.current().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

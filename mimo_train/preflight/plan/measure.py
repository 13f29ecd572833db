"""Measures one layer of each module on this machine's device: seconds forward and backward, at every legal tp.

One process builds the run's modules with one layer each and initial weights, and reads no data. For tp above 1 it is
the first rank of a fake world whose messages take no time; messages are estimated.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from encoders.joined.model import JoinedEncoder
from encoders.plain.spec import PlainSpec
from encoders.staged import StagedEncoder
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_log import LogConfig, ProfilingConfig
from mimo_train.config.schema_modules import FeatureCacheConfig, LayoutConfig, LoraConfig, ModuleConfig
from mimo_train.config.schema_run import PlacementConfig
from mimo_train.estimate.flops import Work, module_work
from mimo_train.layout.legality import encoder_faults, language_faults, projector_faults
from mimo_train.layout.run import resolve
from mimo_train.models.parameters import modules_of
from mimo_train.parallel import device as devices
from mimo_train.preflight.dry_run import fake_world
from mimo_train.preflight.plan.costs import LayerCost, Profile
from mimo_train.training.step.pipeline import build_parts, start_processes

_WARM_UP, _TIMED = 2, 5
"""Calls that are not timed, and timed calls, of which the median counts."""


def measure(cfg: ConfigContainer, vocab: int, most: int = 1) -> Profile:
    """Measure a layer of each module of a run, for the samples of its microbatches. With `most` above 1 this process
    stays in a fake world.

    Args:
        vocab: rows of the embedding.
        most: the largest tp; all its divisors that are legal for a module are measured.

    Raises:
        UserError: an encoder is a plain torch module, which has no layers.
    """
    for name, module in cfg.encoders.items():
        if isinstance(module.encoder, PlainSpec):
            raise UserError(
                f"--measure: modules.{name}.encoder.family {module.encoder.family} is a plain torch module, whose "
                "layers are not known: plan without --profile"
            )
    costs = []
    for tp in (size for size in range(1, most + 1) if most % size == 0):
        if names := [name for name in cfg.modules if _divides(cfg, name, tp)]:
            costs += _of_size(cfg, vocab, tp, names)
    return Profile(devices.name(devices.current()) or "the CPU", cfg.train.precision, costs)


def _of_size(cfg: ConfigContainer, vocab: int, tp: int, names: Sequence[str]) -> list[LayerCost]:
    small = _of_one_layer(cfg, tp, names)
    if tp > 1:
        if dist.is_initialized():
            dist.destroy_process_group()
        fake_world.join(0, tp, per_node=1)  # has the device already
    kind, device = start_processes(small)
    parts = build_parts(resolve(small), kind, device)
    samples, costs = cfg.train.micro_batch_size, []
    for name, (chunk, *_) in modules_of(parts.pipeline.model).items():
        if name not in names:
            continue
        module = unwrap_model(chunk)
        calls = _language_calls(small, module) if name == LANGUAGE else _encoder_calls(small, name, module)
        tokens, passes = 0, []
        for inputs, layers in calls:
            tokens += math.prod(inputs.shape[:-1])
            passes.append(_timed(layers, inputs))
        work = module_work(small, name, vocab, 1.0).layers[0]
        costs.append(_cost(name, tp, tokens, work, samples, passes))
    return costs


def _divides(cfg: ConfigContainer, name: str, tp: int) -> bool:
    layout = LayoutConfig(tp=tp)
    if name == LANGUAGE:
        return not [*language_faults(cfg.llm, layout, f"modules.{LANGUAGE}")]
    module = replace(cfg.modules[name], layout=layout)
    return not [*encoder_faults(module, name), *projector_faults(module, cfg.llm.hidden_size, name)]


def _cost(name: str, tp: int, tokens: int, work: Work, samples: int, passes: list[tuple[float, float]]) -> LayerCost:
    share = samples / tp
    ahead, back = share * (work.matmuls + work.attention), share * (work.matmuls_back + work.attention_back)
    forward, backward = (sum(each) for each in zip(*passes, strict=True))
    return LayerCost(name, tp, tokens, ahead, back, forward, backward)


def _of_one_layer(cfg: ConfigContainer, tp: int, names: Sequence[str]) -> ConfigContainer:
    """Return the run with one layer in each of the modules `names`, all trained, on `tp` ranks. A language model that
    is not among them has replicas."""
    language = LayoutConfig(tp=tp) if LANGUAGE in names else LayoutConfig(dp=tp)
    return replace(
        cfg,
        modules={
            name: _with_one_layer(name, module, language if name == LANGUAGE else LayoutConfig(tp=tp))
            for name, module in cfg.modules.items()
            if name in {*names, LANGUAGE}
        },
        pretrained="",
        placement=PlacementConfig(mode="shared"),
        data=replace(cfg.data, tokenizer="bytes", chat_template="auto", special_tokens_in_text=[]),
        train=replace(
            cfg.train,
            global_batch_size=cfg.train.micro_batch_size * language.dp,
            rampup_batch_size=[],
            recompute="none",
            # Predictions with a profile know neither fp8 nor compiled layers.
            fp8="none",
            num_layers_at_start_in_bf16=0,
            num_layers_at_end_in_bf16=0,
            compile="none",
        ),
        checkpoint=replace(cfg.checkpoint, load_modules={}),
        log=LogConfig(),
        profiling=ProfilingConfig(),
    )


def _with_one_layer(name: str, module: ModuleConfig, layout: LayoutConfig) -> ModuleConfig:
    bare = replace(
        module,
        layout=layout,
        fp8="",
        compile="",
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
    if len(parts := encoder.parts) > 1:
        return replace(bare, encoder=replace(encoder, **{part: _one_layer(own) for part, own in parts.items()}))
    return replace(bare, encoder=_one_layer(encoder))


def _one_layer(encoder: Any) -> Any:
    kept = {"num_layers": 1, "feature_layer": -1, "full_attention": [0], "deepstack": []}
    named = {field.name for field in fields(encoder)}
    return replace(encoder, **{key: value for key, value in kept.items() if key in named})


_Call = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""(hidden states, function that passes them through the layers)."""


def _language_calls(cfg: ConfigContainer, gpt: Any) -> list[_Call]:
    """Return the decoder, with the arguments that the model passes to it."""
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
    encoder, projector = cfg.modules[name].encoder, cfg.modules[name].projector
    parameter = next(module.parameters())
    area = encoder.largest_area or getattr(encoder, "image_size", 0) ** 2
    extent = (math.isqrt(area),) * 2 if encoder.kind == "image" else (encoder.max_samples, encoder.sample_rate)
    sizes = [encoder.input_size(*extent, merge=projector.merge)] * cfg.train.micro_batch_size
    calls: list[_Call] = []
    for staged in (each for each in module.modules() if isinstance(each, StagedEncoder)):
        if isinstance(staged, JoinedEncoder):  # only its parts have layers
            continue
        shape = staged.rows_of(sizes), staged.spec.hidden_size
        hidden_RH = torch.randn(shape, dtype=parameter.dtype, device=parameter.device)
        calls.append((hidden_RH, lambda states, staged=staged: staged.through_layers(states, sizes)))  # type: ignore[misc]
    return calls


def _timed(layers: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> tuple[float, float]:
    seconds = []
    for number in range(_WARM_UP + _TIMED):
        hidden = inputs.detach().requires_grad_()
        begin = _now()
        output = layers(hidden)
        between = _now()
        output.backward(torch.ones_like(output))
        if number >= _WARM_UP:
            seconds.append((between - begin, _now() - between))
    forward, backward = zip(*seconds, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _now() -> float:
    if devices.current().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

"""Answers of a model on one process, by greedy decoding."""

from dataclasses import replace
from typing import Any

import torch

from data.collate import collate_media, encode_prompt
from data.media.decode import decode_media
from data.media.headers import parse_extent
from data.records import Part, Turn
from data.tokens import Tokenizer
from mimo_train.config.fault import UserError
from mimo_train.config.schema import ConfigContainer, PlacementConfig
from mimo_train.config.schema_log import LogConfig, ProfilingConfig
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.evaluation.greedy import PredictStep
from mimo_train.plan.inputs import media_of
from mimo_train.step.schedule import Pipeline

NAMES = {"image": "picture", "audio": "clip"}
"""Word for a file in messages, by its kind."""


def on_one_process(cfg: ConfigContainer) -> ConfigContainer:
    """The same model with every module on one rank, and one sample at a time, on whatever device is here; without what
    only training uses, such as trackers that are not installed here."""
    modules = {name: replace(module, layout=LayoutConfig()) for name, module in cfg.modules.items()}
    train = replace(cfg.train, global_batch_size=1, micro_batch_size=1, rampup_batch_size=[])
    return replace(
        cfg,
        modules=modules,
        placement=PlacementConfig(mode="shared"),
        train=train,
        run=replace(cfg.run, device="auto", inprocess_restarts=0),
        log=LogConfig(),
        profiling=ProfilingConfig(),
    )


@torch.no_grad()
def answer(
    cfg: ConfigContainer,
    pipeline: Pipeline,
    tokenizer: Tokenizer,
    prompt: str,
    files: dict[str, list[bytes]],
    max_new_tokens: int,
) -> str:
    """The model's answer.

    Args:
        prompt: what a user asks; for a plain GPT, the text that it continues.
        files: pictures (image) and clips (audio), by kind, in their order before the prompt.
    """
    ids, media = _encode(cfg, tokenizer, prompt, files)
    limit, predict = cfg.data.sequence_length, PredictStep(pipeline)
    if len(ids) >= limit:
        raise UserError(f"--prompt: takes {len(ids)} tokens with its media, data.sequence_length is {limit}")
    places = {item.module: tokenizer.placeholder_id(item.placeholder) for item in media_of(cfg)}
    # One microbatch of one sample; on one rank loads are not needed.
    rows = {name: [[ids.count(placeholder)]] for name, placeholder in places.items()}
    new: list[int] = []
    while len(new) < max_new_tokens and len(ids) < limit:
        batch = _batch(ids, media, limit, pipeline.device, tokenizer)
        pipeline.shapes.begin(rows, rows)
        output, collect = predict(iter([batch]), pipeline.model[0])
        assert collect is not None, "one process has the last stage"
        token = int(collect(output)["predicted"][0, len(ids) - 1])
        if token in tokenizer.template.stop_ids:
            break
        ids.append(tokenizer.as_text(token))
        new.append(token)
    return tokenizer.decode(new).strip()


def _encode(
    cfg: ConfigContainer, tokenizer: Tokenizer, prompt: str, files: dict[str, list[bytes]]
) -> tuple[list[int], dict]:
    """Token ids of the prompt, and the inputs of every encoder module."""
    if not cfg.encoders and not files:
        begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
        return begin + tokenizer.encode(prompt), {}
    modules = media_of(cfg)
    tokens, parts, inputs = {}, [], dict.fromkeys(cfg.encoders)
    for kind, raws in files.items():
        readers = [item for item in modules if item.kind == kind]
        if not readers:
            raise UserError(f"--{kind}: no module of this model reads {NAMES[kind]}s, it has {', '.join(cfg.modules)}")
        extents = [_extent(kind, raw, number) for number, raw in enumerate(raws, start=1)]
        tokens[kind] = [
            [(tokenizer.placeholder_id(item.placeholder), item.num_tokens(*extent)) for item in readers]
            for extent in extents
        ]
        parts += [part for _ in raws for part in (Part(kind), Part("text", "\n"))]
        for item in readers:
            decoded = [
                decode_media(kind, raw, item.size(*extent), item.resize)
                for raw, extent in zip(raws, extents, strict=True)
            ]
            inputs[item.module] = {item.module: collate_media(decoded, item.field)}
    return encode_prompt([Turn("user", (*parts, Part("text", prompt)))], tokenizer, tokens), inputs


def _batch(ids: list[int], media: dict, limit: int, device: torch.device, tokenizer: Tokenizer) -> dict:
    row = torch.full((1, limit), tokenizer.pad_id, dtype=torch.int64)
    row[0, : len(ids)] = torch.tensor(ids)
    texts = {"input_ids": row, "labels": torch.zeros_like(row), "position_ids": torch.arange(limit)[None]}
    batch: dict[str, Any] = {name: tensor.to(device) for name, tensor in texts.items()}
    if media:
        batch["modality_inputs"] = {
            name: None
            if inputs is None
            else {name: {field: _on(device, value) for field, value in inputs[name].items()}}
            for name, inputs in media.items()
        }
    return batch


def _on(device: torch.device, value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return value.to(device) if isinstance(value, torch.Tensor) else [tensor.to(device) for tensor in value]


def _extent(kind: str, raw: bytes, number: int) -> tuple[int, int]:
    extent = parse_extent(kind, raw)
    if extent is None:
        raise UserError(f"--{kind}: {NAMES[kind]} {number} ({len(raw)} bytes) has no readable header")
    return extent

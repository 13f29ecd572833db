"""`mimo-train generate`: one process loads a checkpoint of any layout and answers by greedy decoding."""

from dataclasses import replace
from pathlib import Path

import torch

from data.collate import collate_media, encode_prompt
from data.media.decode import decode_media
from data.media.headers import parse_extent
from data.records import Part, Turn
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.store import load_checkpoint
from mimo_train.config.compose import from_dict
from mimo_train.config.schema import LANGUAGE, ConfigContainer, LayoutConfig, PlacementConfig
from mimo_train.evaluation.greedy import predict_step
from mimo_train.model.lora import merge_lora
from mimo_train.plan.samples import media_of
from mimo_train.step.state import GlobalState
from mimo_train.training.setup import build_state, start_processes

NAMES = {"image": "picture", "audio": "clip"}
"""What a file is called, by its kind and by the option that gives it."""


def main(checkpoint: str, *, prompt: str, media: dict[str, list[str]], max_new_tokens: int) -> int:
    """Print the answer to `prompt` about `media`: kind (image, audio) -> files. Returns the exit code.

    Raises:
        ValueError: no complete checkpoint, a picture or clip that cannot be read or that no module takes, or a prompt
            that does not fit into `data.sequence_length`.
    """
    files = {kind: _read(kind, paths) for kind, paths in media.items() if paths}
    folder = folders.chosen(Path(checkpoint), checkpoint, "CHECKPOINT")
    cfg = on_one_process(from_dict(folders.read_record(folder)["config"]))
    state = GlobalState(cfg)
    model = build_state(state, *start_processes(cfg))
    load_checkpoint(folder, state.layout, model)
    merge_lora(model)
    model[0].eval()
    print(answer(state, model[0], prompt, files, max_new_tokens))
    torch.distributed.destroy_process_group()
    return 0


def on_one_process(cfg: ConfigContainer) -> ConfigContainer:
    """The same model with every module on one rank, and one sample at a time."""
    modules = {name: replace(module, layout=LayoutConfig()) for name, module in cfg.modules.items()}
    train = replace(cfg.train, global_batch_size=1, micro_batch_size=1)
    return replace(cfg, modules=modules, placement=PlacementConfig(mode="shared"), train=train)


@torch.no_grad()
def answer(state: GlobalState, model, prompt: str, files: dict[str, list[bytes]], max_new_tokens: int) -> str:
    """The model's answer.

    Args:
        prompt: what a user asks; for a plain GPT, the text that it continues.
        files: pictures (image) and clips (audio), by kind, in the order in which they stand before the prompt.
    """
    ids, media = _encode(state, prompt, files)
    limit = state.cfg.data.sequence_length
    if len(ids) >= limit:
        raise ValueError(f"--prompt: takes {len(ids)} tokens with its media, data.sequence_length is {limit}")
    places = {item.module: state.tokenizer.placeholder_id(item.placeholder) for item in media_of(state.cfg)}
    # One microbatch of one sample; on one rank nothing is divided by loads.
    rows = {name: [[ids.count(placeholder)]] for name, placeholder in places.items()}
    new: list[int] = []
    while len(new) < max_new_tokens and len(ids) < limit:
        batch = _batch(ids, media, limit, state)
        state.pipeline.plan.begin(rows, rows)
        output, collect = predict_step(state, iter([batch]), model)
        token = int(collect(output)["predicted"][0, len(ids) - 1])
        if token == state.tokenizer.end_of_turn_id:
            break
        ids.append(state.tokenizer.as_text(token))
        new.append(token)
    return state.tokenizer.decode(new).strip()


def _encode(state: GlobalState, prompt: str, files: dict[str, list[bytes]]) -> tuple[list[int], dict]:
    """Token ids of the prompt, and the inputs of every encoder module."""
    cfg, tokenizer = state.cfg, state.tokenizer
    if set(cfg.modules) == {LANGUAGE} and not files:
        begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
        return begin + tokenizer.encode(prompt), {}
    modules = media_of(cfg)
    tokens, parts, inputs = {}, [], dict.fromkeys(cfg.encoders)
    for kind, raws in files.items():
        readers = [item for item in modules if item.kind == kind]
        if not readers:
            raise ValueError(f"--{kind}: no module of this model reads {NAMES[kind]}s, it has {', '.join(cfg.modules)}")
        extents = [_extent(kind, raw, number) for number, raw in enumerate(raws, start=1)]
        tokens[kind] = [
            [(tokenizer.placeholder_id(item.placeholder), item.num_tokens(*extent)) for item in readers]
            for extent in extents
        ]
        parts += [part for _ in raws for part in (Part(kind), Part("text", "\n"))]
        for item in readers:
            decoded = [decode_media(kind, raw, item.size(*extent)) for raw, extent in zip(raws, extents, strict=True)]
            inputs[item.module] = {item.module: collate_media(decoded, item.field)}
    return encode_prompt([Turn("user", (*parts, Part("text", prompt)))], tokenizer, tokens), inputs


def _batch(ids: list[int], media: dict, limit: int, state: GlobalState) -> dict:
    row = torch.full((1, limit), state.tokenizer.pad_id, dtype=torch.int64)
    row[0, : len(ids)] = torch.tensor(ids)
    batch = {"input_ids": row, "labels": torch.zeros_like(row), "position_ids": torch.arange(limit)[None]}
    batch = {name: tensor.to(state.device) for name, tensor in batch.items()}
    if state.cfg.encoders:
        batch["modality_inputs"] = {
            name: None
            if inputs is None
            else {name: {field: _on(state.device, value) for field, value in inputs[name].items()}}
            for name, inputs in media.items()
        }
    return batch


def _on(device: torch.device, value: torch.Tensor | list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    return value.to(device) if isinstance(value, torch.Tensor) else [tensor.to(device) for tensor in value]


def _extent(kind: str, raw: bytes, number: int) -> tuple[int, int]:
    extent = parse_extent(kind, raw)
    if extent is None:
        raise ValueError(f"--{kind}: {NAMES[kind]} {number} ({len(raw)} bytes) has no readable header")
    return extent


def _read(kind: str, paths: list[str]) -> list[bytes]:
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"--{kind}: no file {path}")
    return [Path(path).read_bytes() for path in paths]

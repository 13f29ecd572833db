"""`mimo-train generate`: one process loads a checkpoint of any layout and answers by greedy decoding."""

from dataclasses import replace
from pathlib import Path

import torch

from data.collate import collate_media, encode_prompt
from data.decode import decode_resized
from data.header import parse_header_bytes
from data.records import Part, Turn
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.store import load_checkpoint
from mimo_train.compose import from_dict
from mimo_train.config import LANGUAGE, ConfigContainer, LayoutConfig, PlacementConfig
from mimo_train.model.lora import merge_lora
from mimo_train.samples import media_of
from mimo_train.training.decode import predict_step
from mimo_train.training.setup import build_state, start_processes
from mimo_train.training.state import GlobalState


def main(checkpoint: str, *, prompt: str, images: list[str], max_new_tokens: int) -> int:
    """Print the answer to `prompt` about `images`. Returns the exit code.

    Raises:
        ValueError: no complete checkpoint, a picture that cannot be read or that no module takes, or a prompt that
            does not fit into `data.sequence_length`.
    """
    folder = folders.chosen(Path(checkpoint), checkpoint, "CHECKPOINT")
    cfg = on_one_process(from_dict(folders.read_record(folder)["config"]))
    state = GlobalState(cfg)
    model = build_state(state, *start_processes(cfg))
    load_checkpoint(folder, state.layout, model)
    merge_lora(model)
    model[0].eval()
    print(answer(state, model[0], prompt, [Path(image).read_bytes() for image in _existing(images)], max_new_tokens))
    torch.distributed.destroy_process_group()
    return 0


def on_one_process(cfg: ConfigContainer) -> ConfigContainer:
    """The same model with every module on one rank, and one sample at a time."""
    modules = {name: replace(module, layout=LayoutConfig()) for name, module in cfg.modules.items()}
    train = replace(cfg.train, global_batch_size=1, micro_batch_size=1)
    return replace(cfg, modules=modules, placement=PlacementConfig(mode="shared"), train=train)


@torch.no_grad()
def answer(state: GlobalState, model, prompt: str, pictures: list[bytes], max_new_tokens: int) -> str:
    """The model's answer.

    Args:
        prompt: what a user asks; for a plain GPT, the text that it continues.
        pictures: files, in the order in which they stand before the prompt.
    """
    ids, media = _encode(state, prompt, pictures)
    limit = state.cfg.data.sequence_length
    if len(ids) >= limit:
        raise ValueError(f"--prompt: takes {len(ids)} tokens with its pictures, data.sequence_length is {limit}")
    new: list[int] = []
    while len(new) < max_new_tokens and len(ids) < limit:
        batch = _batch(ids, media, limit, state)
        output, collect = predict_step(state, iter([batch]), model)
        token = int(collect(output)["predicted"][0, len(ids) - 1])
        if token == state.tokenizer.end_of_turn_id:
            break
        ids.append(token)
        new.append(token)
    return state.tokenizer.decode(new).strip()


def _encode(state: GlobalState, prompt: str, pictures: list[bytes]) -> tuple[list[int], dict]:
    """Token ids of the prompt, and the inputs of every encoder module."""
    cfg, tokenizer = state.cfg, state.tokenizer
    readers = {name: module for name, module in cfg.encoders.items() if module.encoder.kind == "image"}
    if pictures and not readers:
        raise ValueError(f"--image: no module of this model reads pictures, it has {', '.join(cfg.modules)}")
    if set(cfg.modules) == {LANGUAGE}:
        begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
        return begin + tokenizer.encode(prompt), {}
    sizes = [_size(picture, number) for number, picture in enumerate(pictures, start=1)]
    of_module = {media.module: media for media in media_of(cfg)}
    tokens = {
        "image": [
            [
                (tokenizer.placeholder_id(of_module[name].placeholder), of_module[name].num_tokens(*size))
                for name in readers
            ]
            for size in sizes
        ]
    }
    inputs = {}
    for name in cfg.encoders:
        decoded = [decode_resized(raw, *of_module[name].size(*size)) for raw, size in zip(pictures, sizes, strict=True)]
        collated = collate_media(decoded if name in readers else [], of_module[name].field)
        inputs[name] = None if collated is None else {name: collated}
    parts = [part for _ in pictures for part in (Part("image"), Part("text", "\n"))]
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


def _size(raw: bytes, number: int) -> tuple[int, int]:
    header = parse_header_bytes(raw)
    if header is None:
        raise ValueError(f"--image: picture {number} ({len(raw)} bytes) has no readable header")
    return header.height, header.width


def _existing(images: list[str]) -> list[str]:
    for image in images:
        if not Path(image).is_file():
            raise ValueError(f"--image: no file {image}")
    return images

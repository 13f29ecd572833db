"""The media half of a model of `transformers`: the model without its language model. Shape suffixes: R rows, the
features of all items one after the other; H width of the language model."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from encoders.errors import EncoderError
from encoders.plain.model import PlainEncoder
from encoders.transformers_media.directory import (
    keep_float32,
    projects_in_forward,
    saved_buffers,
    skeleton,
    without_language,
)
from encoders.transformers_media.processor import FRAMES, MediaProcessor
from encoders.transformers_media.spec import MediaImages, MediaSpec
from encoders.transformers_media.tensors import structure_of
from encoders.transformers_media.videos import PIXELS

Item = Mapping[str, Any]
"""What `MediaProcessor.read` returns of an item."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Difference of features in a batch and alone, in units of the largest feature."""


def media_half(config: PretrainedConfig, kind: str) -> PreTrainedModel:
    """Return the media half for a kind of media with random weights, in float32 on the CPU. The other parts of
    the model are never in memory. Buffers that no file has, such as rotary frequencies, get their values."""
    model = skeleton(config)
    norm = getattr(model.get_input_embeddings(), "embed_norm", None)
    model = without_language(model, kind).to_empty(device="cpu")
    model.initialize_weights()
    if norm is not None and not list(norm.parameters()):  # Muse Spark, whose audio takes it without weights
        model.base_model.get_input_embeddings = lambda: SimpleNamespace(embed_norm=norm)
    return cast(PreTrainedModel, model.float())


def read_buffers(model: PreTrainedModel, path: str) -> None:
    """Read the buffers that files have, such as bounds of layers that clip: no training changes them."""
    state = model.state_dict()
    names = [name for name in saved_buffers(model) if not isinstance(state[name], FakeTensor)]
    for tensors in _weight_files(path) if names else ():
        stored = structure_of(path).stored_names(tensors)
        for name in stored.keys() & names:
            state[name].copy_(tensors[stored[name]]())


def _weight_files(path: str) -> Iterator[dict[str, Callable[[], torch.Tensor]]]:
    """Yield how to read each tensor of a file, for each file of a directory; as in `transformers`, `.bin` files count
    if there are no others."""
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            yield {name: partial(tensors.get_tensor, name) for name in tensors.keys()}
    if not any(Path(path).glob("*.safetensors")):
        for file in Path(path).glob("pytorch_model*.bin"):
            values = torch.load(file, "cpu", weights_only=True, mmap=True)
            yield {name: partial(values.get, name) for name in values}


def getters(model: PreTrainedModel, kind: str) -> list[Any]:
    """Return `get_image_features`, or that of another kind, of the model and of the one inside it."""
    owners = (model, model.base_model)
    return [getattr(owner, name) for owner in owners if hasattr(owner, name := f"get_{kind}_features")]


class MediaHalf(torch.nn.Module):
    """Images or audio as the processor gives them -> features, [R, H], in each row followed by those of the layers in
    `spec.deepstack`. Parameters that no feature depends on are frozen.

    Raises:
        EncoderError: the model has no features of this kind.
    """

    EXAMPLES: ClassVar[Mapping[str, Sequence[tuple[int, int]]]] = {
        "image": ((64, 96), (1200, 700)),
        "audio": ((8000, 16000), (35 * 16000, 16000)),
    }
    """Sizes of items that together use all parameters that features depend on: in one tile or window, and in
    several."""

    def __init__(self, spec: MediaSpec):
        super().__init__()
        self.kind, self.deepstack = spec.kind, spec.deepstack
        self.model = self._built(spec)
        self.arguments = {medium: self._argument_names(medium) for medium in {self.kind, *_videos(spec)}}
        self.batches = True
        """False if features of an item depend on the others of a batch."""
        self.verified: set[bool] = set()
        """True and False after batches of equal and of unequal sizes gave the features of their items."""
        reached = {id(parameter) for parameter in self._reached(spec)}
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in reached)

    def forward(self, items: Sequence[Item]) -> torch.Tensor:
        """Return the features of items in their order, [R, H].

        Raises:
            EncoderError: the model gives another number of features than its text has places.
        """
        groups = (
            self._verified(items, list(self._groups(items))) if self.batches else [[at] for at in range(len(items))]
        )
        features: dict[int, torch.Tensor] = {}
        for group in groups:
            rows = [items[at]["rows"] for at in group]
            features |= zip(group, self._features([items[at] for at in group]).split(rows), strict=True)
        return torch.cat([features[at] for at in range(len(items))])

    def train(self, mode: bool = True) -> "MediaHalf":
        """Set the mode, but for batch norms: they keep the statistics of the directory."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def _built(self, spec: MediaSpec) -> PreTrainedModel:
        model = media_half(spec.hf_config(), self.kind)
        if not getters(model, self.kind):
            raise EncoderError(f"{type(model).__name__} has no get_{self.kind}_features")
        read_buffers(model, spec.path)
        return model

    def _argument_names(self, medium: str) -> set[str]:
        """Return the names of the processor's tensors that the model takes of an item."""
        # The outer method may take `*args, **kwargs` alone.
        return {name for get in self._getters(medium) for name in inspect.signature(get).parameters}

    def _getters(self, medium: str) -> list[Any]:
        return getters(self.model, medium) or getters(self.model, self.kind)

    def _output(self, inputs: Mapping[str, Any], medium: str) -> torch.Tensor:
        output = self._getters(medium)[0](**inputs, return_dict=True)
        if projects_in_forward(type(self.model)):
            return cast(torch.Tensor, self.model.multi_modal_projector(_rows(output.last_hidden_state)))
        if self.kind == "audio" and output.get("attention_mask") is not None:  # Gemma 4, whose rows are padded
            return cast(torch.Tensor, output.pooler_output[output.attention_mask.bool()])
        if not self.deepstack:
            return _rows(output.pooler_output)
        if output.get("pooler_output") is None:  # Granite 4 Vision, whose levels are (layer, features)
            levels = [_rows(features) for _, features in output.deepstack_features]
            return torch.cat([torch.zeros_like(levels[0]), *levels], 1)
        return torch.cat([_rows(output.pooler_output), *map(_rows, output.deepstack_features)], 1)

    def _features(self, items: Sequence[Item], **options: Any) -> torch.Tensor:
        """Return the features of items whose tensors agree in all but their first dimension.

        Args:
            options: further arguments of the class.
        """
        medium = items[0].get("medium", self.kind)
        arguments = self.arguments[medium]
        inputs = {name: _joined([item[name] for item in items]) for name in items[0] if name in arguments}
        if PIXELS in items[0] and PIXELS not in arguments:  # Perception LM, whose `forward` does so
            inputs["pixel_values"] = _joined([item[PIXELS] for item in items])
        dtype = next(self.model.parameters()).dtype
        inputs = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        features_RH = self._output(inputs | options, medium)
        expected = sum(item["rows"] for item in items)
        if len(features_RH) != expected:
            raise EncoderError(
                f"{type(self.model).__name__} gives {len(features_RH)} features for {len(items)} {self.kind} item(s), "
                f"and their text has {expected} places: the processor and config.json of the directory differ"
            )
        return features_RH

    def _groups(self, items: Sequence[Item]) -> Iterator[list[int]]:
        """Yield the numbers of items that are joined along their first dimension; those with `FRAMES` are padded."""
        groups: dict[Any, list[int]] = {}
        for at, item in enumerate(items):
            end = -1 if FRAMES in item else None
            shapes = (
                (name, value.shape[1:end] if isinstance(value, torch.Tensor) else None) for name, value in item.items()
            )
            medium = item.get("medium", self.kind)
            shapes = (shape for shape in shapes if shape[0] in self.arguments[medium])
            groups.setdefault((medium, *shapes), []).append(at)
        yield from groups.values()

    def _verified(self, items: Sequence[Item], groups: list[list[int]]) -> list[list[int]]:
        """Return the groups if features of a batch are those of its items alone, else each item as a group. It is tried
        once with items of equal sizes, and once with others."""
        for first, second in ((group[0], at) for group in groups for at in group[1:]):
            pair = [items[first], items[second]]
            is_equal = len({_sizes(item) for item in pair}) == 1
            if is_equal in self.verified:
                continue
            self.verified.add(is_equal)
            if reason := self._batch_fault(pair):
                self.batches = False
                name = type(self.model).__name__
                warnings.warn(
                    f"{name} cannot compute several items as a batch ({reason}): it computes them one by one",
                    stacklevel=2,
                )
                return [[at] for at in range(len(items))]
        return groups

    @torch.no_grad()
    def _batch_fault(self, items: Sequence[Item]) -> str:
        """Return why features of a batch are not those of its items alone; empty if they are. Dropout and noise
        (`sample` of VibeVoice, in evaluation too) would differ, so they are off."""
        is_training, options = self.training, {"sample": False} if "sample" in self.arguments[self.kind] else {}
        self.eval()
        alone = torch.cat([self._features([item], **options) for item in items])
        try:
            together = self._features(items, **options)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, EncoderError) as error:  # the first dimension is no batch, as in MiniCPM-V 4.6
            return str(error)
        finally:
            self.train(is_training)
        difference, largest = float((together - alone).abs().max()), float(alone.abs().max())
        if difference <= TOLERANCE[together.dtype] * largest:
            return ""
        return f"features differ by {difference:.1e}, the largest is {largest:.1e}"

    def _examples(self, spec: MediaSpec) -> Iterator[Item]:
        processor: MediaProcessor = spec.processor()
        for first, second in self.EXAMPLES[self.kind]:
            if self.kind == "image":
                yield processor.read(torch.zeros(3, first, second, dtype=torch.uint8))
            else:
                yield processor.read(torch.zeros(processor.length(first, second)))
        if isinstance(spec, MediaImages) and spec.reads_videos:
            videos = spec.videos()
            yield videos.read(torch.zeros(len(videos.frames(*SHORT)), 3, *SHORT[:2], dtype=torch.uint8), SHORT)

    def _reached(self, spec: MediaSpec) -> Iterator[torch.Tensor]:
        """Yield the parameters that features of the examples depend on, by the graph of a forward pass."""
        self.eval()
        for item in self._examples(spec):
            with torch.random.fork_rng(devices=()), torch.enable_grad():
                try:
                    waiting, seen = [self._features([item]).grad_fn], set()
                except (RuntimeError, IndexError, EncoderError) as error:
                    made = f"that its processor made ({' '.join(str(error).split())})"
                    if "medium" in item:
                        warnings.warn(
                            f"{spec.path}: {type(self.model).__name__} cannot compute a video {made}. Set "
                            "encoder.reads_videos=false to read frames as images",
                            stacklevel=2,
                        )
                        continue
                    raise EncoderError(
                        f"{spec.path}: {type(self.model).__name__} cannot compute an item {made}. config.json, weights "
                        "and processor differ: `mimo-train check` compares the shapes of tensors. Copy the directory "
                        "again"
                    ) from error
            while waiting:
                node = waiting.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                if hasattr(node, "variable"):
                    yield node.variable
                waiting += [following for following, _ in node.next_functions]
        self.train()


def _videos(spec: MediaSpec) -> tuple[str, ...]:
    return ("video",) if spec.reads_videos else ()


SHORT = (64, 96, 8, 8, 1)
"""Extent of a video that uses all parameters."""


def _sizes(item: Item) -> tuple[Any, ...]:
    return item["rows"], *(value.shape for value in item.values() if isinstance(value, torch.Tensor))


def _rows(features: Any) -> torch.Tensor:
    """Return the features of a tensor, or of several, one item after the other, [R, H]."""
    parts = features if isinstance(features, list | tuple) else [features]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        most = max(value.size(-1) for value in values)
        return (
            torch.cat([F.pad(value, (0, most - value.size(-1))) for value in values]) if len(values) > 1 else values[0]
        )
    return [entry for value in values for entry in value] if isinstance(values[0], list) else values[0]


class MediaEncoder(PlainEncoder):
    """A media half as the encoder of a run, whole on every rank: data parallel only."""

    MODULE = MediaHalf

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any):
        super().__init__(config, *arguments, **options)
        keep_float32(self.model.model, config.params_dtype)

    def _refuse_batch_norms(self) -> None:
        """Do nothing: statistics are not updated, see `MediaHalf.train`."""

    def forward(self, items: Sequence[Item]) -> torch.Tensor:  # type: ignore[override]
        """Return the features of images or audio in their order, [R, H]; see `MediaHalf`."""
        if self.recomputes and torch.is_grad_enabled():
            features_RH = checkpoint(self.model, items, use_reentrant=False)
        else:
            features_RH = self.model(items)
        return cast(torch.Tensor, features_RH.to(self.config.params_dtype))

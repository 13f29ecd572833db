"""A decoder of a batch of sequences, token by token, with a cache of keys and values.

The cache is Megatron-Core's `StaticInferenceContext` (0.19.2), which its attention fills and reads, also on the CPU.
Its engines are not used: they serve batches of text-only requests.

Prompts of one batch have columns of a cache in common: shorter ones are padded behind their last token, and their
answers follow behind the padding, which no token sees.

Shape suffixes: S sequence, B batch, C columns of the cache, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.utils import unwrap_model

from data.collate import collate_media
from mimo_train.config.parts import LANGUAGE
from mimo_train.evaluation.generation.prompts import Prompt
from mimo_train.layout.decoding import require_decodable
from mimo_train.models.attention import SdpaAttention
from mimo_train.models.attention_mask import mask_of_columns
from mimo_train.models.parameters import modules_of
from mimo_train.parallel.device import to_device
from mimo_train.training.step.pipeline import Pipeline


class Decoder:
    """The model of this rank. Returns the logits of the next token of each sequence, after its prompt and after every
    token. Collective over the language model's tensor-parallel ranks, which pass the same prompts and tokens."""

    def __init__(self, pipeline: Pipeline):
        """Set the model of `pipeline` to evaluation mode. Raises UserError if its layout cannot decode."""
        require_decodable(pipeline.layout)
        self._pipeline, self._model = pipeline, pipeline.model[0].eval()
        (language,) = modules_of(pipeline.model)[LANGUAGE]
        self._language = unwrap_model(language)
        # A class of transformers has its own cache.
        self._is_as_is = hasattr(self._language, "new_cache")
        self._tp_group = pipeline.groups.collections[LANGUAGE].tp
        model = unwrap_model(self._model)
        self._placeholders = {*model.special_token_ids.values()} if isinstance(model, MimoModel) else set[int]()
        self._is_exact_in_batches: bool | None = None
        self._cache: Any = None
        self._lengths_B = self._positions = torch.empty(0)

    @property
    def takes_lengths(self) -> bool:
        """True if prompts of a batch may have several lengths. States of recurrent layers, classes of transformers and
        the kernels of Transformer Engine take no padding."""
        return not self._is_as_is and all(
            isinstance(getattr(layer.self_attention, "core_attention", None), SdpaAttention)
            for layer in self._language.decoder.layers
        )

    def takes_batch(self, prompts: Sequence[Prompt]) -> bool:
        """True if sequences have the same logits in a batch as alone. A class of transformers is tried once, on two
        prompts of equal length: RWKV, for example, mixes the sequences of a batch (transformers 5.23)."""
        if not self._is_as_is or len(prompts) < 2:
            return True
        if self._is_exact_in_batches is None:
            token = self._padding_of(prompts)
            other = next((each for each in prompts[1].ids if each not in (token, *self._placeholders)), token)
            alone, together = (
                [self.begin(some, len(some[0].ids) + 2), *(self.step([token, other][: len(some)]) for _ in range(2))]
                for some in (prompts[:1], prompts[:2])
            )
            pairs = [(ours[0].float(), batched[0].float()) for ours, batched in zip(alone, together, strict=True)]
            largest = torch.finfo(alone[0].dtype).eps ** 0.5
            self._is_exact_in_batches = all(
                float((ours - batched).abs().max()) <= largest * float(ours.abs().max()) for ours, batched in pairs
            )
        return self._is_exact_in_batches

    def begin(self, prompts: Sequence[Prompt], length: int) -> torch.Tensor:
        """Start sequences with their prompts; returns the logits [B, V] after them.

        Args:
            length: columns of the cache: the tokens of the longest prompt, and of the longest answer.
        """
        lengths = [len(prompt.ids) for prompt in prompts]
        device, longest = self._pipeline.device, max(lengths)
        assert self.takes_lengths or len(set(lengths)) == 1, lengths
        self._lengths_B, self._longest = torch.tensor(lengths, device=device), longest
        if self._is_as_is:
            self._cache = self._language.new_cache()
        else:
            self._cache = Columns(len(prompts), length, is_padded=len(set(lengths)) > 1)
        self._positions = torch.cat([prompt.positions_to(length) for prompt in prompts], dim=-2).to(device)
        padding = self._padding_of(prompts)
        ids_BS = torch.tensor([prompt.ids + [padding] * (longest - len(prompt.ids)) for prompt in prompts])
        batch: dict[str, Any] = {"input_ids": ids_BS, "position_ids": self._positions[..., :longest]}
        if prompts[0].inputs:
            batch |= {"modality_inputs": _joined(prompts)}
        if any(prompt.blocks is not None for prompt in prompts):
            batch |= {"blocks": torch.stack([prompt.blocks_to(longest) for prompt in prompts])}
        # One microbatch, all of it of this rank: features need no exchange.
        rows = {name: [prompt.rows[name] for prompt in prompts] for name in prompts[0].rows}
        self._pipeline.shapes.begin(rows)
        with self._alone():
            # A MimoModel gives its language model no cache (mimo/model/base.py:700).
            hook = self._language.register_forward_pre_hook(self._with_cache, with_kwargs=True)
            try:
                output = self._model(**to_device(batch, device), attention_mask=None)
            finally:
                hook.remove()
        return self._advance(longest, output[0] if isinstance(output, tuple) else output)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Add a token to each sequence; returns the logits [B, V] after them."""
        assert self._cache is not None, "begin comes first"
        column = self._cache.sequence_len_offset
        ids_BS = torch.tensor(tokens, device=self._pipeline.device)[:, None]
        # All positions: Megatron-Core rotates the cached keys again, and looks up the last.
        places_BC = self._places(column + 1)
        positions = self._positions.gather(-1, places_BC.expand(*self._positions.shape[:-1], -1))
        inputs: dict[str, Any] = {"input_ids": ids_BS, "attention_mask": None}
        with self._alone():
            if not self._is_as_is:
                # An answer that is complete may go on behind the last learned position; nobody reads its logits.
                last = positions[..., column:].clamp(max=self._language.max_sequence_length - 1)
                embedding_SBH = self._language.embedding(input_ids=ids_BS, position_ids=last)
                inputs |= {"input_ids": None, "decoder_input": embedding_SBH}
                if self._cache.is_padded:
                    seen_BC = torch.arange(column + 1, device=ids_BS.device) < self._lengths_B[:, None]
                    seen_BC[:, self._longest :] = True
                    inputs["attention_mask"] = mask_of_columns(seen_BC, places_BC, self._language.config)
            output = self._language(**inputs, position_ids=positions, **self._cache_arguments())
        return self._advance(1, output)

    def keep(self, rows: Sequence[int]) -> bool:
        """Continue with some sequences only; returns False, and continues with all, if the cache cannot."""
        if self._is_as_is:
            return False
        self._cache.keep(rows)
        self._lengths_B, self._positions = self._lengths_B[rows], self._positions[..., rows, :]
        return True

    def agree(self, tokens: list[int]) -> list[int]:
        """Return the tokens of the first tensor-parallel rank, so that rounding cannot separate the ranks."""
        if self._tp_group.size() == 1:
            return tokens
        agreed = torch.tensor(tokens, device=self._pipeline.device)
        dist.broadcast(agreed, group=self._tp_group, group_src=0)
        return agreed.tolist()

    def _padding_of(self, prompts: Sequence[Prompt]) -> int:
        """Return a token for padding: any of text, because placeholders require features."""
        return next((token for prompt in prompts for token in prompt.ids if token not in self._placeholders), 0)

    def _places(self, columns: int) -> torch.Tensor:
        """Return the place of each column's token in its sequence, [B, C]; any for padding."""
        columns_C = torch.arange(columns, device=self._lengths_B.device)
        behind = self._lengths_B[:, None] - self._longest
        return torch.where(columns_C < self._longest, columns_C, columns_C + behind)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Compute without gradients, exchanges of features and divided sequences, whose parts would need equal
        lengths."""
        model, language = unwrap_model(self._model), self._language
        attributes: list[tuple[Any, str, Any]] = []
        if isinstance(model, MimoModel):
            attributes += [(model, "shared_bridges", {}), (model, "partition_adapter", None)]
        if language.config.sequence_parallel:
            owners = {
                id(owner): owner for part in language.modules() for owner in (part, getattr(part, "config", part))
            }
            names = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
            attributes += [
                (owner, name, False) for owner in owners.values() for name in names if getattr(owner, name, False)
            ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
        try:
            for owner, name, value in attributes:
                setattr(owner, name, value)
            with torch.no_grad():
                yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def _advance(self, added: int, logits_BV: torch.Tensor) -> torch.Tensor:
        self._cache.sequence_len_offset += added
        return logits_BV

    def _with_cache(self, _module: torch.nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict]:
        return arguments, {**options, **self._cache_arguments(self._lengths_B - 1)}

    def _cache_arguments(self, last_B: torch.Tensor | None = None) -> dict[str, Any]:
        return {"inference_context": self._cache, "output_processor": partial(_last_logits, last_B)}


class Columns(StaticInferenceContext):
    """Keys and values of a batch.

    Attributes:
        is_padded: True if rows have several lengths; positions and masks then differ between rows.
    """

    def __init__(self, rows: int, columns: int, *, is_padded: bool):
        super().__init__(rows, columns)
        self.is_padded = is_padded

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        of_layers = self.key_value_memory_dict
        for layer, memory in of_layers.items():
            if isinstance(memory, dict):  # states of a recurrent layer, [B, ...]
                of_layers[layer] = {name: state[rows] for name, state in memory.items()}
            else:  # keys and values, [C, B, ...]
                of_layers[layer] = tuple(part[:, rows] for part in memory)
        self.max_batch_size = len(rows)


def _joined(prompts: Sequence[Prompt]) -> dict[str, dict[str, Any] | None]:
    """Return the arguments of every module's encoder for the media of all prompts, in order."""
    arguments: dict[str, dict[str, Any] | None] = {}
    for name in prompts[0].inputs:
        fields: dict[str, list] = {}
        for prompt in prompts:
            for field, items in (prompt.inputs[name] or {name: {}})[name].items():
                fields.setdefault(field, []).extend(items)
        values = {field: (collate_media(items, field) or {})[field] for field, items in fields.items()}
        arguments[name] = {name: values} if values else None
    return arguments


def _last_logits(
    last_B: torch.Tensor | None,
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    **_others: object,
) -> torch.Tensor:
    """Return logits [B, V] of one position of each sequence, which saves memory for a long prompt; None: the last."""
    rows = torch.arange(hidden_states.size(1), device=hidden_states.device)
    hidden_BH = hidden_states[-1 if last_B is None else last_B, rows]
    logits_SBV, _ = output_layer(hidden_BH[None], weight=output_weight, runtime_gather_output=True)
    return scale_logits(logits_SBV)[0]

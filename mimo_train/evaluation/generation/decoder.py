"""A decoder of one sequence, token by token, with a cache of keys and values.

The cache is Megatron-Core's `StaticInferenceContext` (0.19.2), which its attention fills and reads, also on the CPU.
Its engines are not used: they serve batches of text-only requests.

Shape suffixes: S sequence, B batch of 1, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.utils import unwrap_model

from mimo_train.config.parts import LANGUAGE
from mimo_train.evaluation.generation.prompts import Prompt
from mimo_train.models.parameters import modules_of
from mimo_train.parallel.device import to_device
from mimo_train.training.step.pipeline import Pipeline


class Decoder:
    """The model of one process. Returns the logits of the next token, after a prompt and after every token."""

    def __init__(self, pipeline: Pipeline):
        """Set the model of `pipeline`, with every module on this rank, to evaluation mode."""
        self._pipeline, self._model = pipeline, pipeline.model[0].eval()
        (language,) = modules_of(pipeline.model)[LANGUAGE]
        self._language = unwrap_model(language)
        # A class of transformers has its own cache.
        self._is_as_is = hasattr(self._language, "new_cache")
        self._cache: Any = None
        self._positions = torch.empty(0)

    @torch.no_grad()
    def begin(self, prompt: Prompt, length: int) -> torch.Tensor:
        """Start a sequence of up to `length` positions with a prompt; returns the logits [V] after it."""
        self._cache = self._language.new_cache() if self._is_as_is else StaticInferenceContext(1, length)
        self._positions = _positions(prompt, length).to(self._pipeline.device)
        ids_BS, positions = torch.tensor([prompt.ids]), self._positions[..., : len(prompt.ids)]
        batch: dict[str, Any] = {"input_ids": ids_BS, "position_ids": positions}
        if prompt.inputs:
            batch |= {"modality_inputs": prompt.inputs}
        if prompt.blocks is not None:
            batch |= {"blocks": prompt.blocks[None]}
        # One microbatch of one sample; one rank needs no loads.
        rows = {name: [[number]] for name, number in prompt.rows.items()}
        self._pipeline.shapes.begin(rows, rows)
        # A MimoModel gives its language model no cache (mimo/model/base.py:700).
        hook = self._language.register_forward_pre_hook(self._with_cache, with_kwargs=True)
        try:
            output = self._model(**to_device(batch, self._pipeline.device), attention_mask=None)
        finally:
            hook.remove()
        return self._advance(len(prompt.ids), output[0] if isinstance(output, tuple) else output)

    @torch.no_grad()
    def step(self, token: int) -> torch.Tensor:
        """Add a token; returns the logits [V] after it."""
        assert self._cache is not None, "begin comes first"
        at = self._cache.sequence_len_offset
        # All positions: cached keys are already rotated, and Megatron-Core looks up the last.
        positions = self._positions[..., : at + 1]
        id_BS = torch.tensor([[token]], device=self._pipeline.device)
        token_of: dict[str, Any] = {"input_ids": id_BS}
        if not self._is_as_is:
            embedding_SBH = self._language.embedding(input_ids=id_BS, position_ids=positions[..., at:])
            token_of = {"input_ids": None, "decoder_input": embedding_SBH}
        output = self._language(**token_of, position_ids=positions, attention_mask=None, **self._cache_arguments())
        return self._advance(1, output)

    def _advance(self, added: int, logits_V: torch.Tensor) -> torch.Tensor:
        assert self._cache is not None
        self._cache.sequence_len_offset += added
        return logits_V

    def _with_cache(self, _module: torch.nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict]:
        return arguments, {**options, **self._cache_arguments()}

    def _cache_arguments(self) -> dict[str, Any]:
        return {"inference_context": self._cache, "output_processor": _last_logits}


def _positions(prompt: Prompt, length: int) -> torch.Tensor:
    """Return positions of a prompt and the text after it: [1, length], or [axes, 1, length] on several."""
    if prompt.positions is None:
        return torch.arange(length)[None]
    rest = prompt.positions.max() + 1 + torch.arange(length - len(prompt.ids))
    return torch.cat([prompt.positions, rest.expand(len(prompt.positions), -1)], dim=1)[:, None]


def _last_logits(
    *,
    hidden_states: torch.Tensor,
    output_layer: torch.nn.Module,
    output_weight: torch.Tensor | None,
    scale_logits: Callable[[torch.Tensor], torch.Tensor],
    **_others: object,
) -> torch.Tensor:
    """Return logits [V] of the last position only, which saves memory for a long prompt."""
    logits_SBV, _ = output_layer(hidden_states[-1:], weight=output_weight)
    return scale_logits(logits_SBV)[0, 0]

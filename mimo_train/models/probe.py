"""Properties of a class of `transformers` that its config does not say, found by running it on a few tokens.

Shape suffixes: B batch, S sequence, H hidden, M rows of a batch, N positions with logits, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch

from encoders.transformers_media.directory import output_of
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE

PROBED = 8
"""Positions whose logits are compared; a text has at least twice as many tokens."""
USED = 512
"""Most tokens of the text whose logits must depend on a parameter. DeepSeek V4 joins up to 128 tokens as one."""
ROUNDING = {torch.float32: 1e-5}
"""Largest change of logits by rounding, relative to the largest; 4e-3 in half precision. Experts get other batches."""


class Probe:
    """Checks a causal language model of transformers.

    Attributes:
        takes_positions: True if its forward pass takes positions that count from 0.
    """

    def __init__(self, model: Any, vocab_size: int, dtype: torch.dtype, longest: int):
        """`longest`: tokens of the longest text; 0: any number."""
        self._model, self._vocab_size, self._dtype, self._longest = model, vocab_size, dtype, longest
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._proven = {False: 0, True: 0}

    @torch.enable_grad()
    def unused(self) -> list[str]:
        """Return the names of trained parameters on which no logit depends, such as those of sparse indexers, by the
        graph of a forward pass. Experts count as used: which ones are depends on the tokens."""
        was_training, device = self._model.training, self._model.get_input_embeddings().weight.device
        self._model.eval()
        places = torch.arange(min(self._longest or 2 * PROBED, USED), device=device)
        with only_at(self._model, places[-PROBED:], len(places)):
            logits = self._model(input_ids=(places % self._vocab_size)[None], use_cache=False).logits
        waiting, seen, used = [logits.grad_fn], set[Any](), set[int]()
        self._model.train(was_training)
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                used.add(id(getattr(node, "variable", None)))
                waiting += [following for following, _ in node.next_functions]
        trained = ((name, value) for name, value in self._model.named_parameters() if value.requires_grad)
        return [name for name, value in trained if id(value) not in used and "expert" not in name]

    @cached_property
    def has_plain_head(self) -> bool:
        """True if logits are what a linear layer without bias and adapters returns, unchanged (not capped or scaled),
        so that its weight is all that losses need. Runs the model once."""
        head: Any = output_of(self._model)
        is_linear: bool = type(head) is torch.nn.Linear and head.bias is None
        if not is_linear:
            return False
        was_training, collected = self._model.training, list[torch.Tensor]()
        ids = torch.arange(2 * PROBED, device=head.weight.device) % self._vocab_size
        self._model.eval()

        def ones(hidden_MH: torch.Tensor, _weight: torch.Tensor) -> torch.Tensor:
            return hidden_MH.new_ones(1, 1, dtype=torch.float32)

        logits = torch.empty(0)
        with torch.no_grad(), replaced_head(self._model, ones, collected):
            with suppress(IndexError, RuntimeError):  # the class changes the logits of some tokens
                logits = self._model(input_ids=ids[None], use_cache=False).logits
        self._model.train(was_training)
        is_kept = len(collected) == 1 and logits.data_ptr() == collected[0].data_ptr()
        return is_kept and logits.shape == (1, 1, 1) and bool(logits == 1)

    def require_independence(self, packed: bool, length: int) -> None:
        """Compare logits of texts that differ in tokens that must not matter: later ones, and with `packed` those of
        earlier documents. Masks may change with the length (windows, chunks), so longer rows are compared again.

        Args:
            packed: True for rows of several documents.
            length: tokens of a row.

        Raises:
            UserError: the model is not causal, or mixes the documents of a packed row.
        """
        if length <= self._proven[packed]:
            return
        power = max(1 << (length - 1).bit_length(), 2 * PROBED)
        text = max(2 * PROBED, min(power, self._longest or power))
        self._proven[packed] = length if packed else text
        row, was_training = max(text, length) if packed else text, self._model.training
        self._model.eval()
        sees_later, mixes = self._sees_later(text), packed and self._mixes(row, min(text, row // 2))
        self._model.train(was_training)
        if sees_later:
            raise UserError(
                f"modules.{LANGUAGE}: tokens of {type(self._model).__name__} see later ones in a text of {text}, so "
                "that it is no causal language model. Set is_decoder in its config.json, or choose another model"
            )
        if mixes:
            raise UserError(
                f"data.pack: {type(self._model).__name__} of modules.{LANGUAGE} mixes the documents of a packed row of "
                f"{row} tokens. Set data.pack=false"
            )

    def _sees_later(self, length: int) -> bool:
        places, middle = torch.arange(length), length // 2
        before = torch.arange(middle - PROBED, middle)
        unchanged = self._logits(places < 0, before, places)
        if self.takes_positions and self._differ(unchanged, self._logits(places < 0, before, None)):
            self.takes_positions = False  # RoBERTa counts from another number
            unchanged = self._logits(places < 0, before, None)
        return self._differ(self._logits(places >= middle, before, places), unchanged)

    def _mixes(self, length: int, restart: int) -> bool:
        """True if the first `restart` tokens of a row change logits of documents behind them."""
        places = torch.arange(length)
        behind = torch.cat([torch.arange(restart, restart + PROBED), torch.arange(length - PROBED, length)])
        if not self.takes_positions:
            return True
        first, second = (self._logits(changed, behind, places % restart) for changed in (places < restart, places < 0))
        return self._differ(first, second)

    @torch.no_grad()
    def _logits(self, changed_S: torch.Tensor, chosen_N: torch.Tensor, places_S: torch.Tensor | None) -> torch.Tensor:
        """Return the logits at `chosen_N` of a text with other tokens where `changed_S`, [N, V]."""
        device = self._model.get_input_embeddings().weight.device
        ids_BS = ((torch.arange(len(changed_S)) + PROBED * changed_S) % self._vocab_size)[None].to(device)
        options = {}
        if places_S is not None and self.takes_positions:
            options["position_ids"] = places_S[None].to(device)
        with only_at(self._model, chosen_N.to(device), len(changed_S)):
            logits_NV = self._model(input_ids=ids_BS, **options, use_cache=False).logits[0].float()
        return logits_NV if len(logits_NV) == len(chosen_N) else logits_NV[chosen_N.to(device)]

    def _differ(self, first_NV: torch.Tensor, second_NV: torch.Tensor) -> bool:
        """True if logits differ, at more than one position: rounding may send a token to another expert."""
        rounding = ROUNDING.get(self._dtype, 4e-3)
        differs_NV = (first_NV - second_NV).abs() > rounding * first_NV.abs().max()
        return int(differs_NV.any(1).sum()) > 1


@contextmanager
def replaced_head(
    model: Any, losses: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], collected: list[torch.Tensor]
) -> Iterator[None]:
    """Let the output layer of a model call `losses(hidden states [M, H], weight)`, and collect what that returns."""
    head: Any = output_of(model)

    def forward(states_BSH: torch.Tensor) -> torch.Tensor:
        collected.append(losses(states_BSH.flatten(0, -2), head.weight))
        return collected[-1][None]

    head.forward = forward  # hooks of the layer are called as before
    try:
        yield
    finally:
        del head.forward


@contextmanager
def only_at(model: Any, learned_N: torch.Tensor | None, positions: int) -> Iterator[None]:
    """Give the output layer of a model only the hidden states of chosen positions, as [1, N, H]."""
    if learned_N is None:
        yield
        return

    def chosen(_module: torch.nn.Module, arguments: tuple) -> tuple:
        (states_BSH,) = arguments
        rows_MH = states_BSH.flatten(0, -2)
        return (rows_MH.index_select(0, learned_N)[None] if len(rows_MH) == positions else states_BSH,)

    head = output_of(model)
    assert head is not None, "`parameters_of` requires it"
    hook = head.register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        hook.remove()

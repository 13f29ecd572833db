"""The output layer of the language model, and what the next pass computes of it.

Shape suffixes: B batch, S sequence, H hidden, N positions with logits, V vocabulary part of this tensor-parallel rank
(whole if gathered), L losses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from mimo_train.estimate.activations import logits_bytes
from mimo_train.models.output.divergence import Lesson
from mimo_train.models.output.token_losses import token_losses
from mimo_train.models.output.vocabulary import Vocabulary


@dataclass(frozen=True, eq=False)
class OutputRequest:
    """What the output layer computes in the next pass."""

    learned_N: torch.Tensor | None = None
    """Offsets in [B * S] of the positions that get logits, ascending, without duplicates; None: all."""
    lesson: Lesson | None = None
    """A teacher's part of the losses of these positions."""
    predicts: bool = False
    """True for the most likely tokens next to the losses. Only without gradients."""

    def labels(self, labels_BS: torch.Tensor) -> torch.Tensor:
        """Return the labels of the positions, [N]."""
        labels = labels_BS.reshape(-1)
        return labels if self.learned_N is None else labels.index_select(0, self.learned_N)

    def losses(self, labels_BS: torch.Tensor) -> Callable[..., torch.Tensor]:
        """Return `token_losses` of the positions, as a function of the arguments that it lacks."""
        return partial(token_losses, labels_N=self.labels(labels_BS), lesson=self.lesson, predicts=self.predicts)

    def count(self, positions: int) -> int:
        """Return the number of positions that get logits, of a pass over `positions`."""
        return positions if self.learned_N is None else len(self.learned_N)

    def needs_no_logits(self, count: int, rows: int, most_bytes: int) -> bool:
        """True if losses are computed without logits: with a lesson, without gradients, where that takes no longer, and
        where logits would take more than `most_bytes`.

        Args:
            count: positions.
            rows: rows of the output layer on this rank.
        """
        if self.lesson is not None or self.predicts or not torch.is_grad_enabled():
            return True
        return logits_bytes(count, rows) > most_bytes

    def placed(self, losses_LN: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """Return losses as [B, S], or [2, B, S] if there are two of a token; 0 at other positions."""
        values = losses_LN
        if self.learned_N is not None:
            values = losses_LN.new_zeros(len(losses_LN), shape[0] * shape[1]).index_copy(1, self.learned_N, losses_LN)
        return values.view(-1, *shape).squeeze(0) if len(values) == 1 else values.view(-1, *shape)


class OutputLayer(ColumnParallelLinear):
    """Megatron-Core's output layer, with the cap and the divisor of logits, which also computes losses without them."""

    vocabulary: Vocabulary

    @classmethod
    def adapt(cls, layer: ColumnParallelLinear, vocabulary: Vocabulary) -> None:
        """Make this of an output layer that Megatron-Core built."""
        assert layer.bias is None and not layer.config.defer_embedding_wgrad_compute
        layer.__class__ = cls
        layer.vocabulary = vocabulary

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        losses: Callable[..., torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits [S, B, V] of `input_` [S, B, H], or with `losses` what that returns.

        Losses too are computed inside of this call: with `optim.overlap_param_gather` a pre-hook waits for the weight.

        Args:
            weight: of tied embeddings.
            losses: `token_losses` of labels. `input_` is [N, H] then, whole on every tensor-parallel rank.
        """
        if losses is not None:
            input_ = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
            fused = self.gradient_accumulation_fusion
            weight = self.weight if weight is None else weight
            return losses(input_, weight, vocabulary=self.vocabulary, adds_to_main_grad=fused), None
        logits_SBV, _ = super().forward(input_, weight, runtime_gather_output)
        logits = self.vocabulary.logits
        if logits.softcap:
            logits_SBV = logits.softcap * torch.tanh(logits_SBV / logits.softcap)
        return (logits_SBV if logits.divisor == 1 else logits_SBV / logits.divisor), None


def process_output(
    request: OutputRequest,
    *,
    hidden_states: torch.Tensor,
    output_layer: ColumnParallelLinear,
    output_weight: torch.Tensor | None,
    labels: torch.Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    **_others: Any,
) -> torch.Tensor:
    """Megatron-Core's `output_processor`: return losses [B, S] of `labels` [B, S], or logits [1, N, V] without them.
    Losses are [2, B, S] with a lesson or predictions. `hidden_states` are [S, B, H]; under sequence parallelism each
    tensor-parallel rank has a part."""
    gathers = output_layer.sequence_parallel
    if gathers:
        # Not in the layer: the number of chosen positions in a rank's part differs between ranks.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )
    length, batch = hidden_states.shape[:2]
    learned_N = request.learned_N
    if learned_N is None:
        rows_NH = hidden_states.transpose(0, 1).reshape(batch * length, -1)
    else:
        rows_NH = hidden_states.flatten(0, 1).index_select(0, learned_N % length * batch + learned_N // length)
    rows, most_bytes = output_layer.output_size_per_partition, output_layer.config.max_logits
    if labels is not None and isinstance(output_layer, OutputLayer):
        if request.needs_no_logits(len(rows_NH), rows, most_bytes):
            losses_LN, _ = output_layer(rows_NH, weight=output_weight, losses=request.losses(labels))
            return request.placed(losses_LN, (batch, length))
    assert request.lesson is None and not request.predicts, "labels and our output layer are there"
    output_layer.sequence_parallel = False
    try:
        logits_N1V, _ = output_layer(
            rows_NH.unsqueeze(1), weight=output_weight, runtime_gather_output=runtime_gather_output
        )
    finally:
        output_layer.sequence_parallel = gathers
    if labels is None:
        return logits_N1V.transpose(0, 1)
    losses_N = compute_language_model_loss(request.labels(labels).unsqueeze(0), logits_N1V)
    return request.placed(losses_N.view(1, -1), (batch, length))

"""Losses of a microbatch: the values a loss function may return, their weights, their sums over a step, and the
division by its tokens."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.parallel.groups import RunGroups
from mimo_train.training.tasks.base import OF_SOURCE

ACCEPTED_RETURNS = (
    "(loss, {name: value}): the mean of a microbatch, averaged over microbatches and data-parallel ranks",
    "(loss, num_tokens, {name: value}): a sum, divided by the tokens of the global batch; num_tokens is an int",
    "{name: loss}: several losses, weighted by train.loss_weights",
)
"""Results that a loss function may return. A value or a loss is a scalar (a mean) or a pair of (sum, count). Without
{name: value} the loss itself is reported, as `loss`.

With context parallelism a rank returns the sums and counts of its part of each sequence. In the first form the losses
of these ranks add up: each is the sum of its part divided by the count of the full sequence.
"""

MAX_LOSSES = 64
"""Most loss names of a step, without those of a mixture's sources."""

UNNAMED = "loss"
"""Name of a loss that is reported without a name."""


def divide_gradients(chunks: Iterable[DistributedDataParallel], tokens: torch.Tensor) -> None:
    """Divide the gradients of a step's loss sums by the tokens of the global batch: the sum over ranks of
    `StepLosses.local_tokens`, [1]. Every loss is then a mean over these tokens, at any layout."""
    factor = 1.0 / tokens.clamp(min=1).to(torch.float32)
    for chunk in chunks:
        chunk.scale_gradients(factor)


def weighted_sum(
    losses: Mapping[str, Any],
    weights: Mapping[str, float],
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Combine several named losses into one sum over tokens.

    The first loss defines n, the number of tokens of the microbatch. The total is the sum over losses of weight x mean
    x n. After division by the tokens of the global batch, each loss counts by its mean over the tokens times its weight
    (default 1).

    Args:
        losses: name -> scalar (a mean) or (sum, count).
        weights: `train.loss_weights`.
        cp_group: ranks that hold parts of the sequences. Means are over all of them, and their totals add up.
            Collective over it if given.

    Returns:
        (total, this rank's part of n as int, {name: [sum, count]}).
    """
    reports = {name: _sum_and_count(loss) for name, loss in losses.items()}
    pairs = {name: torch.stack(part).detach() for name, part in reports.items()}
    local_tokens = next(iter(pairs.values()))[1].to(torch.int)
    counts = torch.stack([pair[1] for pair in pairs.values()])
    if cp_group is not None and len(counts) > 1:
        dist.all_reduce(counts, group=cp_group)
    parts = zip(reports.items(), counts.clamp(min=1).unbind(), strict=True)
    means = torch.stack([weights.get(name, 1.0) * total / count for (name, (total, _)), count in parts])
    return counts[0] * means.sum(), local_tokens, pairs


class StepLosses:
    """Named losses of a step: normalises what loss functions return, keeps the reports, and takes means over ranks.

    The one message of a step sums `local_sums` and `local_tokens` over ranks; `reduced` reads the sums. The language
    model's last stage adds to them, one rank of each tensor-parallel group.

    Attributes:
        reports: {name: [sum, count]} of every microbatch of the current step, on ranks of the last stage.
        numbers: length of the longest `local_sums`.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        groups: RunGroups,
        validate: Callable[[torch.Tensor, torch.Tensor], None] = lambda loss, num_tokens: None,
        *,
        needs_tokens: bool = False,
        sources: Sequence[str] = (),
        rare: Sequence[str] = (),
    ):
        """Start without reports.

        Args:
            weights: `train.loss_weights`.
            sources: names of the sources of a mixture.
            rare: names of other values that a step may have no sample of.
            needs_tokens: losses must be sums with their number of tokens, which divides the router losses too
                (`mimo_train.models.router_losses.RouterLosses`).
            validate: called with the loss sum of every microbatch and its number of tokens.
        """
        self.reports: list[dict[str, torch.Tensor]] = []
        self._num_tokens: list[torch.Tensor] = []
        self._weights, self._validate, self._needs_tokens = dict(weights), validate, needs_tokens
        language = groups.collections.get(LANGUAGE)
        self._adds = language is not None and language.tp.rank() == 0
        # Context-parallel ranks have parts of a mean; one of them counts it.
        self._counts_mean = int(language is not None and language.cp.rank() == 0)
        self._cp_group = language.cp if language is not None and language.cp.size() > 1 else None
        self._of_sources = {*rare, *(f"{OF_SOURCE}{name}" for name in sources)}
        self.numbers = 2 * (MAX_LOSSES + len(self._of_sources))

    def begin(self) -> None:
        """Start a step."""
        self.reports, self._num_tokens = [], []

    def wrap(self, loss_func: Callable) -> Callable:
        """Return the loss function in the schedule's form: always (sum, number of tokens, report)."""

        def normalised(output_tensor: Any, non_loss_data: bool = False) -> Any:
            if non_loss_data:
                return loss_func(output_tensor, non_loss_data=True)
            loss, num_tokens, report = self._normalise(loss_func(output_tensor))
            if not self.reports:
                self._require_names(report)
            self._validate(loss, num_tokens)
            self.reports.append(report)
            self._num_tokens.append(num_tokens)
            return loss, num_tokens, report

        return normalised

    def local_tokens(self) -> torch.Tensor | None:
        """Return the tokens that this rank counts in the step, [1]; None if another rank counts them."""
        if not self._num_tokens or not self._adds:
            return None
        return torch.stack(self._num_tokens).sum().reshape(1)

    def local_sums(self) -> torch.Tensor | None:
        """Return what this rank adds to the step: float64 [sum, count, sum, count, ...], names in sorted order; None if
        another rank adds it. Raises UserError if microbatches have other names."""
        if not self.reports or not self._adds:
            return None
        names = sorted(self.reports[0])
        for report in self.reports:
            if sorted(report) != names:
                raise UserError(
                    "the loss function reports other names for other microbatches. Report all names in each, with "
                    "count 0"
                )
        sums = torch.cat([report[name] for report in self.reports for name in names])
        return sums.view(len(self.reports), -1).sum(0, dtype=torch.float64)

    def reduced(self, sums: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the losses of the step over microbatches and ranks, float64 on the device; empty if there are none.

        Returns:
            (means by name, 0-d; [sum, count] of `loss/NAME` of a mixture's sources and of `rare` values by name).
        """
        if not self.reports:
            return {}, {}
        names = sorted(self.reports[0])
        pairs = dict(zip(names, sums[: 2 * len(names)].view(-1, 2).unbind(), strict=True))
        of_sources = {name: pairs.pop(name) for name in names if name in self._of_sources}
        return {name: total / count.clamp(min=1) for name, (total, count) in pairs.items()}, of_sources

    def _normalise(self, result: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        if isinstance(result, dict) and result:
            first = next(iter(result.values()))
            if self._needs_tokens and not isinstance(first, (tuple, list)) and torch.as_tensor(first).numel() == 1:
                raise UserError(_NO_TOKENS)
            return weighted_sum(result, self._weights, self._cp_group)
        if not (isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[-1], dict)):
            kinds = ", ".join(type(item).__name__ for item in result) if isinstance(result, tuple) else ""
            raise TypeError(
                f"the loss function returned {f'({kinds})' if kinds else type(result).__name__}: it must return one of "
                f"{'; '.join(ACCEPTED_RETURNS)}"
            )
        if self._weights:
            raise UserError(
                f"train.loss_weights: names {', '.join(self._weights)}, but the loss function returns its total "
                "itself: let it return {name: loss}, or remove the weights"
            )
        loss = _one_number("the loss", result[0])
        if len(result) == 3:
            num_tokens = _one_number("num_tokens", torch.as_tensor(result[1], device=loss.device))
            if num_tokens.is_floating_point():
                raise TypeError(
                    f"the loss function returned num_tokens of type {num_tokens.dtype}, expected whole numbers. "
                    "Return num_tokens.to(torch.int)"
                )
            report = result[2] or {UNNAMED: (loss, num_tokens)}
            return loss, num_tokens, {name: _pair(value) for name, value in report.items()}
        if self._needs_tokens:
            raise UserError(_NO_TOKENS)
        # A mean counts as one token, so that the sum over microbatches and ranks is divided by their number.
        count = torch.full((), self._counts_mean, dtype=torch.int, device=loss.device)
        report = result[1] or {UNNAMED: loss}
        return loss, count, {name: _pair(value, self._counts_mean) for name, value in report.items()}

    def _require_names(self, report: dict[str, torch.Tensor]) -> None:
        if unknown := sorted(self._weights.keys() - report.keys()):
            raise UserError(
                f"train.loss_weights.{unknown[0]}: no such loss; the forward step returns {', '.join(report)}"
            )
        if (number := len(report.keys() - self._of_sources)) > MAX_LOSSES:
            raise UserError(
                f"the loss function reports {number} losses, expected at most {MAX_LOSSES}. Report sums of some"
            )


_NO_TOKENS = (
    "modules.language.llm.router_aux_loss: the loss function returns a mean, but the losses of routers have their "
    "weight only with a sum of token losses: let it return (sum, number of tokens, report) or {name: (sum, number)}, "
    "or set router_aux_loss and router_z_loss to 0"
)


def _one_number(what: str, value: Any) -> torch.Tensor:
    """Return a 0-d tensor, which the schedule can add; no view, which the schedule cannot free."""
    value = torch.as_tensor(value)
    if value.numel() != 1:
        raise TypeError(
            f"the loss function returned {what} with shape {tuple(value.shape)}, expected one number. Return "
            "its sum or mean"
        )
    return value.sum() if value.dim() else value


def _pair(value: Any, count: int = 1) -> torch.Tensor:
    """Return [sum, count] in fp32 of a reported value; `count` is the count of a scalar."""
    if isinstance(value, torch.Tensor) and value.shape == (2,) and value.dtype == torch.float32:
        return value.detach()
    return torch.stack(_sum_and_count(value, count)).detach()


def _sum_and_count(value: Any, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(value, (tuple, list)) and len(value) == 2:
        total = torch.as_tensor(value[0])
        return total.float().reshape(()), torch.as_tensor(value[1], device=total.device).float().reshape(())
    value = torch.as_tensor(value)
    if value.numel() == 2:
        first, second = value.float().reshape(2).unbind()
        return first, second
    if value.numel() != 1:
        raise TypeError(f"a named loss is a scalar or a pair (sum, count), got a tensor of shape {tuple(value.shape)}")
    value = value.float().reshape(())
    return value, torch.full_like(value, count)

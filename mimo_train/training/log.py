"""What a step writes into metrics.jsonl, TensorBoard and onto the console; the logging rank writes."""

import time

import torch

from mimo_train.metrics.accounting import tokens_per_step
from mimo_train.training.state import GlobalState


class StepLog:
    """Collects the numbers of a step and writes them every `train.log_interval` steps."""

    def __init__(self, state: GlobalState, scheduler):
        self._state, self._scheduler = state, scheduler
        self._tokens = tokens_per_step(state.layout.global_batch_size, state.cfg.data.sequence_length)
        self._bad = torch.zeros((), dtype=torch.int64, device=state.device)
        self._started = time.perf_counter()
        self._rates: dict[str, float] = {}

    def start_step(self) -> None:
        """Start the clock of a step, and note the learning rates it runs with."""
        self._started = time.perf_counter()
        self._rates = self._scheduler.learning_rates()

    def end_step(self, losses: dict[str, torch.Tensor], grad_norm: float | None, skipped: int, bad) -> None:
        """Write the step that has just ended, if it is due.

        Args:
            losses: reduced losses; empty on ranks that have none.
            grad_norm: norm over all modules, None if the update was skipped.
            skipped: 1 if the update was skipped.
            bad: above 0 where a sample of the step could not be read.
        """
        progress, train = self._state.train_state, self._state.cfg.train
        self._bad += (bad > 0).sum()
        due = progress.step % train.log_interval == 0 or progress.step == train.iters
        if not due:
            return
        progress.bad_samples += int(self._bad)
        self._bad.zero_()
        self._require_budget()
        if not self._state.is_logging_rank:
            return
        seconds = time.perf_counter() - self._started
        values = {name: float(value) for name, value in losses.items()}
        values["grad_norm"] = float("nan") if grad_norm is None else grad_norm
        values |= {f"learning_rate/{name}": rate for name, rate in self._rates.items()}
        values["tokens_per_second"] = self._tokens / seconds
        values["step_seconds"] = seconds
        if progress.bad_samples:
            values["bad_samples"] = progress.bad_samples
        if skipped:
            values["skipped_iters"] = progress.skipped_iters
        self._state.metrics.log(progress.step, progress.consumed_train_samples, values)
        self._state.console.step(progress.step, values)

    def _require_budget(self) -> None:
        """Every rank counts the same samples, so every rank stops at the same step."""
        found, allowed = self._state.train_state.bad_samples, self._state.cfg.data.max_bad_samples
        if found > allowed:
            raise ValueError(
                f"data.max_bad_samples: {found} samples could not be read, {allowed} are allowed: mend the shards "
                "(`mimo-train shards verify` names them) or raise data.max_bad_samples"
            )

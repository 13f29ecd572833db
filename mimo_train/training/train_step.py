"""One step of training: forward and backward over its microbatches, one reduction, clip, update."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from mimo_train.checkpoint.checkpointer import Checkpointer
from mimo_train.optim.module_optimizer import ModuleOptimizer
from mimo_train.parallel import device as devices
from mimo_train.training.setup import Session
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.forward_step import ForwardStepCallable, record_losses
from mimo_train.training.step.losses import StepLosses, divide_gradients
from mimo_train.training.step.pipeline import Pipeline
from mimo_train.training.step.state import StepResult

LocalPart = torch.Tensor | Sequence[float] | None
"""This rank's numbers: a tensor or host numbers, padded with zeros at the end; None is all zeros."""


def train_step(session: Session, forward_step: ForwardStepCallable) -> StepResult:
    """Make the current step of the data with a prepared forward step. Collective over all ranks."""
    data, pipeline, optimizer, losses = session.data, session.parts.pipeline, session.optimizer, session.losses
    sums: dict[str, torch.Tensor] = {}
    for _ in session.rerun.runs(data):
        # Megatron-Core's schedule ends with the reduction of gradients over the ranks of each module.
        forward_backward(pipeline, optimizer, losses, forward_step, data, len(data.current.microbatches))
        with session.parts.stopwatch("reduce"):
            sums = reduce_metrics(local_metrics(session), pipeline.device)
            divide_gradients(pipeline.chunks, sums["tokens"])
        data.receive(sums["bad samples"], sums.get("learned"))
    should_checkpoint, should_exit, exit_code = session.rerun.verdict()
    tokens, status = sums["tokens"][0], torch.cat([sums["votes"], sums["save"]])
    if should_exit:
        _receive(session, status.tolist())
        return StepResult(
            tokens=tokens,
            skipped_iter=1,
            should_checkpoint=should_checkpoint,
            should_exit=True,
            exit_code=exit_code,
        )
    with session.parts.stopwatch("optimizer"):
        norms, status_on_host = optimizer.reduce_norms(status)
        _receive(session, status_on_host)
        optimizer.clip(norms)
        updated = optimizer.update(norms)
    if updated:
        session.schedulers.step(increment=1)
    means, of_sources = losses.reduced(sums["losses"])
    if means and "router losses" in sums:
        means |= pipeline.router_losses.reduced(sums["router losses"])
    return StepResult(
        losses=means,
        of_sources=of_sources,
        tokens=tokens,
        logits=sums.get("logits"),
        skipped_iter=int(not updated),
        grad_norm=norms.total,
        num_zeros_in_grad=norms.num_zeros if updated else None,
        should_checkpoint=should_checkpoint,
    )


def forward_backward(
    pipeline: Pipeline,
    optimizer: ModuleOptimizer,
    losses: StepLosses,
    forward_step: ForwardStepCallable,
    data: StepIterator,
    num_microbatches: int,
) -> None:
    """Run the next `num_microbatches` of `data` forward and backward, from gradients of zero. Collective. `losses` then
    has only their losses; `forward_step` is a prepared one."""
    optimizer.zero_grad()
    for chunk in pipeline.chunks:
        chunk.zero_grad_buffer()
    losses.begin()
    with pipeline.stopwatch("forward_backward"):
        pipeline.run(record_losses(forward_step, losses), data, num_microbatches=num_microbatches)


def local_metrics(session: Session) -> dict[str, tuple[int, LocalPart]]:
    """Return this rank's part of the message of a step, {name: (length, numbers)}; the same names on all ranks."""
    state, data, losses, pipeline = session.state, session.data, session.losses, session.parts.pipeline
    samples, router_losses = state.run.batch.global_batch_size, pipeline.router_losses
    metrics: dict[str, tuple[int, LocalPart]] = {
        "tokens": (1, losses.local_tokens()),
        "votes": (ExitVotes.NUMBERS, session.votes.numbers(state.train_state.step + 1)),
        "save": (Checkpointer.NUMBER, session.checkpointer.local_status()),
        "losses": (losses.numbers, losses.local_sums()),
        "bad samples": (samples, data.local_bad_samples()),
    }
    if router_losses.active:
        metrics["router losses"] = (router_losses.numbers, router_losses.local_sums())
    if data.weighs:
        metrics["learned"] = (samples + 1, data.local_learned())
    if session.trained_logits is not None:
        metrics["logits"] = (1, session.trained_logits.local_count())
    return metrics


def reduce_metrics(parts: Mapping[str, tuple[int, LocalPart]], device: torch.device) -> dict[str, torch.Tensor]:
    """Sum named lists of numbers over all ranks in one message. Collective; the host does not wait.

    Args:
        parts: {name: (length, this rank's numbers)}; the same names and lengths in the same order on every rank.
        device: device of the sums.

    Returns:
        {name: sum over ranks, float64 [length] on `device`}. Integers up to 2^53 stay exact.
    """
    lengths = [length for length, _ in parts.values()]
    on_host, on_device = [0.0] * sum(lengths), {}
    first = 0
    for length, part in parts.values():
        assert part is None or len(part) <= length, (length, part)
        if isinstance(part, torch.Tensor):
            on_device[first] = part
        elif part is not None:
            on_host[first : first + len(part)] = part
        first += length
    total = devices.tensor(on_host, torch.float64, device)
    for first, part in on_device.items():
        total[first : first + len(part)] = part.to(device)
    dist.all_reduce(total)
    return dict(zip(parts, total.split(lengths), strict=True))


def _receive(session: Session, status: list[float]) -> None:
    """Take the sums over ranks of the votes, and of the status of the save in flight."""
    session.votes.receive(status[: ExitVotes.NUMBERS])
    session.checkpointer.receive(status[ExitVotes.NUMBERS :])

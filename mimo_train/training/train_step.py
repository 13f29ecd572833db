"""One step of training: forward and backward over its microbatches, one reduction, clip, update."""

import torch

from mimo_train.checkpoint.checkpointer import Checkpointer
from mimo_train.parallel.metric_reduction import LocalPart, reduce_metrics
from mimo_train.training.setup import Session
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step.forward_step import ForwardStepCallable, forward_backward
from mimo_train.training.step.state import StepResult


def train_step(session: Session, forward_step: ForwardStepCallable) -> StepResult:
    """Make the current step of the data with a prepared forward step. Collective over all ranks."""
    data, pipeline, optimizer, losses = session.data, session.parts.pipeline, session.optimizer, session.losses
    sums: dict[str, torch.Tensor] = {}
    for _ in session.rerun.runs(data):
        # Megatron-Core's schedule ends with the reduction of gradients over the ranks of each module.
        forward_backward(pipeline, optimizer, losses, forward_step, data, len(data.current.microbatches))
        with session.parts.stopwatch("reduce"):
            sums = reduce_metrics(local_metrics(session), pipeline.device)
            pipeline.divide_gradients(sums["tokens"])
        data.receive(sums["bad samples"], sums.get("learned"))
    should_checkpoint, should_exit, exit_code = session.rerun.verdict()
    if should_exit:
        return StepResult(
            tokens=sums["tokens"][0],
            skipped_iter=1,
            should_checkpoint=should_checkpoint,
            should_exit=True,
            exit_code=exit_code,
        )
    with session.parts.stopwatch("optimizer"):
        norms, on_host = optimizer.reduce_norms(torch.cat([sums["votes"], sums["save"]]))
        session.votes.receive(on_host[: ExitVotes.NUMBERS])
        session.checkpointer.receive(on_host[ExitVotes.NUMBERS :])
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
        tokens=sums["tokens"][0],
        logits=sums.get("logits"),
        skipped_iter=int(not updated),
        grad_norm=norms.total,
        num_zeros_in_grad=norms.num_zeros if updated else None,
        should_checkpoint=should_checkpoint,
    )


def local_metrics(session: Session) -> dict[str, tuple[int, LocalPart]]:
    """Return this rank's part of the message of a step, {name: (length, numbers)}; the same names on all ranks."""
    state, data, losses, pipeline = session.state, session.data, session.losses, session.parts.pipeline
    samples, router_losses = state.run.batch.global_batch_size, pipeline.router_losses
    metrics: dict[str, tuple[int, LocalPart]] = {
        "tokens": (1, pipeline.local_tokens()),
        "votes": (ExitVotes.NUMBERS, session.votes.numbers(state.train_state.step + 1)),
        "save": (Checkpointer.NUMBER, session.checkpointer.local_status()),
        "losses": (losses.numbers, losses.local_sums()),
        "bad samples": (samples, data.local_bad_samples()),
    }
    if router_losses.active:
        metrics["router losses"] = (router_losses.numbers, router_losses.local_sums())
    if data.weighs:
        metrics["learned"] = (samples, data.local_learned())
    if session.trained_logits is not None:
        metrics["logits"] = (1, session.trained_logits.local_count())
    return metrics

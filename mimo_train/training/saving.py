"""When the loop saves and when it ends."""

from pathlib import Path

from mimo_train.flight.recorder import RECORDER
from mimo_train.metrics import progress
from mimo_train.step.batches import StepIterator
from mimo_train.step.state import GlobalState
from mimo_train.training.callbacks import Callbacks
from mimo_train.training.exit import AgreedVotes
from mimo_train.training.setup import Session

FINISHED = "finished"
"""Reason of an exit after `train.iters` steps."""

EXPLAINED = {
    "signal": "a signal requested an exit",
    "exit_duration_minutes": "train.exit_duration_minutes {train.exit_duration_minutes:g} have passed",
    "exit_interval": "train.exit_interval {train.exit_interval} is reached",
}
"""Console message for each reason to end before the last step."""


def exit_reason(state: GlobalState, votes: AgreedVotes) -> str | None:
    """Why the run ends after this step: finished, signal, exit_duration_minutes or exit_interval; None: it continues.
    The same on every rank."""
    train, step = state.cfg.train, state.train_state.step
    if step >= train.iters:
        return FINISHED
    if votes.signalled:
        return "signal"
    if votes.out_of_time:
        return "exit_duration_minutes"
    return "exit_interval" if _due(train.exit_interval, step) else None


class Saver:
    """Saves when a checkpoint is due, and reports it to progress.txt, the console and the callbacks."""

    def __init__(self, session: Session, callbacks: Callbacks):
        self._state, self._checkpointer = session.state, session.checkpointer
        self._bad_samples, self._empty_steps, self._callbacks = session.bad_samples, session.empty_steps, callbacks
        self._saved_step = -1
        """The last step with a persistent checkpoint of this job."""

    def save_and_decide_exit(self, data: StepIterator, votes: AgreedVotes) -> bool:
        """Save once if the step is due, and return whether the loop should end.

        A checkpoint is due when the run ends, for any `exit_reason`, every `checkpoint.save_interval` steps, and,
        of the non-persistent kind, every `checkpoint.non_persistent_interval` steps where no other is due. Collective:
        every rank decides the same at the same step.
        """
        state, step, checkpoint = self._state, self._state.train_state.step, self._state.cfg.checkpoint
        ending = exit_reason(state, votes)
        due = ending or ("save_interval" if _due(checkpoint.save_interval, step) else None)
        non_persistent = due is None and _due(checkpoint.non_persistent_interval, step)
        if (due or non_persistent) and self._saved_step != step:
            self.save(data, due or "non_persistent_interval", non_persistent=non_persistent)
        if ending in EXPLAINED:
            why = EXPLAINED[ending].format(train=state.cfg.train)
            again = "" if checkpoint.resume == "auto" else " with checkpoint.resume=auto"
            state.console.message(f"{why}: saved at step {step}; the same command{again} continues the run")
        return ending is not None

    def save(
        self, data: StepIterator, reason: str, *, non_persistent: bool = False, run_dir: Path | None = None
    ) -> Path:
        """Save everything, and report it to progress.txt, the console and the callbacks. Collective.

        The time is recorded in the timer `save-checkpoint`, and printed on the console.

        Args:
            data: iterator at the step of the checkpoint, or at the next one.
            reason: why it is saved.
            non_persistent: whether it is of the kind of which only the newest is kept.
            run_dir: a folder in which all checkpoints are kept, instead of `run.dir` with its `checkpoint.keep`.

        Returns:
            The checkpoint's folder.
        """
        state, run = self._state, self._state.train_state
        timer = state.timers("save-checkpoint", log_level=0)
        timer.start()
        # A run that resumes here does not read these steps again.
        self._bad_samples.settle()
        self._empty_steps.settle()
        with RECORDER.during("save"):
            folder = self._checkpointer.save(data, non_persistent=non_persistent, run_dir=run_dir)
        timer.stop()
        if not non_persistent:
            self._saved_step = run.step
        if state.is_logging_rank:
            progress.checkpoint_saved(state.run_dir, step=run.step, path=folder, reason=reason)
            progress.throughput(
                state.run_dir,
                world_size=state.layout.world_size,
                step=run.step,
                tokens=run.consumed_train_samples * state.cfg.data.sequence_length,
                flops=run.floating_point_operations_so_far,
                job_seconds=state.job_seconds,
            )
        seconds = timer.elapsed(reset=True, barrier=False)
        state.console.message(f"checkpoint of step {run.step} ({reason}) in {seconds:.2g} s: {folder}")
        self._callbacks.fire("on_checkpoint", state, folder)
        return folder


def _due(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0

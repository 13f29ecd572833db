"""Saves of a run, and the end of the loop that follows from them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.storage.url import Place
from mimo_train.checkpoint.save import SaveFailed
from mimo_train.flight.recorder import RECORDER
from mimo_train.logging import progress
from mimo_train.training.callbacks import Callback, Callbacks
from mimo_train.training.setup import Session
from mimo_train.training.shutdown import EXPLAINED, AgreedVotes, exit_reason, is_due
from mimo_train.training.step.batches import StepIterator
from mimo_train.training.step.state import GlobalState, StepResult

MAX_FAILED_SAVES = 3
"""Consecutive saves that may fail before the run ends."""

_LONG_WAIT = 1.0
"""Longest wait for the previous save, in seconds, that the console does not report."""


@dataclass(frozen=True)
class _Facts:
    """Numbers of a checkpoint, reported when it is complete, which may be some steps later."""

    step: int
    reason: str
    began: float
    """By `time.perf_counter`."""
    waited: float
    """Seconds for which training was blocked."""
    tokens: int
    flops: float


class Saver(Callback):
    """Saves when a checkpoint is due; reports it to progress.txt, the console and the callbacks when it is complete.
    `is_ending` is True at the last step or an exit condition."""

    def __init__(self, session: Session, callbacks: Callbacks):
        self._state, self._checkpointer = session.state, session.checkpointer
        self._session, self._callbacks, self.is_ending = session, callbacks, False
        self._first_step = session.state.train_state.step
        """The step from which this job started."""
        self._saved_step = session.checkpointer.resumed_step
        """The last step with a persistent checkpoint in the run's folder, complete or in flight."""
        self._in_flight: _Facts | None = None
        self._failures = 0
        """Failed saves in a row."""
        self._reported_shortage = False

    def on_step_end(self, state: GlobalState, result: StepResult) -> None:
        self.is_ending = self.save_and_decide_exit(self._session.data, self._session.votes.agreed)

    def save_and_decide_exit(self, data: StepIterator, votes: AgreedVotes) -> bool:
        """Save once if the step is due, and return True if the loop should end. Collective, with the same decision on
        all ranks.

        A checkpoint is due at any `exit_reason` and every `checkpoint.save_interval` steps. If none is due, a
        non-persistent one is due every `checkpoint.non_persistent_interval` steps. The last checkpoint of a run is
        complete on return.

        Raises:
            SaveFailed: more saves in a row failed than `MAX_FAILED_SAVES`, the last save of the run failed,
                or weights are not finite; on every rank.
        """
        state, step, checkpoint = self._state, self._state.train_state.step, self._state.cfg.checkpoint
        if self._in_flight is not None:  # the last step's message may say that it is complete or has failed
            self._settle(self._checkpointer.poll)
        ending = exit_reason(state, votes)
        due = ending or ("save_interval" if is_due(checkpoint.save_interval, step) else None)
        non_persistent = due is None and is_due(checkpoint.non_persistent_interval, step)
        if ending:
            self.finish(can_end=False)  # the last save follows, and repeats a failed one of this step
        if ending in EXPLAINED and step == self._first_step:  # nothing new to save
            reason = EXPLAINED[ending].format(train=state.cfg.train)
            state.console.message(f"{reason}: this job has made no step, and has saved nothing; start it again")
            return True
        if (due or non_persistent) and self._saved_step != step:
            if ending:
                self.save(data, ending, must_succeed=True)
            else:
                self._begin(data, due or "non_persistent_interval", non_persistent)
        if ending in EXPLAINED:
            reason = EXPLAINED[ending].format(train=state.cfg.train)
            again = "" if checkpoint.resume == "auto" else " with checkpoint.resume=auto"
            state.console.message(f"{reason}: saved at step {step}; the same command{again} continues the run")
        return ending is not None

    def save(
        self,
        data: StepIterator,
        reason: str,
        *,
        non_persistent: bool = False,
        run_dir: Place | None = None,
        must_succeed: bool = False,
    ) -> Place | None:
        """Save everything, wait until it is complete, and report it to progress.txt, the console and the callbacks.
        Collective.

        The timer `save-checkpoint` records the time, and the console prints it.

        Args:
            data: iterator at the step of the checkpoint, or at the next one.
            reason: reason of the save, for the reports.
            non_persistent: save the kind of which only the newest is kept.
            run_dir: a folder that keeps all checkpoints, instead of `run.dir` with its `checkpoint.keep`.
            must_succeed: a failure ends the run, as it always does with a `run_dir`.

        Returns:
            The checkpoint's folder; None if the save failed and the run continues.

        Raises:
            SaveFailed: see `save_and_decide_exit`.
        """
        self.finish(can_end=run_dir is None)
        options = {"non_persistent": non_persistent, "run_dir": run_dir}
        saved = self._timed(data, reason, self._checkpointer.save, options, must_succeed or run_dir is not None)
        if saved is None:
            return None
        facts, folder = saved
        assert folder is not None
        self._report(facts, folder)
        return folder

    def save_apart(self, data: StepIterator, folder: Path, reason: str) -> Path:
        """Save into `folder`, even if the save in flight fails."""
        saved = self.save(data, reason, run_dir=folder)
        assert isinstance(saved, Path)
        return saved

    def keep_best(self) -> None:
        """Save the current step if its evaluation is among the best and it has no persistent checkpoint, and name the
        best ones. Collective.

        Raises:
            SaveFailed: see `save_and_decide_exit`.
        """
        if not self._checkpointer.is_among_best():
            return
        if self._saved_step != self._state.train_state.step:
            self._begin(self._session.data, "keep_best", non_persistent=False)
        self._checkpointer.name_best()

    def finish(self, *, can_end: bool = True) -> None:
        """Wait for the save in flight and report it. Raises SaveFailed only if `can_end`. Collective."""
        if self._in_flight is not None:
            with RECORDER.during("save"):
                self._settle(self._checkpointer.finish, can_end=can_end)

    def _begin(self, data: StepIterator, reason: str, non_persistent: bool) -> None:
        """Start a save while training continues, if the config allows it."""
        if self._in_flight is not None:
            began = time.perf_counter()
            self.finish()
            waited = time.perf_counter() - began
            if waited > _LONG_WAIT:
                self._state.console.message(
                    f"waited {waited:.2g} s for the previous checkpoint: saves take longer than the steps between them"
                )
        options = {"non_persistent": non_persistent}
        saved = self._timed(data, reason, self._checkpointer.begin, options, must_succeed=False)
        if saved is None:
            return
        if (shortage := self._checkpointer.memory_shortage) and not self._reported_shortage:
            self._state.console.message(f"checkpoint.asynchronous=auto: saves block training, because {shortage}")
        self._reported_shortage = bool(shortage)
        facts, folder = saved
        if folder is None:
            self._in_flight = facts
        else:
            self._report(facts, folder)

    def _timed(
        self,
        data: StepIterator,
        reason: str,
        save: Callable[..., Place | None],
        options: dict[str, Any],
        must_succeed: bool,
    ) -> tuple[_Facts, Place | None] | None:
        """Call a save of the checkpointer under the timer `save-checkpoint`. Return its facts and its result; None if
        it failed and the run continues."""
        state, run = self._state, self._state.train_state
        timer, began = state.timers("save-checkpoint", log_level=0), time.perf_counter()
        timer.start()
        self._session.counts.settle()  # a run that resumes here does not read these steps again
        try:
            with RECORDER.during("save"):
                folder = save(data, **options)
        except SaveFailed as error:
            if must_succeed:
                raise
            self._failed(error, run.step)
            return None
        finally:
            timer.stop()
            waited = timer.elapsed(reset=True, barrier=False)  # also of a failed save
        if not options["non_persistent"]:
            self._saved_step = run.step
        tokens, flops = run.consumed_train_tokens, run.floating_point_operations_so_far
        return _Facts(run.step, reason, began, waited, tokens, flops), folder

    def _settle(self, outcome: Callable[[], Place | None], *, can_end: bool = True) -> None:
        facts = self._in_flight
        assert facts is not None
        try:
            folder = outcome()
        except SaveFailed as error:
            self._in_flight = None
            self._failed(error, facts.step, can_end=can_end)
            return
        if folder is not None:
            self._in_flight = None
            self._report(facts, folder)

    def _failed(self, error: SaveFailed, step: int, *, can_end: bool = True) -> None:
        self._failures += 1
        if self._saved_step == step:
            self._saved_step = -1
        left = MAX_FAILED_SAVES - self._failures
        if can_end and (error.is_final or left < 0):
            raise error
        self._state.console.message(
            f"no checkpoint of step {step}: {error}. Training continues; "
            f"{'the next failure' if left <= 0 else f'{left + 1} more failures in a row'} would end the run"
        )

    def _report(self, facts: _Facts, folder: Place) -> None:
        state, self._failures = self._state, 0
        if state.is_logging_rank:
            progress.append(state.run_dir, "checkpoint", step=facts.step, path=folder, reason=facts.reason)
            progress.throughput(
                state.run_dir,
                world_size=state.layout.world_size,
                step=facts.step,
                tokens=facts.tokens,
                flops=facts.flops,
                job_seconds=state.job_seconds,
            )
        seconds = time.perf_counter() - facts.began
        blocked = f" (training blocked for {facts.waited:.2g} s)" if state.train_state.step != facts.step else ""
        state.console.message(
            f"saved checkpoint at step {facts.step} ({facts.reason}) in {seconds:.2g} s{blocked}: {folder}"
        )
        self._callbacks.fire("on_checkpoint", state, folder)

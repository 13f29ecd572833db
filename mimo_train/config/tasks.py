"""Tasks by the name of `train.task`: what each reads and needs. Their losses are in `mimo_train/training/tasks/`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskTraits:
    """What a task reads from the data and needs from the model."""

    form: str = "turns"
    """Records: `turns` (one answer), `pairs` (chosen and rejected answer) or `labels` (an answer with a label)."""
    needs_reference: bool = False
    """True if the loss takes log-probabilities of a reference model."""
    keys: tuple[str, ...] = ()
    """Keys of the section `preference` that the loss uses."""
    value_head: bool = False
    """True if the model ends in one number for each token, not in logits."""
    has_teacher: bool = False
    """True if a frozen model next to the run's modules gives part of the loss (`distill`)."""

    @property
    def answers(self) -> int:
        """Token sequences of a sample; with `labels` the second is a mismatched answer, for the KL term."""
        return 1 if self.form == "turns" else 2


TASKS = {
    "sft": TaskTraits(),
    "distill": TaskTraits(has_teacher=True),
    "dpo": TaskTraits("pairs", needs_reference=True, keys=("beta", "label_smoothing", "sft_weight")),
    "ipo": TaskTraits("pairs", needs_reference=True, keys=("beta", "sft_weight")),
    "simpo": TaskTraits("pairs", keys=("beta", "gamma", "label_smoothing", "sft_weight")),
    "orpo": TaskTraits("pairs", keys=("beta",)),
    "kto": TaskTraits("labels", needs_reference=True, keys=("beta", "desirable_weight", "undesirable_weight")),
    "reward": TaskTraits("pairs", value_head=True, keys=("center_rewards",)),
}
"""Tasks by the name of `train.task`."""

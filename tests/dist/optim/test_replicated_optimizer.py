"""Without the distributed optimizer the numbers are the same, and weights of fp32 are updated where they are."""

import pytest

from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import RATE, TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole

WHOLE = "optim.distributed_optimizer=false"
STEPS, SAVED = 6, 3
REPLICAS = ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.dp=2")
EXPERTS = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.expert_ffn_hidden_size=48",
    "modules.language.llm.shared_expert_ffn_hidden_size=32",
)
CASES = {
    "clip groups, rates of their own, stages": (
        *REPLICAS,
        "modules.images.optim.clip_grad=1e-2",
        f"modules.images.optim.projector_lr={RATE / 2}",
        "modules.images.freeze_until={encoder: 2}",
        "optim.clip_grad=0.5",
        "log.metrics=[num_zeros_in_grad]",
    ),
    "bf16": (*REPLICAS, "train.precision=bf16"),
    "fp16": (*REPLICAS, "train.precision=fp16", "optim.initial_loss_scale=1024", "optim.loss_scale_window=2"),
    "reduction overlaps backward": (*REPLICAS, "optim.overlap_grad_reduce=true"),
    "experts": (*EXPERTS, *REPLICAS, "modules.language.layout.ep=2"),
    "tied stages, a frozen encoder": ("layout=images_tp2_language_pp2", "modules.images.freeze=[encoder]"),
}

ONLY_NUMBERS = ("fp16", "reduction overlaps backward", "tied stages, a frozen encoder")
"""Cases whose checkpoints hold nothing that those of the others do not."""


def run_config(digits, run_dir, *overrides: str):
    return config("vlm_digits", run_dir, digits, f"train.iters={STEPS}", *overrides)


def _train(cfg, save: bool = False) -> dict:
    """Steps of a run, which saves in the middle if asked to; with the sizes of what it trains and of its state."""
    steps = Steps(cfg)
    points = steps.train(SAVED) if save else []
    if save:
        steps.save()
    points += steps.train(STEPS - steps.state.train_state.step)
    parts = list(steps.optimizer.inner())
    return {
        "points": points,
        "trained": sum(p.numel() for chunk in steps.model for p in chunk.parameters() if p.requires_grad),
        "state": sum(state["exp_avg"].numel() for part in parts for state in part.optimizer.state.values()),
        "updates": steps.optimizer.updates,
        "scale": float(steps.optimizer.get_loss_scale()),
    }


def train(cfg, save: bool = False) -> tuple[list[tuple], list[dict]]:
    found = run_ranks(_train, resolve(cfg).layout.world_size, cfg, save)
    return whole([rank["points"] for rank in found]), found


@pytest.mark.parametrize("case", CASES)
def test_states_kept_whole_give_the_same_numbers_and_checkpoints_of_the_same_kind(case, digits, tmp_path):
    overrides, saved = CASES[case], case not in ONLY_NUMBERS
    divided, their_ranks = train(run_config(digits, tmp_path / "divided", *overrides), save=saved)
    kept, ranks = train(run_config(digits, tmp_path / "whole", *overrides, WHOLE), save=saved)
    assert max(largest_difference(divided, kept)) < TOLERANCE
    assert all(rank["state"] == rank["trained"] for rank in ranks), "a replica does not keep the whole state"
    assert sum(rank["state"] for rank in their_ranks) <= sum(rank["state"] for rank in ranks)
    assert [rank["updates"] for rank in ranks] == [rank["updates"] for rank in their_ranks]
    assert [rank["scale"] for rank in ranks] == [rank["scale"] for rank in their_ranks]
    for name, source, own in saved * (("there", "divided", WHOLE), ("back", "whole", None), ("again", "whole", WHOLE)):
        resume = f"checkpoint.resume={tmp_path / source}"
        cfg = run_config(digits, tmp_path / name, *overrides, resume, *filter(None, [own]))
        continued, _ = train(cfg)
        assert len(continued) == STEPS - SAVED
        if name == "again":
            assert [point[1:] for point in continued] == [point[1:] for point in kept[SAVED:]]
        renumbered = [(step + SAVED, *rest) for step, *rest in continued]
        assert max(largest_difference(divided[SAVED:], renumbered)) < TOLERANCE, name


def test_a_checkpoint_with_whole_states_continues_at_another_layout(digits, tmp_path):
    one, _ = train(run_config(digits, tmp_path / "whole", *EXPERTS, *REPLICAS, WHOLE), save=True)
    others = {"divided": ("layout=one_process",), "stages": ("layout=images_tp2_language_pp2", WHOLE)}
    for name, overrides in others.items():
        resume = f"checkpoint.resume={tmp_path / 'whole'}"
        continued, _ = train(run_config(digits, tmp_path / name, *EXPERTS, *overrides, resume))
        renumbered = [(step + SAVED, *rest) for step, *rest in continued]
        assert max(largest_difference(one[SAVED:], renumbered)) < TOLERANCE, name

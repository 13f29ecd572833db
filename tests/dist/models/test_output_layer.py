"""Losses without logits over parts of the vocabulary, and in runs whose layout the parity table does not try."""

import pytest
import torch

from tests.dist.ranks import run_ranks
from tests.dist.runs import config
from tests.dist.steps import Steps
from tests.unit.models import test_token_losses as alone

RANKS = 2


def _of_parts() -> dict[str, list[tuple[float, float]]]:
    """On one of two ranks: (error, size) of losses and gradients of each case, against one rank with all rows."""
    import torch.distributed as dist
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    from mimo_train.estimate import activations
    from mimo_train.models.output.divergence import Lesson, TeacherHead
    from mimo_train.models.output.token_losses import token_losses
    from mimo_train.models.output.vocabulary import Logits, Vocabulary

    activations.BLOCK_BYTES = 1 << 16
    group, logits, half = dist.group.WORLD, Logits(2.0, 0.5), alone.ROWS // RANKS
    hidden, weight, labels, gradients = alone.inputs()
    own = slice(group.rank() * half, (group.rank() + 1) * half)
    taught, results = torch.randn(alone.TOKENS, 5, generator=torch.Generator().manual_seed(3)), {}
    ways = {"trained": (logits, None, True), "frozen": (logits, None, False), "plain": (Logits(), None, True)}
    # Equal logits of the teacher on both ranks, at the limit of the top k.
    ways |= {f"top {top_k}": (logits, top_k, True) for top_k in (0, 7)}
    for name, (logits, top_k, trained) in ways.items():
        found = []
        for tp_group, rows in ((alone.ALONE, slice(None)), (group, own)):
            of, part = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_(trained)
            lesson = None
            if top_k is not None:
                full = alone.head(top_k, rows=alone.VOCABULARY - 10).weight_VH
                full[400:410] = full[20:30]
                head = TeacherHead(full[rows], Logits(divisor=0.5), tp_group, 1.5, top_k)
                lesson = Lesson(head, taught)
            entering = of if tp_group is alone.ALONE else copy_to_tensor_model_parallel_region(of, group=group)
            losses = token_losses(entering, part, labels, Vocabulary(tp_group, alone.VOCABULARY, logits), lesson=lesson)
            (losses * gradients).sum().backward()
            found.append([losses.detach(), of.grad, part.grad])
        (losses, of_hidden, of_weight), mine = found
        right = [losses, of_hidden, of_weight[own] if trained else None]
        results[name] = [
            (float((ours - theirs).norm()), float(theirs.norm()))
            for ours, theirs in zip(mine, right, strict=True)
            if theirs is not None
        ]
    # Labels that are no token, as Megatron-Core has them, which counts padding.
    of = hidden.clone().requires_grad_()
    (losses,) = token_losses(of, weight[own], labels, Vocabulary(group, alone.ROWS))
    stored = hidden @ weight[own].T
    core = vocab_parallel_cross_entropy(stored.unsqueeze(1), labels.unsqueeze(1), tp_group=group).squeeze(1)
    results["core"] = [(float((losses - core).detach().norm()), float(core.norm()))]
    # Predictions, of tokens that are equal on both ranks.
    weight[5] *= 5
    weight[640] = weight[5]
    hidden[:40] = 10 * weight[5]
    with torch.no_grad():
        for rows, tp_group in ((own, group), (slice(None), alone.ALONE)):
            _, predicted = token_losses(
                hidden, weight[rows], labels, Vocabulary(tp_group, alone.VOCABULARY), predicts=True
            )
            results.setdefault("predicted", []).append(predicted.tolist())
    return results


def _joined() -> dict[str, list]:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return _of_parts()


def test_parts_of_the_vocabulary_give_the_losses_of_all_of_it():
    for results in run_ranks(_joined, RANKS):
        ours, right = results.pop("predicted")
        assert ours == right and right[:40] == [5.0] * 40
        for name, errors in results.items():
            assert all(error < 1e-6 * size for error, size in errors), (name, errors)


def _two_steps(cfg) -> list[tuple[float | None, float | None]]:
    return Steps(cfg).train(2)


CASES = {
    "adapters, tp sp": ("vlm_digits", 2, ("modules.language.lora.rank=4", "modules.language.layout.tp=2",
                                          "modules.language.layout.sp=true", "modules.images.layout.dp=2",
                                          "placement.mode=shared")),
    "frozen": ("vlm_digits", 1, ("modules.language.freeze=[llm]", "layout=one_process")),
    "pairs": ("vlm_digits", 1, ("train.task=simpo", "layout=one_process")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_runs_without_stored_logits_have_the_numbers_of_runs_with_them(name, request, tmp_path):
    config_name, ranks, overrides = CASES[name]
    demo = request.getfixturevalue("pairs" if name == "pairs" else "digits")
    keys = ("train.global_batch_size=8", "train.micro_batch_size=4", "train.iters=2", *overrides)
    stored, without = (
        run_ranks(_two_steps, ranks, config(config_name, tmp_path / most, demo, *keys, f"train.max_logits_mib={most}"))
        for most in ("256", "0")
    )
    for one, other in zip(stored[-1], without[-1], strict=True):
        assert other == pytest.approx(one, rel=3e-6) and one[1] > 0

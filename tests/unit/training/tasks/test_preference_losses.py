"""Losses of tasks that compare answers, against their formulas on hand-made microbatches."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid

from mimo_train.config.errors import ConfigError
from mimo_train.config.tasks import TASKS, PreferenceConfig
from mimo_train.training.tasks.registry import CLASSES

ALONE = SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1), dp=SimpleNamespace(size=lambda: 1))
LENGTHS = [[5, 3], [2, 7], [4, 4]]
"""Tokens of the two answers of three samples."""
REFERENCE = torch.tensor([[-9.0, -7.5], [-4.0, -15.0], [-7.0, -8.0]])
LABELS = torch.tensor([1.0, 0.0, 1.0])


def _task(name: str, **keys):
    cfg = SimpleNamespace(
        train=SimpleNamespace(task=name),
        traits=TASKS[name],
        preference=PreferenceConfig(**keys),
        data=SimpleNamespace(mix=[]),
    )
    return CLASSES[name](cfg)


def _rows(packed: bool) -> tuple[dict, torch.Tensor]:
    """A microbatch with a prompt of two tokens before each answer, and its losses per token."""
    width, draw = 9, torch.Generator().manual_seed(3)
    losses, mask = torch.rand(6, width, generator=draw) * 3, torch.zeros(6, width)
    for row, length in enumerate(length for pair in LENGTHS for length in pair):
        mask[row, 2 : 2 + length] = 1
    answers = torch.where(mask > 0, torch.arange(6)[:, None], -1)
    batch = {"loss_mask": mask, "answers": answers, "targets": LABELS, "reference": REFERENCE}
    if packed:
        batch |= {"loss_mask": mask.reshape(1, -1), "answers": answers.reshape(1, -1)}
        losses = losses.reshape(1, -1)
    return batch, losses.requires_grad_()


def _formula(name: str, keys: PreferenceConfig, logps: torch.Tensor) -> torch.Tensor:
    """The loss of each sample, written down from the papers; `logps`: [samples, 2]."""
    beta, tokens = keys.beta, torch.tensor(LENGTHS)
    ratios, means = logps - REFERENCE, logps / tokens
    sft = -keys.sft_weight * means[:, 0]
    smooth = keys.label_smoothing
    if name == "dpo":
        margin = beta * (ratios[:, 0] - ratios[:, 1])
        return sft - (1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)
    if name == "ipo":
        return sft + ((ratios / tokens)[:, 0] - (ratios / tokens)[:, 1] - 1 / (2 * beta)) ** 2
    if name == "simpo":
        margin = beta * (means[:, 0] - means[:, 1]) - keys.gamma
        return sft - (1 - smooth) * logsigmoid(margin) - smooth * logsigmoid(-margin)
    if name == "orpo":
        odds = means.exp() / (1 - means.exp())
        return -means[:, 0] - beta * logsigmoid((odds[:, 0] / odds[:, 1]).log())
    divergence = ratios[:, 1].detach().mean().clamp(min=0)
    good = keys.desirable_weight * (1 - torch.sigmoid(beta * (ratios[:, 0] - divergence)))
    bad = keys.undesirable_weight * (1 - torch.sigmoid(beta * (divergence - ratios[:, 0])))
    return torch.where(LABELS > 0, good, bad)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dpo", {}),
        ("dpo", {"beta": 0.5, "label_smoothing": 0.1, "sft_weight": 0.3}),
        ("ipo", {"sft_weight": 0.2}),
        ("simpo", {"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.2}),
        ("orpo", {"beta": 0.3}),
        ("kto", {"desirable_weight": 1.3, "undesirable_weight": 0.7}),
    ],
)
def test_losses_and_gradients_are_those_of_the_formula(name, keys, packed):
    batch, losses = _rows(packed)
    total, units, report = _task(name, **keys)(batch, ALONE, losses)
    logps = -(losses * batch["loss_mask"]).reshape(6, 9).sum(1).view(3, 2)
    expected = _formula(name, PreferenceConfig(**keys), logps)
    assert int(units) == 3 and total.item() == pytest.approx(expected.sum().item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(total, losses)
    (wanted,) = torch.autograd.grad(expected.sum(), losses)
    torch.testing.assert_close(gradient, wanted)
    assert report["loss"].tolist() == pytest.approx([total.item(), 3])
    if name == "kto":
        assert report["rewards/chosen"][1] == 2 and report["rewards/rejected"][1] == 1
        divergence = (logps - REFERENCE)[:, 1].mean().clamp(min=0)
        assert report["kl"].tolist() == pytest.approx([3 * divergence.item(), 3])
    else:
        chosen, rejected = (report[f"rewards/{which}"][0] for which in ("chosen", "rejected"))
        torch.testing.assert_close(report["rewards/margins"][0], chosen - rejected)
        assert report["logps/chosen"][0].item() == pytest.approx(logps[:, 0].sum().item(), rel=1e-6)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_bad_samples_and_those_without_a_reference_count_nowhere(name):
    """One is bad, one has no reference value: the loss is that of the other, and no gradient is nan."""
    batch, losses = _rows(packed=False)
    alone = {key: value[:2] if key in ("loss_mask", "answers") else value[:1] for key, value in batch.items()}
    needs = TASKS[name].needs_reference
    kept = [0] if needs else [0, 2]
    batch["loss_mask"][2:4] = 0
    batch["reference"] = torch.where(torch.tensor([[False], [False], [True]]), torch.nan, REFERENCE)
    batch["targets"] = torch.where(torch.tensor([False, True, False]), torch.nan, LABELS)
    total, units, report = _task(name)(batch, ALONE, losses)
    assert int(units) == len(kept) and report["loss"][1] == len(kept)
    (gradient,) = torch.autograd.grad(total, losses)
    assert gradient.isfinite().all() and not gradient[2:4].any()
    if needs:
        expected, *_ = _task(name)(alone, ALONE, losses[:2])
        assert total.item() == pytest.approx(expected.item()) and not gradient[4:].any()


@pytest.mark.parametrize("name", [name for name, traits in TASKS.items() if traits.answers > 1])
def test_a_packed_row_of_padding_alone_counts_nothing(name):
    losses = torch.rand(1, 8, requires_grad=True)
    batch = {"loss_mask": torch.zeros(1, 8), "answers": torch.full((1, 8), -1), "targets": torch.zeros(0)}
    batch |= {"reference": torch.zeros(0, 2), "documents": (8,), "lengths": (0,)}
    total, units, report = _task(name)(batch, ALONE, losses)
    total.backward()
    assert total == units == 0 and not any(sums.any() for sums in report.values())
    assert losses.grad is not None and not losses.grad.any()


def test_a_task_that_needs_a_reference_does_not_run_without():
    batch, losses = _rows(packed=False)
    del batch["reference"]
    with pytest.raises(KeyError):
        _task("dpo")(batch, ALONE, losses)


def test_a_held_out_set_has_no_loss_of_a_source_of_the_mixture():
    task = _task("dpo")
    task.cfg.data.mix = [SimpleNamespace(name="first"), SimpleNamespace(name="second")]
    batch, losses = _rows(packed=False)
    *_, report = task(batch, ALONE, losses)
    *_, of_sources = task(batch | {"sources": torch.ones_like(batch["answers"])}, ALONE, losses)
    assert of_sources.keys() - report.keys() == {"loss/first", "loss/second"}
    assert of_sources["loss/first"][1] == 0 and of_sources["loss/second"].tolist() == report["loss"].tolist()


def test_names_and_traits_are_of_the_same_tasks():
    assert CLASSES.keys() == TASKS.keys()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["preference.beta=0.2"], "preference.beta: is 0.2, but train.task=sft does not use it"),
        (["train.task=orpo", "preference.sft_weight=1"], "preference.sft_weight: is 1.0, but train.task=orpo"),
        (["train.task=dpo", "preference.gamma=1"], "preference.gamma: is 1.0, but train.task=dpo"),
        (["train.task=dpo", "preference.label_smoothing=0.5"], "preference.label_smoothing: must be"),
        (["train.task=dpo", "train.forward_step=a.b:c"], "train.forward_step: is a.b:c, and train.task=dpo has a loss"),
        (["train.task=ppo"], "train.task: must be sft or"),
    ],
)
def test_keys_that_a_task_does_not_use_are_config_errors(overrides, message):
    from mimo_train.config.compose import load
    from mimo_train.layout.run import resolve

    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        resolve(load("gpt_tiny", overrides))

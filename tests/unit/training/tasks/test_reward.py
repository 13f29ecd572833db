"""The loss of reward models, against its formula, and configs that cannot have one."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import logsigmoid

from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.tasks import TASKS, PreferenceConfig
from mimo_train.evaluation.generation.answers import Answers
from mimo_train.hf.llava_limits import export_form
from mimo_train.hf.parts import classifier_config
from mimo_train.layout.run import resolve
from mimo_train.training.tasks.reward import Reward

ALONE = SimpleNamespace(cp=SimpleNamespace(rank=lambda: 0, size=lambda: 1), dp=SimpleNamespace(size=lambda: 1))
LENGTHS = [5, 3, 6, 7, 4, 4]
"""Tokens of the two answers of three samples. Two are learned; the last one follows them, as a line break may."""
MARGINS = torch.tensor([0.5, torch.nan, 1.5])


def _batch(packed: bool) -> tuple[dict, torch.Tensor]:
    """A microbatch whose last sample is bad, and values; -100 where no answer ends."""
    width = sum(LENGTHS) + 2 if packed else max(LENGTHS)
    rows, ends = 1 if packed else 6, torch.tensor(LENGTHS).cumsum(0).tolist()
    mask, values = torch.zeros(rows, width), torch.full((rows, width), -100.0)
    answers = torch.full((rows, width), -1)
    for answer, length in enumerate(LENGTHS):
        row, end = (0, ends[answer]) if packed else (answer, length)
        values[row, end - 1] = answer / 4 - 0.3 * (answer % 2)
        learned = slice(end - 3, end - 1)
        if answer < 4:
            mask[row, learned], answers[row, learned] = 1, answer
    batch = {"loss_mask": mask, "answers": answers, "targets": MARGINS, "lengths": (ends[-1],) if packed else LENGTHS}
    return batch | ({"documents": (*ends, width)} if packed else {}), values.requires_grad_()


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_the_last_token_of_each_answer_scores_it(packed):
    cfg = SimpleNamespace(
        train=SimpleNamespace(task="reward"),
        traits=TASKS["reward"],
        preference=PreferenceConfig(center_rewards=0.1),
        data=SimpleNamespace(mix=[]),
    )
    batch, values = _batch(packed)
    loss, pairs, report = Reward(cfg).loss(batch, ALONE, values)
    chosen, rejected = torch.tensor([0.0, 0.5], requires_grad=True), torch.tensor([-0.05, 0.45], requires_grad=True)
    expected = -logsigmoid(chosen - rejected - torch.tensor([0.5, 0.0])) + 0.1 * (chosen + rejected) ** 2
    assert int(pairs) == 2 and torch.allclose(loss, expected.sum())
    means = {name: float(total / count) for name, (total, count) in report.items()}
    assert means == pytest.approx({
        "loss": float(expected.mean()), "rewards/chosen": 0.25, "rewards/rejected": 0.2, "rewards/margins": 0.05,
        "rewards/accuracies": 1.0,
    })  # fmt: skip
    loss.backward()
    expected.sum().backward()
    gradients = torch.stack([chosen.grad, rejected.grad], dim=1).flatten()
    assert torch.allclose(values.grad[values.grad != 0], gradients)


def test_configs_without_a_place_for_a_value_head():
    with pytest.raises(ConfigError, match="modules.language.freeze: freezes the value head of train.task=reward"):
        resolve(load("vlm_digits", ["train.task=reward", "modules.language.freeze=[llm]"]))
    with pytest.raises(UserError, match="train.task=reward scores texts and writes none"):
        Answers(load("gpt_tiny", ["train.task=reward"]), None, None, None, 1)
    for model_type in ("", "cohere2"):
        with pytest.raises(UserError, match="has no class for sequence classification of"):
            classifier_config(model_type, None)
    modules = dict.fromkeys(("images", "language"), SimpleNamespace(pretrained="vlm"))
    composite = SimpleNamespace(modules=modules, encoders={"images": None}, traits=TASKS["reward"])
    assert "cannot be exported: transformers has no class for vlm with a value head" in export_form(composite)

"""The forward step of several modules: its microbatch, its loss, and the guard against a wrong last stage."""

from types import SimpleNamespace

import pytest
import torch

from mimo_train.training.step import mimo_step


def model(output, *, last: bool = True, language: bool = True):
    """Stands for a `MimoModel` at one stage; keeps what it was called with."""
    role = SimpleNamespace(has_language_module=language, is_last_stage=lambda name: last)

    def forward(**inputs):
        forward.inputs = inputs
        return output, inputs.get("loss_mask")

    forward.role = role
    return forward


def test_a_microbatch_holds_what_the_model_takes_and_nothing_else():
    microbatch = {"input_ids": 1, "labels": 2, "loss_mask": 3, "position_ids": 4, "sample_numbers": 5, "texts": []}
    microbatch["modality_inputs"] = {"images": {"images": {"pixels": 6}}}
    batch = mimo_step.get_batch(iter([microbatch]))
    assert batch == {key: value for key, value in microbatch.items() if key not in ("sample_numbers", "texts")}
    with pytest.raises(KeyError, match="attention_mask: not in this microbatch. It has input_ids, .*causal"):
        batch["attention_mask"]
    assert mimo_step.get_batch(iter([])) is None


def test_the_loss_is_a_sum_with_its_number_of_tokens():
    total, tokens, report = mimo_step.loss_func(torch.tensor([[1.0, 0, 1]]), torch.tensor([[2.0, 50, 3]]))
    assert (float(total), int(tokens)) == (5.0, 2) and tokens.dtype == torch.int
    assert report["lm loss"].tolist() == [5.0, 2.0]


def test_only_the_last_stage_of_the_language_model_has_a_loss():
    features = {"images": torch.zeros(2, 3)}
    for stage in (model(features, language=False), model(features, last=False)):
        assert mimo_step.forward_step(None, iter([{"modality_inputs": {}}]), stage) == (features, None)
        assert stage.inputs["input_ids"] is None
    mask = torch.tensor([[1.0, 1]])
    batch = {"input_ids": torch.zeros(1, 2), "loss_mask": mask}
    output, loss_func = mimo_step.forward_step(None, iter([batch]), model(torch.tensor([[2.0, 4]])))
    assert float(loss_func(output)[0]) == 6.0


def test_features_at_the_last_stage_are_a_clear_error():
    stage = model({"images": torch.zeros(1), "audio": torch.zeros(1)})
    with pytest.raises(TypeError, match=r"features of images, audio instead of a loss.*modules\.\*\.layout"):
        mimo_step.forward_step(None, iter([{}]), stage)


def test_data_that_ends_early_is_named():
    with pytest.raises(ValueError, match=r"data ended before train\.iters"):
        mimo_step.forward_step(None, iter([]), model(None))

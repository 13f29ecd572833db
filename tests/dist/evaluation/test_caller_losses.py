"""Evaluations with the caller's forward step and loss: any return form, any layout, models without text."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.logging.progress import events
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.models.test_heads import gpt, value_step
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config


def _form(form: str, output, batch, cp):
    """Loss functions in the forms that training accepts, of the losses per token of the shipped step."""
    import torch

    from mimo_train.parallel.context import own_part

    mask = own_part({"loss_mask": batch["loss_mask"]}, cp)["loss_mask"]
    total, tokens = (output * mask).sum(), mask.sum()
    if form == "sum":
        torch.rand(1)  # as a step with noise of its own does
        pair = torch.stack([3 * total.detach(), tokens])
        return 3 * total, tokens.to(torch.int), {"lm loss": pair, "squares": [(output.square() * mask).sum(), tokens]}
    if form == "mean":  # of the whole sequence: context-parallel ranks add up
        mean = total / batch["loss_mask"].sum()
        return mean, {"mean loss": mean.detach()}
    return {"a": (total, tokens), "b": (2 * total, tokens)}


def _caller_step(form: str, state, data_iterator, model):
    """The shipped step of either kind of model, with another loss function."""
    from megatron.core.utils import unwrap_model

    from mimo_train.config.parts import LANGUAGE
    from mimo_train.models.parameters import modules_of
    from mimo_train.training.pretrain import default_forward_step

    batch = next(data_iterator)
    output, loss_func = default_forward_step(state.cfg)(state, iter([dict(batch)]), model)
    if loss_func is None:
        return output, None
    cp = unwrap_model(modules_of([unwrap_model(model)])[LANGUAGE][0]).pg_collection.cp
    return output, lambda losses: _form(form, losses, batch, cp)


def _evaluations(cfg) -> list[dict[str, float]]:
    """Evaluations of a new model: with the shipped step, and with each form."""
    import torch

    from mimo_train.bridge.training.setup import setup
    from mimo_train.training.pretrain import default_forward_step

    run = setup(cfg)
    steps = [partial(default_forward_step(cfg), run.state)]
    steps += [partial(_caller_step, form, run.state) for form in ("sum", "mean", "named")]
    before = torch.get_rng_state()
    values = [run.valid_data_iterator.evaluate(0, step) for step in steps]
    assert torch.equal(torch.get_rng_state(), before), "training goes on with its own random numbers"
    run.close()
    return values


LAYOUTS = {
    "pp2 vpp2": ("gpt_tiny", 2, ("layout=language_pp2_vpp2", "modules.language.llm.num_layers=4")),
    "cp2": ("gpt_tiny", 2, ("layout=language_cp2",)),
    "dp2": ("gpt_tiny", 2, ("layout=language_dp2",)),
    "images, language pp2": (
        "vlm_digits",
        4,
        ("layout=images_pp2_language_pp2", "modules.images.encoder.num_layers=2"),
    ),
}


@pytest.mark.parametrize(("name", "ranks", "overrides"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_what_the_callers_loss_function_returns_is_reduced_as_in_training(
    name, ranks, overrides, digits, prose, tmp_path
):
    demo = digits if name == "vlm_digits" else prose
    same = (f"data.validation_shards={demo}/held_out", "train.eval_samples=6", "train.global_batch_size=4")
    same += ("train.micro_batch_size=1", "data.sequence_length=72")
    cfg = config(name, tmp_path / "run", demo, "train.iters=1", *same, *overrides)
    by_rank = run_ranks(_evaluations, ranks, cfg)
    (plain, summed, mean, named), *others = [values for values in by_rank if any(values)]
    assert all(other == [plain, summed, mean, named] for other in others), "all ranks of the last stage"
    exact = {key: plain[key] for key in ("eval/exact_match", "eval/samples")}
    assert plain["eval/samples"] == 6 and all(values.items() >= exact.items() for values in (summed, mean, named))
    loss = plain["eval/loss"]
    close = partial(pytest.approx, rel=TOLERANCE)
    assert summed["eval/loss"] == summed["eval/lm loss"] == close(3 * loss) and summed["eval/squares"] > loss**2
    assert (named["eval/a"], named["eval/b"]) == (close(loss), close(2 * loss))
    assert named["eval/loss"] == close(3 * loss)
    lines = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    of_samples = sum(line["loss"] for line in lines) / len(lines)
    assert mean["eval/loss"] == mean["eval/mean loss"] == close(of_samples), "a microbatch of repeated samples has none"


def _pretrain(cfg, step, head: bool) -> tuple[int, str]:
    """Exit code and standard output of a rank."""
    import contextlib
    import io

    from mimo_train.models.heads import make_value_model
    from mimo_train.training.pretrain import pretrain

    os.environ["MIMO_STOPPED_CODE"] = "75"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = pretrain(cfg, step, pre_wrap_hook=make_value_model(32, sequence_parallel=False) if head else None)
    return code, said.getvalue()


def test_a_value_model_is_evaluated_by_its_own_loss_and_without_exact_match(prose, tmp_path):
    held_out = (f"data.validation_shards={prose}/held_out", "train.eval_samples=6", "train.report_samples=4")
    cfg = gpt(prose, tmp_path, "layout=language_pp2", "train.iters=2", *held_out)
    _, (code, said) = run_ranks(_pretrain, 2, cfg, value_step, True)
    assert code == 0
    (line,) = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "eval/loss" in line]
    assert line["eval/value loss"] == line["eval/loss"] > 0 and line["eval/samples"] == 6
    assert "eval/exact_match" not in line and "exact match is skipped" in said
    assert not (tmp_path / "predictions.jsonl").exists() and not (tmp_path / "samples.json").exists()


def _failing_step(state, data_iterator, model):
    if not model.training:
        raise IndexError("only in evaluations")
    return _caller_step("sum", state, data_iterator, model)


def test_an_evaluation_that_fails_does_not_lose_the_checkpoint(prose, tmp_path):
    cfg = gpt(prose, tmp_path, "train.iters=2", f"data.validation_shards={prose}/held_out")
    with pytest.raises(RankFailure, match="IndexError: only in evaluations"):
        run_ranks(_pretrain, 1, cfg, _failing_step, False)
    assert folders.newest(tmp_path).name == "step_00000002"


def _mean_step(state, data_iterator, model):
    return _caller_step("mean", state, data_iterator, model)


def _stopping_step(rank: int, state, data_iterator, model):
    """Signals `rank` in the second batch of an evaluation."""
    import torch.distributed as dist

    if not model.training:
        _stopping_step.batches = getattr(_stopping_step, "batches", 0) + 1
        if _stopping_step.batches == 3 and dist.get_rank() == rank:  # two microbatches a batch
            os.kill(os.getpid(), signal.SIGTERM)
    return _caller_step("sum", state, data_iterator, model)


def test_a_stop_in_the_last_evaluation_keeps_the_training_and_the_next_job_evaluates_the_sets_it_has(prose, tmp_path):
    def job(step, *overrides: str) -> tuple[str, list[dict[str, float]]]:
        """What a job says, and the evaluations of the run so far."""
        sets = (f"data.validation_shards={prose}/held_out", "train.eval_samples=12")
        batch = ("layout=language_pp2", "train.iters=2", "train.global_batch_size=4", "train.micro_batch_size=2")
        (code, _), (same, said) = run_ranks(_pretrain, 2, gpt(prose, tmp_path, *batch, *sets, *overrides), step, False)
        assert code == same
        reason = [line.facts["reason"] for line in events(tmp_path) if line.kind == "exit"][-1]
        assert (code, reason) == ((75, "signal") if "to end" in said else (0, "finished"))
        return said, [line for line in read_metrics(tmp_path / "metrics.jsonl") if "eval/loss" in line]

    said, evaluations = job(partial(_stopping_step, 0))
    assert "evaluation at step 2 stopped after 8 samples" in said and not evaluations
    assert folders.newest(tmp_path).name == "step_00000002"
    plain = partial(_caller_step, "sum")
    _, (first,) = job(plain)
    assert first["eval/samples"] == 9 and first["step"] == 2
    assert job(plain)[1] == [first], "not made twice"
    assert "eval/mean loss" in job(_mean_step)[1][-1], "another step measures another loss"
    _, (*_, other) = job(plain, "train.eval_samples=8", f"data.test_shards={Path(prose)}/train")
    assert other["eval/samples"] == other["test/samples"] == 8 and other["eval/loss"] != other["test/loss"] > 0
    assert (tmp_path / "test_predictions.jsonl").exists()

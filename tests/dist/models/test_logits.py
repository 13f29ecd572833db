"""Logits where a loss is: how many rows the output layer gets, and what is counted of them. That losses and gradients
are those of all logits is in `test_layout_parity`."""

import json

import pytest

from mimo_train.checkpoint import folders
from mimo_train.estimate.flops import StepFlops
from mimo_train.estimate.parameters import embedding_rows
from tests.dist.layout_tables import ALL_LOGITS, ONE, WHOLE_ROWS, apart, same
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, train_rank
from tests.dist.steps import Steps

STEPS = ("train.global_batch_size=8", "train.iters=2")


def _two_steps(cfg) -> tuple[int, int, int, float]:
    """On one rank: rows that the output layer got, positions with a loss in the texts of this rank, those that the
    step's sum has of all ranks, and FLOPs of the logits of one."""
    from megatron.core.utils import unwrap_model

    run, rows, learned, counted = Steps(cfg), [], 0, 0
    language = getattr(unwrap_model(run.model[0]), "language_model", None)
    head = getattr(unwrap_model(language), "output_layer", None) if language is not None else None
    if head is not None:
        head.register_forward_pre_hook(lambda _head, given: rows.append(given[0].shape[0]))
    for _ in range(2):
        run.train()
        texts = [one["loss_mask"] for one in run.session.data.current.microbatches if "loss_mask" in one]
        learned += int(sum(mask.sum() for mask in texts))
        counted += int(run.result.logits)
    vocab = embedding_rows(cfg.llm, run.session.parts.tokenizer.vocab_size)
    return sum(rows), learned, counted, StepFlops(cfg, vocab).of_logit(1).model


@pytest.mark.parametrize(
    ("row", "ranks", "last"),
    [(same("dp2", "dp2"), 2, [0, 1]), (same("dp2", "tp2 sp"), 2, [0, 1]), (apart(ONE, "pp2"), 3, [2])],
    ids=str,
)
def test_the_output_layer_gets_the_positions_with_a_loss(row, ranks, last, digits, tmp_path):
    """On every rank of the last stage, with sequence parallelism too; the step's sum has those of a text once."""
    cfg = config("vlm_digits", tmp_path, digits, *STEPS, *row.overrides(4))
    found = run_ranks(_two_steps, ranks, cfg)
    assert all(found[rank][0] == found[rank][1] > 0 for rank in last), found
    texts = sum(found[rank][1] for rank in last) // cfg.language.layout.tp
    assert {counted for _, _, counted, _ in found} == {texts}


def _a_step_behind_a_pass_that_failed(cfg) -> tuple[str, set[int]]:
    """What the pass failed with, and rows that the output layer got in the step behind it."""
    import torch
    from megatron.core.utils import unwrap_model

    from mimo_train.models.language_model import choose_logits

    run, rows = Steps(cfg), []
    language = unwrap_model(unwrap_model(run.model[0]).language_model)
    language.output_layer.register_forward_pre_hook(lambda _head, given: rows.append(given[0].shape[0]))
    choose_logits(language, torch.zeros(1, dtype=torch.int64))
    said = ""
    try:
        language(torch.full((1, 8), -1), torch.zeros(1, 8, dtype=torch.int64), None)
    except IndexError as error:
        said = str(error)
    run.train()
    return said, set(rows)


def test_places_of_a_pass_that_failed_are_not_those_of_the_next(digits, tmp_path):
    cfg = config("vlm_digits", tmp_path, digits, "layout=one_process", WHOLE_ROWS, ALL_LOGITS)
    ((said, rows),) = run_ranks(_a_step_behind_a_pass_that_failed, 1, cfg)
    assert "out of range" in said and rows == {cfg.data.sequence_length}


def _train_all(cfg) -> int:
    """With a forward step of a user's own, which knows nothing of `train.logits`."""
    from mimo_train.training.pretrain import pretrain
    from mimo_train.training.step.forward_step import mimo_forward_step

    def own(state, data_iterator, model):
        batch = next(data_iterator)
        return mimo_forward_step(state, iter([{key: value for key, value in batch.items() if key != "learned"}]), model)

    return pretrain(cfg, forward_step_func=own)


def test_flops_are_those_of_the_logits_that_were_computed(digits, tmp_path):
    """Of a run whose rows are as long as any may be, so that the number of positions is known. A forward step that does
    not choose among them computes all."""
    flops = {}
    for logits, train in (("learned", train_rank), ("own", _train_all), ("all", train_rank)):
        chosen = f"train.logits={'all' if logits == 'all' else 'learned'}"
        keys = (*STEPS, "layout=one_process", "train.micro_batch_size=4", WHOLE_ROWS, chosen)
        cfg = config("vlm_digits", tmp_path / logits, digits, *keys, "train.log_interval=2")
        run_ranks(train, 1, cfg)
        record = json.loads((folders.newest(tmp_path / logits) / folders.RECORD).read_text())
        flops[logits] = record["train_state"]["floating_point_operations_so_far"]
    ((_, learned, _, of_one),) = run_ranks(_two_steps, 1, config("vlm_digits", tmp_path / "steps", digits, *keys[:-1]))
    positions = 2 * 8 * cfg.data.sequence_length
    assert 0 < learned < positions / 2
    assert flops["all"] - flops["learned"] == pytest.approx((positions - learned) * of_one, rel=1e-12)
    assert flops["own"] == pytest.approx(flops["all"], rel=1e-12)

"""Suspect losses: a step is repeated, and what it gives then decides how the run goes on."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mimo_train.layout.run import resolve
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import config, curve, train_on_ranks


def _train_with_fault(cfg, value: float, step: int, transient: bool, node: str) -> tuple[int, list[str]]:
    """Exit code, and what the state machine says, of `mimo-train train` with a loss function that multiplies the loss
    of one microbatch of `step` by `value`: once, or always. `node` is what the machine is called."""
    import logging

    from mimo_train.commands.train import main
    from mimo_train.debug import rerun
    from mimo_train.training import pretrain
    from mimo_train.training.step.state import GlobalState

    rerun.SPIKE_SAMPLES = 2
    good_step = pretrain.default_forward_step(cfg)
    calls = 0

    def forward_step(state: GlobalState, data_iterator, model):
        output, loss_func = good_step(state, data_iterator, model)

        def wrong_loss(output):
            nonlocal calls
            calls += 1
            microbatches = state.run.batch.num_microbatches
            # The last microbatch of the step; of its first run only, if the fault is transient.
            wrong = calls == microbatches or (not transient and calls % microbatches == 0)
            return loss_func(output * value if wrong else output)

        now = loss_func is not None and state.train_state.step == step - 1
        return output, wrong_loss if now else loss_func

    original = pretrain.pretrain
    pretrain.pretrain = lambda run, **options: original(run, forward_step, **options)
    name = os.uname()
    os.uname = lambda: os.uname_result((name[0], node, *name[2:]))
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("megatron.core.rerun_state_machine").addHandler(handler)
    return main(resolve(cfg)), said


def train(
    cfg, value: float, *, step: int = 4, transient: bool = True, node: str = "first"
) -> tuple[list[int], list[str]]:
    """Exit codes of all ranks, and what their state machines say."""
    results = run_ranks(_train_with_fault, resolve(cfg).layout.world_size, cfg, value, step, transient, node)
    return [code for code, _ in results], [text for _, said in results for text in said]


def curve_of(cfg) -> list[tuple]:
    """What is in the log of a run."""
    return curve(read_metrics(Path(cfg.run.dir) / "metrics.jsonl"))


@pytest.fixture
def cfg(digits, tmp_path):
    """Makes runs of six steps with validation, by folder and layout."""

    def make(name: str, *overrides: str):
        layout = [] if any(entry.startswith("layout=") for entry in overrides) else ["layout=two_processes"]
        return config("vlm_digits", tmp_path / name, digits, "train.iters=6", *layout, *overrides)

    return make


def test_a_run_without_faults_is_the_run_without_validation(cfg):
    plain = curve(train_on_ranks(cfg("plain")))
    assert curve(train_on_ranks(cfg("validated", "train.rerun=validate_results"))) == plain
    run = cfg("stats", "train.rerun=report_determinism_stats")
    codes, said = train(run, 1.0)
    assert codes == [0, 0] and curve_of(run) == plain
    assert f"    {6 * resolve(run).batch.num_microbatches} samples, all identical" in said


@pytest.mark.parametrize(
    "layout",
    [
        ("images_dp2_language_dp2",),
        ("language_pp2_vpp2",),
        ("language_tp2", "modules.language.layout.sp=true"),
    ],
)
def test_a_spike_that_does_not_come_back_leaves_no_trace(layout, digits, prose, tmp_path):
    """Not in dropout either, for which tensor-parallel ranks have generators of their own, nor in the balance of
    experts."""
    name, demo, overrides = "vlm_digits", digits, []
    if layout[0].startswith("language"):
        name, demo, overrides = "gpt_tiny", prose, ["llm@modules.language.llm=gpt_tiny_moe"]
    sizes = ("modules.language.llm.num_layers=4", "modules.language.llm.dropout=0.1")
    overrides += ["train.iters=6", f"layout={layout[0]}", *sizes, *layout[1:]]
    plain = curve(train_on_ranks(config(name, tmp_path / "plain", demo, *overrides)))
    run = config(name, tmp_path / "spiky", demo, *overrides, "train.rerun=validate_results")
    codes, said = train(run, 1000.0)
    assert set(codes) == {0} and any("Possible transient error" in text for text in said)
    assert curve_of(run) == plain


def test_without_validation_the_spike_is_learned_from(cfg):
    plain = curve(train_on_ranks(cfg("plain")))
    run = cfg("spiky")
    assert train(run, 1000.0)[0] == [0, 0]
    spiky = curve_of(run)
    assert spiky[:3] == plain[:3] and spiky[3][1] > 100 * plain[3][1]


def test_a_loss_that_is_no_number_only_once_ends_the_run_with_17(cfg, tmp_path):
    run = cfg("nan", "train.rerun=validate_results", "checkpoint.save_interval=2")
    assert train(run, float("nan"))[0] == [17, 17]
    assert [folder.name for folder in sorted((tmp_path / "nan" / "checkpoints").glob("step_*"))] == ["step_00000002"]
    # Started again it goes on from there, to the numbers of a run without a fault.
    plain = curve(train_on_ranks(cfg("plain")))
    assert curve(train_on_ranks(run)) == plain


def test_a_loss_that_is_no_number_twice_is_saved_for_another_machine(cfg, tmp_path):
    run = cfg("inf", "train.rerun=validate_results")
    wrong = {"value": float("inf"), "transient": False}
    assert train(run, **wrong)[0] == [16, 16]
    assert [folder.name for folder in (tmp_path / "inf" / "checkpoints").glob("step_*")] == ["step_00000003"]
    assert train(run, **wrong)[0] == [16, 16], "on the same machine, it asks for another one"
    codes, said = train(run, **wrong, node="second")
    assert codes == [17, 17] and any("Correct result" in text for text in said), "the samples or the run are wrong"
    codes, said = train(run, 1.0, node="second")
    assert codes == [17, 17] and any("Possible persistent error" in text for text in said), "the first machine is"
    # The verdict stands. The run goes on without it, or without the step.
    skipping = cfg("inf", "train.rerun=validate_results", "train.skip_iters=[4]", "train.iters=5")
    assert train(skipping, **wrong)[0] == [0, 0]
    shutil.rmtree(tmp_path / "inf" / "checkpoints" / "step_00000005")
    plain = curve(train_on_ranks(cfg("plain")))
    assert curve(train_on_ranks(cfg("inf"))) == plain


def test_a_step_that_is_not_validated_can_be_bisected(cfg, tmp_path):
    """The first step of a job, before which no checkpoint could be saved."""
    run = cfg("first", "train.rerun=validate_results", "train.on_nan=bisect")
    with pytest.raises(RankFailure):
        train(run, float("nan"), step=1, transient=False)
    origin = json.loads((tmp_path / "first" / "replay" / "step_00000001.json").read_text())["origin"]
    assert (origin["microbatch"], origin["direction"]) == (1, "loss function")

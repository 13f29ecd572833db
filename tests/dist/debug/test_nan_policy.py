"""Steps whose gradient is not finite: what they are named by, what they leave, and how they are made again."""

import json
from pathlib import Path

import pytest

from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve

SUSPECTS = range(24, 32)
"""Samples of the last microbatch of step 2, of 16 samples; the first with an image is spoiled."""

PATCHES = "encoders.images.patch_embedding"
"""The first layer of the encoder."""


def vlm(digits, run_dir, layout: str, *overrides: str):
    sizes = ("train.iters=4", "train.global_batch_size=16", "train.micro_batch_size=8", "optim.decay=constant")
    return config("vlm_digits", run_dir, digits, f"layout={layout}", *sizes, *overrides)


def _spoil_a_image(bad: bool) -> None:
    """All images are of floats from now on; of one sample, a pixel is NaN if `bad`."""
    from data.samples.shard_dataset import ShardDataset

    read = ShardDataset.read_media

    def spoiled(self, number, *which):
        items, fault = read(self, number, *which)
        items = [item.float() for item in items]
        if bad and number == next(number for number in SUSPECTS if self.meta(number).tokens["images"]):
            items[-1][0, 3, 3] = float("nan")
        return items, fault

    ShardDataset.read_media = spoiled


def _spoil_a_weight(model, rank: int) -> None:
    """One weight of the language model on `rank` becomes NaN."""
    import torch
    import torch.distributed as dist

    from mimo_train.models.parameters import modules_of

    if dist.get_rank() == rank:
        with torch.no_grad():
            language = modules_of(model)["language"][0].module
            language.decoder.layers[-1].mlp.linear_fc1.weight[0, 0] = float("nan")


def _spoil_forward(model, rank: int) -> None:
    """The first language layer's MLP gives one value that is NaN, on `rank`."""
    import torch
    import torch.distributed as dist

    def spoiled(output):
        return output.index_fill(0, torch.tensor([1]), float("nan"))

    if dist.get_rank() == rank:
        _after_first_mlp(model, spoiled)


def _spoil_backward(model) -> None:
    """The gradient that the first language layer's MLP gives on becomes infinite."""

    def spoiled(output):
        output.register_hook(lambda gradient: gradient * float("inf"))
        return output

    _after_first_mlp(model, spoiled)


def _after_first_mlp(model, spoiled) -> None:
    """Passes what the first language layer's MLP gives through a function."""
    from mimo_train.models.parameters import modules_of

    for chunk in modules_of(model).get("language", ()):
        mlp = chunk.module.decoder.layers[0].mlp
        inner = mlp.forward

        def forward(*args, inner=inner, **kwargs):
            output, bias = inner(*args, **kwargs)
            return spoiled(output), bias

        mlp.forward = forward


def _run(cfg, fault: str = "", rank: int = 0) -> dict:
    """A run with a fault at step 2, and what this rank has of its end."""
    import torch

    from mimo_train.debug.nan_policy import NonFiniteStep
    from mimo_train.training.callbacks import Callback, Callbacks
    from mimo_train.training.loop import train
    from tests.dist.steps import Steps

    def weights() -> list:
        return [parameter.detach().clone() for chunk in run.model for parameter in chunk.parameters()]

    class Spoil(Callback):
        def on_step_start(self, state):
            if state.train_state.step == 1 and fault == "weight":
                _spoil_a_weight(run.model, rank)
            if state.train_state.step == 1 and fault == "forward":
                _spoil_forward(run.model, rank)
            if state.train_state.step == 1 and fault == "backward":
                _spoil_backward(run.model)
            before[:] = weights()

    if fault in ("pixel", "float"):
        _spoil_a_image(bad=fault == "pixel")
    before, message = [], ""
    run = Steps(cfg)
    state, iterator = run.state, run.session.data
    try:
        train(run.session, _bad_loss if fault == "loss" else run.step_func, Callbacks([Spoil()]))
    except NonFiniteStep as error:
        message = str(error)
    finally:
        run.session.close()
    same = [torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, weights(), strict=True)]
    number = next(number for number in SUSPECTS if iterator.dataset.meta(number).tokens.get("images", True))
    return {
        "message": message,
        "unchanged": all(same),
        "state": state.train_state.state_dict(),
        "sample": (number, *map(str, iterator.dataset.locate(number))),
    }


def failed(cfg, *fault, step: int = 2) -> tuple[list[str], dict, tuple]:
    """(lines of the error, the replay file, (number, shard, key) of the spoiled sample) of a run that must fail."""
    results = run_ranks(_run, resolve(cfg).layout.world_size, cfg, *fault)
    (message,) = {result["message"] for result in results}
    assert f"step {step}: a gradient is not finite" in message, results
    assert all(result["unchanged"] for result in results)
    assert all(result["state"]["step"] == step - 1 for result in results)
    record = json.loads((Path(cfg.run.dir) / "replay" / f"step_{step:08d}.json").read_text())
    return message.splitlines(), record, results[0]["sample"]


def line_of(lines: list[str], what: str) -> str:
    (line,) = [line for line in lines if line.startswith(what)]
    return line


@pytest.mark.parametrize(
    ("layout", "overrides", "microbatch"),
    [
        ("two_processes", (), 0),  # the sample is short, and in the microbatch of short ones
        ("images_dp2_language_dp2", ("train.micro_batch_size=4", "data.pad=sequence"), 1),
    ],
)
def test_a_spoiled_image_is_named_with_its_sample(layout, overrides, microbatch, digits, tmp_path):
    cfg = vlm(digits, tmp_path / "run", layout, *overrides)
    lines, record, (number, shard, key) = failed(cfg, "pixel")
    sample = f"{Path(shard).name} {key} (number {number})"
    # Samples 24 to 27 are the first replica's part of the microbatch, 28 to 31 the second's.
    replica = int("dp2" in layout and number >= 28)
    ranks = {"two_processes": (0, 1), "images_dp2_language_dp2": (replica, 2 + replica)}[layout]
    inputs = line_of(lines, "inputs not finite")
    assert inputs == f"inputs not finite: images on rank {ranks[0]}, microbatch {microbatch} (pixels input): {sample}"
    losses = line_of(lines, "losses not finite")
    assert f"language on rank {ranks[1]}, microbatch {microbatch} (lm loss nan)" in losses and sample in losses
    assert losses.count("microbatch") == 1
    assert {part["module"] for part in record["findings"]["gradients"]} == {"images", "language"}
    assert not record["findings"]["weights"]
    assert (record["step"], record["consumed_samples"], record["samples"]) == (2, 16, [16, 32])
    assert (record["microbatches"], record["suspect_microbatches"]) == (2, [microbatch])
    assert {"number": number, "shard": shard, "key": key} in record["findings"]["losses"][0]["samples"]


def test_weights_of_every_chunk_are_named_by_their_place_in_the_model(prose, tmp_path):
    """Rank 1 holds layers 1 and 3, each the first of its chunk."""
    layers = "modules.language.llm.num_layers=4"
    cfg = config("gpt_tiny", tmp_path, prose, "layout=language_pp2_vpp2", layers, "train.on_nan=bisect")
    lines, record, _ = failed(cfg, "weight", 1)
    weights = line_of(lines, "weights not finite")
    assert weights == "weights not finite: language on rank 1 (1 parameter: decoder.layers.1.mlp.linear_fc1.weight)"
    assert (record["origin"]["layer"], record["origin"]["ranks"]) == ("decoder.layers.1", [1])
    named = {place["rank"]: place["names"] for place in record["findings"]["gradients"]}
    assert all(name.startswith(("embedding.", "decoder.layers.0.", "decoder.layers.2.")) for name in named[0])


@pytest.mark.parametrize(
    ("fault", "layout", "microbatch", "direction", "module", "layer", "begins", "weights", "ranks"),
    [
        ("pixel", "one_process", 0, "forward", "images", PATCHES, False, True, [0]),
        ("pixel", "images_tp2_language_pp2", 0, "forward", "images", PATCHES, False, True, [0, 1]),
        ("weight", "images_dp1_language_dp2", 0, "forward", "language", "decoder.layers.1", True, False, [2]),
        ("weight", "images_tp2_language_pp2", 0, "forward", "language", "decoder.layers.1", True, False, [3]),
        ("backward", "images_tp2_language_pp2", 0, "backward", "language", "decoder.layers.1", True, True, [3]),
    ],
)
def test_bisect_names_the_layer_where_it_begins(
    fault, layout, microbatch, direction, module, layer, begins, weights, ranks, digits, tmp_path
):
    cfg = vlm(digits, tmp_path / "run", layout, "train.on_nan=bisect")
    lines, record, _ = failed(cfg, fault, ranks[0])
    assert record["origin"] == {
        "microbatch": microbatch, "direction": direction, "module": module, "layer": layer, "ranks": ranks,
        "begins": begins, "weights": weights,
    }  # fmt: skip
    told = line_of(lines, "bisect")
    assert told.startswith(f"bisect: begins in microbatch {microbatch}, {direction}, module {module}, rank")
    assert f", layer {layer}: " in told


def test_bisect_follows_a_value_to_the_part_of_the_sequence_where_it_begins(digits, tmp_path):
    """The rank with the other part meets it one layer later."""
    cfg = vlm(digits, tmp_path, "two_processes", "modules.language.layout.cp=2", "train.on_nan=bisect")
    _, record, _ = failed(cfg, "forward", 2)
    assert (record["origin"]["layer"], record["origin"]["ranks"]) == ("decoder.layers.0", [2])
    assert record["origin"]["begins"] and record["origin"]["weights"]


def _bad_loss(state, data_iterator, model):
    """The default forward step, but the loss of every microbatch is infinite."""
    from mimo_train.training.step.forward_step import mimo_forward_step

    output, loss_func = mimo_forward_step(state, data_iterator, model)
    if loss_func is None:
        return output, None

    def infinite(output):
        loss, tokens, report = loss_func(output)
        return loss * float("inf"), tokens, {name: value * float("inf") for name, value in report.items()}

    return output, infinite


def test_bisect_names_the_loss_function(digits, tmp_path):
    lines, _, _ = failed(vlm(digits, tmp_path, "two_processes", "train.on_nan=bisect"), "loss", step=1)
    assert line_of(lines, "bisect").startswith("bisect: begins in microbatch 0, loss function, module language, rank 1")
    assert "language on rank 1, microbatch 0 (lm loss inf)" in line_of(lines, "losses not finite")


def test_the_replay_file_makes_the_step_again(digits, tmp_path):
    cfg = vlm(digits, tmp_path / "run", "two_processes", "modules.language.llm.dropout=0.1", "checkpoint.keep=1")
    _, record, _ = failed(cfg, "pixel")
    again = load(record["config_file"], record["overrides"])
    assert record["command"].split()[:5] == ["torchrun", "--nproc-per-node", "2", "-m", "mimo_train.cli"]
    assert record["command"].endswith(" ".join(["train", record["config_file"], *record["overrides"]]))
    assert again.run.dir != cfg.run.dir
    _, second, _ = failed(again, "pixel")
    for same in ("findings", "step", "samples", "consumed_samples", "grad_norm"):
        assert second[same] == record[same]
    assert second["origin"]["layer"] == PATCHES
    # What does not come back: the run of one step ends well.
    last = {result["state"]["step"] for result in run_ranks(_run, 2, again, "float")}
    assert last == {2}


def test_a_run_started_again_does_not_continue_from_the_replays_checkpoint(digits, tmp_path):
    cfg = vlm(digits, tmp_path / "run", "one_process")
    failed(cfg, "pixel")
    from mimo_train.checkpoint.folders import chosen, newest_first

    assert not newest_first(tmp_path / "run")
    assert chosen(tmp_path, str(tmp_path / "run" / "replay" / "checkpoints" / "step_00000001")) is not None


def test_a_skipped_step_is_a_step_left_out(digits, tmp_path):
    skip = vlm(digits, tmp_path / "skip", "two_processes", "train.on_nan=skip")
    results = run_ranks(_run, 2, skip, "pixel")
    assert all(result["state"]["step"] == 4 and result["state"]["skipped_iters"] == 1 for result in results)
    run_ranks(_run, 2, vlm(digits, tmp_path / "out", "two_processes", "train.skip_iters=[2]"), "float")
    curves = [curve(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("skip", "out")]
    assert [step for step, _, _ in curves[0]] == [1, 3, 4]
    assert curves[0] == curves[1]
    assert not (tmp_path / "skip" / "replay").exists()


def test_skip_ends_after_ten_bad_steps_in_a_row(digits, tmp_path):
    cfg = vlm(digits, tmp_path / "run", "one_process", "train.on_nan=skip", "train.iters=20")
    lines, _, _ = failed(cfg, "weight", 0, step=11)
    assert "as in the 9 steps before it" in lines[0]


def test_fp16_looks_for_its_scale_until_the_smallest(digits, tmp_path):
    scales = ("train.precision=fp16",)
    high = vlm(digits, tmp_path / "high", "one_process", "optim.initial_loss_scale=4", *scales)
    (result,) = run_ranks(_run, 1, high, "pixel")
    assert (result["message"], result["state"]["skipped_iters"]) == ("", 1)
    failed(vlm(digits, tmp_path / "low", "one_process", "optim.initial_loss_scale=1", *scales), "pixel")


def test_a_good_run_is_the_same_under_every_policy(digits, tmp_path):
    curves = []
    for policy in ("raise", "skip", "bisect"):
        run_ranks(_run, 2, vlm(digits, tmp_path / policy, "two_processes", f"train.on_nan={policy}"))
        curves.append(curve(read_metrics(tmp_path / policy / "metrics.jsonl")))
        assert not (tmp_path / policy / "replay").exists()
    assert curves[0] == curves[1] == curves[2] and len(curves[0]) == 4

"""Preference tasks: one process's losses at every layout, and reference values that no run takes from another."""

from pathlib import Path

import pytest

from data.demo.make import make_demo
from tests.dist.layout_tables import MODELS, PACKED, Row, alone, apart, same
from tests.dist.pairs import write_pairs
from tests.dist.parity import config_of
from tests.dist.ranks import run_ranks
from tests.dist.steps import Steps
from tests.dist.stretched import stretch_images
from tests.records import flip

STEPS = 3
VLM = "vlm, images of any size"
ROWS: dict[tuple[str, str], tuple[Row, ...]] = {
    (VLM, "dpo"): (
        apart("one", "one", *PACKED),
        same("dp2", "dp2"),
        same("dp2", "tp2 sp"),
        same("dp2", "cp2", *PACKED),
    ),
    ("gpt", "ipo"): (alone("pp2"),),
    ("gpt", "kto"): (alone("dp2"), alone("cp2")),
    ("experts", "orpo"): (alone("dp2 ep2"),),
}
"""(model, task) -> layouts on two processes."""
VALUES = ("loss", "rewards/margins", "rewards/chosen", "kl")


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Model -> form -> demo."""
    folder = tmp_path_factory.mktemp("demos")
    digits = make_demo(folder / "digits", train_samples=48, held_out_samples=4, shards=1)
    made = {"sizes": stretch_images(digits, folder / "sizes"), "prose": make_demo(folder / "prose", "text")}
    shards = {model: min((made[MODELS[model].demo] / "train").glob("*.tar")) for model, _ in ROWS}
    return {model: write_pairs(shard, folder / f"{at}") for at, (model, shard) in enumerate(shards.items())}


def run(demos, folder: Path, model: str, task: str, row: Row | None = None, *changes: str):
    form = "labels" if task == "kto" else "pairs"
    overrides = (f"train.task={task}", "train.global_batch_size=8", "optim.warmup_iters=0", f"data.cache_dir={folder}")
    return config_of(model, {MODELS[model].demo: demos[model][form]}, folder, row, *overrides, *changes)


def trained(cfgs: dict) -> dict:
    """Gradient norm and values of each step of each run on this rank; values on the last stage only."""
    found = {}
    for key, cfg in cfgs.items():
        steps = Steps(cfg)
        points = []
        for _ in range(STEPS):
            steps.train(1)
            losses = steps.result.losses
            points.append((steps.result.grad_norm, {name: float(losses[name]) for name in VALUES if name in losses}))
        found[key] = points
        steps.session.close()
    return found


def test_every_layout_gives_the_losses_of_one_process(demos, tmp_path):
    """Each run computes its own reference values; their files have the same names, because weights are the same."""
    one = {key: run(demos, tmp_path / f"one {at}", *key) for at, key in enumerate(ROWS)}
    two = {
        (*key, str(row)): run(demos, tmp_path / f"two {len(key[0])} {row}".replace(",", ""), *key, row)
        for key, rows in ROWS.items()
        for row in rows
    }
    (alone_,), ranks = run_ranks(trained, 1, one), run_ranks(trained, 2, two)
    for (model, task, row), cfg in two.items():
        expected = alone_[model, task]
        points = [of_rank[model, task, row] for of_rank in ranks]
        for step in range(STEPS):
            norm, values = expected[step]
            measured = max((of_rank[step] for of_rank in points), key=lambda point: len(point[1]))
            assert measured[0] == pytest.approx(norm, rel=1e-5), (model, task, row, step)
            assert values.keys() == measured[1].keys() and "loss" in values
            assert measured[1]["loss"] == pytest.approx(values["loss"], rel=1e-5), (model, task, row, step)
            for name in values:
                assert measured[1][name] == pytest.approx(values[name], rel=1e-5, abs=1e-5), (model, task, row, step)
        assert abs(values.get("rewards/margins", 1)) > 1e-4, "something is learned"
        names = [
            {file.name for file in Path(each.run.dir).glob("*.mimo-reference")} for each in (one[model, task], cfg)
        ]
        assert names[0] == names[1] and len(names[0]) == (task != "orpo")


def lives(configs: dict) -> dict:
    """On a rank: metrics of each run, one after the other, or the error that it ends with."""
    from mimo_train.config.errors import UserError
    from mimo_train.logging.sinks.jsonl import read_metrics
    from mimo_train.training.pretrain import pretrain

    found = {}
    for name, (cfg, before) in configs.items():
        (file,) = Path(cfg.data.cache_dir).glob("*.mimo-reference") if before else (None,)
        if before == "damage":
            flip(file)
        elif before == "remove":
            file.unlink()
        try:
            pretrain(cfg)
            found[name] = read_metrics(Path(cfg.run.dir) / "metrics.jsonl")
        except UserError as error:
            found[name] = str(error)
        found[f"{name} files"] = {
            path.name: path.stat().st_mtime_ns for path in Path(cfg.data.cache_dir).glob("*.mimo-reference")
        }
    return found


def test_reference_values_are_of_the_start_weights_and_of_each_row(demos, tmp_path):
    """Over two shuffled epochs of a run that does not learn, rewards stay 0; a resumed run needs the file."""
    still = ("optim.lr=0", "optim.min_lr=0", "data.shuffle_block=2", "optim.weight_decay=0")
    held = (f"data.validation_shards={demos['gpt']['pairs']}/train",)
    saving = ("train.iters=2", "checkpoint.save_interval=1")

    def of(name: str, cache: str, *changes: str):
        return run(demos, tmp_path / name, "gpt", "dpo", None, f"data.cache_dir={tmp_path / cache}", *changes)

    longer = ("train.iters=3", *saving[1:])
    adapted = (*still, "train.iters=1", "modules.language.lora.rank=2")
    found = run_ranks(
        lives,
        1,
        {
            "still": (of("still", "a", *still, *held, "train.iters=12"), ""),
            "again": (of("again", "a", *still, "train.iters=1"), ""),
            "first": (of("first", "b", *saving), ""),
            "damaged": (of("again_b", "b", *saving), "damage"),
            "resumed": (of("first", "b", *longer), ""),
            "missing": (of("first", "b", "train.iters=4", *saving[1:]), "remove"),
            "shorter": (of("shorter", "a", *still, "train.iters=1", "data.sequence_length=96"), ""),
            "split": (of("split", "c", *still, "train.iters=1", "data.validation_fraction=0.25"), ""),
            "adapted": (of("adapted", "d", *adapted), ""),
            "scaled": (of("scaled", "d", *adapted, "modules.language.lora.alpha=32"), ""),
        },
    )[0]
    for line in found["still"]:
        prefix = "" if "grad_norm" in line else "eval/"
        assert abs(line[f"{prefix}rewards/chosen"]) < 1e-5 and abs(line[f"{prefix}rewards/margins"]) < 1e-5
    evaluation = found["still"][-1]
    assert evaluation["eval/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert evaluation["eval/samples"] == 48 and 0 <= evaluation["eval/exact_match"] <= 1
    # The held-out set is the training set, so it has the same file.
    assert len(found["still files"]) == 1 and found["again files"] == found["still files"]
    assert found["first files"].keys() == found["damaged files"].keys() and len(found["first files"]) == 1
    assert found["first files"] != found["damaged files"] == found["resumed files"]
    assert [line["step"] for line in found["resumed"]][-1] == 3
    assert "start a new run" in found["missing"] and "step 3" in found["missing"]
    assert found["split"][-1]["eval/loss"] == pytest.approx(0.693147, abs=1e-5) and len(found["split files"]) == 2
    assert len(found["adapted files"]) == 1 and len(found["scaled files"]) == 2
    assert len(found["shorter files"]) == 2 and found["shorter files"].items() > found["still files"].items()


SHORT_DPO = ("train.iters=30", "optim.lr=2e-4")


def demo_runs(folder: Path) -> list[dict]:
    """On a rank: a few steps of vlm_digits, and of vlm_digits_dpo from its weights; the lines of the second run."""
    from mimo_train.config.compose import load
    from mimo_train.logging.sinks.jsonl import read_metrics
    from mimo_train.training.pretrain import pretrain

    common = ("layout=one_process", "run.device=cpu", "log.tensorboard=false", "data.demo=", "train.report_samples=0")
    for name, kind, changes in (
        ("vlm_digits", "digits", ("train.iters=20", "data.validation_shards=")),
        (
            "vlm_digits_dpo",
            "digits_pairs",
            SHORT_DPO + (f"data.validation_shards={folder}/digits_pairs/held_out",),
        ),
    ):
        demo = make_demo(folder / kind, kind, train_samples=240, held_out_samples=64, shards=1)
        places = [f"run.dir={folder / name}", f"data.shards={demo}/train", f"data.cache_dir={folder / 'cache'}"]
        places += [f"checkpoint.weights={folder / 'vlm_digits'}"] * name.endswith("dpo")
        assert pretrain(load(name, (*common, *places, *changes, "optim.warmup_iters=5"))) == 0
    return read_metrics(folder / "vlm_digits_dpo" / "metrics.jsonl")


def test_the_demo_learns_right_from_wrong_answers(tmp_path):
    (lines,) = run_ranks(demo_runs, 1, tmp_path)
    first, last = lines[0], lines[-1]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert last["eval/samples"] == 64 and last["eval/loss"] < 0.69
    assert last["eval/rewards/accuracies"] > 0.6 and last["eval/rewards/margins"] > 0

"""Samples of two answers give the losses and gradients of two samples, at any padding and layout, and their media are
encoded once."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dist.layout_tables import MODELS, PACKED, WHOLE_ROWS, Row, alone, apart, same
from tests.dist.pairs import write_pairs
from tests.dist.parity import config_of
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, largest_difference
from tests.dist.steps import Steps, whole
from tests.dist.stretched import stretch_images

STEPS = 2
ANY_SIZE, TWO, MIXED = "vlm, images of any size", "two vision encoders", "images and sound"
AXES = ("modules.language.llm.mrope_section=[2,1,1]",)
TOLERANT = ("data.max_bad_samples=1000",)
FROZEN = ("modules.images.freeze=[encoder]",)
CACHED = (*FROZEN, "modules.images.feature_cache.dir=CACHE")


@dataclass(frozen=True)
class Case:
    """A run of two answers at a layout, or on one process."""

    changes: tuple[str, ...] = ()
    row: Row | None = None
    damaged: bool = False
    resumed: bool = False
    """The run is saved after its first step, and resumed."""


EXPECTED = {
    "gpt": (),
    "experts": (WHOLE_ROWS,),
    ANY_SIZE: AXES,
    f"{ANY_SIZE}, frozen": FROZEN,
    f"{ANY_SIZE}, damaged": TOLERANT,
    TWO: (),
    MIXED: (),
}
"""Model and variant -> what else the run sets that has every answer as a sample."""
ON_ONE = {
    "gpt": [Case(PACKED)],
    "experts": [Case((WHOLE_ROWS,))],
    ANY_SIZE: [Case(), Case(PACKED), Case((WHOLE_ROWS,), resumed=True)],
    f"{ANY_SIZE}, frozen": [Case(CACHED), Case(CACHED)],
    f"{ANY_SIZE}, damaged": [Case(PACKED)],
    TWO: [Case()],
    MIXED: [Case(PACKED)],
}
ON_TWO = {
    "gpt": [Case((), alone("tp2")), Case(PACKED, alone("cp2")), Case((), alone("pp2"))],
    "experts": [Case((WHOLE_ROWS,), alone("dp2 ep2"))],
    ANY_SIZE: [
        Case(PACKED, apart("one", "one")),
        Case((), same("dp2", "dp2")),
        Case((), same("dp2", "cp2")),
        Case(PACKED, same("dp2", "tp2")),
    ],
    f"{ANY_SIZE}, damaged": [Case((), apart("one", "one")), Case(PACKED, same("dp2", "dp2"))],
}


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> dict[str, dict[str, Path]]:
    """The demo of each model, as pairs and as twice as many samples."""
    from data.demo.make import make_demo

    folder, written, sizes = tmp_path_factory.mktemp("demos"), {}, {"train_samples": 48, "held_out_samples": 4}
    made = {
        "digits": make_demo(folder / "digits", **sizes, shards=1),
        "mixed": make_demo(folder / "mixed", "mixed", **sizes, shards=1),
        "prose": make_demo(folder / "prose", "text"),
    }
    made["sizes"] = stretch_images(made["digits"], folder / "sizes")
    for at, name in enumerate(EXPECTED):
        shard = min((made[_model(name).demo] / "train").glob("*.tar"))
        written[name] = write_pairs(shard, folder / f"{at}", damaged=name.endswith("damaged"))
    return written


def _model(name: str):
    return MODELS[name.removesuffix(", frozen").removesuffix(", damaged")]


def config(demos, folder: Path, name: str, form: str, changes: tuple[str, ...], row: Row | None = None):
    """A config; steps are of the same answers in both forms."""
    model, answers = _model(name), 2 if form == "pairs" else 1
    model_name = next(key for key, value in MODELS.items() if value is model)
    size = [f"train.global_batch_size={16 // answers}", "data.shuffle=false", "optim.warmup_iters=0"]
    size += ["train.micro_batch_size=8"] if form == "twice" else []
    axes = AXES if model_name == ANY_SIZE else ()
    changes = tuple(change.replace("CACHE", str(folder.parent / "cache")) for change in changes)
    return config_of(model_name, {model.demo: demos[name][form]}, folder, row, *axes, *changes, *size)


def without_token_losses(data_iterator, model):
    """A forward step of which only the losses of routers have a gradient; it counts tokens, or samples of several
    answers."""
    import torch

    from mimo_train.training.step.forward_step import gpt_forward_step

    batch = next(data_iterator)
    output, _ = gpt_forward_step(_State, iter([batch]), model)
    mask = batch["loss_mask"]
    units = torch.tensor(len(batch["sample_numbers"])) if "answers" in batch else mask.sum()

    def loss(output):
        total = (output.float() * mask).sum()
        return 0 * total, units.int(), {"lm loss": torch.stack([total.detach(), mask.sum()])}

    return output, loss


class _State:
    """What the shipped forward step takes of the state."""

    task = print  # not called


def trained(runs: dict[tuple, tuple[str, object, bool]]) -> dict[tuple, tuple[list[tuple], int]]:
    """Curve of each run (form, config, whether to resume) on this rank, and the items that its encoders got."""
    from mimo_train.config.tasks import TASKS, TaskTraits

    found = {}
    for key, (form, cfg, resumed) in runs.items():
        # Cross entropy of all answers is the same for one sample with two and two samples.
        TASKS["sft"] = TaskTraits(form="turns" if form == "twice" else form)
        step_func = without_token_losses if cfg.llm.num_experts else None
        run, curve, items = Steps(cfg, step_func), [], 0
        for step in range(STEPS):
            curve += run.train(1)
            for batch in run.session.data.current.microbatches:
                inputs = [value[name] for name, value in batch.get("modality_inputs", {}).items() if value]
                items += sum(len(each.get("pixels", each.get("waveforms", each.get("items", ())))) for each in inputs)
            if resumed and step == 0:
                run.save()
                run.session.close()
                run = Steps(cfg)
        found[key] = curve, items
        run.session.close()
    return found


def test_two_answers_of_a_sample_are_two_samples_at_any_layout(demos, tmp_path):
    runs, on_two = {}, {}
    for name, changes in EXPECTED.items():
        runs[name, "twice"] = "twice", config(demos, tmp_path / f"{len(runs)}", name, "twice", changes), False
    for ranks, cases, of in ((1, ON_ONE, runs), (2, ON_TWO, on_two)):
        for name, case in [(model, case) for model, of_model in cases.items() for case in of_model]:
            changes = case.changes + (TOLERANT if name.endswith("damaged") else ())
            folder = tmp_path / f"{ranks} {len(of)}"
            of[name, f"{len(of)} {case}"] = (
                "pairs",
                config(demos, folder, name, "pairs", changes, case.row),
                case.resumed,
            )
    (one,), two = run_ranks(trained, 1, runs), run_ranks(trained, 2, on_two)
    cached = 0
    for (name, case), (curve, items) in one.items():
        expected, of_expected = one[name, "twice"]
        assert max(largest_difference(whole([expected]), whole([curve]))) < TOLERANCE, (name, case)
        if name.endswith("frozen") and case != "twice":
            assert 2 * items == (0 if cached else of_expected), "the second run reads no image"
            cached += 1
        elif case != "twice":
            assert 2 * items == of_expected
    for name, case in on_two:
        curve = whole([rank[name, case][0] for rank in two])
        assert max(largest_difference(whole([one[name, "twice"][0]]), curve)) < TOLERANCE, (name, case)
    healthy, damaged = (whole([one[name, "twice"][0]]) for name in (ANY_SIZE, f"{ANY_SIZE}, damaged"))
    assert largest_difference(healthy, damaged)[0] > 100 * TOLERANCE

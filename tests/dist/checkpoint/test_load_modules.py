"""`checkpoint.load_modules`: modules of a new run from checkpoints of other runs, at any layout, under any name."""

from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.config.schema import ConfigContainer
from tests.dist.ranks import run_ranks
from tests.dist.runs import config
from tests.dist.steps import Steps

DETAILS = (
    "encoder@modules.details.encoder=vit_tiny",
    "projector@modules.details.projector=mlp",
    *(f"modules.details.encoder.{key}" for key in ("num_layers=1", "hidden_size=32", "ffn_hidden_size=64")),
)
"""A second encoder, alike the first one."""


def _built(sources: list[ConfigContainer], cfg: ConfigContainer, faulty: list[ConfigContainer]) -> tuple:
    """Save a run of each source after a step, then one of `cfg` that begins with parts of them; what it says, and what
    each faulty one raises."""
    from mimo_train.config.errors import UserError

    for source in sources:
        steps = Steps(source)
        steps.train()
        steps.save()
        steps.session.close()
    steps = Steps(cfg)
    said = [str(loaded) for loaded in steps.session.checkpointer.loaded]
    steps.save()
    steps.session.close()
    raised = []
    for one in faulty:
        try:
            session = Steps(one).session
            raised.append("\n".join(str(loaded) for loaded in session.checkpointer.loaded))
            session.close()
        except UserError as error:
            raised.append(str(error))
    return said, raised


@pytest.fixture(scope="module")
def loaded(digits, prose, tmp_path_factory) -> dict:
    """Runs by name, what a run says of what it has loaded, and what others say."""
    runs = tmp_path_factory.mktemp("runs")
    gpt = ("layout=language_tp2", "data.sequence_length=96", "modules.language.llm.name=gpt_mini")

    def vlm(name: str, *overrides: str) -> ConfigContainer:
        return config("vlm_digits", runs / name, digits, "train.iters=4", *overrides)

    base = vlm("base")
    keys = ("normalization", "activation", "position")
    alike = [f"modules.language.llm.{key}={getattr(base.llm, key)}" for key in keys]
    alike += [f"modules.language.llm.tie_embeddings={str(base.llm.tie_embeddings).lower()}"]
    language = f"checkpoint.load_modules.language.path={runs / 'gpt'}"
    images = (
        f"checkpoint.load_modules.images.path={runs / 'two'}",
        "checkpoint.load_modules.images.module=details",
        "checkpoint.load_modules.images.only=[encoder]",
    )
    sources = [
        config("gpt_tiny", runs / "gpt", prose, "train.iters=4", *gpt, *alike),
        vlm("two", *DETAILS, "layout=one_process", "modules.images.layout.dp=2", "modules.details.layout.tp=2",
            "modules.language.layout.dp=2"),
    ]  # fmt: skip
    three = ("layout=two_processes", "modules.language.llm.num_layers=3", language)
    faulty = [
        vlm("strict", *three),
        vlm("lax", *three, "checkpoint.load_modules.language.strict=false"),
        vlm("idle", "layout=two_processes", language, "checkpoint.load_modules.language.only=['*nothing*']"),
        vlm("fewer", "layout=two_processes", language, "checkpoint.load_modules.language.path=" + str(runs / "none")),
    ]
    target = vlm("target", "layout=two_processes", language, *images)
    initial = vlm("initial", "layout=two_processes")
    sources.append(initial)
    ranks = run_ranks(_built, 2, sources, target, faulty)
    assert ranks[0][1] == ranks[1][1] and ranks[0][0] == ranks[1][0]
    return {
        "runs": runs,
        "said": ranks[0][0],
        **dict(zip(("strict", "lax", "idle", "fewer"), ranks[0][1], strict=True)),
    }


def weights(run_dir: Path) -> dict:
    from mimo_train.checkpoint.format.index import WEIGHT
    from mimo_train.checkpoint.format.read import Reader

    reader = Reader(folders.newest(run_dir))
    keys = [key for key in reader.index.pieces if key.state == WEIGHT and not key.module.startswith("rank_")]
    return {(key.module, key.name): reader.whole(key) for key in keys}


def test_a_language_model_and_an_encoder_under_another_name(loaded):
    """Bit by bit, in the optimizer's master copies, which is what a checkpoint has; the projector is the run's own."""
    runs = loaded["runs"]
    gpt, two, target = weights(runs / "gpt"), weights(runs / "two"), weights(runs / "target")
    counts = {"language": 0, "encoder": 0, "projector": 0}
    for (module, name), value in target.items():
        if module == "language":
            counts["language"] += 1
            assert value.equal(gpt[module, name]), name
        elif name.startswith("encoders."):
            counts["encoder"] += 1
            assert value.equal(two["details", name.replace("encoders.images.", "encoders.details.")]), name
            assert value.std() == 0 or not value.equal(two["images", name]), name
        else:
            counts["projector"] += 1
            there = two["details", name]
            assert value.shape == there.shape and (value.std() == 0 or not value.equal(there)), name
    assert all(counts.values()), counts
    language, images = loaded["said"]
    assert language == f"modules.language: {counts['language']} tensors of language in {folders.newest(runs / 'gpt')}"
    first, unused = images.splitlines()
    assert first == f"modules.images: {counts['encoder']} tensors of details in {folders.newest(runs / 'two')}"
    assert unused.startswith("  unused: input_projections.0.")


def test_what_does_not_fit_is_an_error_or_listed(loaded):
    key = "checkpoint.load_modules.language"
    strict, lax = loaded["strict"], loaded["lax"]
    assert strict.startswith(f"{key}: checkpoint ") and "num_layers was 2, is 3" in strict
    assert f"{key}.strict=false" in strict
    _, new, changed = lax.splitlines()
    assert new.startswith("  new: decoder.layers.2.") and "layers.1." not in new
    assert changed == "  changed: modules.language.llm.num_layers was 2, is 3"
    assert loaded["idle"].startswith(f"{key}.only: *nothing* matches nothing in checkpoint ")
    assert loaded["fewer"].startswith(f"{key}.path: no complete checkpoint in ")

"""Two encoders side by side: each computes what it computes alone, from its own directory, at every layout."""

from pathlib import Path

import pytest
import torch

from mimo_train.config.compose import load
from tests.dist.ranks import run_ranks
from tests.dist.runs import TINY, TOLERANCE, curve, largest_difference, train_on_ranks
from tests.towers import TOWERS, publish

FIRST, SECOND = "dinov2", "dinov3"
"""Both read images of 42 x 42 pixels: with a class token alone, and with two registers beside it."""


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("towers")
    return {name: publish(TOWERS[name], root / name) for name in (FIRST, SECOND)}


def config(towers: dict, digits: Path, run_dir: Path, *overrides: str):
    file = run_dir.parent / f"{run_dir.name}.yaml"
    first, second = (towers[name].folder for name in (FIRST, SECOND))
    file.write_text(
        "defaults: [projector@modules.images.projector: mlp, llm@modules.language.llm: gpt_tiny, data@data: digits, "
        "optim@optim: adamw, layout: one_process, _self_]\n"
        f"modules: {{images: {{encoder: {{family: joined, first_pretrained: {first}, second_pretrained: {second}, "
        "first: {resize: fixed, shortest_edge: 0, interpolation: bilinear}}}}\n"
    )
    places = (f"run.dir={run_dir}", f"data.shards={digits}/train", "data.validation_shards=", "data.demo=")
    batch = ("train.global_batch_size=8", "train.micro_batch_size=4", "data.sequence_length=160")
    return load(str(file), (*TINY, *places, *batch, *overrides))


def _features(cfg, media: torch.Tensor) -> list:
    """Features of images, [rows, width], as an array."""
    from mimo_train.estimate.parameters import embedding_rows, encoder_parameters
    from mimo_train.hf.load import load_pretrained
    from mimo_train.layout.run import resolve
    from mimo_train.models.parameters import modules_of
    from mimo_train.training.step.pipeline import build_parts, start_processes

    run = resolve(cfg)
    parts = build_parts(run, *start_processes(run.cfg))
    model, groups = parts.pipeline.model, parts.pipeline.groups
    load_pretrained(run.cfg, model, groups, embedding_rows(run.cfg.llm, parts.tokenizer.vocab_size))
    encoder = modules_of(model)["images"][0].module.encoders["images"]
    assert encoder_parameters(cfg.modules["images"].encoder) == sum(one.numel() for one in encoder.parameters())
    with torch.no_grad():
        return encoder(media).numpy()


def test_features_are_those_of_both_side_by_side(towers, digits, tmp_path):
    (media,) = towers[FIRST].media
    (features,) = run_ranks(_features, 1, config(towers, digits, tmp_path / "run"), media)
    expected = torch.cat([towers[name].features["last norm"] for name in (FIRST, SECOND)], dim=-1)
    assert (torch.from_numpy(features) - expected).abs().max() / expected.abs().max() < 1e-5


LAYOUTS = {
    "pp2": ("layout=images_pp2_language_one",),
    "tp2": ("layout=images_tp2_language_pp2", "modules.images.projector.merge=2", "train.recompute=full"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_no_number(name, towers, digits, tmp_path):
    keys = [key for key in LAYOUTS[name] if not key.startswith("layout")]

    def train(folder: str, *overrides: str) -> list[tuple]:
        return curve(train_on_ranks(config(towers, digits, tmp_path / folder, "train.iters=3", *keys, *overrides)))

    one, other = train("one"), train("other", *LAYOUTS[name])
    assert max(largest_difference(one, other)) < TOLERANCE
    assert one[-1][1] < one[0][1]

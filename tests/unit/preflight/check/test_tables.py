"""The tables that `mimo-train check` prints."""

import pytest

from mimo_train.estimate.flops import module_work
from mimo_train.layout.run import resolve
from mimo_train.preflight.check import main
from mimo_train.preflight.check.report import Report
from mimo_train.preflight.check.tables import add_ranks, flops_of_ranks, flops_text
from tests.unit.configs import load
from tests.unit.layout.test_layout import arranged
from tests.unit.preflight.check.shards import run


def table(cfg):
    report = Report()
    add_ranks(report, cfg, resolve(cfg).layout)
    (found,) = report.tables
    return found


def test_stages_idle_ranks_and_the_way_of_features():
    first = {"images": 4, "sounds": 0, "photos": 0, "language": 4}
    cfg = arranged({"dp": 2, "pp": 2}, (32, 4), first=first, images={"tp": 2}, sounds={"dp": 2}, photos={"tp": 2})
    cfg.placement.allow_idle = True
    found = table(cfg)
    assert found.header == ("ranks", "modules")
    assert found.rows == [
        ("0-1", "sounds + photos"),
        ("2-3", "idle"),
        ("4-5", "images + language, stage 1 of 2"),
        ("6-7", "language, stage 2 of 2"),
    ]
    assert found.notes[:3] == [
        "features of images are redistributed, from tp2 to dp2: it is on the first ranks of language (4-5)",
        "features of sounds are sent from ranks 0-1 to 4-5",
        "features of photos are sent from ranks 0-1 to 4-5",
    ]
    assert "placement.ranks_per_node" in found.notes[3]


def test_nodes_and_an_order_that_is_not_the_config_s():
    cfg = arranged({"tp": 2, "dp": 2}, images={})
    cfg.placement.ranks_per_node = 2
    found = table(cfg)
    assert found.rows == [("0-3", "0-1", "language"), ("4", "2", "images")]
    assert "order language, images" in found.notes[-1]


ROWS = 384
"""Rows of the embedding."""


def flops(name: str, *overrides: str, **media: float) -> dict[tuple[int, ...], dict[str, float]]:
    found = flops_of_ranks(resolve(load(name, *overrides)), ROWS, media)
    return {(ranks.start, ranks.stop): modules for ranks, modules in found.items()}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vlm_digits", ["layout=images_dp2_language_dp2"]),
        ("vlm_digits", ["layout=images_pp2_language_one"]),
        ("vlm_digits", ["placement.mode=shared", "modules.images.layout.dp=2", "modules.language.layout.tp=2"]),
        ("gpt_tiny", ["llm@modules.language.llm=gpt_tiny_moe", "layout=language_ep2"]),
        ("mixed_tiny", ["placement.mode=disjoint"]),
        ("recipes/qwen2_5_vl_lora", ["layout=images_64", "data.tokenizer=bytes"]),
    ],
)
def test_ranks_together_do_the_work_of_all_modules(name, overrides):
    cfg = load(name, *overrides)
    total = sum(module_work(cfg, module, ROWS, 1.0).whole.total for module in cfg.modules)
    found = flops_of_ranks(resolve(cfg), ROWS, {})
    ranks = sum(len(ranks) * sum(modules.values()) for ranks, modules in found.items())
    assert ranks == pytest.approx(cfg.train.global_batch_size * total)


def test_the_table(capsys):
    _, out, _ = run(capsys, "vlm_digits", "modules.language.layout.pp=2", "run.device=cpu")
    found = flops("vlm_digits", "modules.language.layout.pp=2")
    most = found[2, 3]["language, stage 2 of 2"]
    table = out[out.index("Work of a rank") :].splitlines()
    assert table[1].split("  ")[0].strip() == "modules"
    for line, title, number, share in (
        (table[2], "images", flops_text(found[0, 1]["images"]), found[0, 1]["images"] / most),
        (table[3], "language, stage 1 of 2", "", found[1, 2]["language, stage 1 of 2"] / most),
        (table[4], "language, stage 2 of 2", flops_text(most), 1.0),
    ):
        assert line.strip().startswith(title) and number in line and line.rstrip().endswith(f"{share:.0%}")
    _, shared, _ = run(capsys, "vlm_digits", "layout=one_process")
    (parts,) = flops("vlm_digits", "layout=one_process").values()
    share = parts["images"] / sum(parts.values())
    assert f"images ({share:.0%}) + language ({1 - share:.0%})" in shared
    _, unknown, _ = run(capsys, "vlm_digits", "--without-data")
    assert "without the output layer of language" in unknown and "without the output layer" not in out


TWO, THREE = "1: one_process", "3: images_dp1_language_dp2 train.micro_batch_size=4"


def checked(capsys, layouts: str) -> tuple[int, list[str], list[str]]:
    """Return the exit code, the rows of the table, and the errors."""
    code = main("vlm_digits", [f"launch.layouts={{{layouts}}}"], without_data=True)
    out, err = capsys.readouterr()
    table = out.partition("layouts by nodes\n")[2].partition("\n\n")[0].splitlines()
    return code, [" ".join(row.split()) for row in table[1:]], err.splitlines()


def test_layouts_are_shown_by_their_nodes(capsys):
    code, rows, _ = checked(capsys, f"{THREE}, {TWO}")
    assert code == 0
    assert rows == ["1 1 8 images (one rank), language (one rank)", "3 1 4 images (one rank), language (dp2)"]


def test_every_fault_of_every_layout_has_its_key(capsys):
    wrong = "2: images_dp1_language_dp2, 5: one_process train.micro_batch_size=7"
    code, rows, errors = checked(capsys, f"{TWO}, {wrong}")
    assert code == 1 and len(rows) == 1
    for start, words in (
        ("error: launch.layouts.2: the layout needs 3 processes", "2 nodes"),
        ("error: launch.layouts.5: train.global_batch_size", "7"),
    ):
        assert any(line.startswith(start) and words in line for line in errors), errors


def test_without_data_neither_weights_nor_tokenizer_need_be_here(capfd):
    absent = "modules.language.pretrained=/models/vicuna"
    overrides = [absent, "launch.layouts={1: ''}", "layout=images_8"]
    assert main("recipes/llava_1_5_finetune", overrides, without_data=True) == 0
    assert f"notice: {absent.replace('=', ': ')} is not on this machine" in capfd.readouterr().err

"""The drawing of a layout: a box for each rank, by module, with its coordinates."""

import copy

from mimo_train.config.compose import load
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.layout.run import resolve
from mimo_train.logging.report.layout_drawing import layout_drawing
from mimo_train.logging.report.page import environment
from tests.unit.logging.report.parsed_page import ParsedPage


def drawn(run) -> ParsedPage:
    return ParsedPage(environment().get_template("layout.html.j2").module.layout_drawing(layout_drawing(run)))


def test_encoders_apart_and_on_the_first_stage_idle_ranks_and_nodes_are_drawn():
    names = {"images": 5, "photos": 0, "sounds": 0, "language": 5}
    cfg = load("vlm_digits")
    images = cfg.modules["images"]
    cfg.modules = {name: copy.deepcopy(images) for name in ("images", "photos", "sounds")} | {
        "language": cfg.modules["language"]
    }
    sizes = {"images": {"tp": 2}, "photos": {"dp": 4}, "sounds": {"tp": 4}, "language": {"dp": 2, "pp": 2}}
    for name, axes in sizes.items():
        cfg.modules[name].layout = LayoutConfig(**axes)
    cfg.placement.first_rank, cfg.placement.allow_idle, cfg.placement.ranks_per_node = names, True, 8
    cfg.placement.tp_across_nodes = True
    page = drawn(resolve(cfg))
    assert "rank 3 · node 0 photos tp 0 · pp 0 · dp 3 sounds tp 3 · pp 0 · dp 0" in page.words
    assert "rank 5 · node 0 images tp 0 · pp 0 · dp 0 ↓ language tp 0 · pp 0 · dp 0" in page.words
    assert "rank 8 · node 1 language tp 0 · pp 1 · dp 1" in page.words
    assert "8 processes, modules share ranks; idle: 4; 8 a node." in page.words
    assert "photos dp4 + sounds tp4" in page.words
    assert len(page.all("section")) == 2 and len(page.all("div", "arrow")) == 1


def test_a_large_layout_is_cut_and_counted():
    cfg = load("vlm_digits", ["train.global_batch_size=1024"])
    cfg.modules["language"].layout = LayoutConfig(dp=128)
    page = drawn(resolve(cfg))
    assert len(page.all("span", "chip")) == 1 + 64 and "and 64 more" in page.text

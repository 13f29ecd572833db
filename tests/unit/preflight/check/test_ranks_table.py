"""The table of ranks that `mimo-train check` prints."""

from mimo_train.layout.run import resolve
from mimo_train.preflight.check.report import Report
from mimo_train.preflight.check.tables import add_ranks
from tests.unit.layout.test_layout import arranged


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


def test_equal_sizes_on_the_same_ranks_move_nothing():
    found = table(arranged({"dp": 2}, mode="shared", images={"dp": 2}))
    assert found.rows == [("0-1", "images + language")]
    assert found.notes == ["features of images stay where they are: it is on the first ranks of language (0-1)"]

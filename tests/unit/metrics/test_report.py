import base64
import copy
import json
import math
import re
from html.parser import HTMLParser

import pytest

from mimo_train.config.compose import load
from mimo_train.config.schema import LayoutConfig
from mimo_train.metrics.sinks.jsonl import JsonlSink
from mimo_train.plan.layout import ModuleLayout, plan
from mimo_train.report.layout_drawing import coordinates, draw_layout
from mimo_train.report.page import write_report

PNG = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
).decode()
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0 not looked into").decode()
VOID = {"meta", "link", "img", "br", "path"}


class Page(HTMLParser):
    """Checks that tags are balanced; keeps the attributes of every element, and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID or (tag == "path" and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data + " "

    def all(self, tag, css=""):
        return [
            attrs
            for name, attrs in self.elements
            if name == tag and css in ["", *(attrs.get("class") or "").split(" ")]
        ]


@pytest.fixture(scope="module")
def vlm():
    cfg = load("vlm_digits", ["train.iters=40", "train.global_batch_size=32"])
    return cfg, plan(cfg)


def write_metrics(run_dir, steps=40, evaluations=True, loss=lambda step: 5 / step):
    sink = JsonlSink(run_dir / "metrics.jsonl", 0)
    for step in range(1, steps + 1):
        values = {"lm loss": loss(step), "grad_norm": 1.0, "learning_rate/images": 1e-3, "learning_rate/language": 2e-3}
        sink.log(step, 32 * step, values | {"tokens_per_second": 9000.0 + step, "step_seconds": 0.5})
        if evaluations and step % 20 == 0:
            values = {"eval/loss": 1 / step, "eval/exact_match": step / 50, "eval/samples": 512, "eval/recall": 0.25}
            sink.log(step, 32 * step, values)
    sink.close()


def report(run_dir, vlm):
    path = write_report(run_dir, *vlm)
    assert path == run_dir / "report.html"
    assert not list(run_dir.glob(".*.tmp"))
    text = path.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text) and "<script" not in text and "url(" not in text
    return Page(text)


def test_headline_curves_table_layout_and_config(tmp_path, vlm):
    write_metrics(tmp_path)
    page = report(tmp_path, vlm)
    text = " ".join(page.text.split())
    for part in (
        "Held-out exact match 80.0% 512 samples, step 40",
        "Held-out loss 0.0250",
        "Steps 40",
        "Samples 1,280",
        "Tokens per second 9,020 median",
        "Training time 20 s 0.5 s per step, median",
        "A step is 32 samples: 4 microbatches of 8.",
        "global_batch_size: 32",
        "recall",
    ):
        assert part in text, part
    assert len(page.all("figure", "chart")) == 5
    labels = [attrs["aria-label"] for attrs in page.all("div", "plot")]
    assert (
        labels[0].startswith("Loss. training, smoothed: ")
        and "held-out: 0.05 at step 20, 0.025 at step 40" in labels[0]
    )
    assert len(page.all("details")) == 1 and len(page.all("table")) == 1
    assert len(page.all("span", "chip")) == 2


def test_equal_learning_rates_share_a_curve_and_different_ones_are_named(tmp_path, vlm):
    write_metrics(tmp_path)
    different = report(tmp_path, vlm).text
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.update({"learning_rate/images": 2e-3} if "learning_rate/images" in line else {})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "images, language " not in different and "images, language " in report(tmp_path, vlm).text


def test_samples_are_marked_in_words_and_their_text_is_escaped(tmp_path, vlm):
    samples = [
        {"images": [PNG, JPEG], "question": 'Is 1 < 2? "yes"', "answer": "<b>7</b>", "truth": "7", "correct": True},
        {"image": PNG, "question": "Which?", "answer": "8", "truth": "9", "correct": False},
        {"images": ['x" onerror="alert(1)', "aGVsbG8="], "question": "q", "answer": "a", "truth": "t", "correct": None},
    ]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    page = report(tmp_path, vlm)
    images = page.all("img")
    assert [image["src"].split(";")[0] for image in images] == ["data:image/png", "data:image/jpeg", "data:image/png"]
    assert images[0]["alt"] == 'held-out picture to the question: Is 1 < 2? "yes"'
    assert all("onerror" not in image for image in images) and not page.all("b")
    assert page.text.count("✓ right") == 1 and page.text.count("✗ wrong") == 1
    assert "1 of these 2 are right." in page.text


def test_clips_can_be_played_and_nothing_else_is_let_in(tmp_path, vlm):
    wav = base64.b64encode(b"RIFF\x24\x00\x00\x00WAVE").decode()
    words = {"question": "q", "answer": "a", "truth": "t", "correct": None}
    samples = [{"images": [PNG], "clips": [wav, wav], **words}, {"images": [], "clips": ['" onplay="x', PNG], **words}]
    (tmp_path / "samples.json").write_text(json.dumps(samples))
    clips = report(tmp_path, vlm).all("audio")
    assert [clip["src"] for clip in clips] == [f"data:audio/wav;base64,{wav}"] * 2
    assert not any("onplay" in clip for clip in clips)


@pytest.mark.parametrize(
    ("steps", "evaluations", "loss"),
    [
        (0, False, None),
        (1, False, lambda step: 5.0),
        (1, False, lambda step: math.nan),
        (30, True, lambda step: math.inf if step > 10 else 1.0),
        (40, False, lambda step: 0.0),
    ],
)
def test_odd_runs_have_a_report(tmp_path, vlm, steps, evaluations, loss):
    write_metrics(tmp_path, steps, evaluations, loss)
    page = report(tmp_path, vlm)
    drawings = "".join(attrs.get("d", "") + attrs.get("style", "") for _, attrs in page.elements)
    assert "nan" not in drawings and "inf" not in drawings
    assert ("No metrics yet." in page.text) == (steps == 0)


def test_an_empty_folder_and_unreadable_samples(tmp_path, vlm):
    assert "No metrics yet." in report(tmp_path, vlm).text
    (tmp_path / "samples.json").write_text('[{"quest')
    assert "samples.json cannot be read" in report(tmp_path, vlm).text


def test_a_plain_gpt_has_no_arrow_and_a_report_can_be_written_again(tmp_path):
    cfg = load("gpt_tiny")
    write_metrics(tmp_path)
    first = report(tmp_path, (cfg, plan(cfg)))
    assert not first.all("div", "arrow") and "Steps 40 of 300" in " ".join(first.text.split())
    report(tmp_path, (cfg, plan(cfg)))


def test_a_long_run_stays_a_small_page(tmp_path, vlm):
    write_metrics(tmp_path, steps=6_000)
    page = report(tmp_path, vlm)
    assert (tmp_path / "report.html").stat().st_size < 150_000
    assert len(page.all("tr")) == 51 and "The last 50 of 300." in page.text
    assert not page.all("path", "dot")[1:], "only the legend's dot"


def test_coordinates_count_tp_first_then_cp_dp_pp():
    module = ModuleLayout("language", tp=2, pp=2, dp=3, cp=2, ep=1, sp=False, first_rank=4)
    seen = [tuple(coordinates(module, rank)[axis] for axis in ("pp", "dp", "cp", "tp")) for rank in module.ranks]
    assert seen == sorted(set(seen)) and len(seen) == 24
    assert coordinates(module, 4 + 1) == {"tp": 1, "cp": 0, "dp": 0, "pp": 0}
    assert coordinates(module, 4 + 2) == {"tp": 0, "cp": 1, "dp": 0, "pp": 0}
    assert coordinates(module, 4 + 4) == {"tp": 0, "cp": 0, "dp": 1, "pp": 0}
    assert coordinates(module, 4 + 12) == {"tp": 0, "cp": 0, "dp": 0, "pp": 1}


def test_disjoint_modules_are_boxes_of_their_own_with_an_arrow():
    layout = plan(load("vlm_digits", ["layout=images_tp2_language_pp2"]))
    page = Page(draw_layout(layout))
    text = " ".join(page.text.split())
    assert "rank 0 tp 0 · pp 0 · dp 0 rank 1 tp 1 · pp 0 · dp 0" in text
    assert "rank 2 tp 0 · pp 0 · dp 0 rank 3 tp 0 · pp 1 · dp 0" in text
    assert len(page.all("div", "arrow")) == 1


def test_shared_modules_stand_in_one_box():
    page = Page(draw_layout(plan(load("vlm_digits", ["layout=one_process"]))))
    text = " ".join(page.text.split())
    assert "rank 0 images tp 0 · pp 0 · dp 0 ↓ language tp 0 · pp 0 · dp 0" in text and "rank 1" not in text


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
    page = Page(draw_layout(plan(cfg)))
    text = " ".join(page.text.split())
    assert "rank 3 · node 0 photos tp 0 · pp 0 · dp 3 sounds tp 3 · pp 0 · dp 0" in text
    assert "rank 5 · node 0 images tp 0 · pp 0 · dp 0 ↓ language tp 0 · pp 0 · dp 0" in text
    assert "rank 8 · node 1 language tp 0 · pp 1 · dp 1" in text
    assert "8 processes, modules share ranks; idle: 4; 8 a node." in text
    assert "photos dp4 + sounds tp4" in text and len(page.all("section")) == 2 and len(page.all("div", "arrow")) == 1


def test_a_large_layout_is_cut_and_counted():
    cfg = load("vlm_digits", ["train.global_batch_size=1024"])
    cfg.modules["language"].layout = LayoutConfig(dp=128)
    page = Page(draw_layout(plan(cfg)))
    assert len(page.all("span", "chip")) == 1 + 64 and "and 64 more" in page.text

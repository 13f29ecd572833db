"""report.html as a whole: what it says, and that it is one file from which nothing leads out."""

import base64
import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from tests.hang import HANG_SECONDS
from tests.unit.logging.report.made_up_runs import PNG, report, write_metrics

WAV = base64.b64encode(b"RIFF\x24\x00\x00\x00WAVE").decode()
VIDEOS = [base64.b64encode(raw).decode() for raw in (b"\0\0\0\x20ftypisom", b"\x1a\x45\xdf\xa3webm")]
WORDS = {"images": [], "clips": [], "question": "q", "answer": "a", "truth": "t", "correct": None}
ROOT = Path(__file__).resolve().parents[3]


def test_headline_curves_table_layout_and_config(tmp_path, vlm):
    write_metrics(tmp_path)
    page = report(tmp_path, vlm)
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
        assert part in page.words, part
    assert len(page.all("figure", "chart")) == 5
    labels = [attrs["aria-label"] for attrs in page.all("div", "plot")]
    assert (
        labels[0].startswith("Loss. training, smoothed: ")
        and "held-out: 0.05 at step 20, 0.025 at step 40" in labels[0]
    )
    assert len(page.all("details")) == 1 and len(page.all("table")) == 1
    assert len(page.all("span", "chip")) == 2


def test_models_are_named_and_a_blind_run_says_so(tmp_path):
    cfg = load("vlm_digits")
    seeing = report(tmp_path, resolve(cfg)).words.replace(" ", "")
    assert "images:vit_tiny,language:gpt_mini." in seeing and "Blind" not in seeing
    cfg = load("vlm_digits", ["data.blind=true"])
    assert "Blind: media are replaced by zeros" in report(tmp_path, resolve(cfg)).words


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


def test_an_empty_folder_has_a_report_of_its_plan(tmp_path, vlm):
    page = report(tmp_path, vlm)
    assert "No metrics yet." in page.text and "4 microbatches of 8." in page.words
    assert not page.all("figure") and not page.all("table") and "Held-out" not in page.text


def test_a_plain_gpt_has_no_arrow_and_a_report_can_be_written_again(tmp_path):
    cfg = load("gpt_tiny")
    write_metrics(tmp_path)
    first = report(tmp_path, resolve(cfg))
    assert not first.all("div", "arrow") and "Steps 40 of 300" in first.words
    report(tmp_path, resolve(cfg))


def test_a_long_run_stays_a_small_page(tmp_path, vlm):
    write_metrics(tmp_path, steps=6_000)
    page = report(tmp_path, vlm)
    assert (tmp_path / "report.html").stat().st_size < 150_000
    assert len(page.all("tr")) == 51 and "The last 50 of 300." in page.text
    assert len(page.all("path", "dot")) == 2, "only those of legends"


def test_no_name_and_no_text_becomes_markup(tmp_path):
    evil = """</li></pre></style><script src="http://example.org/x.js">alert('1')</script>&amp;"""
    run_dir = tmp_path / evil.replace("/", "|")
    run_dir.mkdir()
    cfg = load("mixed_tiny")
    cfg.run.dir = evil
    cfg.modules = {name if name != "audio" else evil: module for name, module in cfg.modules.items()}
    for name in cfg.encoders:
        cfg.modules[name] = copy.deepcopy(cfg.modules[name])
        cfg.modules[name].encoder.name = evil
    values = {"step": 1, "consumed_samples": 1, "lm loss": 1.0, f"learning_rate/{evil}": 1.0, f"eval/{evil}": 1.0}
    (run_dir / "metrics.jsonl").write_text(json.dumps(values) + "\n")
    sample = {"images": [PNG], "clips": [evil], "question": evil, "answer": evil, "truth": evil, "correct": evil}
    (run_dir / "samples.json").write_text(json.dumps([sample]))
    page = report(run_dir, resolve(cfg))
    assert page.words.count("http://example.org/x.js") >= 9 and "&amp;" in page.words
    assert [image["alt"] for image in page.all("img")] == [f"held-out image to the question: {evil}"]


def test_samples_are_marked_in_words_and_their_text_is_escaped(tmp_path, vlm):
    samples = [
        {"images": [PNG, PNG], "question": 'Is 1 < 2? "yes"', "answer": "<b>7</b>", "truth": "7", "correct": True},
        {"images": [PNG], "question": "Which?", "answer": "8", "truth": "9", "correct": False},
        {"images": [], "clips": [WAV], "question": "q", "answer": "a", "truth": "t", "correct": None, "videos": VIDEOS},
    ]
    (tmp_path / "samples.json").write_text(json.dumps([{"clips": [], **sample} for sample in samples]))
    page = report(tmp_path, vlm)
    images = page.all("img")
    assert [image["src"] for image in images] == [f"data:image/png;base64,{PNG}"] * 3
    assert [clip["src"] for clip in page.all("audio")] == [f"data:audio/wav;base64,{WAV}"]
    sources = [f"data:video/{kind};base64,{raw}" for kind, raw in zip(("mp4", "webm"), VIDEOS, strict=True)]
    videos = page.all("video")
    assert [video["src"] for video in videos] == sources and all("controls" in video for video in videos)
    assert images[0]["alt"] == 'held-out image to the question: Is 1 < 2? "yes"'
    assert not page.all("b")
    assert page.text.count("✓ right") == 1 and page.text.count("✗ wrong") == 1
    assert "1 of these 2 are right." in page.text
    assert [len(page.all("li", state)) for state in ("sample", "right", "wrong")] == [3, 1, 1]


@pytest.mark.parametrize("text", ['[{"quest', '{"question": "q"}', '["q"]', '[{"images": ["x onerror"]}]'])
def test_unreadable_samples_are_told_and_cost_no_report(tmp_path, vlm, text):
    (tmp_path / "samples.json").write_text(text)
    page = report(tmp_path, vlm)
    assert "samples.json cannot be read: " in page.text and not page.all("ul", "samples")


def test_the_page_forbids_the_browser_to_fetch(tmp_path, vlm):
    policy = next(meta["content"] for meta in report(tmp_path, vlm).all("meta") if "http-equiv" in meta)
    assert policy.split("; ")[0] == "default-src 'none'"
    assert not re.search("script|https?:|[*]", policy)


def test_half_a_character_costs_no_report(tmp_path, vlm):
    (tmp_path / "samples.json").write_text(json.dumps([WORDS | {"question": "\ud83d"}]))
    assert "Question ?" in report(tmp_path, vlm).words


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import mimo_train.logging.report.page", ("torch", "megatron", "transformers")),
        ("from mimo_train.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass", ("jinja2",)),
    ],
)
def test_the_report_imports_no_torch_and_help_no_report(code, absent):
    check = f"\nimport sys\nfound = set({absent}) & set(sys.modules)\nassert not found, found"
    result = subprocess.run(
        [sys.executable, "-c", code + check], cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert result.returncode == 0, result.stderr

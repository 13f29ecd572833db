"""Runs on every form of data: built shards, fields of a source, videos, and a chat template of the tokenizer."""

import base64
import io
import json
import signal

import pytest
from PIL import Image

from data.index.find_shards import find_shards
from data.media.headers import parse_video_header_bytes
from data.media.video import decode_video
from data.samples.media_spec import Sampling
from mimo_train.layout.run import resolve
from mimo_train.logging.report.page import write_report
from tests.dist.commands import command
from tests.dist.exit_callbacks import At
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.tables import table_of_shards
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image
from tests.unit.data.text.chat_templates import QWEN_VL, save_tokenizer
from tests.videos import make_video


def test_a_mixture_with_fields_of_one_source_is_one_of_plain_records(tmp_path):
    for at in range(8):
        key, raw = f"{at:03d}", encode_image(28, 28, "PNG", seed=at)
        talk = [(f"{key}.png", raw), (f"{key}.json", chat("<image>\nWhich?", f"answer {at}"))]
        other = [(f"{key}.png", encode_image(20, 20, "PNG")), (f"{key}.right.png", raw)]
        other += [(f"{key}.json", json.dumps({"q": "Which?"}).encode()), (f"{key}.cls", f"answer {at}".encode())]
        write_tar(tmp_path / "talks" / f"{key}.tar", talk)
        write_tar(tmp_path / "labelled" / f"{key}.tar", other)
    fields = json.dumps({"question": "json[q]", "label": "cls", "image": "right.png"})
    runs = (("two_processes", f"{{name: b, shards: {tmp_path}/labelled, fields: {fields}}}"),)
    runs += (("one_process", f"{{name: b, shards: {tmp_path}/talks}}"),)
    changes = ("train.iters=2", "train.global_batch_size=8", "train.micro_batch_size=2", "data.shards=")
    curves = []
    for layout, second in runs:
        mix = f"data.mix=[{{name: a, shards: {tmp_path}/talks}}, {second}]"
        changed = (*changes, f"layout={layout}", mix)
        curves.append(curve(train_on_ranks(config("vlm_digits", tmp_path / layout, tmp_path, *changed))))
    assert len(curves[0]) == 2
    for one, same in zip(*curves, strict=True):
        assert one == pytest.approx(same, rel=TOLERANCE)


def killed_before(cfg, step):
    from mimo_train.training.pretrain import pretrain

    return pretrain(cfg, callbacks=[At(0, step, signal.SIGKILL)])


def test_a_run_on_parquet_files_is_one_on_tars_also_killed_and_on_other_ranks(digits, tmp_path):
    table_of_shards(digits / "train", tmp_path / "rows" / "train" / "train-0.parquet")
    half = find_shards(digits / "train")[1]
    changes = ("train.iters=6", "train.global_batch_size=8", "train.micro_batch_size=2", "checkpoint.save_interval=2")

    def run(name, layout, rows, *more):
        mix = f"data.mix=[{{name: a, shards: {rows}, weight: 2}}, {{name: b, shards: {half}, weight: 1}}]"
        return config("vlm_digits", tmp_path / name, digits, *changes, f"layout={layout}", "data.shards=", mix, *more)

    tars = curve(train_on_ranks(run("tars", "one_process", digits / "train")))
    cfg = run("rows", "two_processes", tmp_path / "rows" / "train")
    with pytest.raises(RankFailure):
        run_ranks(killed_before, 2, cfg, 4)
    more = run("rows", "images_dp1_language_dp2", tmp_path / "rows" / "train", "data.pack=true")
    rows = curve(train_on_ranks(more))
    assert len(tars) == 6 and [step for step, *_ in rows] == [step for step, *_ in tars]
    for one, same in zip(rows, tars, strict=True):
        assert one == pytest.approx(same, rel=TOLERANCE)


pytest.importorskip("av")


def images(video, key):
    """What is read of a video, as numbered members."""
    count = Sampling(max_frames=3).count(parse_video_header_bytes(video).milliseconds)
    for at, image in enumerate(decode_video(video, count)):
        raw = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(raw, "PNG")
        yield f"{key}.0.{at}.png", raw.getvalue()


def test_a_run_on_videos_is_one_on_their_images_at_another_layout(tmp_path):
    members = {"videos": [], "images": []}
    for at in range(8):
        key, rest = f"{at:03d}", []
        if at % 3:
            video = make_video(images=5 + 10 * at, seed=at, key_every=8)
            members["videos"].append((f"{key}.0.mp4", video))
            members["images"] += images(video, key)
        if at % 2:
            rest.append((f"{key}.1.png", encode_image(28, 28, "PNG", seed=at)))
        marks = "<video>" * (at % 3 > 0) + "<image>" * (at % 2)
        for own in members.values():
            own += [*rest, (f"{key}.json", chat(f"{marks}q", f"answer {at}"))]
    changes = ("train.iters=2", "train.global_batch_size=8", "train.micro_batch_size=2", "data.video.max_frames=3")
    curves = []
    for name, layout in (("videos", "images_dp1_language_dp2"), ("images", "one_process")):
        write_tar(tmp_path / name / "train" / "000.tar", members[name])
        changed = (*changes, f"layout={layout}", "data.shuffle=false")
        curves.append(curve(train_on_ranks(config("vlm_digits", tmp_path / f"run_{name}", tmp_path / name, *changed))))
    assert len(curves[0]) == 2
    for one, other in zip(*curves, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)


def test_a_run_with_the_tokenizers_own_template(digits, tmp_path):
    """Marks around pads, several special tokens in a turn, another end of turn than ours: the same at any layout."""
    tokenizer = save_tokenizer(tmp_path / "tokenizer", QWEN_VL)

    def run(layout: str, *overrides: str):
        return config(
            "vlm_digits",
            tmp_path / layout,
            digits,
            f"layout={layout}",
            f"data.tokenizer={tokenizer}",
            "data.sequence_length=128",
            "train.eval_interval=3",
            "train.eval_samples=8",
            "train.report_samples=2",
            f"data.validation_shards={digits}/held_out",
            *(overrides or ("train.iters=3",)),
        )

    layouts = ("one_process", "two_processes")
    lines = [train_on_ranks(run(layout)) for layout in layouts]
    assert max(largest_difference(*map(curve, lines))) < TOLERANCE
    scores = [next(line["eval/loss"] for line in of_run if "eval/loss" in line) for of_run in lines]
    assert scores[0] == pytest.approx(scores[1], rel=TOLERANCE)
    shown = [json.loads((tmp_path / layout / "samples.json").read_text()) for layout in layouts]
    assert shown[0] == shown[1] and all(sample["truth"] and "<|" not in sample["truth"] for sample in shown[0])
    image = tmp_path / "image.png"
    image.write_bytes(encode_image(28, 28, "PNG"))
    options = ["--image", str(image), "--prompt", "Which digit?", "--max-new-tokens", "3"]
    ((code, _),) = run_ranks(command, 1, ["generate", str(tmp_path / "two_processes"), *options])
    assert code == 0
    with pytest.raises(RankFailure, match=r"data\.tokenizer: tokenizer, chat template.*are not those of checkpoint"):
        train_on_ranks(run("one_process", "train.iters=4", "data.chat_template=own"))


def test_a_run_on_the_video_demo_has_a_report_with_a_player(tmp_path):
    pytest.importorskip("av")
    from data.demo.make import make_demo

    demo = make_demo(tmp_path / "demo", "video_digits", train_samples=32, held_out_samples=4, shards=1)
    shown = ("train.iters=2", "train.eval_interval=2", "train.report_samples=2")
    changes = (f"data.validation_shards={demo}/held_out", *shown)
    cfg = config("video_digits", tmp_path / "run", demo, *changes)
    assert len(curve(train_on_ranks(cfg))) == 2
    samples = json.loads((tmp_path / "run" / "samples.json").read_text())
    assert [(len(sample["images"]), len(sample["videos"])) for sample in samples] == [(8, 1)] * 2
    assert len([*decode_video(base64.b64decode(samples[0]["videos"][0]), 8)]) == 8
    page = write_report(tmp_path / "run", resolve(cfg)).read_text()
    assert page.count("<video controls") == 2 and samples[1]["videos"][0] in page

"""Videos are trained on by a run of several modules as their pictures are, at any layout."""

import io

import pytest
from PIL import Image

from data.media.headers import parse_video_header_bytes
from data.media.video import decode_video
from data.samples.frames import Sampling
from tests.dist.runs import TOLERANCE, config, curve, train_on_ranks
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_picture
from tests.videos import make_video

pytest.importorskip("av")


def pictures(video, key):
    """What is read of a video, as numbered members."""
    count = Sampling(max_frames=3).count(parse_video_header_bytes(video).milliseconds)
    for at, picture in enumerate(decode_video(video, count)):
        raw = io.BytesIO()
        Image.fromarray(picture.permute(1, 2, 0).numpy()).save(raw, "PNG")
        yield f"{key}.0.{at}.png", raw.getvalue()


def test_a_run_on_videos_is_one_on_their_pictures_at_another_layout(tmp_path):
    members = {"videos": [], "pictures": []}
    for at in range(8):
        key, rest = f"{at:03d}", []
        if at % 3:
            video = make_video(pictures=5 + 10 * at, seed=at, key_every=8)
            members["videos"].append((f"{key}.0.mp4", video))
            members["pictures"] += pictures(video, key)
        if at % 2:
            rest.append((f"{key}.1.png", encode_picture(28, 28, "PNG", seed=at)))
        marks = "<video>" * (at % 3 > 0) + "<image>" * (at % 2)
        for own in members.values():
            own += [*rest, (f"{key}.json", chat(f"{marks}q", f"answer {at}"))]
    changes = ("train.iters=2", "train.global_batch_size=8", "train.micro_batch_size=2", "data.video.max_frames=3")
    curves = []
    for name, layout in (("videos", "images_dp1_language_dp2"), ("pictures", "one_process")):
        write_tar(tmp_path / name / "train" / "000.tar", members[name])
        changed = (*changes, f"layout={layout}", "data.shuffle=false")
        curves.append(curve(train_on_ranks(config("vlm_digits", tmp_path / f"run_{name}", tmp_path / name, *changed))))
    assert len(curves[0]) == 2
    for one, other in zip(*curves, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)

"""Shards that `shards build` wrote are trained on, by a run of two modules on two processes."""

import json
import math

from data.build.build import Settings, build_shards
from data.build.columns import Columns
from data.build.find import find_source
from tests.dist.runs import config, curve, train_on_ranks
from tests.unit.data.helpers import encode_picture


def test_a_run_trains_on_what_was_built(tmp_path):
    records, question = [], "What is it?"
    for at in range(16):
        (tmp_path / f"{at}.png").write_bytes(encode_picture(28, 28, "PNG", seed=at))
        records.append({"image": f"{at}.png" if at % 4 else ["0.png", f"{at}.png"], "caption": f"{at}"})
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    source = find_source(tmp_path / "records.jsonl", Columns({}, question))
    assert build_shards(source, tmp_path / "shards", Settings(per_shard=5)).samples == {"train": 16}
    changes = ("train.iters=2", "train.global_batch_size=8", "train.micro_batch_size=2", "layout=two_processes")
    lines = train_on_ranks(config("vlm_digits", tmp_path / "run", tmp_path / "shards", *changes))
    losses = [loss for _, loss, _ in curve(lines)]
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert lines[-1]["consumed_samples"] == 16 and not any(line.get("bad_samples") for line in lines)

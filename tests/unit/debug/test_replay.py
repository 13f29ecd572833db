"""The command of a replay."""

import shlex
from types import SimpleNamespace

from mimo_train.config.compose import load
from mimo_train.debug import nan_policy


def test_a_replay_writes_into_no_folder_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(nan_policy.dist, "barrier", lambda: None)
    cfg = load("gpt_tiny", ["checkpoint.dir=s3://bucket/run"])
    state = SimpleNamespace(
        cfg=cfg,
        run_dir=tmp_path,
        train_state=SimpleNamespace(step=3),
        layout=SimpleNamespace(processes=range(1)),
        is_logging_rank=False,
    )
    _, command = nan_policy.write_replay(
        state, SimpleNamespace(current=None), {}, None, None, tmp_path / "step_00000003"
    )
    words = shlex.split(command)
    again = load("gpt_tiny", words[words.index("train") + 2 :])
    assert again.checkpoint.dir == "" and again.run.dir == str(tmp_path / "replay" / "step_00000004")

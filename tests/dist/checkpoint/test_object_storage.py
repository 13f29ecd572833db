"""Checkpoints in object storage: vlm_digits on two processes, its checkpoints on a local S3 server."""

import errno
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from data.storage.object_store import store_of
from data.storage.url import Url
from mimo_train.checkpoint import best, folders, inspection
from mimo_train.cli import main
from mimo_train.config.errors import UserError
from mimo_train.config.schema_selection import KeepBestConfig
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference
from tests.object_storage import environment, moto_server

STEPS = 7
ROOT = Url.parse("s3://bucket/kept/run")


@pytest.fixture(scope="module")
def storage():
    """A server, in the environment of this process; ranks are given it."""
    with moto_server() as values, environment(values):
        yield values


def run_config(digits: Path, run_dir: Path, root: Url, *overrides: str):
    saving = (f"checkpoint.dir={root}", f"train.iters={STEPS}", "checkpoint.save_interval=2", "checkpoint.keep=2")
    return config("vlm_digits", run_dir, digits, "layout=two_processes", *saving, *overrides)


def _train(cfg, values: dict[str, str], hurt=None) -> list[int]:
    """One rank of a run; what the first tells is written to `told` in its folder. Returns in how many parts its files
    of tensors were sent.

    Args:
        hurt: is called with the rank, the number of its upload, from 1 on, and of the block of that.
    """
    from data.storage import object_store
    from mimo_train.checkpoint.format import files as durable
    from mimo_train.logging.console import Console
    from mimo_train.training import setup
    from mimo_train.training.pretrain import pretrain

    os.environ.update(values)
    setup.ObjectLock = partial(setup.ObjectLock, beat=0.5)  # the wait for one of a dead run is four of them
    durable.IN_ONE, object_store.PART = 0, 1 << 14  # tiny files in parts, as large ones are
    upload, rank, uploads = object_store.ObjectStore.upload, int(os.environ["RANK"]), []

    def tell(self, text: str) -> None:
        if rank == 0:
            with (Path(cfg.run.dir) / "told").open("a") as file:
                file.write(f"{text}\n")

    def parts_of(parts):
        for number, part in enumerate(parts):
            if hurt is not None:
                hurt(rank, len(uploads), number)
            yield from (part[at : at + object_store.PART] for at in range(0, len(part), object_store.PART))

    def uploaded(self, url, parts, size):
        uploads.append(-(-size // object_store.PART))
        return upload(self, url, parts_of(parts), size)

    Console.message, object_store.ObjectStore.upload = tell, uploaded
    assert pretrain(cfg) == 0
    return uploads


class Kill:
    """Kills a rank in the middle of one of its uploads."""

    def __init__(self, rank: int, upload: int):
        self.at = rank, upload

    def __call__(self, rank: int, upload: int, block: int) -> None:
        if (rank, upload) == self.at and block == 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Fail:
    """The storage fails in some uploads of rank 1."""

    def __init__(self, *uploads: int):
        self.uploads = uploads

    def __call__(self, rank: int, upload: int, block: int) -> None:
        if rank == 1 and upload in self.uploads:
            raise OSError(errno.EIO, "the storage fails")


@pytest.fixture(scope="module")
def whole(storage, digits, tmp_path_factory) -> Path:
    """A run that was left alone, its checkpoints at ROOT."""
    run_dir = tmp_path_factory.mktemp("whole")
    results = run_ranks(_train, 2, run_config(digits, run_dir, ROOT, "checkpoint.asynchronous=true"), storage)
    assert all(min(uploads) > 4 for uploads in results), "in several parts"
    return run_dir


def names(root: Url) -> list[str]:
    return [folder.name for folder in folders.complete(root)]


def test_only_the_newest_stay_and_nothing_else(whole, storage):
    """Markers, no marks, and the lock is gone; nothing of a checkpoint is in run.dir."""
    assert names(ROOT) == ["step_00000006", "step_00000007"]
    objects = {str(found.url).removeprefix(f"{ROOT}/") for found in store_of(ROOT).list(ROOT)}
    files = ("COMPLETE", "index.json", "run.json", "rank_00000.safetensors", "rank_00001.safetensors")
    assert objects == {f"checkpoints/{name}/{file}" for name in names(ROOT) for file in files}
    assert not (whole / "checkpoints").exists()


def test_the_best_is_named_in_storage(whole):
    watch = KeepBestConfig("eval/loss", "min")
    for best_step in (6, 7):  # replaced
        best.write(folders.checkpoints_dir(ROOT), watch, [(4, 0.1), (best_step, 0.2)])
        file = folders.checkpoints_dir(ROOT) / "best"
        assert folders.step_in(folders.in_folder(file, "checkpoint.weights")) == best_step
    store_of(file).remove([file])


def test_neither_a_kill_nor_an_upload_that_fails_loses_anything(whole, storage, digits, tmp_path):
    """A rank is killed in the middle of its upload at step 4. The next start waits for a heartbeat in the lock of the
    dead, and continues at step 2; then the storage fails at steps 4 and 7. The first is a save that has failed,
    the second ends the run, for it is its last: nothing is left of either."""
    root = Url.parse("s3://bucket/hurt")
    cfg = run_config(digits, tmp_path, root, "checkpoint.asynchronous=true")
    with pytest.raises(RankFailure, match="died|Connection|connection|closed"):
        run_ranks(_train, 2, cfg, storage, Kill(0, 2))
    torn = folders.checkpoints_dir(root) / "step_00000004"
    there = folders.contents(torn)
    assert there.is_unfinished and "rank_00000.safetensors" not in there.names
    assert names(root) == ["step_00000002"] == [one.name for one in folders.newest_first(root)]
    assert [(one.path, one.kind) for one in inspection.look(root)][1] == (torn, inspection.UNFINISHED)

    with pytest.raises(RankFailure, match=r"SaveFailed: checkpoint\.dir: .*the storage fails"):
        run_ranks(_train, 2, cfg, storage, Fail(1, 3))
    (said,) = [text for text in told(tmp_path) if text.startswith("no checkpoint of step 4")]
    assert said.startswith(f"no checkpoint of step 4: checkpoint.dir: a checkpoint cannot be written to {root} (")
    assert curve(read_metrics(tmp_path / "metrics.jsonl")) == curve(read_metrics(whole / "metrics.jsonl"))
    assert [one.path.name for one in folders.every(root)] == names(root)
    assert names(root) == ["step_00000002", "step_00000006"]


def test_damage_is_named_set_aside_and_another_layout_goes_on(whole, storage, digits, tmp_path, capsys):
    """Verified by a command; a run, here of one process, takes the one before, and saves the step again beside the
    damaged one."""
    root = Url.parse("s3://bucket/damaged")
    copy(ROOT, root)
    newest = folders.newest(root)
    file = newest / "rank_00001.safetensors"
    content = bytearray(content_of(file))
    content[len(content) // 2] ^= 1
    store_of(file).put(file, bytes(content))
    assert main(["checkpoint", "verify", str(root)]) == 1
    out, err = capsys.readouterr()
    assert "step_00000006: whole" in out and f"checkpoint {newest} is damaged: rank_00001.safetensors is damaged" in err

    cfg = run_config(digits, tmp_path, root, "layout=one_process")
    run_ranks(_train, 1, cfg, storage)
    texts = told(tmp_path)
    assert any(f"checkpoint {newest} is damaged: rank_00001" in text for text in texts), texts
    assert any(f"resumed from {folders.step_folder(root, 6)}" in text for text in texts), texts
    (line,) = curve(read_metrics(tmp_path / "metrics.jsonl"))
    assert max(largest_difference(curve(read_metrics(whole / "metrics.jsonl"))[6:], [line])) < TOLERANCE
    assert names(root) == ["step_00000006", "step_00000007.002"]
    assert inspection.kind_of(newest) == inspection.SET_ASIDE
    assert main(["checkpoint", "list", str(root)]) == 0
    assert main(["checkpoint", "show", str(root), "--tensors", "images.*"]) == 0
    assert "step_00000007.002" in capsys.readouterr().out


def _commands(values: dict[str, str], refused, *commands: list[str]) -> list[int]:
    from mimo_train.training.pretrain import pretrain

    os.environ.update(values)
    with pytest.raises(UserError, match=r"checkpoint\.dir: .* has no checkpoint, and run\.dir has "):
        pretrain(refused)
    return [main(arguments) for arguments in commands]


def test_commands_take_a_url_and_a_new_place_hides_no_older_checkpoints(whole, storage, digits, tmp_path):
    """A run that has saved into run.dir is not begun anew, without a word, where it gets a `checkpoint.dir`."""
    older = tmp_path / "run" / "checkpoints" / "step_00000002"
    older.mkdir(parents=True)
    (older / "COMPLETE").write_text("{}")
    refused = run_config(digits, tmp_path / "run", Url.parse("s3://bucket/new"), "layout=one_process")
    generate = ["generate", str(ROOT), "--prompt", "What?", "--max-new-tokens", "2"]
    export = ["export", str(ROOT), "--to", str(tmp_path / "out")]
    assert run_ranks(_commands, 1, storage, refused, generate, export) == [[0, 0]]
    assert [*(tmp_path / "out").rglob("*.safetensors")]


def told(run_dir: Path) -> list[str]:
    return (run_dir / "told").read_text().splitlines()


def content_of(url: Url) -> bytes:
    from data.storage.object_store import read_range

    return bytes(read_range(url, 0, 1 << 30))


def copy(root: Url, to: Url) -> None:
    for found in [*store_of(root).list(root)]:
        target = Url(to.scheme, to.host, to.path + found.url.path.removeprefix(root.path))
        store_of(to).put(target, content_of(found.url))

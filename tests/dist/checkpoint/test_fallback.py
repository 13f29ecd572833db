"""`checkpoint.resume=auto` with damaged checkpoints: each is named and set aside, and the run goes on from the one
before it with the right weights; a damaged one that was chosen is an error."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mimo_train.checkpoint import folders
from mimo_train.checkpoint.format.files import COMPLETE
from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, curve, train_on_ranks
from tests.records import flip, write_record

MODEL = ("layout=two_processes", "modules.language.lora.rank=2", "modules.language.llm.tie_embeddings=false")
STEPS = 5


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory) -> Path:
    """A run with checkpoints of its steps 2 and 4, and its curve to step 5. They are written beside training; those
    that are not are the same files, see `test_saving`."""
    run_dir = tmp_path_factory.mktemp("whole")
    beside = "checkpoint.asynchronous=true"
    saving = ("checkpoint.save_interval=2", f"train.iters={STEPS}", "train.log_interval=1", beside)
    train_on_ranks(config("vlm_digits", run_dir, digits, *MODEL, *saving))
    shutil.rmtree(folders.step_folder(run_dir, STEPS))
    return run_dir


def truncate(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def without_layout(folder: Path) -> None:
    record = folders.read_record(folder)
    del record["layout"]
    write_record(folder, record)


WAYS: dict[str, Callable[[Path], None]] = {"flipped": flip, "cut": truncate, "empty": empty, "gone": Path.unlink}
RECORDS: dict[str, Callable[[Path], None]] = {
    "no record": lambda folder: write_record(folder, []),
    "a short record": without_layout,
    "a record of another step": lambda folder: write_record(folder, folders.read_record(folder) | {"step": 3}),
}
"""Under a marker that is right."""


def copies(whole: Path, to: Path) -> Iterator[tuple[str, str, Path]]:
    """(name, what is damaged, run) of copies of a run whose newest checkpoint is damaged."""

    def copied(name: str) -> Path:
        shutil.copytree(whole / "checkpoints", to / name / "checkpoints")
        return folders.step_folder(to / name, 4)

    for file in sorted(path.name for path in folders.step_folder(whole, 4).iterdir()):
        for way, damage in WAYS.items():
            damage(copied(f"{file} {way}") / file)
            yield f"{file} {way}", file, to / f"{file} {way}"
    for name, damage in RECORDS.items():
        damage(copied(name))
        yield name, folders.RECORD, to / name


def both_damaged(whole: Path, to: Path) -> Path:
    shutil.copytree(whole / "checkpoints", to / "both" / "checkpoints")
    flip(next(folders.step_folder(to / "both", 2).glob("*.safetensors")))
    (folders.step_folder(to / "both", 4) / COMPLETE).unlink()
    return to / "both"


def _resumed(cfg, good: str, runs: list[str]) -> list[tuple]:
    """What each start of several comes to, all with one model: (whether weights and moments are those of `good`, step,
    what was set aside, error, error of a start from the damaged one by its name)."""
    import torch

    from mimo_train.checkpoint.local_shards import optimizer_shards
    from mimo_train.config.errors import UserError
    from mimo_train.layout.run import resolve
    from tests.dist.steps import Steps

    steps = Steps(cfg)
    checkpointer = steps.session.checkpointer

    def start(run_dir: str, resume: str) -> str:
        cfg.run.dir, cfg.checkpoint.resume = run_dir, resume
        checkpointer._run = resolve(cfg)
        try:
            checkpointer.resume()
        except UserError as error:
            return str(error)
        return ""

    def state() -> list[torch.Tensor]:
        moments = [
            value.clone()
            for optimizer in steps.optimizer.inner()
            for one in optimizer_shards(optimizer)
            for value in one.values.values()
        ]
        return [*steps.parameters().values(), *moments]

    steps.train()  # so that nothing is as in the checkpoint
    assert not start(f"{good}/new", good)
    right, found = state(), []
    for run in runs:
        chosen = start(f"{run}/new", str(folders.step_folder(Path(run), 4)))
        steps.train()
        fault = start(run, "auto")
        same = all(torch.equal(one, other) for one, other in zip(state(), right, strict=True))
        aside = [str(one) for one in checkpointer.set_aside]
        found.append((same, steps.state.train_state.step, aside, fault, chosen))
    return found


def test_the_curve_goes_on_from_the_one_before(whole, digits, tmp_path):
    """As if the run had never been stopped; metrics and progress have what a reader needs, once."""
    shutil.copytree(whole, tmp_path / "run")
    run_dir = tmp_path / "run"
    newest = folders.step_folder(run_dir, 4)
    flip(next(newest.glob("*.safetensors")))
    lines = train_on_ranks(config("vlm_digits", run_dir, digits, *MODEL, f"train.iters={STEPS}"))
    assert curve(lines) == curve(read_metrics(whole / "metrics.jsonl"))
    (noted,) = [line for line in (run_dir / "progress.txt").read_text().splitlines() if "\tdamaged\t" in line]
    assert f"path={newest}\twhy=rank_00000.safetensors is damaged between bytes" in noted
    assert [folder.name for folder in folders.complete(run_dir)] == ["step_00000002", "step_00000005"]


def test_every_damage_of_every_file_is_named_and_the_one_before_is_taken(whole, digits, tmp_path):
    """All of them by one model in turn, so that what a torn read leaves behind would show."""
    cases = list(copies(whole, tmp_path))
    cfg = config("vlm_digits", tmp_path / "new", digits, *MODEL, "train.iters=99")
    good = folders.step_folder(whole, 2)
    both = both_damaged(whole, tmp_path)
    ranks = run_ranks(_resumed, 2, cfg, str(good), [*(str(run) for *_, run in cases), str(both)])
    (_, _, aside, fault, _), (_, _, *others, _) = (of.pop() for of in ranks)
    assert ranks[0] == ranks[1] and others == [aside, fault]
    *damages, remedy = fault.splitlines()
    assert not aside and [line.partition(" is damaged: ")[0] for line in damages] == [
        f"checkpoint {folders.step_folder(both, step)}" for step in (4, 2)
    ]
    assert remedy.startswith(f"run.dir: no checkpoint in {both} can be read (2 tried), and none was set aside: copy ")
    assert "remove this folder" not in fault
    assert len(folders.newest_first(both)) == 2, "nothing is moved where nothing is left"
    for (name, file, run), (same, step, aside, fault, chosen) in zip(cases, ranks[0], strict=True):
        newest = folders.step_folder(run, 4)
        assert not fault and same and step == 2, (name, fault)
        assert len(aside) == 1 and aside[0].startswith(f"checkpoint {newest} is damaged: "), (name, aside)
        assert file in aside[0] or COMPLETE in name, (name, aside)
        assert (newest / folders.DAMAGED).is_file() and newest not in folders.newest_first(run), name
        if (newest / COMPLETE).is_file():
            assert chosen.startswith(f"checkpoint {newest} is damaged: ") and "remove this folder" in chosen, chosen
        else:
            assert "no complete checkpoint in" in chosen

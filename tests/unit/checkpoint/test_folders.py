"""Folders of checkpoints of both kinds: which is newest, which stay."""

from pathlib import Path

import pytest

from mimo_train.checkpoint import folder_changes, folders
from mimo_train.checkpoint.damage import damage_in, damaged
from mimo_train.config.errors import PeersError, UserError
from tests.records import write_record


def saved(run_dir: Path, step: int, non_persistent: bool = False) -> Path:
    """A complete checkpoint, as far as its folder tells."""
    folder = folders.step_folder(run_dir, step, non_persistent)
    folder.mkdir(parents=True)
    write_record(folder, {"step": step})
    return folder


def names(run_dir: Path, non_persistent: bool = False) -> list[int]:
    return [folders.read_record(folder)["step"] for folder in folders.complete(run_dir, non_persistent)]


@pytest.mark.parametrize(
    ("persistent", "non_persistent", "newest"),
    [
        ([], [], None),
        ([4], [], (4, False)),
        ([], [3], (3, True)),
        ([4, 8], [9], (9, True)),
        ([4, 8], [6], (8, False)),
        ([8], [8], (8, False)),
    ],
)
def test_the_newest_of_both_kinds_is_resumed(tmp_path, persistent, non_persistent, newest):
    for step in persistent:
        saved(tmp_path, step)
    for step in non_persistent:
        saved(tmp_path, step, True)
    expected = newest and folders.step_folder(tmp_path, *newest)
    assert folders.newest(tmp_path) == expected and folders.newest_readable(tmp_path) == (expected, [])
    if expected:
        assert folders.chosen(tmp_path / "other", str(tmp_path)) == expected
        assert folders.chosen(tmp_path / "other", str(expected)) == expected


@pytest.mark.parametrize("folder", ["auto", "never", "empty"])
def test_a_folder_without_a_checkpoint_is_an_error_whatever_its_name(tmp_path, folder):
    (tmp_path / folder).mkdir()
    with pytest.raises(UserError, match=f"^checkpoint.weights: no complete checkpoint in .*{folder}: give"):
        folders.in_folder(tmp_path / folder, "checkpoint.weights")


def test_a_run_begins_at_no_earlier_step_than_its_folder_holds(tmp_path):
    """Its checkpoints would be removed as the oldest, and the next start would take those of later steps."""
    first, second = saved(tmp_path, 200), saved(tmp_path, 800)
    elsewhere = saved(tmp_path / "other", 700).rename(tmp_path / "best")
    folders.require_none_later(tmp_path, second)
    folders.require_none_later(tmp_path / "new", first)
    for start, step in ((None, 0), (first, 200), (elsewhere, 700)):
        with pytest.raises(UserError, match=f"step_00000800 is of a later step than {step}, .*another run.dir"):
            folders.require_none_later(tmp_path, start)


def test_an_unfinished_checkpoint_is_none(tmp_path):
    saved(tmp_path, 2)
    folder_changes.begin(tmp_path, 3, True, 0)
    folders.step_folder(tmp_path, 1).mkdir()
    assert folders.newest(tmp_path) == folders.newest_readable(tmp_path)[0] == folders.step_folder(tmp_path, 2)


@pytest.mark.parametrize("complete", [None, 2])
def test_a_checkpoint_that_lost_its_record_is_named(tmp_path, complete):
    """Without an error the run would begin again before it, and write over it."""
    if complete:
        saved(tmp_path, complete)
    copy = folders.step_folder(tmp_path, 3)
    copy.mkdir(parents=True)
    (copy / "index.json").touch()
    for ask in (
        lambda: folders.chosen(tmp_path / "new", str(tmp_path)),
        lambda: folders.require_none_later(tmp_path, None),
    ):
        with pytest.raises(UserError, match=f"^checkpoint.resume: {copy}: no complete checkpoint, .*or remove it"):
            ask()
    with pytest.raises(UserError, match=f"^checkpoint.weights: {copy}"):
        folders.in_folder(tmp_path, "checkpoint.weights")
    if complete:
        before, (said,) = folders.newest_readable(tmp_path)
        assert before == folders.step_folder(tmp_path, 2) and said.startswith(f"checkpoint {copy} is damaged: COMPLETE")
    else:
        both = (
            rf"^checkpoint {copy} is damaged: COMPLETE is missing, .*\nrun.dir: no checkpoint in {tmp_path} can be read"
        )
        with pytest.raises(UserError, match=both):
            folders.newest_readable(tmp_path)


def test_only_damage_of_the_checkpoint_itself_sets_it_aside(tmp_path):
    """Not that of the one whose weights it leaves out; a peer's error is as good as one's own."""
    base = tmp_path / "base"
    mine = saved(tmp_path, 4)
    error = damaged(mine, "a file is missing")
    assert damage_in(mine, error) == "a file is missing" and not damage_in(base, error)
    assert damage_in(mine, PeersError(str(error), type(error).__name__)) == "a file is missing"
    assert not damage_in(mine, PeersError(str(error))) and not damage_in(mine, UserError(str(error)))


def test_what_is_set_aside_is_no_checkpoint_and_stays(tmp_path):
    folder_changes.set_aside(saved(tmp_path, 4), UserError())
    saved(tmp_path, 2), saved(tmp_path, 3)
    folder_changes.remove_old(tmp_path, 1)
    assert [path.name for path in folders.newest_first(tmp_path)] == ["step_00000003"]
    assert (folders.step_folder(tmp_path, 4) / folders.DAMAGED).is_file()
    assert folder_changes.begin(tmp_path, 4, False, 0).name == "step_00000004.002"


def test_a_checkpoint_under_the_name_of_another_step_is_damaged(tmp_path):
    renamed = saved(tmp_path, 3).rename(folders.step_folder(tmp_path, 9))
    with pytest.raises(UserError, match=f"{renamed} is damaged: its name has step 9, and its run.json step 3"):
        folders.read_record(renamed)
    kept = renamed.rename(tmp_path / "best")
    assert folders.read_record(kept)["step"] == 3


def test_each_kind_is_thinned_out_by_its_own_rule(tmp_path):
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
        saved(tmp_path, step, True)
    unfinished = [folder_changes.begin(tmp_path, 5, kind, 0) for kind in (False, True)]
    folder_changes.remove_old(tmp_path, 2)
    folder_changes.remove_unfinished(tmp_path)
    assert names(tmp_path) == [3, 4] and names(tmp_path, True) == [1, 2, 3, 4]
    assert [folder.exists() for folder in unfinished] == [False, True]
    folder_changes.remove_old(tmp_path, 0, True)
    assert names(tmp_path) == [3, 4] and names(tmp_path, True) == [4]
    folder_changes.remove_old(tmp_path, 0)
    assert names(tmp_path) == [3, 4]


def test_a_folder_in_a_checkpoint_goes_with_it(tmp_path):
    """Such as an export of the user: else no later checkpoint could be saved."""
    old, new = saved(tmp_path, 1), saved(tmp_path, 2)
    (old / "export").mkdir()
    (old / "export/config.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (old / "link").symlink_to(tmp_path / "elsewhere")
    folder_changes.remove_old(tmp_path, 1)
    assert not old.exists() and new.exists() and (tmp_path / "elsewhere").exists()

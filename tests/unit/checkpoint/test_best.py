"""The best checkpoints: their order, which stay, and the path that names them."""

import json
import math

import pytest

from mimo_train.checkpoint import best, folder_changes, folders, inspection
from mimo_train.config.errors import UserError
from mimo_train.config.schema_selection import KeepBestConfig
from tests.unit.checkpoint.test_folders import names, saved

NAN = math.nan


@pytest.mark.parametrize(
    ("scores", "mode", "steps"),
    [
        ([[1, 0.5], [2, 0.3], [3, 0.4]], "min", [2, 3, 1]),
        ([[1, 0.5], [2, 0.3], [3, 0.4]], "max", [1, 3, 2]),
        ([[1, 0.5], [2, NAN], [3, 0.5], [4, math.inf]], "min", [1, 3]),  # the earlier at equal values
        ([[1, 0.5], [2, 0.4], [2, 0.6]], "min", [1, 2]),  # evaluated twice
        ([], "min", []),
    ],
)
def test_the_order_of_the_best(scores, mode, steps):
    assert [step for step, _ in best.ranked(scores, mode)] == steps


def test_the_best_stay_next_to_the_newest_and_are_named_by_a_path(tmp_path):
    for step in (1, 2, 3, 4, 5):
        saved(tmp_path, step)
    # Step 9 has no checkpoint: its save has failed.
    best.write(
        tmp_path / "checkpoints", KeepBestConfig("eval/loss", "min", 2), [(9, 0.1), (2, 0.2), (1, 0.3), (4, 0.4)]
    )
    folder_changes.remove_old(tmp_path, 1, best=(9, 2, 1, 4), best_count=2)
    assert names(tmp_path) == [1, 2, 5]
    for step in (2, 3):  # of these, the newest alone stays
        saved(tmp_path, step, non_persistent=True)
    folder_changes.remove_old(tmp_path, 1, True, best=(2, 3), best_count=2)
    assert names(tmp_path) == [1, 2, 5] and names(tmp_path, True) == [3]
    path = tmp_path / "checkpoints" / "best"
    assert json.loads(path.read_text())["best"][1] == {"step": 2, "value": 0.2}
    assert folders.in_folder(path, "KEY") == folders.step_folder(tmp_path, 2)
    assert inspection.folders_at(path) == [folders.step_folder(tmp_path, 2)]
    assert folders.chosen(tmp_path / "other", str(path)) == folders.step_folder(tmp_path, 2)
    link = tmp_path / "linked" / "checkpoints" / "best"  # of a user
    link.parent.mkdir(parents=True)
    link.symlink_to(folders.step_folder(tmp_path, 1))
    assert folders.in_folder(link, "KEY") == link
    folder_changes.remove(folders.step_folder(tmp_path, 2))
    folder_changes.remove(folders.step_folder(tmp_path, 1))
    with pytest.raises(UserError, match=r"^KEY: none of the checkpoints in .*best exists \(steps 9, 2, 1, 4\)"):
        folders.in_folder(path, "KEY")
    for text, message in (("no JSON", "does not name checkpoints"), (None, "there is no .*best: only a run with")):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(UserError, match=f"^KEY: .*{message}"):
            folders.in_folder(path, "KEY")

"""`mimo-train hang`: its exit codes, which scripts rely on."""

import pytest

from mimo_train.cli import main
from mimo_train.flight import report
from tests.unit.flight.test_starts import earlier_start


def test_the_exit_code_says_whether_somebody_is_to_blame(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "PAUSE", 0.0)
    ranks = earlier_start(tmp_path, 2)
    assert main(["hang", str(tmp_path)]) == 3
    assert "to blame: " in capsys.readouterr().out
    for rank in ranks:
        rank.to("end")
    assert main(["hang", str(tmp_path)]) == 0
    assert "nobody is to blame" in capsys.readouterr().out
    assert main(["hang", str(tmp_path / "none")]) == 1, "not 0: nothing is known"
    assert "to blame" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        main(["hang", "--help"])
    assert raised.value.code == 0 and "Exit code 0 if nobody is to blame, 3 if a rank is" in capsys.readouterr().out


def test_a_folder_without_files_says_which_one_may_be_meant(tmp_path, capsys):
    assert main(["hang", str(tmp_path)]) == 1
    assert "is it the run.dir of a run?" in capsys.readouterr().err
    earlier_start(tmp_path / "mine", 1)
    assert main(["hang", str(tmp_path)]) == 1
    assert f"there are runs in it: give {tmp_path / 'mine'}\n" in capsys.readouterr().err

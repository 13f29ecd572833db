from datetime import datetime

from mimo_train.metrics.progress import append_to_progress_log, checkpoint_saved, evaluated, job_exited, job_started


def test_events_are_appended_lines_of_tab_separated_columns(tmp_path):
    run_dir = tmp_path / "run"
    job_started(run_dir, world_size=2, step=0)
    checkpoint_saved(run_dir, step=200, path="checkpoints/step_00000200")
    evaluated(run_dir, step=200, values={"eval/loss": 0.31214, "eval/samples": 512})
    job_exited(run_dir, step=800, reason="finished")
    rows = [line.split("\t") for line in (run_dir / "progress.txt").read_text().splitlines()]
    assert [row[1:] for row in rows] == [
        ["start", "world_size=2", "step=0"],
        ["checkpoint", "step=200", "path=checkpoints/step_00000200"],
        ["evaluation", "step=200", "eval/loss=0.31214", "eval/samples=512"],
        ["exit", "step=800", "reason=finished"],
    ]
    assert all(datetime.fromisoformat(row[0]).tzinfo is not None for row in rows)


def test_text_with_line_breaks_stays_one_line(tmp_path):
    append_to_progress_log(tmp_path, "exit\treason=one\ntwo\r\nthree")
    (line,) = (tmp_path / "progress.txt").read_text().splitlines()
    assert line.endswith("\texit\treason=one two three")

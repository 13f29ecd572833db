"""A sweep of real runs, in processes that are forked instead of started."""

from mimo_train.cli import main
from mimo_train.config.compose import to_yaml
from mimo_train.launch import sweep as sweeps
from tests.dist.ranks import _start as start_ranks
from tests.dist.runs import config, train_rank
from tests.unit.logging.report.parsed_page import ParsedPage


class Forked:
    """A task's process, as `subprocess.Popen`."""

    def __init__(self, cfg):
        self.processes, self.pipes, self.meeting = start_ranks(train_rank, 1, (cfg,))

    def poll(self):
        return self.returncode

    @property
    def returncode(self):
        return self.processes[0].exitcode


def test_a_sweep_of_two_keys_ranks_its_runs(prose, tmp_path, monkeypatch, capsys):
    held_out = (f"data.validation_shards={prose}/held_out", "train.eval_samples=16", "data.sequence_length=64")
    cfg = config("gpt_tiny", tmp_path / "sweep", prose, *held_out, "train.iters=3", "optim.decay=constant")
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(cfg))
    monkeypatch.setattr(sweeps, "_start", lambda sweep, task, devices: Forked(task.cfg))
    command = ["launch", "sweep", str(file), "--sweep", "optim.lr=0.3,0.0001", "--sweep", "run.seed=1,2"]
    assert main([*command, "--at-once", "2"]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("task_") and "finished at step 3" in line]
    assert {row[0] for row in rows[:2]} == {"task_1", "task_2"}, "the larger rate learns more in three steps"
    losses = [float(row[1]) for row in rows]
    assert losses == sorted(losses) and len(losses) == 4
    page = ParsedPage((tmp_path / "sweep" / "compare.html").read_text())
    assert "optim.lr 0.3 0.3 0.0001 0.0001" in page.words and "run.seed 1 2 1 2" in page.words
    assert len(page.all("li", "sample")) > 0 and not page.outside()

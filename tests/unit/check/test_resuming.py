"""What `mimo-train check` says of the checkpoints of a run.dir: from where a run resumes, and what keeps it from it."""

import json
from pathlib import Path

from data.pipeline import Dataset
from data.tokens import build_tokenizer
from mimo_train.check import check
from mimo_train.config import compose
from tests.unit.check.shards import on, shard, sound
from tests.unit.configs import load


def saved(run_dir: Path, *overrides: str, fingerprint: str = "", steps=(100, 200)) -> str:
    """A run.dir as training leaves it, with a checkpoint that is not complete; returns the override that names it."""
    for step in steps:
        folder = run_dir / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        record = {"config": compose.to_dict(load("vlm_digits", *overrides)), "data_fingerprint": fingerprint}
        (folder / "run.json").write_text(json.dumps(record))
    (run_dir / "checkpoints" / "step_00000300").mkdir()
    return f"run.dir={run_dir}"


def test_a_run_that_resumes_says_from_where(tmp_path):
    report = check(load("vlm_digits", saved(tmp_path)))
    assert (report.faults, report.warnings) == ([], [])
    assert f"resumes {tmp_path}/checkpoints/step_00000200" in report.notes
    report = check(load("vlm_digits", f"checkpoint.resume={tmp_path}/checkpoints/step_00000100"))
    assert f"resumes {tmp_path}/checkpoints/step_00000100" in report.notes


def test_a_checkpoint_of_another_layout_is_fine(tmp_path):
    report = check(load("vlm_digits", saved(tmp_path, "layout=language_tp2")))
    assert (report.faults, report.warnings) == ([], [])
    (note,) = report.notes
    assert "language tp2; now images one rank, language one rank" in note and "resharded" in note


def test_a_checkpoint_of_another_model_is_a_fault(tmp_path):
    override = saved(tmp_path, "modules.language.llm.hidden_size=64", "modules.language.llm.dropout=0.1")
    (fault,) = check(load("vlm_digits", override)).faults
    assert fault.key == "run.dir"
    assert "(modules.language.llm.hidden_size was 64, is 96)" in fault.message
    (fault,) = check(load("vlm_digits", override, "checkpoint.resume=never")).faults
    assert fault.key == "checkpoint.resume" and "step_00000200 is of a later step than 0" in fault.message


def test_a_checkpoint_of_other_modules_is_a_fault(tmp_path):
    override = saved(tmp_path)
    (fault,) = check(load("gpt_tiny", override)).faults
    assert "modules were images, language, are language" in fault.message


def test_learned_positions_tie_a_checkpoint_to_its_sequence_length(tmp_path):
    override = saved(tmp_path, "modules.language.llm.position=learned")
    report = check(load("vlm_digits", override, "modules.language.llm.position=learned", "data.sequence_length=64"))
    assert "data.sequence_length was 96, is 64" in report.faults[0].message
    assert check(load("vlm_digits", saved(tmp_path / "rope"), "data.sequence_length=64")).faults == []


def test_a_checkpoint_of_other_data_is_a_fault(tmp_path):
    path = shard(Path("a.tar"), *sound())
    fingerprint = Dataset([path], tokenizer=build_tokenizer("bytes"), sequence_length=96).fingerprint
    (fault,) = check(load(*on(path), saved(tmp_path / "old", fingerprint="0123"))).faults
    assert fault.key == "data.shards"
    assert f"fingerprint {fingerprint}, was 0123" in fault.message
    assert check(load(*on(path), saved(tmp_path / "same", fingerprint=fingerprint))).faults == []


def test_a_checkpoint_of_another_template_is_a_fault(tmp_path):
    override, record = saved(tmp_path), tmp_path / "checkpoints" / "step_00000200" / "run.json"
    now = build_tokenizer("bytes", ["<image>"]).fingerprint
    for text, faults in (("0123", ["data.tokenizer"]), (now, [])):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"text_fingerprint": text}))
        found = check(load("vlm_digits", override)).faults
        assert [fault.key for fault in found] == faults
        assert all(f"fingerprint {now}, was 0123" in fault.message for fault in found)


def test_a_checkpoint_whose_record_is_damaged_is_a_warning(tmp_path):
    override = saved(tmp_path)
    for text in ("{}", '{"config": {"train": {"iter": 5}}, "data_fingerprint": ""}'):
        (tmp_path / "checkpoints" / "step_00000200" / "run.json").write_text(text)
        (warning,) = check(load("vlm_digits", override)).warnings
        assert "step_00000200" in warning and "run.json cannot be read" in warning


def test_a_checkpoint_whose_record_is_no_json_is_a_fault(tmp_path):
    """Training would end on it."""
    override = saved(tmp_path)
    for text in ("{", "[]", ""):
        (tmp_path / "checkpoints" / "step_00000200" / "run.json").write_text(text)
        (fault,) = check(load("vlm_digits", override)).faults
        assert fault.key == "checkpoint.resume"
        assert "step_00000200 is damaged: run.json" in fault.message and "remove this folder" in fault.message


def test_folders_of_checkpoints_must_be_there(tmp_path):
    (tmp_path / "file").touch()
    overrides = [f"run.dir={tmp_path}/file"], [f"checkpoint.resume={tmp_path}/none"]
    keys = [fault.key for given in overrides for fault in check(load("vlm_digits", *given)).faults]
    assert keys == ["run.dir", "checkpoint.resume"]

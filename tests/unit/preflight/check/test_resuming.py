"""`mimo-train check` on checkpoints of a run.dir: where a run resumes, and what prevents it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.samples.shard_dataset import ShardDataset
from data.text.tokens import build_tokenizer
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.spans import Span
from mimo_train.checkpoint.format.write import Part, complete, write_rank
from mimo_train.checkpoint.resume.same_run import recorded_config, resume_faults
from mimo_train.config import compose
from mimo_train.config.errors import ConfigError
from mimo_train.config.pretrained.weight_files import BIN
from mimo_train.preflight.check import check
from tests.records import write_record
from tests.unit.configs import load
from tests.unit.preflight.check.shards import on, shard, sound, write_weights


def saved(run_dir: Path, *overrides: str, fingerprint: str = "", steps=(100, 200), config="vlm_digits", **more) -> str:
    """Make a run.dir as training leaves it, with an incomplete checkpoint; return the override that names it."""
    for step in steps:
        folder = run_dir / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        config_of_run = compose.to_dict(load(config, *overrides))
        record = {"step": step, "config": config_of_run, "data_fingerprint": fingerprint, **more}
        write_record(folder, record)
    (run_dir / "checkpoints" / "step_00000300").mkdir()
    (run_dir / "checkpoints" / "step_00000300" / "PARTIAL").touch()
    return f"run.dir={run_dir}"


def test_a_run_that_resumes_says_from_where(tmp_path):
    report = check(load("vlm_digits", saved(tmp_path)))
    assert (report.faults, report.warnings) == ([], [])
    assert f"resumes {tmp_path}/checkpoints/step_00000200" in report.notes
    report = check(load("vlm_digits", f"checkpoint.resume={tmp_path}/checkpoints/step_00000100"))
    assert f"resumes {tmp_path}/checkpoints/step_00000100" in report.notes


def test_a_run_that_has_made_all_of_its_steps_is_told_that_it_has_nothing_to_do(tmp_path):
    override = saved(tmp_path)
    for iters in (199, 200):
        report = check(load("vlm_digits", override, f"train.iters={iters}"))
        assert f"nothing to do: step 200 of train.iters {iters} is done. Raise it" in report.warnings[0]
        assert not report.faults, "as training, which ends well"
    assert check(load("vlm_digits", override, "train.iters=201")).warnings == []


def test_a_checkpoint_of_another_layout_is_fine(tmp_path):
    report = check(load("vlm_digits", saved(tmp_path, "layout=language_tp2")))
    assert (report.faults, report.warnings) == ([], [])
    (note,) = (note for note in report.notes if "resharded" in note)
    assert "language tp2; now images one rank, language one rank" in note


def test_a_checkpoint_of_another_model_is_a_fault(tmp_path):
    override = saved(tmp_path, "modules.language.llm.hidden_size=64", "modules.language.llm.dropout=0.1")
    (fault,) = check(load("vlm_digits", override)).faults
    assert fault.key == "run.dir"
    assert ": modules.language.llm.hidden_size was 64, is 96;" in fault.message, "dropout may change"
    (fault,) = check(load("vlm_digits", override, "checkpoint.resume=never")).faults
    assert fault.key == "checkpoint.resume" and "step_00000200 is of a later step than 0" in fault.message


def test_weights_that_are_not_read_are_a_warning(tmp_path):
    override = saved(tmp_path)
    (warning,) = check(load("vlm_digits", override, "checkpoint.weights=runs/gone")).warnings
    assert warning.startswith("checkpoint.weights=runs/gone: not read, since this run continues")


CHANGES = {
    "modules.language.llm.num_attention_heads=2": "modules.language.llm.num_attention_heads was 4, is 2",
    "modules.images.encoder.activation=relu": "modules.images.encoder.activation was gelu, is relu",
    "modules.images.encoder.pixel_mean=[0,0,0]": "modules.images.encoder.pixel_mean was [",
    "modules.language.llm.tie_embeddings=false": "modules.language.llm.tie_embeddings was True, is False",
    "modules.language.llm.layernorm_epsilon=1e-3": "modules.language.llm.layernorm_epsilon was 1e-05, is 0.001",
    "modules.images.projector.activation=relu": "modules.images.projector.activation was gelu, is relu",
    "modules.language.lora.rank=4": "modules.language.lora.rank was 0, is 4",
}


@pytest.mark.parametrize("override", CHANGES)
def test_weights_of_another_meaning_are_a_fault(tmp_path, override):
    """The shapes are equal. A new run with these weights fails too, and only its adapters may be new."""
    same_model = saved(tmp_path)
    (fault,) = check(load("vlm_digits", same_model, override)).faults
    assert fault.key == "run.dir" and CHANGES[override] in fault.message
    assert f"step_00000200 is of another model: {CHANGES[override]}" in fault.message
    new = check(load("vlm_digits", f"checkpoint.weights={tmp_path}", override))
    if "lora" in override:
        assert new.faults == [] and f"starts from the weights of {tmp_path}/checkpoints/step_00000200" in new.notes
    else:
        (fault,) = new.faults
        assert fault.key == "checkpoint.weights" and CHANGES[override] in fault.message


ADAPTERS = ("modules.language.lora.rank=4", "modules.language.lora.targets=[linear_qkv, linear_proj]")


@pytest.mark.parametrize(
    ("override", "change", "more"),
    [
        ("modules.language.lora.rank=0", "lora.rank was 4, is 0, so that its adapters would be lost", False),
        ("modules.language.lora.alpha=1000", "lora.alpha was 16.0, is 1000.0", False),
        ("modules.language.lora.targets=[linear_qkv]", "lora.targets was ['linear_qkv', 'linear_proj']", False),
        ("modules.language.lora.targets=[linear_qkv, linear_proj, linear_fc1]", "lora.targets was ['linear_q", True),
        ("modules.language.lora.dropout=0.5", "", True),
    ],
)
def test_trained_adapters_are_kept(tmp_path, override, change, more):
    """`more`: overrides with which a new run may have them."""
    trained = saved(tmp_path, *ADAPTERS)
    found = check(load("vlm_digits", trained, *ADAPTERS, override)).faults
    assert [fault.key for fault in found] == ["run.dir"] * bool(change)
    assert not found or f"modules.language.{change}" in found[0].message
    found = check(load("vlm_digits", f"checkpoint.weights={tmp_path}", *ADAPTERS, override)).faults
    assert [fault.key for fault in found] == ["checkpoint.weights"] * (not more)


def test_a_key_that_a_checkpoint_lacks_means_its_default(tmp_path):
    """The key was added after the checkpoint was saved. A key that no version has any more is named."""
    override = saved(tmp_path)
    path = tmp_path / "checkpoints" / "step_00000200" / "run.json"
    record = json.loads(path.read_text())
    llm = record["config"]["modules"]["language"]["llm"]
    del llm["qk_norm"], record["config"]["modules"]["language"]["lora"], record["config"]["log"]
    write_record(path.parent, record)
    assert check(load("vlm_digits", override)).faults == []
    (fault,) = check(load("vlm_digits", override, "modules.language.llm.qk_norm=true")).faults
    assert "modules.language.llm.qk_norm was False, is True" in fault.message
    write_record(path.parent, json.dumps(record).replace('"bias": ', '"biases": '))
    (fault,) = check(load("vlm_digits", override)).faults
    assert "modules.language.llm.biases was False, and is no key of this version" in fault.message


def test_keys_that_were_removed_are_named_where_they_changed_numbers(tmp_path):
    """`export` and `generate` read the config of a checkpoint; a config file with such a key gets an error."""
    override = saved(tmp_path)
    path = tmp_path / "checkpoints" / "step_00000200" / "run.json"
    record = json.loads(path.read_text())
    record["config"]["data"] |= {"stream": False, "bounds": record["config"]["data"]["bounds"] | {"sample_bytes": 9}}
    record["config"]["placement"]["bridge"] = "native"
    record["config"]["log"] |= {"prometheus": False, "prometheus_port": 0}
    record["config"]["optim"]["min_loss_scale"] = 1.0
    record["config"]["modules"]["images"]["balance"] = "patches"
    write_record(path.parent, record)
    recorded = recorded_config(path.parent, trust_code=False)
    assert recorded.data.bounds == load("vlm_digits").data.bounds and recorded.modules["images"].balance == "images"
    report = check(load("vlm_digits", override))
    (note,) = [note for note in report.notes if "will differ" in note]
    assert report.faults == [] and note.endswith(": data.bounds.sample_bytes was 9, and is no key of this version")
    with pytest.raises(ConfigError, match="log.prometheus: was a key of an earlier version. Remove it"):
        load("vlm_digits", "log.prometheus=false")


def test_modules_come_in_their_order(tmp_path):
    """It orders the features of a medium that several encoders read; the language model's place does not matter."""
    override = saved(tmp_path, config="mixed_tiny")
    path = tmp_path / "checkpoints" / "step_00000200" / "run.json"
    record = json.loads(path.read_text())
    modules = record["config"]["modules"]
    orders = {("language", "images", "audio"): 0, ("audio", "images", "language"): 1}
    for order, faults in orders.items():
        record["config"]["modules"] = {name: modules[name] for name in order}
        write_record(path.parent, record)
        found = check(load("mixed_tiny", override)).faults
        assert len(found) == faults, found
    assert "modules were audio, images, language, are images, audio, language in this order" in found[0].message


def test_a_new_run_may_leave_out_an_encoder(tmp_path):
    saved(tmp_path, config="mixed_tiny")
    weights = f"checkpoint.weights={tmp_path}"
    report = check(load("mixed_tiny", weights, "~modules.audio"))
    assert not [fault for fault in report.faults if fault.key == "checkpoint.weights"]
    assert f"starts from the weights of {tmp_path}/checkpoints/step_00000200 without modules.audio" in report.notes
    (fault,) = check(load("mixed_tiny", f"run.dir={tmp_path}", "~modules.audio")).faults
    assert fault.key == "run.dir" and "modules were images, audio, language, are images, language" in fault.message


def test_modules_come_from_other_runs(tmp_path):
    """The other modules there do not matter; a module with another meaning is a fault, or listed."""
    saved(tmp_path, config="mixed_tiny")
    images = "checkpoint.load_modules.images"
    load_images = (f"{images}.path={tmp_path}", f"{images}.module=images")
    report = check(load("mixed_tiny", *load_images, "~modules.audio"))
    assert f"modules.images starts from the weights of images in {tmp_path}/checkpoints/step_00000200" in report.notes
    assert not [fault for fault in report.faults if fault.key.startswith("checkpoint.")]
    relu = (*load_images, "modules.images.encoder.activation=relu")
    (fault,) = check(load("mixed_tiny", *relu)).faults
    assert fault.key == images and "modules.images.encoder.activation was gelu, is relu" in fault.message
    report = check(load("mixed_tiny", *relu, f"{images}.strict=false"))
    assert not report.faults and f"{images}: modules.images.encoder.activation was gelu, is relu" in report.warnings
    for override, key in (
        (f"{images}.module=video", f"{images}.module"),
        (f"{images}.module=language", f"{images}.module"),
        (f"{images}.path=", f"{images}.path"),
        (f"{images}.only=[llm]", f"{images}.only"),
        (f"checkpoint.load_modules.video.path={tmp_path}", "checkpoint.load_modules.video"),
    ):
        found = check(load("mixed_tiny", *load_images, override)).faults
        assert key in [fault.key for fault in found], override


def test_a_checkpoint_of_another_tokenizer_is_a_fault(tmp_path):
    tokenizer = build_tokenizer("bytes", ["<image>"])
    text, vocabulary = tokenizer.fingerprint, tokenizer.vocabulary_fingerprint
    for name, was, faults in (("same", text, 0), ("other", "0123", 1)):
        override = saved(tmp_path / name, text_fingerprint=was)
        found = check(load("vlm_digits", override)).faults
        assert [fault.key for fault in found] == ["data.tokenizer"] * faults
    assert f"(fingerprint {text}, was 0123)" in found[0].message
    for name, was, faults in (("bytes", vocabulary, 0), ("others", "0123", 1)):
        saved(tmp_path / name, text_fingerprint="other placeholders", vocabulary_fingerprint=was)
        found = check(load("vlm_digits", f"checkpoint.weights={tmp_path / name}")).faults
        assert [fault.key for fault in found] == ["data.tokenizer"] * faults


def test_learned_positions_tie_a_checkpoint_to_its_sequence_length(tmp_path):
    override = saved(tmp_path, "modules.language.llm.position=learned")
    report = check(load("vlm_digits", override, "modules.language.llm.position=learned", "data.sequence_length=64"))
    assert "data.sequence_length was 96, is 64" in report.faults[0].message
    assert check(load("vlm_digits", saved(tmp_path / "rope"), "data.sequence_length=64")).faults == []


def test_a_checkpoint_of_other_data_is_a_fault(tmp_path):
    path = shard(Path("a.tar"), *sound())
    fingerprint = ShardDataset([path], tokenizer=build_tokenizer("bytes"), sequence_length=96).fingerprint
    (fault,) = check(load(*on(path), saved(tmp_path / "old", fingerprint="0123"))).faults
    assert fault.key == "data.shards" and f"checkpoint.weights={tmp_path / 'old'}/checkpoints/step_" in fault.message
    assert "/train, is a.tar" in fault.message and "so the order of samples would not continue" in fault.message
    assert check(load(*on(path), saved(tmp_path / "same", fingerprint=fingerprint))).faults == []


def test_a_checkpoint_whose_record_holds_no_config_is_a_fault(tmp_path):
    """Training would fail on it."""
    override = saved(tmp_path)
    path = tmp_path / "checkpoints" / "step_00000200" / "run.json"
    whole = json.loads(path.read_text())["config"]
    for config, lacking in (
        ({}, "config.run.seed"),
        (None, "holds no config"),
        (whole | {"run": {}}, "config.run.seed"),
        (whole | {"modules": []}, "config.modules.language"),
        (whole | {"modules": {"images": None, "language": {}}}, "config of modules"),
    ):
        write_record(path.parent, {"config": config, "data_fingerprint": ""})
        (fault,) = check(load("vlm_digits", override)).faults
        assert fault.key == "checkpoint.resume" and "step_00000200 is damaged" in fault.message
        assert lacking in fault.message


def test_a_checkpoint_whose_record_is_no_json_is_a_fault(tmp_path):
    """Training would fail on it, or set it aside if there is an earlier one."""
    override = saved(tmp_path)
    for text in ("{", "[]", ""):
        write_record(tmp_path / "checkpoints" / "step_00000200", text)
        report = check(load("vlm_digits", override))
        (warning,) = report.warnings
        assert "step_00000200 is damaged: run.json" in warning and warning.endswith("; a run sets it aside")
        assert not report.faults and f"resumes {tmp_path}/checkpoints/step_00000100" in report.notes
    write_record(tmp_path / "checkpoints" / "step_00000100", "{")
    (fault,) = check(load("vlm_digits", override)).faults
    assert fault.key == "checkpoint.resume"
    assert "step_00000100 is damaged: run.json" in fault.message and "can be read (2 tried)" in fault.message


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_a_checkpoint_that_lost_a_file_is_damaged(tmp_path, spoil):
    """For example one that was copied in part: training would set it aside, or fail."""
    override = saved(tmp_path)
    first, newest = (tmp_path / "checkpoints" / f"step_00000{step}" for step in (100, 200))
    record = (newest / "run.json").read_bytes()
    shutil.rmtree(newest)
    newest.mkdir()
    write_rank(newest, 0, [Part(Key("language", "weight", WEIGHT), Span.of_whole((8,)), torch.ones(8), True)])
    complete(newest, 1, {"run.json": record})
    assert check(load("vlm_digits", override)).warnings == []
    (file,) = newest.glob("*.safetensors")
    spoil(file)
    report = check(load("vlm_digits", override))
    (warning,) = report.warnings
    assert f"step_00000200 is damaged: {file.name}" in warning and warning.endswith("; a run sets it aside")
    assert not report.faults and f"resumes {first}" in report.notes
    for key in ("checkpoint.resume", "checkpoint.weights", "checkpoint.load_modules.language.path"):
        (fault,) = check(load("vlm_digits", f"{key}={newest}", f"run.dir={tmp_path}/new")).faults
        assert fault.key == key and f"step_00000200 is damaged: {file.name}" in fault.message


def test_a_checkpoint_of_trained_weights_alone_needs_the_one_with_the_others(tmp_path):
    base = tmp_path / "base" / "checkpoints" / "step_00000100"
    own = saved(tmp_path / "run", f"checkpoint.weights={tmp_path}/base", left_out="96 weights 0123456789abcdef")
    start = (own, "checkpoint.trained_only=true")
    (fault,) = check(load("vlm_digits", *start)).faults
    assert fault.key == "checkpoint.weights" and fault.message.startswith(f"no complete checkpoint in {tmp_path}/base")
    saved(tmp_path / "base", steps=(100,))
    assert check(load("vlm_digits", *start)).faults == []
    (base / "index.json").unlink()
    for key in ("checkpoint.resume", "checkpoint.weights"):
        (fault,) = check(load("vlm_digits", f"{key}={tmp_path}/run", f"run.dir={tmp_path}/new")).faults
        assert fault.key == "checkpoint.weights" and f"{base} is damaged" in fault.message


def test_weights_of_directories_must_be_there(tmp_path):
    """A resumed run does not read them."""
    sizes = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 256}
    sizes |= {"num_hidden_layers": 4, "vocab_size": 400, "rms_norm_eps": 1e-6, "rope_theta": 5000.0}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    start = (f"modules.language.pretrained={tmp_path}", "data.tokenizer=bytes")
    (fault,) = check(load("vlm_digits", *start)).faults
    assert fault.key == "modules.language.pretrained"
    assert fault.message.startswith(f"{tmp_path} has no weights (model.safetensors, model.safetensors.index.json, ")
    assert check(load("vlm_digits", *start), without_data=True).faults == []
    weights = write_weights(tmp_path, *start)
    assert check(load("vlm_digits", *start)).faults == []
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    (fault,) = check(load("vlm_digits", *start)).faults
    assert re.search(r"is damaged .*not fully covered.: copy it again", fault.message)
    assert check(load("vlm_digits", *start, saved(tmp_path / "run", *start))).faults == []


def test_names_of_tensors_are_compared_with_those_of_the_model(tmp_path):
    """`check` compares them as a start does, from headers alone; of `.bin` files too."""
    sizes = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 256}
    sizes |= {"num_hidden_layers": 4, "vocab_size": 400, "rms_norm_eps": 1e-6, "rope_theta": 5000.0}
    start = (f"modules.language.pretrained={tmp_path}", "data.tokenizer=bytes")

    def faults(tied: bool = False) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(sizes | {"tie_word_embeddings": tied}))
        return [str(fault) for fault in check(load("vlm_digits", *start)).faults]

    (fault,) = faults()
    assert "has no weights" in fault
    weights = write_weights(tmp_path, *start)
    tensors = load_file(weights)
    # A tied model may have the output layer nevertheless.
    assert faults() == faults(tied=True) == []
    save_file(tensors | {"lm_head.weight": torch.zeros(399, 1)}, weights)
    (fault,) = faults(tied=True)
    assert "lm_head.weight has shape (399, 1) there, and 400 rows here" in fault
    for name, changed in (
        ("it lacks model.norm.weight", {key: value for key, value in tensors.items() if key != "model.norm.weight"}),
        (
            "has model.layers.4.mlp.bias, for which the model has no place",
            {**tensors, "model.layers.4.mlp.bias": torch.ones(1)},
        ),
    ):
        save_file(changed, weights)
        (fault,) = faults()
        assert fault.startswith("modules.language.pretrained: ") and name in fault
        weights.unlink()
        torch.save(changed, tmp_path / BIN)
        assert faults() == [fault]
        (tmp_path / BIN).unlink()


def test_folders_of_checkpoints_must_be_there(tmp_path):
    (tmp_path / "file").touch()
    overrides = [f"run.dir={tmp_path}/file"], [f"checkpoint.resume={tmp_path}/none"], [f"checkpoint.weights={tmp_path}"]
    keys = [fault.key for given in overrides for fault in check(load("vlm_digits", *given)).faults]
    assert keys == ["run.dir", "checkpoint.resume", "checkpoint.weights"]


def test_faults_of_a_checkpoint_dir_name_that_key_and_those_of_a_mixture_its_own(tmp_path):
    mixed = ("data.demo=", "data.shards=", "data.mix=[{shards: a}]", "checkpoint.dir=s3://bucket/run")
    record = {"config": compose.to_dict(load("vlm_digits", *mixed)), "data_fingerprint": "old"}
    cfg = load("vlm_digits", *mixed, "modules.language.llm.hidden_size=64", "run.seed=7")
    faults = resume_faults(tmp_path, record, cfg, data_fingerprint="new", text_fingerprint=None)
    assert [fault.key for fault in faults] == ["checkpoint.dir", "data.mix", "run.seed"]
    assert all("another checkpoint.dir" in fault.message for fault in faults)


def test_how_shards_differ_is_said_with_their_numbers(tmp_path):
    record = {"config": compose.to_dict(load(*on("old"))), "data_fingerprint": "old", "data_size": [1, 40]}
    given = {"data_fingerprint": "new", "text_fingerprint": None}
    for shards, size, words in (
        ("old", (2, 50), "of checkpoint a: there were 1 shard with 40 samples, and are 2 shards with 50 samples, so"),
        ("old", (1, 40), "of checkpoint a: there are 1 shard with 40 samples as before, and names, sizes or contents"),
        ("new", (1, 1), "of checkpoint a: data.shards was old, is new; there were 1 shard with 40 samples, and are 1 "),
        ("new", None, "of checkpoint a: data.shards was old, is new, so the order of samples would not continue"),
    ):
        (fault,) = resume_faults(Path("a"), record, load(*on(shards)), **given, data_size=size)
        assert words in fault.message and "with its weights: checkpoint.weights=a" in fault.message, fault.message

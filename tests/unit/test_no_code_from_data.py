"""Files that execute when they are loaded plainly do not when they are given here: each is refused, by a sentence."""

import hashlib
import json
import pickle
import socket
import sys

import pytest
import torch

from data.errors import DataError
from data.index.index_file import catalogue_path
from data.index.indexing import build_index
from data.text.tokens import build_tokenizer
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.damage import DamagedCheckpoint
from mimo_train.checkpoint.format.files import COMPLETE, INDEX, Damage, write_marker
from mimo_train.checkpoint.format.index import WEIGHT, Key
from mimo_train.checkpoint.format.read import Reader
from mimo_train.checkpoint.resume.same_run import recorded_config
from mimo_train.cli import main
from mimo_train.config import compose
from mimo_train.config.errors import UserError
from mimo_train.config.pretrained.adapter import adapted_paths
from mimo_train.config.user_code import code_named
from mimo_train.hf.tensors import TensorFolder
from mimo_train.training.step.feature_cache import FeatureCache
from tests.records import write_record
from tests.tars import write_tar
from tests.unit.checkpoint.format.test_files import written
from tests.unit.configs import load
from tests.unit.data.helpers import open_index


class Hostile:
    """What a pickle of this runs."""

    def __init__(self, ran):
        self.ran = ran

    def __reduce__(self):
        return open, (str(self.ran), "w")


@pytest.fixture
def crafted(tmp_path):
    """A file that torch.load executes, and the file that shows that it did."""
    ran, file = tmp_path / "ran", tmp_path / "crafted.pt"
    file.write_bytes(pickle.dumps(Hostile(ran)))
    torch.save(Hostile(ran), file)
    torch.load(file, weights_only=False).close()
    assert ran.exists()  # a plain load runs it
    ran.unlink()
    yield file, ran
    assert not ran.exists()


def copied(crafted, folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(crafted[0].read_bytes())
    return folder


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors"])
def test_an_adapter(tmp_path, crafted, name):
    with pytest.raises(UserError, match="holds more than tensors, which is not unpickled|is damaged .*too large"):
        adapted_paths(copied(crafted, tmp_path / "adapter", name))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json"])
def test_the_directory_of_a_model(tmp_path, crafted, name):
    folder = copied(crafted, tmp_path / "model", name)
    with pytest.raises(UserError, match="modules.language.pretrained: "):
        TensorFolder(folder, "modules.language.pretrained")


@pytest.mark.parametrize("name", ["common.pt", "__0_0.distcp", ".metadata", "mp_rank_00/model_optim_rng.pt"])
def test_a_checkpoint_of_other_programs(tmp_path, crafted, name):
    folder = tmp_path / "checkpoints" / "step_00000002"
    copied(crafted, (folder / name).parent, name.rpartition("/")[2])
    formats = r"has another format \(.*unpickling"
    with pytest.raises(UserError, match=f"^checkpoint.resume: checkpoint {folder} {formats}"):
        folders.in_folder(folder, "checkpoint.resume")
    with pytest.raises(UserError, match=f"^checkpoint.resume: checkpoint {folder} {formats}"):
        folders.in_folder(tmp_path, "checkpoint.resume")
    # Not set aside as damaged, which would begin the run anew, or from another step.
    with pytest.raises(UserError, match=formats) as raised:
        folders.newest_readable(tmp_path)
    assert not isinstance(raised.value, DamagedCheckpoint) and folder.is_dir()


def test_the_record_of_a_checkpoint(tmp_path, crafted):
    folder = copied(crafted, tmp_path / "step_00000002", folders.RECORD)
    copied(crafted, folder, folders.COMPLETE)
    with pytest.raises(UserError):
        folders.read_record(folder)


@pytest.mark.parametrize("name", ["rank_00001.safetensors", INDEX, folders.RECORD, COMPLETE])
@pytest.mark.parametrize("command", ["list", "show", "verify"])
def test_a_file_of_a_checkpoint(tmp_path, crafted, capsys, name, command):
    folder = written(tmp_path)
    write_record(folder, {"step": 4, "layout": {}})
    copied(crafted, folder, name)
    code = main(["checkpoint", command, str(folder)])
    said = capsys.readouterr().err
    assert code == 1 and "is damaged" in said or name == COMPLETE, said
    with pytest.raises((Damage, UserError)):
        folders.read_record(folder)
        Reader(folder).whole(Key("language", "embedding.word_embeddings.weight", WEIGHT))


def test_kept_features(tmp_path, crafted):
    """Also where somebody has made the checksum right: they are computed again."""
    cache = FeatureCache(tmp_path / "features", 10**6, fingerprint="a")
    cache.write("key", torch.ones(3))
    (file,) = (tmp_path / "features").glob("*/*")
    assert torch.equal(cache.read("key"), torch.ones(3))
    content = crafted[0].read_bytes()
    file.write_bytes(hashlib.blake2b(content, digest_size=16).digest() + content)
    assert cache.read("key") is None and cache.files.damaged == 1 and not file.exists()


def test_the_index_of_a_shard(tmp_path, crafted):
    shard = write_tar(tmp_path / "x.tar", [("a.txt", b"a")])
    good = open_index(shard)
    catalogue_path(shard).write_bytes(crafted[0].read_bytes())
    assert [open_index(shard).key(row) for row in range(len(good))] == ["a"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"])
def test_a_file_of_a_tokenizer(tmp_path, crafted, name):
    with pytest.raises(DataError):
        build_tokenizer(copied(crafted, tmp_path / "tokenizer", name))


def test_members_of_a_shard_that_other_decoders_unpickle(tmp_path, crafted):
    members = {f"a.{name}": crafted[0].read_bytes() for name in ("pyd", "pickle", "pth", "npy")} | {"a.txt": b"a"}
    shard = tmp_path / "x.tar"
    write_tar(shard, members.items())
    assert len(build_index(shard)) == 1


def test_a_tokenizer_with_code_of_its_own(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    ran, folder = tmp_path / "ran", tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises((OSError, ValueError, TypeError)):
        AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert ran.exists()  # a plain load that trusts it runs it, and then finds no vocabulary
    ran.unlink()

    def asked(*_):
        raise AssertionError("a question on a terminal")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(DataError, match="names code of its own for the tokenizer .*own.Own.*which is not run"):
        build_tokenizer(folder)
    assert not ran.exists()


def test_a_name_that_is_no_folder_asks_no_network(monkeypatch):
    def asked(*_, **__):
        raise AssertionError("a network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    with pytest.raises(DataError, match="no folder 'somebody/tokenizer'"):
        build_tokenizer("somebody/tokenizer")


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """Makes modules in the working directory, each of which shows that it was imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(name):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
        return f"{name}:Spec"

    return make


def doctored(tmp_path, change):
    """A checkpoint with the right markers, whose config somebody has changed."""
    plain = compose.to_dict(load("vlm_digits"))
    change(plain)
    folder = tmp_path / "checkpoints" / "step_00000002"
    folder.mkdir(parents=True)
    text = folders.record_text({"step": 2, "config": plain})
    (folder / folders.RECORD).write_bytes(text)
    write_marker(folder, {folders.RECORD: text})
    return folder


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["export", "--to", "exported"]])
@pytest.mark.parametrize("joined", [False, True])
def test_an_encoder_that_a_checkpoint_names(tmp_path, evil, capsys, command, joined):
    path = evil(f"evil_{command[0]}_{joined}")

    def change(plain):
        own = {"family": path}
        plain["modules"]["images"]["encoder"] = {"family": "joined", "second": own} if joined else own

    folder = str(doctored(tmp_path, change))
    assert main([command[0], folder, *command[1:]]) == 1
    complaint = capsys.readouterr().err
    assert f"run.json names the code {path}, which would be imported and run" in complaint, complaint
    assert "--trust-code" in complaint and not (tmp_path / "ran").exists()
    # The user's word; what is imported is said before, and then fails, for there is no Spec in it.
    assert main([command[0], folder, *command[1:], "--trust-code"]) == 1
    assert (tmp_path / "ran").exists()
    said, failed = capsys.readouterr().err.splitlines()
    key = f"modules.images.encoder.{'second.' if joined else ''}family"
    assert said == f"notice: {key} names code that is imported: {path}" and "has no Spec" in failed


def test_callbacks_that_a_checkpoint_names(tmp_path, evil):
    path = evil("evil_callbacks")
    folder = doctored(tmp_path, lambda plain: plain["train"].update(callbacks=[path], forward_step=path))
    cfg = recorded_config(folder, trust_code=False)
    assert cfg.train.callbacks == [] and cfg.train.forward_step == "" and not (tmp_path / "ran").exists()


def test_what_a_users_own_config_names_is_said_before_it_is_imported(tmp_path, evil, capfd):
    path = evil("own_encoder_said")
    (tmp_path / "own_encoder_said.py").write_text("import sys; sys.stderr.write('imported\\n')\n")
    overrides = ["~encoder@modules.images.encoder", f"+modules.images.encoder.family={path}", "train.callbacks=[a:B]"]
    assert main(["check", "vlm_digits", *overrides]) == 1
    family, callbacks, ran = capfd.readouterr().err.splitlines()[:3]
    assert family.endswith(f"imported: {path}") and callbacks.endswith("imported: a:B") and ran == "imported"


def test_every_key_that_names_code_is_known():
    named = {"modules": {"a": {"encoder": {"family": "joined", "first": {"family": "b.c"}}}, "x": 7, "y": None}}
    assert code_named(named | {"train": {"callbacks": ["d:E"], "forward_step": "f:g"}}) == {
        "modules.a.encoder.first.family": ["b.c"],
        "train.callbacks": ["d:E"],
        "train.forward_step": ["f:g"],
    }
    assert code_named({"modules": 3, "train": None}) == code_named(compose.to_dict(load("vlm_digits"))) == {}

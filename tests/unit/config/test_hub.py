"""Names of models on the Hugging Face hub: what is downloaded, which commit, and what is wrong."""

import json
import re
import shutil
import threading
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save

from encoders.joined.spec import JoinedSpec
from mimo_train.checkpoint.resume import same_run
from mimo_train.checkpoint.resume.config_diff import key_changes
from mimo_train.config.compose import load, to_dict, to_yaml
from mimo_train.config.errors import ConfigError, UserError
from mimo_train.config.pretrained import hub as names
from mimo_train.config.pretrained.config_of_directory import base_of_adapter
from mimo_train.launch.start import start_of
from mimo_train.preflight.check import main

LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 100, "num_hidden_layers": 3, "vocab_size": 300, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
}  # fmt: skip
SMALL = {
    "config.json": json.dumps(LLAMA).encode(),
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# Tiny",
}
WEIGHTS = save({"model.norm.weight": np.ones(48, np.float32)})
OTHERS = {
    "pytorch_model.bin": b"other",
    "model.fp16.safetensors": b"other",
    "consolidated.safetensors": b"other",
    "onnx/model.onnx": b"other",
    "original/params.json": b"{}",
}
TINY = SMALL | OTHERS | {"model.safetensors": WEIGHTS}
KEY = "modules.language.pretrained"


def composed(name: str, *overrides: str, **options):
    return load("gpt_tiny", [f"{KEY}={name}", *overrides], **options)


def fault(name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        composed(name, *overrides)
    return str(error.value)


def in_cache(folder: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_name_becomes_the_folder_of_its_commit(hub, capsys):
    commit = hub.commit("org/tiny", TINY)
    cfg = composed("org/tiny")
    folder = Path(constants.HF_HUB_CACHE) / "models--org--tiny" / "snapshots" / commit
    assert (cfg.language.pretrained, cfg.data.tokenizer) == (str(folder), str(folder))
    assert (cfg.llm.name, cfg.llm.hidden_size) == ("tiny", 48)
    assert in_cache(folder) == {*SMALL, "model.safetensors"} == hub.sent.keys()
    assert capsys.readouterr().err.count(f"notice: {KEY}: org/tiny is at commit {commit}\n") == 1

    hub.forget()
    assert composed("org/tiny") == cfg
    assert hub.requests == ["GET /api/models/org/tiny"]
    # A record names the commit. It is enough, without a request.
    recorded = to_dict(cfg)
    assert recorded["modules"]["language"]["pretrained"] == recorded["data"]["tokenizer"] == f"org/tiny@{commit}"
    hub.forget()
    assert composed(f"org/tiny@{commit}") == cfg
    assert hub.requests == []


def test_equal_names_get_one_commit(hub):
    hub.commit("org/tiny", TINY)
    composed("org/tiny", "data.tokenizer=org/tiny", "modules.language.lora.rank=0")
    assert hub.requests.count("GET /api/models/org/tiny") == 1


def test_weights_are_not_downloaded_where_they_are_not_read(hub):
    hub.commit("org/tiny", TINY)
    cfg = composed("org/tiny", weights=False)
    assert in_cache(cfg.language.pretrained) == {*SMALL} == hub.sent.keys()
    cfg = load("gpt_tiny", ["data.tokenizer=org/tiny"])  # a tokenizer has none
    assert in_cache(cfg.data.tokenizer) == {*SMALL}
    composed("org/tiny")  # now the weights are missing, and only these
    assert hub.sent == dict.fromkeys(SMALL, 0) | {name: len(TINY[name]) for name in [*SMALL, "model.safetensors"]}


def test_an_index_names_the_weights(hub):
    files = {"a.safetensors": WEIGHTS, "model-00002.safetensors": WEIGHTS}
    index = {"weight_map": {"x": "a.safetensors", "y": "model-00002.safetensors"}}
    others = {"model-00003.safetensors": b"other", "pytorch_model.bin.index.json": b"{}"}
    hub.commit("org/tiny", SMALL | files | others | {"model.safetensors.index.json": json.dumps(index).encode()})
    folder = composed("org/tiny").language.pretrained
    assert {name for name in in_cache(folder) if name.endswith(".safetensors")} == {*files}


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub):
    first = hub.commit("org/tiny", TINY)
    second = hub.commit("org/tiny", TINY | {"config.json": json.dumps(LLAMA | {"num_hidden_layers": 2}).encode()})
    third = hub.commit("org/tiny", TINY, "refs/pr/1")
    hub.repositories["org/tiny"].refs["v1"] = first
    for revision, commit in {"v1": first, "main": second, first: first, "refs/pr/1": third}.items():
        assert Path(composed(f"org/tiny@{revision}").language.pretrained).name == commit
    assert composed("org/tiny@main").llm.num_layers == 2


def test_a_folder_of_this_machine_comes_first(hub):
    hub.commit("org/tiny", TINY)
    Path("org/tiny").mkdir(parents=True)
    (Path("org/tiny") / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 7}))
    cfg = composed("org/tiny", "data.tokenizer=bytes")
    assert (cfg.language.pretrained, cfg.llm.num_layers, hub.requests) == ("org/tiny", 7, [])


def test_a_run_keeps_its_commit(hub, capsys):
    first = hub.commit("org/tiny", TINY)
    Path("runs/mine").mkdir(parents=True)
    here = "run.dir=runs/mine"
    Path("runs/mine/config.yaml").write_text(to_yaml(composed("org/tiny", here)))
    hub.commit("org/tiny", TINY | {"config.json": json.dumps(LLAMA | {"num_hidden_layers": 2}).encode()})
    hub.forget()
    for name in ("org/tiny", "org/tiny@main"):
        assert Path(composed(name, here).language.pretrained).name == first
    assert hub.requests == []
    assert f"{KEY}: org/tiny is at commit {first}, as the run has recorded" in capsys.readouterr().err
    # What was asked for by another name is what it says.
    third = hub.commit("org/tiny", TINY, "v2")
    assert Path(composed("org/tiny@v2", here).language.pretrained).name == third
    assert Path(composed(f"org/tiny@{third}", here).language.pretrained).name == third
    other = hub.commit("org/other", TINY)
    assert Path(composed("org/other", here).language.pretrained).name == other
    assert composed("org/tiny", "run.dir=runs/another").llm.num_layers == 2


def gated(hub, monkeypatch):
    hub.repositories["org/tiny"].gated = True


def private(hub, monkeypatch):
    hub.repositories["org/tiny"].private = True


def offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def without_network(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "org/none",
            None,
            "there is no folder org/none, and http://.*/org/none does not exist, or .* .`hf auth login`",
        ),
        ("org/tiny", private, "/org/tiny does not exist, or is private. Correct the name, or log in .`hf auth login`"),
        ("org/tiny", gated, "http://.*/org/tiny is gated. Accept its terms there, and log in"),
        ("org/tiny@v9", None, "http://.*/org/tiny has no revision v9. Give a branch, a tag or a commit"),
        ("org/tiny", offline, "org/tiny is not complete in the cache .* HF_HUB_OFFLINE is set. Unset it, or run"),
        (
            "org/tiny",
            without_network,
            "folder org/tiny, and http://127.0.0.1:9/org/tiny cannot be downloaded .*HF_END",
        ),
        ("org/a--b", None, "folder org/a--b, and .*/org/a--b cannot be downloaded .*HFValidationError: "),
        ("no_slash", None, "no folder no_slash: give a directory .* or the name of a model on the hub, ORG/NAME"),
    ],
)
def test_what_is_wrong_has_its_key_and_a_remedy(name, change, said, hub, monkeypatch):
    hub.commit("org/tiny", TINY)
    if change is not None:
        change(hub, monkeypatch)
    assert re.match(f"{KEY}: .*{said}", fault(name))


def test_every_wrong_name_is_named(hub):
    assert fault("org/none", "data.tokenizer=org/nothing").count("there is no folder org/no") == 2


def test_offline_the_cache_is_enough(hub, monkeypatch):
    hub.commit("org/tiny", TINY)
    cfg = composed("org/tiny")
    hub.forget()
    offline(hub, monkeypatch)
    assert composed("org/tiny") == cfg
    (Path(cfg.language.pretrained) / "model.safetensors").unlink()
    assert "is not complete in the cache" in fault("org/tiny")
    assert composed("org/tiny", weights=False) == cfg
    assert hub.requests == []
    assert composed("org/none", "data.tokenizer=bytes", without_data=True).language.pretrained == ""


def test_a_token_opens_what_is_private(hub, monkeypatch):
    hub.commit("org/tiny", TINY)
    private(hub, monkeypatch)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    assert composed("org/tiny").llm.num_layers == 3


def test_one_process_of_a_node_downloads(hub, monkeypatch, capsys):
    commit = hub.commit("org/tiny", TINY)
    name = f"org/tiny@{commit}"
    monkeypatch.setattr(names, "_is_first_of_node", lambda: threading.current_thread() is not waiting)
    monkeypatch.setattr(time, "sleep", lambda _: threading.Event().wait(0.01))
    results = []
    waiting = threading.Thread(target=lambda: results.append(composed(name)))
    waiting.start()
    while "waiting for the first process of this node, which downloads org/tiny@" not in capsys.readouterr().err:
        assert waiting.is_alive()
    assert hub.requests == []
    cfg = composed(name)
    waiting.join(60)
    assert results == [cfg]
    assert hub.sent["model.safetensors"] == len(WEIGHTS)

    # The limit of waiting.
    shutil.rmtree(constants.HF_HUB_CACHE)
    monkeypatch.setattr(names, "_is_first_of_node", lambda: False)
    monkeypatch.setattr(names, "WAIT_SECONDS", 0.02)
    assert f"the first process of this node has not downloaded {name} within 0.02 s. Run `hf download" in fault(name)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"])
def test_the_first_process_of_a_node_is_told_by_its_launcher(variable, monkeypatch):
    assert names._is_first_of_node()
    monkeypatch.setenv(variable, "0")
    assert names._is_first_of_node()
    monkeypatch.setenv(variable, "3")
    assert not names._is_first_of_node()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert names._is_first_of_node()


def test_ranks_are_started_with_commits(hub):
    commit = hub.commit("org/tiny", TINY)
    start = start_of("gpt_tiny", ["modules.language.pretrained=org/tiny", "run.device=cpu"], {})
    assert start.rank[-2:] == [f"{KEY}=org/tiny@{commit}", f"data.tokenizer=org/tiny@{commit}"]
    hub.forget()
    assert load("gpt_tiny", start.rank[start.rank.index("gpt_tiny") + 1 :]).data.tokenizer.endswith(commit)
    assert hub.requests == []


ADAPTER = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "org/tiny"}


def adapter() -> dict[str, bytes]:
    layers = [f"base_model.model.model.layers.{layer}.self_attn.q_proj" for layer in range(3)]
    tensors = {f"{layer}.lora_A.weight": np.ones((4, 48), np.float32) for layer in layers}
    tensors |= {f"{layer}.lora_B.weight": np.ones((96, 4), np.float32) for layer in layers}
    return {"adapter_config.json": json.dumps(ADAPTER).encode(), "adapter_model.safetensors": save(tensors)}


def test_an_adapter_has_a_name_too(hub):
    hub.commit("org/tiny", TINY)
    commit = hub.commit("org/adapter", adapter())
    lora = "modules.language.lora.adapter=org/adapter"
    # Its header is enough for the config.
    cfg = composed("org/tiny", lora, weights=False)
    assert (cfg.language.lora.rank, cfg.language.lora.targets) == (4, ["q_proj"])
    assert in_cache(cfg.language.lora.adapter) == {"adapter_config.json"}
    assert composed("org/tiny", lora) == cfg
    assert in_cache(cfg.language.lora.adapter) == {*adapter()}
    assert to_dict(cfg)["modules"]["language"]["lora"]["adapter"] == f"org/adapter@{commit}"
    # Its base model is in the hub.
    assert base_of_adapter(Path(names.located("org/adapter", "CHECKPOINT"))) == Path(cfg.language.pretrained)


def test_an_argument_is_a_name_unless_its_folder_exists(hub):
    commit = hub.commit("org/tiny", TINY)
    folder = names.located(f"org/tiny@{commit}", "CHECKPOINT")
    assert in_cache(folder) == {*SMALL, "model.safetensors"}
    Path("runs").mkdir()
    assert names.located("runs/mine", "CHECKPOINT") == "runs/mine"  # one that does not exist
    with pytest.raises(UserError, match="CHECKPOINT: there is no folder org/none, "):
        names.located("org/none", "CHECKPOINT")


def test_a_record_is_read_on_another_machine(hub, monkeypatch, capsys):
    hub.commit("org/tiny", TINY)
    cfg = composed("org/tiny")
    record = {"config": to_dict(cfg)}
    monkeypatch.setattr(same_run, "read_record", lambda *_: deepcopy(record))
    shutil.rmtree(constants.HF_HUB_CACHE)
    hub.forget()
    assert same_run.recorded_config(Path("checkpoint"), trust_code=False) == cfg
    assert in_cache(cfg.language.pretrained) == {*SMALL} == hub.sent.keys()  # the checkpoint has the weights
    assert same_run.recorded_config(Path("checkpoint"), trust_code=False, weights=True) == cfg
    assert in_cache(cfg.language.pretrained) == {*SMALL, "model.safetensors"}
    # Without the hub it goes on as without any other directory, and says so.
    shutil.rmtree(constants.HF_HUB_CACHE)
    offline(hub, monkeypatch)
    without = same_run.recorded_config(Path("checkpoint"), trust_code=False)
    assert without.language.pretrained == record["config"]["modules"]["language"]["pretrained"]
    assert f"notice: {KEY}: " in capsys.readouterr().err


def test_folders_of_the_cache_are_compared_by_name(hub):
    commit = hub.commit("org/tiny", TINY)
    folder = composed("org/tiny").language.pretrained
    joined = JoinedSpec(first_pretrained=folder, second_pretrained="/models/mine")
    assert [*key_changes({"first_pretrained": f"org/tiny@{commit}"}, joined, "encoder", {"second_pretrained"})] == []
    outside = f"/elsewhere/hub/models--org--tiny/snapshots/{commit}"
    assert names.named({"a": [folder, outside, 1], "b": folder}) == {
        "a": [f"org/tiny@{commit}", outside, 1], "b": f"org/tiny@{commit}",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_check_reads_headers_alone(kind, hub, capsys):
    name = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[kind]
    hub.commit("org/tiny", SMALL | {name: WEIGHTS + bytes(200_000 * (kind == "bin"))})
    tokens = ["data.tokenizer=bytes", "data.demo=", "data.shards=none"]
    assert main("gpt_tiny", [f"{KEY}=org/tiny", *tokens]) == 1
    said = "".join(capsys.readouterr())
    nbytes = len(hub.repositories["org/tiny"].commits[hub.repositories["org/tiny"].refs["main"]][name])
    assert f"{KEY}: a start downloads {nbytes / 1e6:,.1f} MB of weights, 0.0 MB are in the cache (org/tiny@" in said
    if kind == "safetensors":
        assert "has no tensor model.embed_tokens.weight; it has model.norm.weight" in said
    else:
        assert f"{KEY}: tensors of .bin files are compared with the model after their download" in said
        assert name not in hub.sent


def test_a_cache_that_cannot_be_written_is_taken_as_it_is(hub, monkeypatch):
    """Filled by an older version, which keeps no list of files."""
    commit = hub.commit("org/tiny", TINY)
    cfg = composed("org/tiny")
    shutil.rmtree(Path(cfg.language.pretrained).parents[1] / "trees")
    monkeypatch.setattr(names.Snapshot, "sizes", lambda _: {})
    monkeypatch.setattr(names, "_is_first_of_node", lambda: False)
    monkeypatch.setattr(names, "WAIT_SECONDS", 0.0)
    assert "has not downloaded" in fault(f"org/tiny@{commit}")
    monkeypatch.setattr(names.os, "access", lambda *_: False)
    assert composed(f"org/tiny@{commit}") == cfg


def test_the_path_that_a_record_has_of_a_directory_is_a_name_too(hub):
    commit = hub.commit("org/tiny", TINY)
    encoder = {"path": f"org/tiny@{commit}", "other": "org/tiny"}
    plain = {"modules": {"images": {"encoder": encoder}, "mine": {"encoder": {"path": "org/tiny"}}}}
    key = "modules.images.encoder.path"
    assert names.names_of(plain) == names.recorded_names(plain) == {key: f"org/tiny@{commit}"}
    folders, faults = names.locate(names.names_of(plain), {}, weights=False)
    names.replace_names(plain, folders)
    assert (encoder["path"], encoder["other"], faults) == (folders[f"org/tiny@{commit}"], "org/tiny", [])
    assert names.named(plain)["modules"]["images"]["encoder"]["path"] == f"org/tiny@{commit}"

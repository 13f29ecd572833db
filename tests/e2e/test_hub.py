"""A model and texts named as on the Hugging Face hub: a run, resumed offline, exported, uploaded and checked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from mimo_train.logging.sinks.jsonl import read_metrics
from tests.dist.commands import command
from tests.dist.ranks import run_ranks
from tests.hang import HANG_SECONDS
from tests.hub_server import TOKEN, Hub, hub_server, settings
from tests.tables import write_table

WIDTH, LAYERS, ROWS, KEY_WIDTH, INNER = 48, 2, 300, 24, 100
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": WIDTH, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "vocab_size": ROWS, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "dtype": "float32",
}  # fmt: skip
RUN = (
    "gpt_tiny", "modules.language.pretrained=org/tiny", "run.dir=runs/mine",
    "run.device=cpu", "train.global_batch_size=4", "train.micro_batch_size=2", "data.sequence_length=32",
    "train.eval_samples=2", "optim.warmup_iters=0", "data.demo=", "data.shards=hf://datasets/org/texts",
    "data.validation_shards=hf://datasets/org/texts/data/test-*.parquet",
)  # fmt: skip


def save_llama(folder: Path) -> None:
    """A tiny Llama in two files, with a tokenizer of bytes."""
    from tests.dist.hf.models import tokenizer_of_bytes

    layer = {
        "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,), "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (KEY_WIDTH, WIDTH), "self_attn.v_proj": (KEY_WIDTH, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }  # fmt: skip
    shapes = {f"model.layers.{at}.{name}.weight": shape for at in range(LAYERS) for name, shape in layer.items()}
    ends = {"model.embed_tokens.weight": (ROWS, WIDTH), "lm_head.weight": (ROWS, WIDTH), "model.norm.weight": (WIDTH,)}
    folder.mkdir()
    files = {"model-00001-of-00002.safetensors": shapes, "model-00002-of-00002.safetensors": ends}
    numbers = np.random.default_rng(1)
    for file, tensors in files.items():
        values = {name: numbers.normal(0, 0.1, shape).astype(np.float32) for name, shape in tensors.items()}
        save_file(values, folder / file)
    index = {"weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    (folder / "LICENSE").write_text("MIT")
    tokenizer_of_bytes().save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    save_llama(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def hub():
    with hub_server() as server:
        yield server


def _use(place: Path, url: str, token: str) -> None:
    """On a rank: work in `place`, with this hub and a cache of its own."""
    from huggingface_hub import constants

    os.chdir(place)
    os.environ["HF_TOKEN"] = token
    for name, value in settings(url, place / "cache").items():
        setattr(constants, name, value)


def _train(place: Path, url: str, overrides: tuple[str, ...]) -> int:
    from mimo_train.commands.train import main
    from mimo_train.config import compose
    from mimo_train.launch.processes import started_run

    _use(place, url, "")
    return main(started_run(compose.load(*RUN[:1], (*RUN[1:], *overrides))))


def _command(place: Path, url: str, token: str, arguments: tuple[str, ...]) -> tuple[int, str]:
    _use(place, url, token)
    return command([*arguments])


def said_by(place: Path, hub: Hub, *arguments: str, token: str = "", code: int = 0) -> str:
    """Return the output of a command."""
    ((exit_code, said),) = run_ranks(_command, 1, place, hub.url, token, arguments)
    assert exit_code == code, said
    return said


def launched(place: Path, hub: Hub, *arguments: str) -> str:
    """Return the output of a launcher and its ranks, processes of their own, without a network."""
    environment = os.environ | hub.environment(place / "cache") | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mimo_train.cli", "launch", "here", *arguments],
        env=environment,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_run_comes_from_a_name_and_goes_out_by_one(place, hub):
    commit = hub.commit("org/tiny", place / "tiny")
    files = {path.name for path in (place / "tiny").iterdir()}
    for split in ("train", "test"):
        texts = [f"Text {at} to {split}." for at in range(40)]
        write_table(place / "texts" / "data" / f"{split}-0.parquet", {"text": texts})
    hub.commit("org/texts", place / "texts")

    # Of two ranks, one downloads, and the other waits.
    overrides = ("modules.language.layout.dp=2", "train.iters=2", "data.workers=0")
    assert run_ranks(_train, 2, place, hub.url, overrides) == [0, 0]
    assert read_metrics(place / "runs/mine/metrics.jsonl")[-1]["step"] == 2
    downloaded = [request.rpartition("/")[2] for request in hub.requests if request.startswith("GET /org/tiny/")]
    assert sorted(downloaded) == sorted(files)
    downloaded = [request.rpartition("/")[2] for request in hub.requests if request.startswith("GET /datasets/")]
    assert sorted(downloaded) == ["test-0.parquet", "train-0.parquet"]
    recorded = yaml.safe_load((place / "runs/mine/config.yaml").read_text())
    assert recorded["modules"]["language"]["pretrained"] == recorded["data"]["tokenizer"] == f"org/tiny@{commit}"

    # The branch has moved to another size. The launcher resumes with the first, without a network.
    hub.commit("org/tiny", {"config.json": json.dumps(CONFIG | {"num_hidden_layers": 3}).encode()})
    hub.forget()
    said = launched(place, hub, *RUN, "train.iters=3")
    assert f"org/tiny is at commit {commit}, as the run has recorded" in said
    assert "resumed from" in said and "step 3/3" in said and "not read" not in said
    assert hub.requests == []
    again = yaml.safe_load((place / "runs/mine/config.yaml").read_text())
    assert again["modules"]["language"]["pretrained"] == again["data"]["tokenizer"] == f"org/tiny@{commit}"

    to = ("export", "runs/mine", "--to", "out", "--push-to-hub", "me/mine", "--private")
    said = said_by(place, hub, *to, code=1)
    assert "--push-to-hub: http://127.0.0.1" in said and "did not accept me/mine" in said and "hf auth login" in said
    assert not (place / "out").exists()
    said = said_by(place, hub, *to, token=TOKEN)
    uploaded = hub.repositories["me/mine"]
    mine = uploaded.refs["main"]
    assert f"uploaded: {hub.url}/me/mine/commit/{mine}" in said and uploaded.private
    written = {path.name: path.read_bytes() for path in (place / "out").iterdir()}
    assert {name: file for name, file in uploaded.commits[mine].items() if name != ".gitattributes"} == written
    assert written["LICENSE"] == b"MIT"
    card = written["README.md"].decode()
    assert "license: mit" in card and "base_model:\n- org/tiny\n" in card and "# Tiny" in card
    assert f"Trained with mimo-train from org/tiny at commit {commit}" in card

    # What went out comes in. Headers are enough to compare names and shapes.
    hub.forget()
    new = ("modules.language.pretrained=me/mine", "run.dir=runs/new")
    said = said_by(place, hub, "check", *RUN, *new, token=TOKEN)
    nbytes = len(written["model.safetensors"])
    assert f"a start downloads {nbytes / 1e6:,.1f} MB of weights, 0.0 MB are in the cache (me/mine@{mine})" in said
    assert "no faults" in said and hub.sent["model.safetensors"] <= 100_001 < nbytes

"""Requests of benchmark tasks, and a vLLM server that is started for them, which a small one stands in for here."""

import base64
import io
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from data.records.conversation import Part
from mimo_train.cli import main
from mimo_train.config.errors import UserError
from mimo_train.evaluation.benchmarks import on_vllm
from mimo_train.evaluation.benchmarks.requests import Decoding, decoding_of, request_of
from mimo_train.evaluation.benchmarks.vllm_server import VllmServer
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.launch.exit_signal import interrupted_by_sigterm
from tests.dist.models.composites import file_of, image

GREEDY = Sampling(0, 0, 1, 1234)


@pytest.mark.parametrize(
    ("options", "decoding"),
    [
        ({}, Decoding(GREEDY, None, ())),
        ({"until": ["\n\n"], "max_new_tokens": 16, "num_beams": 1}, Decoding(GREEDY, 16, ("\n\n",))),
        ({"until": "x", "do_sample": False, "temperature": 0, "top_p": None}, Decoding(GREEDY, None, ("x",))),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9, "top_k": 3}, Decoding(GREEDY, None, ())),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 3}, Decoding(Sampling(0.7, 3, 0.9, 1234), None, ())),
        ({"do_sample": True, "temperature": 0}, Decoding(GREEDY, None, ())),
        ({"do_sample": True, "image_aspect_ratio": "original"}, Decoding(Sampling(1, 0, 1, 1234), None, ())),
    ],
)
def test_what_a_task_asks_of_the_decoding(options, decoding):
    assert decoding_of(options) == decoding


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"repetition_penalty": 1.1}])
def test_what_would_change_answers_and_is_not_supported_is_named(options):
    with pytest.raises(UserError, match=f"generation_kwargs: .*{next(iter(options))}.* is not supported"):
        decoding_of(options)


def test_an_answer_ends_at_the_first_of_its_stops():
    assert Decoding(GREEDY, None, ("\n\n", "Q:")).cut(" one Q: two\n\nthree") == "one"


def test_media_of_messages_become_files_without_loss(tmp_path):
    from PIL import Image

    raw, picture = file_of((30, 50)), image(30, 50)
    (tmp_path / "a.png").write_bytes(raw)
    urls = [picture, str(tmp_path / "a.png"), {"bytes": raw}, "data:image/png;base64," + base64.b64encode(raw).decode()]
    content = [{"type": "image", "url": url} for url in urls]
    request = request_of([{"role": "user", "content": [content[0], {"type": "text", "text": "?"}, *content[1:]]}])
    assert request.turns[0].parts == (Part("image"), Part("text", "?"), *[Part("image")] * 3)
    for kind, file in request.files:
        read = Image.open(io.BytesIO(file))
        assert kind == "image" and read.tobytes() == picture.tobytes()
    (_, sound) = request_of([_user("audio", {"array": [0.0, 0.5], "sampling_rate": 8000})]).files[0]
    assert sound[:4] == b"RIFF"
    with pytest.raises(UserError, match="the video of a document is 'nowhere.mp4', which is no file here"):
        request_of([_user("video", "nowhere.mp4")])


def _user(kind: str, url) -> dict:
    return {"role": "user", "content": [{"type": kind, "url": url}]}


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if arguments["--model"].endswith("broken"):
    sys.exit("ValueError: Head size 16 is not supported")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = asked["messages"]
        texts = [part.get("text") or part["image_url"]["url"][:22] for part in message["content"]]
        if texts == ["refuse"]:
            return self.answer(400, {"message": "too long"})
        answer = f"{texts} {asked['temperature']} {asked['repetition_penalty']} {asked['max_tokens']} {asked['stop']}"
        self.answer(200, {"choices": [{"message": {"content": answer}}]})
    def answer(self, code, content):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def log_message(self, *arguments):
        pass
ThreadingHTTPServer((arguments["--host"], int(arguments["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """Makes Python have a server at vLLM's place."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))


def test_a_server_answers_in_order_and_ends_with_its_context(vllm, tmp_path):
    asked = [request_of([_user("image", image(30, 50))]), request_of([{"role": "user", "content": "two"}])]
    with VllmServer(sys.executable, tmp_path, "float32", tmp_path / "log") as server:
        answers = server.answer(asked, Decoding(GREEDY, 7, ("x",)))
        with pytest.raises(UserError, match="vLLM: 400 .*too long"):
            server.answer([request_of([{"role": "user", "content": "refuse"}])], Decoding(GREEDY, None, ()))
        process = server._process
    assert answers == ["['data:image/png;base64,'] 0 1.0 7 ['x']", "['two'] 0 1.0 7 ['x']"]
    assert process.poll() is not None
    with pytest.raises(KeyboardInterrupt), interrupted_by_sigterm():
        with VllmServer(sys.executable, tmp_path, "float32", tmp_path / "log") as server:
            process = server._process
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
    assert process.poll() is not None


def test_a_server_that_cannot_start_is_named_with_its_reason(vllm, tmp_path):
    server = VllmServer(sys.executable, tmp_path / "broken", "float32", tmp_path / "log")
    with pytest.raises(UserError, match="vLLM ended with code 1: ValueError: Head size 16 is not supported"):
        with server:
            pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--include-path", "x"], "--include-path: requires --tasks"),
        (["--backend", "vllm"], "--backend: requires --tasks"),
        (["--tasks", "a", "--metric", "f1"], "--metric: is not supported with --tasks"),
        (["--tasks", "a", "--temperature", "1"], "--temperature: is not supported with --tasks"),
        (["--tasks", "a", "--seed", "0"], "--seed: is not supported with --tasks"),
        (["--tasks", "a", "--split", "test"], "--split: names the samples of the task shards"),
        (["--tasks", "a", "--vllm", "x"], "--vllm: is only for --backend vllm"),
        (["--tasks", "a", "--backend", "vllm", "--layout", "tp=2"], "--layout: is not supported with --backend vllm"),
        (["--tasks", "a"], "--tasks: lmms-eval is not installed. docs/evaluation.md has"),
    ],
)
def test_options_of_tasks(arguments, said, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmms_eval", None)
    assert main(["evaluate", "runs/none", *arguments]) == 1
    assert said in capsys.readouterr().err


def test_vllm_is_rejected_for_a_model_that_reads_the_sound_of_videos(tmp_path, monkeypatch):
    modules = {"images": SimpleNamespace(encoder=SimpleNamespace(sound=True))}
    monkeypatch.setattr(on_vllm, "recorded_config", lambda *_, **__: SimpleNamespace(encoders=modules, modules=modules))
    with pytest.raises(UserError, match=r"without sound, and modules\.images\.encoder\.sound is true"):
        on_vllm._export(tmp_path, tmp_path / "out", trust_code=False, ema=False)

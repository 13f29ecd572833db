"""A vLLM server of an exported directory, started for an evaluation and asked over its OpenAI interface."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from mimo_train.config.errors import UserError
from mimo_train.evaluation.benchmarks.requests import Decoding, Request

START_SECONDS, ANSWER_SECONDS = 1800, 600
CONCURRENT = 16
"""Requests that the server has at a time."""
_FIELDS = {"image": "image_url", "video": "video_url", "audio": "audio_url"}
_TYPES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}


class VllmServer:
    """Answers of a directory's model, from a server that runs inside `with`."""

    def __init__(self, python: str, folder: Path, dtype: str, log: Path, options: Sequence[str] = ()):
        """Prepare a server.

        Args:
            python: Python of an environment that has vLLM.
            dtype: `float32` or `bfloat16`, in which it computes.
            log: file for its output.
            options: further arguments of `vllm serve`.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log = log
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)),
            *("--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", "model"),
            *("--dtype", dtype, *options),
        ]
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "VllmServer":
        """Start the server and wait until it answers. Raises UserError if it cannot start."""
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        print(f"starting vLLM, which logs to {self._log}", file=sys.stderr, flush=True)
        until = time.monotonic() + START_SECONDS
        try:
            while not self._is_up():
                if self._process.poll() is not None:
                    raise UserError(f"--backend: vLLM ended with code {self._process.returncode}: {self._end_of_log()}")
                if time.monotonic() > until:
                    raise UserError(f"--backend: vLLM did not start in {START_SECONDS} s: {self._end_of_log()}")
                time.sleep(0.5)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def answer(
        self, requests: Sequence[Request], decoding: Decoding, done: Callable[[int], Any] = lambda count: None
    ) -> list[str]:
        """Return the texts of answers, in order; see `ModelAnswers.answer`."""
        texts = []
        with ThreadPoolExecutor(CONCURRENT) as pool:
            for text in pool.map(lambda at: self._answer(requests[at], decoding), range(len(requests))):
                texts.append(text)
                done(1)
        return texts

    def score(
        self, pairs: Sequence[tuple[Request, str]], done: Callable[[int], Any] = lambda count: None
    ) -> list[tuple[float, bool]]:
        """Raise UserError: a chat interface gives no probabilities of a text."""
        raise UserError("tasks that compare probabilities need our own model. Leave out --backend vllm")

    def _answer(self, request: Request, decoding: Decoding) -> str:
        sampling = decoding.sampling
        body = {
            "model": "model",
            "messages": messages(request),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "repetition_penalty": 1.0,  # generation_config.json may have another default
            "seed": sampling.seed,
            "stop": list(decoding.stops),
        }
        body |= {"max_tokens": decoding.max_new_tokens} if decoding.max_new_tokens else {}
        reply = self._ask("/v1/chat/completions", json.dumps(body).encode())
        return reply["choices"][0]["message"]["content"] or ""

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        url, headers = f"http://127.0.0.1:{self._port}{path}", {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=ANSWER_SECONDS) as reply:
                return json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            raise UserError(f"vLLM: {error.code} {error.read().decode(errors='replace')[:500]}") from error

    def _is_up(self) -> bool:
        try:
            self._ask("/health")
        except (OSError, UserError):
            return False
        return True

    def _end_of_log(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line]
        return f"{(errors or lines or ['it wrote nothing'])[-1].strip()} (log: {self._log})"

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        for name in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, name)  # with the engine's processes
                process.wait(timeout=20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def messages(request: Request) -> list[dict[str, Any]]:
    """Return a request in OpenAI's form, with media as data URLs."""
    files = iter(request.files)
    written = []
    for turn in request.turns:
        content: list[dict[str, Any]] = []
        for part in turn.parts:
            if part.kind == "text":
                content.append({"type": "text", "text": part.text})
                continue
            kind, raw = next(files)
            data = base64.b64encode(raw).decode()
            content.append({"type": _FIELDS[kind], _FIELDS[kind]: {"url": f"data:{_TYPES[kind]};base64,{data}"}})
        written.append({"role": turn.role, "content": content})
    return written

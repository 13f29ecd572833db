"""A server on this machine that speaks the protocol of the Hugging Face hub, as far as huggingface_hub needs it."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_test"


@dataclass
class Repository:
    """Files by commit, and commits by branch or tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False


@dataclass
class Hub:
    """The repositories of a server, and what it was asked for."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes sent of each file."""
    lfs: dict[str, bytes] = field(default_factory=dict)

    def commit(self, name: str, files: Mapping[str, bytes] | Path, branch: str = "main") -> str:
        """Add a commit of these files, or of a folder's, and return its hash."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        repository = self.repositories.setdefault(name, Repository())
        text = f"{len(repository.commits)} {sorted((path, digest(content)) for path, content in files.items())}"
        commit = hashlib.sha1(f"{name} {text}".encode()).hexdigest()
        repository.commits[commit] = dict(files)
        repository.refs[branch] = commit
        return commit

    def forget(self) -> None:
        """Forget the requests so far."""
        self.requests.clear()
        self.sent.clear()

    def environment(self, cache: Path, **others: str) -> dict[str, str]:
        """Return the variables with which a process uses this server and a cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        } | others


def settings(url: str, cache: Path) -> dict[str, Any]:
    """Return the values of huggingface_hub.constants with which a process that has imported it uses a server."""
    return {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_TOKEN_PATH": str(cache / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve a hub until the block ends."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Error(Exception):
    def __init__(self, status: int, code: str, url: str = "") -> None:
        super().__init__(code)
        self.status, self.code, self.url = status, code, url


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body, path = self.rfile.read(length), unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        try:
            content, headers = self._answer(path, body)
            status = 206 if "Content-Range" in headers else 200
        except _Error as error:
            content, status = json.dumps({"url": error.url}).encode(), error.status
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.code}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def _answer(self, path: str, body: bytes) -> tuple[bytes, dict[str, str]]:
        name = r"(?P<name>[^/]+/[^/]+)"
        for pattern, method in (
            (r"/api/repos/create", self._create),
            (r"/api/validate-yaml", lambda body: {}),
            (r"/upload/(?P<oid>\w+)", self._upload),
            (rf"/{name}\.git/info/lfs/objects/batch", self._lfs),
            (rf"/api/(models|datasets)/{name}(/revision/(?P<revision>.+))?", self._info),
            (rf"/api/(models|datasets)/{name}/tree/(?P<revision>[^/]+)", self._tree),
            (rf"/api/(models|datasets)/{name}/preupload/main", self._preupload),
            (rf"/api/(models|datasets)/{name}/commit/main", self._commit),
            (rf"/(datasets/)?{name}/resolve/(?P<revision>[^/]+)/(?P<file>.+)", self._file),
        ):
            if match := re.fullmatch(pattern, path):
                answer = method(body, **match.groupdict())
                return answer if isinstance(answer, tuple) else (json.dumps(answer).encode(), {})
        raise _Error(404, "no such address")

    def _repository(self, name: str) -> Repository:
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not has_token):
            raise _Error(404 if has_token else 401, "RepoNotFound")
        if repository.gated and not has_token:
            raise _Error(403, "GatedRepo")
        return repository

    def _files(self, name: str, revision: str | None) -> tuple[str, dict[str, bytes]]:
        repository = self._repository(name)
        commit = repository.refs.get(revision or "main", revision or "main")
        if commit not in repository.commits:
            raise _Error(404, "RevisionNotFound")
        return commit, repository.commits[commit]

    def _info(self, _: bytes, name: str, revision: str | None) -> Any:
        commit, files = self._files(name, revision)
        private = self.hub.repositories[name].private
        return {"id": name, "sha": commit, "private": private, "siblings": [{"rfilename": path} for path in files]}

    def _tree(self, _: bytes, name: str, revision: str) -> Any:
        _, files = self._files(name, revision)
        return [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]

    def _file(self, _: bytes, name: str, revision: str, file: str) -> tuple[bytes, dict[str, str]]:
        commit, files = self._files(name, revision)
        if file not in files:
            raise _Error(404, "EntryNotFound")
        content = files[file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest(content)}"', "Accept-Ranges": "bytes"}
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(span[1]), min(int(span[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        if self.command == "GET":
            self.hub.sent[file] = self.hub.sent.get(file, 0) + len(content)
        return content, headers

    def _create(self, body: bytes) -> Any:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise _Error(401, "no token")
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repositories:
            raise _Error(409, "it exists", f"{self.hub.url}/{name}")
        self.hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
        self.hub.commit(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
        return {"url": f"{self.hub.url}/{name}"}

    def _preupload(self, body: bytes, name: str) -> Any:
        self._repository(name)
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
        return {"files": [{"path": path, "uploadMode": modes[path], "shouldIgnore": False} for path in paths]}

    def _lfs(self, body: bytes, name: str) -> tuple[bytes, dict[str, str]]:
        self._repository(name)
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.hub.url}/upload/{wanted['oid']}"}}}
            for wanted in json.loads(body)["objects"]
        ]
        answer = json.dumps({"transfer": "basic", "objects": objects}).encode()
        return answer, {"Content-Type": "application/vnd.git-lfs+json"}

    def _upload(self, body: bytes, oid: str) -> Any:
        assert digest(body) == oid
        self.hub.lfs[oid] = body
        return {}

    def _commit(self, body: bytes, name: str) -> Any:
        repository = self._repository(name)
        files = dict(repository.commits[repository.refs["main"]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
        commit = self.hub.commit(name, files)
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit}

"""Names of the Hugging Face hub, ORG/NAME or ORG/NAME@REVISION, where a config takes a directory.

A name becomes the folder of its commit in the cache of huggingface_hub, which does the work: token, offline mode,
mirrors, locks. All other code sees folders. Records hold ORG/NAME@COMMIT, which any machine can resolve.
"""

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from data.storage.hub import download_error
from data.text_format import shown
from encoders.joined.spec import PARTS as JOINED
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.pretrained.weight_files import (
    BIN,
    BIN_INDEX,
    INDEX,
    QUANTIZED,
    SINGLE,
    Entry,
    indexed_files,
    quantized_weights,
    stored_tensors,
    unpacked,
)
from mimo_train.config.schema_run import RunConfig

WAIT_SECONDS = 7200.0
"""Seconds that the other processes of a node wait for its first one to download."""

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\S+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IN_CACHE = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})$")
_SMALL = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "*.md", "LICENSE*", "NOTICE*"),
    "spk_dict.pt",  # Qwen2.5-Omni's voices
)
"""Files of a model except its weights; those in folders are other formats of the same model."""
_TOKENIZER = "data.tokenizer"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""Variables with this process's number on its node."""


@dataclass(frozen=True)
class Snapshot:
    """A commit of a repository, and its folder in the cache, which may lack files."""

    name: str
    commit: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.name}@{self.commit}"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file of the repository; empty if a cache of another version does not tell."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return {file.path: file.size for file in get_cached_repo_tree(self.name, revision=self.commit)}
        except CachedRepoTreeNotFoundError:
            return {}

    def weights(self, key: str) -> list[str]:
        """Return the names of the weight files, chosen as in `weight_files`. Raises UserError for a damaged index."""
        sizes = self.sizes()
        names = [name for name in _ADAPTERS if name in sizes][:1]
        for single, index in ((SINGLE, INDEX), (BIN, BIN_INDEX)):
            if single in sizes:
                return [*names, single]
            if index in sizes:
                return [*names, *indexed_files(self.folder / index, key)]
        return names

    def has(self, name: str) -> bool:
        """True if a file is in the cache."""
        return (self.folder / name).is_file()

    def weight_bytes(self, key: str) -> tuple[int, int]:
        """Return the bytes of the weights in the cache, and of those that are missing there. Errors as `weights`."""
        sizes, names = self.sizes(), self.weights(key)
        cached = sum(sizes.get(name, 0) for name in names if self.has(name))
        return cached, sum(sizes.get(name, 0) for name in names) - cached

    def read_header(self, name: str, key: str) -> dict[str, Entry]:
        """Return the tensors of a safetensors file by a range request; without their offsets.

        Raises:
            ConfigError: it cannot be read.
        """
        with _explained(key, str(self)):
            header = _header(self.name, self.commit, name)
        return {tensor: Entry(0, tuple(info.shape), info.dtype) for tensor, info in header.tensors.items()}


@cache
def _header(name: str, commit: str, file: str) -> Any:
    from huggingface_hub import HfApi

    return HfApi().parse_safetensors_file_metadata(name, file, revision=commit)


class NoHeadersError(UserError):
    """Weights that are not in the cache are `.bin` files, which have no header."""


def tensors_of(folder: Path, key: str) -> dict[str, Entry]:
    """Return the tensors of a directory by name. Those of weights that are not in the cache come from their headers on
    the hub.

    Args:
        key: config key that names the directory, for errors.

    Raises:
        NoHeadersError: they have no headers.
        UserError: the directory has no weights, or they cannot be read.
    """
    snapshot = snapshot_of(folder)
    if snapshot is None or not snapshot.weight_bytes(key)[1]:
        stored = stored_tensors(folder, key)
        entries = {name: entry for name, (_, entry) in stored.items()}
        for name, (shape, parts) in quantized_weights(stored).items():
            entries = {other: entry for other, entry in entries.items() if other not in parts} | {
                name: Entry(0, shape, "F32")
            }
        return unpacked(entries)
    files = snapshot.weights(key)
    if any(name.endswith(".bin") for name in files):
        raise NoHeadersError(f"{key}: tensors of .bin files are compared with the model after their download")
    entries = {tensor: entry for name in files for tensor, entry in snapshot.read_header(name, key).items()}
    if any(name.endswith(QUANTIZED) for name in entries):
        raise NoHeadersError(f"{key}: quantized tensors are compared with the model after their download")
    return unpacked(entries)


def snapshot_of(folder: str | Path) -> Snapshot | None:
    """Return the snapshot whose folder this is; None for a folder outside of the cache."""
    match = _IN_CACHE.search(os.path.abspath(folder))
    if match is None:
        return None
    from huggingface_hub.constants import HF_HUB_CACHE

    is_here = Path(folder).absolute().parents[2].resolve() == Path(HF_HUB_CACHE).expanduser().resolve()
    return Snapshot(match[1].replace("--", "/"), match[2], Path(folder)) if is_here else None


def snapshots_of(plain: dict[str, Any]) -> dict[str, Snapshot]:
    """Return the snapshots of models and adapters in a config as nested dicts, each by its first dotted key."""
    snapshots: dict[str, Snapshot] = {}
    for section, name, key in model_keys(plain):
        snapshot = snapshot_of(section[name]) if section.get(name) else None
        if snapshot is not None and snapshot not in snapshots.values():
            snapshots[key] = snapshot
    return snapshots


def named_in_hub(folder: Path) -> tuple[str, str]:
    """Return (name of the model in a folder, its revision). A folder of any cache of huggingface_hub gives the hub's
    name and revision, valid on any machine; others give their path and no revision."""
    match = _IN_CACHE.search(folder.absolute().as_posix())
    return (match[1].replace("--", "/"), match[2]) if match else (str(folder.resolve()), "")


def is_name(text: Any) -> bool:
    """True for the name of a repository; the folder of a path that exists comes first, as in `transformers`."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None and not os.path.exists(text)


def named(plain: Any) -> Any:
    """Return nested values with ORG/NAME@COMMIT instead of the folders of snapshots."""
    if isinstance(plain, dict):
        return {key: named(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [named(value) for value in plain]
    snapshot = snapshot_of(plain) if isinstance(plain, str) and "/snapshots/" in plain else None
    return str(snapshot) if snapshot else plain


def model_keys(plain: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield (section, key, dotted key) of the directories of models and adapters in a config as nested dicts."""
    yield plain, "pretrained", "pretrained"
    modules = plain.get("modules")
    for name, module in modules.items() if isinstance(modules, dict) else ():
        if isinstance(module, dict):
            yield module, "pretrained", f"modules.{name}.pretrained"
            for part, keys in (("lora", ["adapter"]), ("encoder", [f"{joined}_pretrained" for joined in JOINED])):
                section = module.get(part)
                if isinstance(section, dict):
                    filled = ["path"] if _is_pinned(section.get("path")) else []  # by `pretrained`, in a record
                    yield from ((section, key, f"modules.{name}.{part}.{key}") for key in [*keys, *filled])


def _directories(plain: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield what `model_keys` yields, the teacher, and the tokenizer."""
    yield from model_keys(plain)
    if isinstance(plain.get("distill"), dict):
        yield plain["distill"], "teacher", "distill.teacher"
    if isinstance(plain.get("data"), dict):
        yield plain["data"], "tokenizer", _TOKENIZER


def names_of(plain: dict[str, Any]) -> dict[str, str]:
    """Return the names in a config as nested dicts, by dotted key."""
    return {key: section[name] for section, name, key in _directories(plain) if is_name(section.get(name))}


def replace_names(plain: dict[str, Any], folders: Mapping[str, str]) -> None:
    """Put folders in the place of their names in a config as nested dicts."""
    for section, name, _ in _directories(plain):
        if isinstance(section.get(name), str):
            section[name] = folders.get(section[name], section[name])


def recorded_names(plain: dict[str, Any]) -> dict[str, str]:
    """Return the names ORG/NAME@COMMIT in a config in record form, by dotted key."""
    return {key: name for key, name in names_of(plain).items() if _is_pinned(name)}


def _is_pinned(text: Any) -> bool:
    return is_name(text) and _COMMIT.fullmatch(text.partition("@")[2]) is not None


def names_in_run(plain: dict[str, Any]) -> dict[str, str]:
    """Return the names that `config.yaml` in the folder of a config's run has, by dotted key."""
    run = plain.get("run")
    folder = (run.get("dir") if isinstance(run, dict) else None) or RunConfig().dir
    try:
        content = yaml.safe_load((Path(str(folder)) / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return recorded_names(content) if isinstance(content, dict) else {}


def locate(
    names: Mapping[str, str], recorded: Mapping[str, str], *, weights: bool
) -> tuple[dict[str, str], list[Fault]]:
    """Download what the cache lacks of models.

    Args:
        names: their names by dotted key.
        recorded: names that the run has recorded. Those are the commits of names without one: a resumed run does not
            follow a branch that has moved.
        weights: download weights too, not only the small files.

    Returns:
        Folder by name, and the faults of the keys whose names have none.
    """
    folders: dict[str, str] = {}
    faults = []
    for key, name in names.items():
        if name in folders:
            continue
        of_models = [other for other in names if names[other] == name and other != _TOKENIZER]
        try:
            snapshot = _snapshot(name, recorded.get(key, ""), key)
            folders[name] = str(fetch(snapshot, key, weights=weights and bool(of_models)).folder)
        except ConfigError as error:
            faults += error.faults
    return folders, faults


def located(text: str, key: str) -> str:
    """Return the folder of a model that an argument names, downloaded; other texts as they are.

    Raises:
        ConfigError: the repository or revision cannot be read.
    """
    if not is_name(text) or Path(text).parent.is_dir():  # a run that does not exist, as runs/my
        return text
    return str(fetch(_snapshot(text, "", key), key, weights=True).folder)


def _snapshot(text: str, recorded: str, key: str) -> Snapshot:
    """Return the commit of a name, which the run may have recorded."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    name, _, revision = text.partition("@")
    commit, source = revision, ""
    if not _COMMIT.fullmatch(revision):
        was, _, commit = recorded.partition("@")
        source = ", as the run has recorded"
        if was != name or revision not in ("", "main"):
            source = ""
            with _explained(key, text):
                commit = HfApi().resolve_revision(name, revision=revision or None).resolved
        if _is_first_of_node():
            say(f"{key}: {text} is at commit {commit}{source}")
    cached = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    folder = repo_folder_name(repo_id=name, repo_type="model")
    return Snapshot(name, commit, cached / folder / "snapshots" / commit)


def fetch(snapshot: Snapshot, key: str, *, weights: bool) -> Snapshot:
    """Download what the cache lacks of a snapshot, or wait until the first process of this node has done so.

    Args:
        key: config key, for errors.
        weights: download weights too, not only the small files.

    Raises:
        ConfigError: it cannot be downloaded.
    """
    _fetch(snapshot, key, _SMALL, "*/*")
    if weights and (names := snapshot.weights(key)):
        _fetch(snapshot, key, names, None)
    return snapshot


def _fetch(snapshot: Snapshot, key: str, files: Sequence[str], ignored: str | None) -> None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    download = partial(
        snapshot_download, snapshot.name, revision=snapshot.commit, allow_patterns=[*files], ignore_patterns=ignored
    )
    deadline, downloads = time.monotonic() + WAIT_SECONDS, _is_first_of_node() or constants.HF_HUB_OFFLINE
    while True:
        try:
            download(local_files_only=True)  # it shows no progress
            # Without sizes, as in a cache of an older version, it cannot tell whether files are missing.
            if snapshot.sizes() or not os.access(constants.HF_HUB_CACHE, os.W_OK):
                return
        except LocalEntryNotFoundError:
            pass
        if downloads:
            with _explained(key, str(snapshot)):
                download()
            return
        say(f"{key}: waiting for the first process of this node, which downloads {snapshot}")
        if time.monotonic() > deadline:
            text = f"the first process of this node has not downloaded {snapshot} within {WAIT_SECONDS:g} s"
            raise ConfigError([Fault(key, f"{text}. Run `hf download {snapshot.name}` before the start")])
        time.sleep(1)


def _is_first_of_node() -> bool:
    return next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"


@contextmanager
def _explained(key: str, text: str) -> Iterator[None]:
    """Turn any error of huggingface_hub, and of the libraries below it, into a config error with a remedy."""
    name, _, revision = text.partition("@")
    try:
        yield
    except Exception as error:
        reason = download_error("model", name, revision, error)
        raise ConfigError([Fault(key, f"there is no folder {text}, and {reason}")]) from None


@cache
def say(line: str) -> None:
    """Print a notice on standard error, once."""
    sys.stderr.write(f"notice: {shown(line)}\n")

"""Datasets of the Hugging Face hub, downloaded by huggingface_hub: its cache, token, mirrors and offline mode."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from data.errors import DataError
from data.storage.files import file_lock
from data.storage.url import Url
from data.text_format import plural, shown

_log = logging.getLogger(__name__)
_DATASET = re.compile(r"datasets/(?P<name>[^/@]+/[^/@]+)(@(?P<revision>refs/\w+/[^/]+|[^/]+))?(/(?P<path>.+))?")
_ALIASES = {"~parquet": "refs/convert/parquet"}


def is_hub(text: str) -> bool:
    """True for a URL of the hub."""
    return text.startswith("hf://")


def download(url: Url, choose: Callable[[Url, Sequence[Url]], Sequence[Url]]) -> list[Path]:
    """Return the local files of a dataset. One process of a machine downloads what is missing; others wait.

    Args:
        url: `hf://datasets/ORG/NAME[@REVISION][/PATH]`.
        choose: (URL without revision, URLs of all files) -> those to download.

    Raises:
        DataError: there is no such dataset, or it cannot be downloaded.
    """
    from huggingface_hub import HfApi, constants, errors, get_cached_repo_tree, snapshot_download

    match = _DATASET.fullmatch(f"{url.host}/{url.path}")
    if match is None:
        raise DataError(f"data.shards: {url} is no dataset of the hub: give hf://datasets/ORG/NAME")
    name, revision = match["name"], unquote(match["revision"] or "")
    root = Url("hf", "datasets", name)
    cache = Path(constants.HF_HUB_CACHE).expanduser() / f"datasets--{name.replace('/', '--')}"
    with _explained(name, revision):
        # Before waiting, so that a branch that moves meanwhile does not divide the ranks of a run.
        commit = HfApi().resolve_revision(name, repo_type="dataset", revision=_ALIASES.get(revision, revision) or None)
    repository: Any = {"repo_id": name, "repo_type": "dataset", "revision": commit.resolved}
    folder = cache / "snapshots" / commit.resolved
    cache.mkdir(parents=True, exist_ok=True)
    with _explained(name, revision), file_lock(cache / ".mimo-train.lock"):
        try:
            tree = get_cached_repo_tree(**repository)
        except errors.CachedRepoTreeNotFoundError:
            snapshot_download(**repository, allow_patterns="README.md")  # keeps the list of files
            tree = get_cached_repo_tree(**repository)
        sizes = {file.path: file.size for file in tree}
        chosen = choose(root / match["path"] if match["path"] else root, [root / path for path in sorted(sizes)])
        paths = [file.path.removeprefix(f"{name}/") for file in chosen]
        if missing := [path for path in paths if not (folder / path).exists()]:
            size = f"{sum(sizes[path] for path in missing) / 1e6:,.1f} MB"
            _log.warning("%s: downloading %s (%s) of commit %s", url, plural(len(missing), "file"), size, folder.name)
            snapshot_download(**repository, allow_patterns=[glob.escape(path) for path in missing])
    return [folder / path for path in paths]


@contextmanager
def _explained(name: str, revision: str) -> Iterator[None]:
    """Turn any error of huggingface_hub, and of the libraries below it, into a DataError with a remedy."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"data.shards: {download_error('dataset', name, revision, error)}") from None


def download_error(kind: str, name: str, revision: str, error: Exception) -> str:
    """Return the message for a `dataset` or `model` that cannot be downloaded; `error`: of huggingface_hub."""
    from huggingface_hub import constants, errors

    is_dataset, log_in = kind == "dataset", "log in (`hf auth login`, or HF_TOKEN)"
    page = f"{constants.ENDPOINT}/{'datasets/' if is_dataset else ''}{name}"
    command = f"hf download {'--repo-type dataset ' if is_dataset else ''}{name}"
    match error:
        case errors.GatedRepoError():
            return f"{page} is gated. Accept its terms there, and {log_in} with the account that did so"
        case errors.RepositoryNotFoundError():
            return f"{page} does not exist, or is private. Correct the name, or {log_in}"
        case errors.RevisionNotFoundError():
            return f"{page} has no revision {revision}. Give a branch, a tag or a commit of it"
    if constants.HF_HUB_OFFLINE:
        return (
            f"the {kind} {name} is not complete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set. "
            f"Unset it, or run `{command}` with a network"
        )
    cause = shown(str(error).strip().partition("\n")[0])
    return (
        f"{page} cannot be downloaded ({type(error).__name__}: {cause}). Check the network and HF_ENDPOINT, or run "
        f"`{command}` elsewhere and copy the cache {constants.HF_HUB_CACHE}"
    )

"""Cached features of frozen encoders: files in the safetensors format, fingerprints, look-ups, and prefetching."""

import hashlib
import inspect
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from safetensors import SafetensorError
from safetensors.torch import load, save

from data.media.options import READING
from data.samples.protocol import MEDIA, Lookup, Samples
from data.storage.file_cache import FileCache
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.inputs.datasets import media_of
from mimo_train.layout.kernels import has_fp8
from mimo_train.models.encoder_module import EncoderModule
from mimo_train.models.parameters import modules_of
from mimo_train.parallel.collectives import agreed
from mimo_train.training.step.batches import StepIterator


class Features:
    """Caches of this rank's frozen encoders, and the look-ups that its datasets use."""

    def __init__(self, cfg: ConfigContainer, model: list[MegatronModule], te: bool):
        """Open the caches of `modules.NAME.feature_cache` after the weights are loaded. Collective. Raises UserError on
        every rank if a folder cannot be made. `te` is True for Transformer Engine's layers."""
        self._lookups: dict[str, Lookup] = {}
        self._prefetched: dict[str, int] = {}
        self._modules: dict[str, EncoderModule] = {}
        self.prefetch_together = False
        """True if ranks compute features of the next step together: either all of them have read it, or none."""
        if any(module.feature_cache.dir for module in cfg.encoders.values()):
            with agreed():
                for name in modules_of(model):
                    if folder := cfg.modules[name].feature_cache.dir:
                        try:
                            Path(folder).mkdir(parents=True, exist_ok=True)
                        except OSError as error:
                            raise UserError(
                                f"modules.{name}.feature_cache.dir: cannot make {folder} ({error.strerror}). Set a "
                                "folder that can be written, or leave it empty"
                            ) from error
        for name, chunks in modules_of(model).items():
            config = cfg.modules[name]
            if name == LANGUAGE or not (config.feature_cache.dir or config.prefetch_microbatches):
                continue
            module: EncoderModule = unwrap_model(chunks[0])
            self._modules[name], self._lookups[name] = module, lambda identity: None
            if config.feature_cache.dir:
                cache = FeatureCache(
                    Path(config.feature_cache.dir),
                    int(config.feature_cache.max_gigabytes * 1e9),
                    fingerprint=fingerprint(cfg, name, module, te),
                    writers=config.layout.dp,
                )
                self._lookups[name], module.cached = cache.read, True
                module.cache = cache if module.pg_collection.tp.rank() == 0 else None
            if config.prefetch_microbatches:
                self._prefetched[name] = config.prefetch_microbatches
                layout = config.layout
                self.prefetch_together |= layout.tp * layout.cp * layout.pp * layout.ep > 1

    def serve(self, dataset: Samples) -> None:
        """Let the readers of a dataset look up features. Call it before they start."""
        dataset.lookups = dict(self._lookups)

    def prefetcher(self, iterator: StepIterator) -> "Prefetcher | None":
        """Return the prefetcher for `iterator`; None if no encoder on this rank prefetches."""
        return Prefetcher(self._modules, self._prefetched, iterator) if self._prefetched else None


class Prefetcher:
    """Computes features of the next microbatches of a `StepIterator` while this rank is idle. One pass takes the
    microbatches whose media items were dealt to ranks together (`ModuleLayout.pass_microbatches`).

    The work of a call depends on the position in the run, not on time. So the ranks of a tensor-parallel group, which
    call it at the same points, do the same.
    """

    def __init__(self, modules: dict[str, EncoderModule], together: dict[str, int], iterator: StepIterator):
        """`together`: microbatches of a pass, by module."""
        self._modules, self._together, self._iterator = modules, together, iterator

    def one(self) -> None:
        """Compute the next pass of every module."""
        for name in self._together:
            self._compute_next(name)

    def all(self) -> None:
        """Compute all passes that may be computed by now."""
        for name in self._together:
            while self._compute_next(name):
                pass

    def _compute_next(self, name: str) -> bool:
        """Compute the rest of the current pass, or the next pass; returns False if both are computed."""
        together, upcoming = self._together[name], list[dict[str, Any]]()
        for offset, (number, microbatch) in enumerate(self._iterator.following()):
            starts_pass = number % together == 0
            if starts_pass and (upcoming or offset >= together):
                break
            inputs = microbatch["modality_inputs"][name]
            if inputs is not None and inputs[name][MEDIA].ahead is None:
                upcoming.append(inputs)
        if upcoming:
            self._modules[name].encode_ahead(upcoming)
        return bool(upcoming)


def fingerprint(cfg: ConfigContainer, name: str, module: EncoderModule, te: bool) -> str:
    """Hash everything except the sample that an encoder's features depend on: weights as loaded, spec, how media are
    read, precision, kind of layers, and source files. Collective over the module's tensor-parallel ranks.

    Each rank hashes its part of the weights, so the fingerprint depends on the tensor-parallel size.
    """
    config = cfg.modules[name]
    local, tp = _weights(module.encoders), module.pg_collection.tp
    parts: list = [local]
    if tp.size() > 1:
        parts = [None] * tp.size()
        dist.all_gather_object(parts, local, group=tp)
    described = {
        "encoder": asdict(config.encoder),
        "processor": next(media.identity for media in media_of(cfg) if media.module == name),
        "merge": config.projector.merge,
        "precision": cfg.train.precision,
        "te": te,
        "blind": cfg.data.blind,
        "media": [READING, cfg.data.background, asdict(cfg.data.video)],
        "weights": parts,
        "code": _code(module.encoders),
    }
    if recipe := has_fp8(cfg).get(name):
        described["fp8"] = [recipe, cfg.train.num_layers_at_start_in_bf16, cfg.train.num_layers_at_end_in_bf16]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _weights(encoders: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter_name, tensor in (*encoders.named_parameters(), *encoders.named_buffers()):
        digest.update(parameter_name.encode())
        # Flattened, because a 0-d tensor has no view as bytes.
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _code(encoders: torch.nn.Module) -> str:
    """Hash the source files of all submodules' classes, which a user may edit."""
    digest = hashlib.sha256()
    files = set()
    for module in encoders.modules():
        with suppress(TypeError, OSError):  # a class without a file
            files.add(inspect.getfile(type(module)))
    for name in sorted(files):
        digest.update(Path(name).read_bytes())
    return digest.hexdigest()


SUFFIX = ".features"


class FeatureCache:
    """Tensors by key in a folder of at most `max_bytes`."""

    def __init__(self, folder: Path, max_bytes: int, *, fingerprint: str, writers: int = 1):
        """Open a folder into which `writers` processes write. Entries with another `fingerprint` are not found. `files`
        counts hits, misses and damaged entries."""
        self._fingerprint = fingerprint
        self.files = FileCache(folder, max_bytes, suffix=SUFFIX, what="features", writers=writers)

    def read(self, key: str) -> torch.Tensor | None:
        """Return the tensor of this key, on the CPU, or None. Thread-safe."""
        content = self.files.read(self._key(key))
        if content is None:
            return None
        try:
            return load(content)["features"]
        except (ValueError, KeyError, SafetensorError):  # not features: computed again
            self.files.drop(self._key(key))
            return None

    def write(self, key: str, features: torch.Tensor) -> None:
        """Store a tensor under this key. A disk error stops further writing with a warning; the run continues."""
        content = save({"features": features.detach().to("cpu", copy=True).contiguous()})
        self.files.write(self._key(key), content)

    def _key(self, key: str) -> str:
        return f"{self._fingerprint}|{key}"

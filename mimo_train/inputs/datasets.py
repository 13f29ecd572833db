"""Build the tokenizer and the datasets from the config, for training and `mimo-train check` alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.errors import DataError
from data.index.index_file import cache_folder
from data.media.options import Bounds, colour_of
from data.records.members import NO_FIELDS, Fields, read_fields
from data.samples.media_spec import Sampling
from data.storage.url import Place
from encoders.base import num_tokens, token_grid
from encoders.transformers_media.spec import MediaImages, MediaSpec
from encoders.transformers_media.tower_spec import AutoTowerSpec
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_mix import HeldOutConfig, source_names
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.schema_selection import KeepBestConfig, StopEarlyConfig
from mimo_train.estimate.matmuls import pair_cost
from mimo_train.inputs.token_files import of_tokens, require_none_for_tokens, token_dataset

if TYPE_CHECKING:
    from data.order.sources import Source
    from data.samples.media_spec import Media
    from data.samples.protocol import Samples
    from data.samples.shard_dataset import ShardDataset
    from data.storage.file_cache import FileCache
    from data.text.tokens import Tokenizer
    from mimo_train.config.pretrained.directory import Directory


def placeholders_of(cfg: ConfigContainer) -> dict[str, str]:
    """Return the placeholder of each encoder module's features. The first module of a kind has the kind's, such as
    `<image>`; further ones have their name in it, such as `<image:details>`."""
    placeholders: dict[str, str] = {}
    for name, module in cfg.encoders.items():
        placeholder = module.encoder.placeholder
        placeholders[name] = f"{placeholder[:-1]}:{name}>" if placeholder in placeholders.values() else placeholder
    return placeholders


def media_of(cfg: ConfigContainer) -> list[Media]:
    """Return what every encoder module needs of a sample, in the order of the config."""
    from data.media.options import Resize
    from data.samples.media_spec import Media

    placeholders = placeholders_of(cfg)
    return [
        Media(
            module=name,
            kind=module.encoder.kind,
            placeholder=placeholders[name],
            sequence_tokens=partial(num_tokens, module.encoder, module.projector),
            size=partial(module.encoder.input_size, merge=module.projector.merge),
            inner_tokens=partial(module.encoder.inner_tokens, merge=module.projector.merge),
            pairs=partial(module.encoder.attention_pairs, merge=module.projector.merge),
            pair_cost=pair_cost(name, module.encoder, module.projector, cfg.llm.hidden_size),
            resize=Resize(**asdict(module.encoder.transform)),
            grid=partial(token_grid, module.encoder, module.projector) if cfg.llm.mrope_section else None,
            canvas=getattr(module.encoder, "canvas", None) if module.encoder.is_tiled else None,
            cut_several=getattr(module.encoder, "cut_several", True),
            bidirectional=module.encoder.bidirectional,
            **_by_processor(module, cfg),
        )
        for name, module in cfg.encoders.items()
    ]


def _by_processor(module: ModuleConfig, cfg: ConfigContainer) -> dict[str, Any]:
    """Return the fields of `Media` of an encoder whose inputs the model's own processor makes."""
    if isinstance(module.encoder, AutoTowerSpec):
        reader = module.encoder.processor()
        return {"read": reader.read, "identity": f"{reader.identity} {module.projector}"}
    if not isinstance(module.encoder, MediaSpec):
        if not module.encoder.reads_videos:
            return {}
        identity = f"{module.encoder} {module.projector} {module.encoder.videos().identity}"
        return _of_videos(module.encoder) | {"identity": identity}
    encoder, processor = module.encoder, module.encoder.processor()
    fields = {"text": processor.text, "read": processor.read, "identity": processor.identity, "types": processor.types}
    if isinstance(encoder, MediaImages):
        if encoder.reads_videos:
            fields |= _of_videos(encoder)
            fields["identity"] = f"{processor.identity} {encoder.videos().identity}"
        fields["sound"] = encoder.sound
        if encoder.class_positions:
            fields |= {"positions": encoder.positions, "has_usual_grids": False}
    for sound in (other.encoder.video_sound() for other in cfg.encoders.values() if other.encoder.sound):
        fields["identity"] = f"{fields['identity']} {sound.identity}"  # audio items have other numbers too
    return fields


def _of_videos(encoder: Any) -> dict[str, Any]:
    """Return the fields of `Media` of an encoder that reads videos as such."""
    from encoders.transformers_media.videos import EXAMPLE

    has_axes = getattr(encoder, "axes", True) and encoder.videos().grid(*EXAMPLE) is None
    return {
        "text": encoder.text,
        "video_frames": encoder.video_frames,
        "video_parts": getattr(encoder, "video_parts", None),
        "read_video": encoder.read_video,
        **({"positions": encoder.positions, "has_usual_grids": True} if has_axes else {}),
    }


def tokenizer_of(cfg: ConfigContainer) -> Any:
    """Return the run's tokenizer, with a placeholder for every encoder module. Raises DataError if `data.tokenizer`
    cannot be loaded, or its chat template cannot be used."""
    from data.text.placeholders import Placeholder
    from data.text.tokens import build_tokenizer

    placeholders = [
        Placeholder(name, cfg.modules[module].encoder.kind, **asdict(cfg.modules[module].placeholder))
        for module, name in placeholders_of(cfg).items()
    ]
    data = cfg.data
    videos = (module.encoder for module in cfg.encoders.values() if module.encoder.reads_videos)
    placeholders += [Placeholder("<video>", "video", encoder.videos().mark) for encoder in islice(videos, 1)]
    return build_tokenizer(
        data.tokenizer,
        placeholders,
        chat_template=data.chat_template,
        template_variables=data.template_variables,
        special_in_text=data.special_tokens_in_text,
    )


def has_another_tokenizer(directory: Directory, cfg: ConfigContainer, tokenizer: Tokenizer) -> bool:
    """True if the directory of a pretrained model has a tokenizer that differs from the run's."""
    from data.text.tokens import build_tokenizer

    source = directory.folder
    # For some families transformers returns an empty tokenizer if the directory has none.
    if not directory.has_tokenizer or Path(cfg.data.tokenizer).resolve() == source.resolve():
        return False
    try:
        theirs = build_tokenizer(str(source), [], chat_template="own")
    except DataError:  # it cannot be read
        return False
    return theirs.vocabulary_fingerprint != tokenizer.vocabulary_fingerprint


def bounds_of(cfg: ConfigContainer) -> Bounds:
    """Return `data.bounds` in the form of the data path."""
    return Bounds(**asdict(cfg.data.bounds))


def sampling_of(cfg: ConfigContainer) -> Sampling:
    """Return `data.video` in the form of the data path."""
    return Sampling(**asdict(cfg.data.video))


def fields_of(cfg: ConfigContainer, source: Source) -> Fields:
    """Return the fields of a source, by default `data.fields`, in the form of the data path."""
    return _fields(cfg.data.fields, "data.fields") if source.fields is None else source.fields


def _fields(fields: Mapping[str, Any], key: str) -> Fields:
    """Return the fields of a config; none if they have faults."""
    try:
        return read_fields(fields, key)
    except DataError:
        return NO_FIELDS


@dataclass(frozen=True)
class HeldOutSet:
    """A held-out set of a run."""

    name: str
    """Name in metrics, `eval/NAME/loss`; empty: `eval/loss`."""
    key: str
    """Config key that defines it."""
    source: Source
    fraction: float = 0.0
    """Held-out fraction of `source`; 0 if `source` is not trained on."""
    is_test: bool = False
    """True if it is evaluated only after the last step, as `test/loss`."""
    interval: int = 0
    """Steps between its evaluations; 0: after the last step only."""
    samples: int = 0
    """Samples per evaluation; 0: all."""
    samples_key: str = "train.eval_samples"
    """Config key of `samples`."""
    metrics: tuple[str, ...] = ()
    """Metrics of generated answers."""
    metrics_key: str = "train.eval_metrics"
    """Config key of `metrics`."""

    @property
    def prefix(self) -> str:
        """Prefix of its metrics."""
        kind = "test" if self.is_test else "eval"
        return f"{kind}/{self.name}/" if self.name else f"{kind}/"

    @property
    def label(self) -> str:
        """Config key that defines it, with the source of a mixture of which it is a part."""
        return f"{self.key} of {self.name}" if self.fraction and self.name else self.key

    @property
    def predictions(self) -> str:
        """Name of the file with its predictions."""
        return f"{'test_' if self.is_test else ''}predictions{self.name and '_'}{self.name}.jsonl"


def training_sources(cfg: ConfigContainer) -> list[Source]:
    """Return the sources of `data.mix`, or the one of `data.shards`, without a name."""
    from data.order.sources import Source

    data = cfg.data
    if not data.mix:
        return [Source("", data.shards)]
    sources = []
    for at, (name, source) in enumerate(zip(source_names(data.mix), data.mix, strict=True)):
        fields = _fields(source.fields, f"data.mix[{at}].fields") if source.fields else None
        sources.append(Source(name, source.shards, f"data.mix[{at}].shards", source.weight, fields))
    return sources


def held_out_sets(cfg: ConfigContainer) -> list[HeldOutSet]:
    """Return the held-out sets of a run in the order in which they are evaluated, test sets last."""
    from data.order.sources import Source

    data, key = cfg.data, cfg.data.held_out_by
    train, metrics = cfg.train, tuple(cfg.train.eval_metrics)
    usual = partial(HeldOutSet, interval=train.eval_interval, samples=train.eval_samples, metrics=metrics)
    sets = []
    if data.validation_shards:
        unnamed = "data.validation_shards"
        sets.append(usual("", unnamed, Source("", data.validation_shards, unnamed)))
    if key:
        # The weight, which may be 0, is for training only.
        sources = [replace(item, weight=None) for item in training_sources(cfg)]
        sets += [usual(item.name, key, item, data.held_out_share) for item in sources]
    sets += [_named_set(cfg, "data.validation", name, item) for name, item in data.validation.items()]
    if data.test_shards:
        test = Source("", data.test_shards, "data.test_shards")
        sets.append(usual("", "data.test_shards", test, is_test=True))
    return sets + [_named_set(cfg, "data.test", name, item) for name, item in data.test.items()]


def _named_set(cfg: ConfigContainer, section: str, name: str, item: HeldOutConfig) -> HeldOutSet:
    from data.order.sources import Source

    key = f"{section}.{name}"
    fields = _fields(item.fields, f"{key}.fields") if item.fields else None
    return HeldOutSet(
        name,
        f"{key}.shards",
        Source("", item.shards, f"{key}.shards", fields=fields),
        is_test=section == "data.test",
        interval=item.interval or cfg.train.eval_interval,
        samples=item.samples or cfg.train.eval_samples,
        samples_key=f"{key}.samples" if item.samples else "train.eval_samples",
        metrics=tuple(item.metrics or cfg.train.eval_metrics),
        metrics_key=f"{key}.metrics" if item.metrics else "train.eval_metrics",
    )


def without_metrics(cfg: ConfigContainer) -> ConfigContainer:
    """Return the config for other data or layouts: without metrics of generated answers, which not every layout can
    generate, and without keys that watch a metric."""

    def plain(sets: Mapping[str, HeldOutConfig]) -> dict[str, HeldOutConfig]:
        return {name: replace(item, metrics=[]) for name, item in sets.items()}

    return replace(
        cfg,
        data=replace(cfg.data, validation=plain(cfg.data.validation), test=plain(cfg.data.test)),
        train=replace(cfg.train, eval_metrics=[], stop_early=StopEarlyConfig()),
        checkpoint=replace(cfg.checkpoint, keep_best=KeepBestConfig()),
    )


def splits_of(cfg: ConfigContainer) -> dict[str, HeldOutSet]:
    """Return the held-out sets by the names that a user gives them: `validation` (the first), `validation/NAME`,
    `test`, `test/NAME`."""
    splits: dict[str, HeldOutSet] = {}
    for item in held_out_sets(cfg):
        kind = "test" if item.is_test else "validation"
        splits.setdefault(kind, item)
        splits[f"{kind}/{item.name}".rstrip("/")] = item
    return splits


def build_dataset(
    cfg: ConfigContainer, tokenizer: Any, *, held_out: HeldOutSet | None = None, shards: Sequence[Source] | None = None
) -> Samples:
    """Build the training samples, or those of a held-out set: in order and with their texts.

    Args:
        shards: sources to use instead of those of the config.

    Raises:
        DataError: there are no shards, or one cannot be used.
    """
    sources = shards or ([held_out.source] if held_out else training_sources(cfg))
    if of_tokens(sources):
        fraction = held_out.fraction if held_out else 0.0
        return token_dataset(cfg, tokenizer, sources, held_out=held_out is not None, fraction=fraction)
    if held_out is None:
        require_none_for_tokens(cfg, sources[0].key)
    return shard_dataset(cfg, tokenizer, sources, held_out)


def shard_dataset(
    cfg: ConfigContainer, tokenizer: Any, sources: Sequence[Source], held_out: HeldOutSet | None = None
) -> ShardDataset:
    """Build a dataset of tar shards; see `build_dataset`."""
    from data.samples.shard_dataset import ShardDataset
    from mimo_train.config.pretrained.directory import read_directory

    data = cfg.data
    for name, module in cfg.encoders.items():
        if isinstance(module.encoder, MediaSpec):
            directory = read_directory(module.encoder.path, f"modules.{name}.encoder.path")
            if has_another_tokenizer(directory, cfg, tokenizer):
                raise DataError(
                    f"data.tokenizer: {data.tokenizer} is not the tokenizer of {directory.folder}, whose processor "
                    f"makes the tokens of {name}: remove the key"
                )
    return ShardDataset(
        sources,
        tokenizer=tokenizer,
        sequence_length=data.sequence_length,
        media=media_of(cfg),
        seed=cfg.run.seed,
        shuffle=data.shuffle and not held_out,
        shuffle_block=data.shuffle_block,
        cache_dir=data.cache_dir or None,
        blind=data.blind,
        max_bad_samples=data.max_bad_samples,
        keep_text=held_out is not None,
        read_retries=data.read_retries,
        bounds=bounds_of(cfg),
        held_fraction=held_out.fraction if held_out else data.validation_fraction,
        only_held=held_out is not None,
        background=colour_of(data.background),
        fields=_fields(data.fields, "data.fields"),
        sampling=sampling_of(cfg),
        skip_null=data.null_captions == "skip",
        members_cache=members_cache(cfg),
        form=cfg.traits.form,
    )


def members_cache(cfg: ConfigContainer) -> FileCache | None:
    """Return the cache of remote shards for a dataset of one rank, or None if it is off.

    Raises:
        DataError: its folder cannot be made.
    """
    from data.storage.file_cache import FileCache

    data = cfg.data
    if not data.cache_bytes:
        return None
    folder = cache_folder(data.cache_dir or None) / "members"
    writers = _RANKS * (1 + len(held_out_sets(cfg)))
    try:
        return FileCache(folder, data.cache_bytes, suffix=".member", what="members of remote shards", writers=writers)
    except OSError as error:
        raise DataError(
            f"data.cache_bytes: cannot make {folder} ({error.strerror}): set data.cache_dir to a folder that can be "
            "written"
        ) from error


_RANKS = 16
"""Most ranks of one machine that share `data.cache_bytes`."""


def without_split(cfg: ConfigContainer) -> ConfigContainer:
    """Return the config with no sample held out, for tools that look at shards."""
    return replace(cfg, data=replace(cfg.data, validation_fraction=0.0, split=""))


@dataclass
class OneShard:
    """Opens single shards with all of their samples, as a run does. It can be sent to other processes."""

    cfg: ConfigContainer

    def __call__(self, shard: Place, fields: Fields | None = None) -> ShardDataset:
        from data.order.sources import Source

        shards = [Source("", [shard], fields=fields)]
        return shard_dataset(without_split(self.cfg), self._tokenizer, shards)

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self.cfg)

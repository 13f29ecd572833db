"""Config -> tokenizer and datasets: what the encoders need of a sample, where the samples are. No Megatron-Core here,
so that `mimo-train check` reads samples exactly as training does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.bounds import Bounds
from encoders.spec import (
    attention_pairs,
    inner_tokens,
    input_size,
    is_tiled,
    num_tokens,
    picture_transform,
    token_grid,
)
from mimo_train.config.schema import ConfigContainer

if TYPE_CHECKING:
    from data.pipeline import Dataset, Media


def placeholders_of(cfg: ConfigContainer) -> dict[str, str]:
    """The placeholder of each encoder module's features: for the first module of a kind that of the kind, such as
    `<image>`; for further ones one with the module's name, such as `<image:details>`. The tokenizer has its tokens."""
    taken: dict[str, str] = {}
    for name, module in cfg.encoders.items():
        own = module.encoder.placeholder
        taken[name] = f"{own[:-1]}:{name}>" if own in taken.values() else own
    return taken


def media_of(cfg: ConfigContainer) -> list[Media]:
    """What every encoder module needs of a sample, in the order of the config."""
    from data.pipeline import Media, Resize

    placeholders = placeholders_of(cfg)
    return [
        Media(
            module=name,
            kind=module.encoder.kind,
            placeholder=placeholders[name],
            num_tokens=partial(num_tokens, module.encoder, module.projector),
            size=partial(input_size, module.encoder, module.projector),
            inner_tokens=partial(inner_tokens, module.encoder, module.projector),
            pairs=partial(attention_pairs, module.encoder, module.projector),
            resize=Resize(**asdict(picture_transform(module.encoder))),
            grid=partial(token_grid, module.encoder, module.projector) if cfg.llm.mrope_section else None,
            canvas=getattr(module.encoder, "canvas", None) if is_tiled(module.encoder) else None,
            cut_several=getattr(module.encoder, "cut_several", True),
        )
        for name, module in cfg.encoders.items()
    ]


def tokenizer_of(cfg: ConfigContainer) -> Any:
    """The run's tokenizer, with a placeholder for every encoder module.

    Raises:
        DataError: `data.tokenizer` cannot be loaded, or its chat template cannot be used.
    """
    from data.placeholders import Placeholder
    from data.tokens import build_tokenizer

    placeholders = [
        Placeholder(name, cfg.modules[module].encoder.kind, **asdict(cfg.modules[module].placeholder))
        for module, name in placeholders_of(cfg).items()
    ]
    data = cfg.data
    return build_tokenizer(
        data.tokenizer, placeholders, chat_template=data.chat_template, template_variables=data.template_variables
    )


def bounds_of(cfg: ConfigContainer) -> Bounds:
    """`data.bounds`, as the data path takes them."""
    return Bounds(**asdict(cfg.data.bounds))


def build_dataset(
    cfg: ConfigContainer,
    tokenizer: Any,
    *,
    held_out: bool = False,
    shards: str | Sequence[str | Path] | None = None,
) -> Dataset:
    """The training samples, or the held-out ones: these in order, and with their texts.

    Args:
        shards: instead of those of the config.

    Raises:
        DataError: no shards, or one that cannot be used.
    """
    from data.pipeline import Dataset

    data = cfg.data
    return Dataset(
        shards or (data.validation_shards if held_out else data.shards),
        tokenizer=tokenizer,
        sequence_length=data.sequence_length,
        media=media_of(cfg),
        seed=cfg.run.seed,
        shuffle=data.shuffle and not held_out,
        cache_dir=data.cache_dir or None,
        blind=data.blind,
        max_bad_samples=data.max_bad_samples,
        keep_text=held_out,
        read_retries=data.read_retries,
        bounds=bounds_of(cfg),
    )


@dataclass
class OneShard:
    """Opens single shards as the training samples of a run. It can be handed to other processes."""

    cfg: ConfigContainer

    def __call__(self, shard: Path) -> Dataset:
        return build_dataset(self.cfg, self._tokenizer, shards=[shard])

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self.cfg)

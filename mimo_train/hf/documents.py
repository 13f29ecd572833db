"""Plan the export of a run: directories, each with parts of the run and the files next to their weights.

It is one directory if all modules came from one or form one LLaVA. Otherwise each part has its own: in the format of
`transformers`, or in ours if it has no class for it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from data.text.tokenizer_directory import COPIED as TOKENIZER_FILES
from data.text.tokens import Tokenizer
from encoders.errors import EncoderError
from encoders.native.whisper.model import sinusoids
from encoders.pretrained import Published
from encoders.projectors.weights import connector
from encoders.registry import FAMILIES
from encoders.weight_map import WeightMap, spelt
from mimo_train.config.errors import UserError
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.composites import Composite, composite_of
from mimo_train.config.pretrained.directory import read_directory
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.transformers_llm import MODEL, TEXT_PARTS, TransformersLlm, class_of, transformers_config
from mimo_train.families.config_json import language_config_json, model_types
from mimo_train.families.weights import HEAD, SCORE, language_map
from mimo_train.hf.directory import copy_files, has_another_template, hub_names, write_json, write_run_tokenizer
from mimo_train.hf.fill import Reader
from mimo_train.hf.llava_limits import published_encoder, why_no_family
from mimo_train.hf.parts import ENCODER, PROJECTOR, Part, classifier_config, pretrained_parts
from mimo_train.hf.tensors import TensorFolder
from mimo_train.inputs.datasets import has_another_tokenizer

OWN = "mimo_train"
"""Key in config.json of a part that has no class in `transformers`."""


@dataclass(frozen=True)
class Extra:
    """A tensor of a directory that comes from no parameter of the run."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None uses the directory's dtype."""
    load: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Written:
    """A part of a module in an export."""

    module: str
    weights: WeightMap
    """Map from our parameters; the first spelling is written."""
    loaded: Any = ""
    """Spelling of names in `transformers` 5's memory, which PEFT uses."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of tensors, by their names in the map, that exceed the model's; see `grown`."""
    transposed: bool = False
    """True to transpose the matrices of stacks."""


def grown(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a vocabulary table with more rows, each the mean of the existing ones. A mean is never the largest logit,
    so such tokens are never predicted."""
    if rows <= len(tensor):
        return tensor
    mean = tensor.mean(0, keepdim=True, dtype=torch.float64).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(rows - len(tensor), -1)])


@dataclass(frozen=True)
class Whole:
    """A module's parameters with a common prefix, by their own names."""

    module: str
    begins: str
    rename: Callable[[MegatronModule, dict[str, torch.Tensor], torch.dtype | None], dict[str, torch.Tensor]] | None = (
        None
    )
    """(module, its tensors without `begins`, dtype of weights or None for theirs) -> the written tensors, all in
    memory. None keeps our names."""


@dataclass
class Document:
    """A directory to write: config.json, tensors and further files."""

    name: str
    """Name of its folder, if there are several."""
    what: str
    """Description for users."""
    config: dict[str, Any]
    """config.json, without the dtype."""
    parts: list[Written] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    whole: list[Whole] = field(default_factory=list)
    write_files: Callable[[Path], None] = lambda to: None
    """Writes the files other than weights and config.json."""
    source: Path | None = None
    """Source directory of everything; None if it is assembled here."""
    sources: list[Part] = field(default_factory=list)
    """Parts as they are in the source directory."""
    is_plain: bool = False
    """True if `transformers` has no class for it."""
    has_other_texts: bool = False
    """True if the run's tokenizer or chat template is not that of the source directory."""

    @property
    def modules(self) -> list[str]:
        """Return the names of its modules."""
        return list(dict.fromkeys([*(part.module for part in self.parts), *(part.module for part in self.whole)]))


def separate(cfg: ConfigContainer, tokenizer: Tokenizer, rows: int) -> list[Document]:
    """Return a directory for each part of a run; parts from one directory go back into one.

    Args:
        rows: rows of the language model's embedding, with padding.
    """
    # Encoders that are joined in one are written as that one.
    parts = [part for part in pretrained_parts(cfg, rows) if part.begins in ("", ENCODER, PROJECTOR)]
    by_folder: dict[Path, list[Part]] = {}
    for part in parts:
        by_folder.setdefault(part.folder, []).append(part)
    documents = [as_it_came(of_folder, cfg, tokenizer) for of_folder in by_folder.values()]
    from_folders = {(part.module, part.begins) for part in parts}
    for name, module in cfg.modules.items():
        if name == LANGUAGE:
            if isinstance(module.llm, TransformersLlm):
                documents = _with_language_as_is(cfg, tokenizer, documents)
            elif not module.pretrained:
                documents.append(_language(cfg, tokenizer, rows))
            continue
        if (name, ENCODER) not in from_folders:
            documents.append(_encoder(name, module))
        if (name, PROJECTOR) not in from_folders and module.projector.kind != "none":
            documents.append(_projector(name, module, cfg.llm.hidden_size))
    return documents


def as_it_came(parts: list[Part], cfg: ConfigContainer, tokenizer: Tokenizer) -> Document:
    """Return a directory's parts as that directory again; a separate language model gets the run's tokenizer.

    Raises:
        UserError: the directory has other parts next to its language model, whose files rely on another tokenizer.
    """
    source = parts[0].folder
    directory = read_directory(str(source), parts[0].key)
    is_composite, composite = composite_of(directory) is not None, composite_of(directory) or Composite("")
    names, classifier = list(dict.fromkeys(part.module for part in parts)), dict[str, Any]()
    if LANGUAGE in names and cfg.traits.value_head:
        classifier = classifier_config("" if is_composite else directory.model_type, tokenizer)
    folder = TensorFolder(source, parts[0].key)
    readers = [Reader(folder, part.weights, part.key) for part in parts]
    written = {spelt(name, part.written.prefixes[0]) for part in parts for name in part.written.row_counts()}
    made = {name for reader in readers for name in reader.read_names}
    omitted = {name for reader in readers for name in (*reader.copies, *reader.dropped)}
    carried = {}
    for name in folder.tensors:
        new = next((reader.written_name(name) for reader in readers if reader.uses(name)), name)
        if name not in made and new not in written and name not in omitted:
            carried[name] = new
    config = dict(directory.config)
    if folder.packed or folder.is_quantized:
        config.pop("quantization_config", None)  # an export is not quantised
    if LANGUAGE in names:
        config = composite.with_vocabulary(config, cfg.llm.vocab_size)
    other = LANGUAGE in names and has_another_tokenizer(directory, cfg, tokenizer)
    if other and is_composite:
        raise _another_tokenizer(cfg, source)
    has_other_texts = other or LANGUAGE in names and has_another_template(directory, tokenizer)
    if other:
        config = config | special_ids(tokenizer)
    config |= classifier
    # transformers 5's spelling of names in memory is the last one of a map.
    loaded = {part.begins: part.weights.prefixes[-1] for part in parts}
    if composite.encoder_loaded is not None:
        loaded |= dict.fromkeys((ENCODER, PROJECTOR) if composite.projector else (ENCODER,), composite.encoder_loaded)
    return Document(
        names[0],
        f"{' and '.join(names)} ({config['model_type']})",
        config,
        [
            Written(part.module, part.written, loaded[part.begins], transposed=reader.transposed)
            for part, reader in zip(parts, readers, strict=True)
        ],
        [carried_tensor(folder, name, new) for name, new in carried.items()],
        write_files=_files_writer(source, cfg, tokenizer, other=other, has_other_texts=has_other_texts),
        source=source,
        sources=parts,
        has_other_texts=has_other_texts,
    )


def _files_writer(
    source: Path, cfg: ConfigContainer, tokenizer: Tokenizer, *, other: bool, has_other_texts: bool
) -> Callable[[Path], None]:
    """Return what copies the files of a directory, with the run's tokenizer or chat template if it has others."""

    def write_files(to: Path) -> None:
        copy_files(source, to)
        for pattern in TOKENIZER_FILES if other else ("chat_template*",) if has_other_texts else ():
            for file in to.glob(pattern):
                file.unlink()
        if other:
            _write_tokenizer(cfg, tokenizer, to)
        elif has_other_texts:
            write_run_tokenizer(cfg, tokenizer, to)

    return write_files


def carried_tensor(folder: TensorFolder, name: str, to: str) -> Extra:
    """Return a tensor of a directory unchanged, under another name."""
    stored = folder.tensors[name]
    return Extra(to, stored.shape, stored.dtype, lambda: folder.whole(name))


def class_tensors(published: Published, before: str = "") -> list[Extra]:
    """Return the tensors of an encoder's class that come from no parameter of ours.

    Args:
        before: prefix of their names.
    """
    return [
        Extra(before + name, shape, None, partial(_filled, shape, value))
        for name, (shape, value) in published.unread.items()
    ]


def _filled(shape: tuple[int, ...], value: float | None) -> torch.Tensor:
    if value is not None:
        return torch.full(shape, value)
    length, width = shape
    return sinusoids(length, width, torch.device("cpu"))


def with_sizes(cfg: ConfigContainer, tokenizer: Tokenizer) -> LlmSpec:
    """Return the language model's spec with the sizes that its run sets."""
    return replace(
        cfg.llm,
        vocab_size=cfg.llm.vocab_size or tokenizer.vocab_size,
        max_positions=cfg.llm.max_positions or cfg.data.sequence_length,
    )


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the token ids for config.json and generation_config.json."""
    ids = {"bos_token_id": tokenizer.begin_id, "pad_token_id": tokenizer.pad_id}
    return ids | {"eos_token_id": tokenizer.end_of_turn_id}


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return generation_config.json for a model made here; it stops where `mimo-train generate` does."""
    stops = sorted(tokenizer.template.stop_ids)
    return special_ids(tokenizer) | {"eos_token_id": stops[0] if len(stops) == 1 else stops, "do_sample": False}


def _language(cfg: ConfigContainer, tokenizer: Tokenizer, rows: int) -> Document:
    spec = with_sizes(cfg, tokenizer)
    kinds = model_types(spec)
    if not kinds:
        document = _in_our_names(LANGUAGE, LANGUAGE, LANGUAGE, "", cfg.llm, reason=why_no_family(spec))
    else:
        config = language_config_json(spec, kinds[0]) | special_ids(tokenizer)
        weights = language_map(spec, rows, kinds[0], head=SCORE if cfg.traits.value_head else HEAD)
        if cfg.traits.value_head:
            config |= classifier_config(kinds[0], tokenizer)
        document = Document(
            LANGUAGE, f"{LANGUAGE} ({kinds[0]})", config, [Written(LANGUAGE, weights, transposed=weights.transposed)]
        )

    def write_files(to: Path) -> None:
        write_run_tokenizer(cfg, tokenizer, to)
        if kinds:
            write_json(to / "generation_config.json", generation_config(tokenizer))

    document.write_files = write_files
    return document


def _with_language_as_is(cfg: ConfigContainer, tokenizer: Tokenizer, documents: list[Document]) -> list[Document]:
    """Return documents with a language model of transformers: in its directory again, with the parts next to it, or in
    a new one."""
    module, whole = cfg.language, [Whole(LANGUAGE, MODEL, hub_names)]
    model_config = module.llm.model_config
    text = f"{LANGUAGE} ({model_config['model_type']})"
    if not module.pretrained:
        config = {"architectures": [class_of(transformers_config(model_config)).__name__], **model_config}
        new = Document(LANGUAGE, text, _with_rows(config, cfg), whole=whole)
        new.write_files = partial(_write_tokenizer, cfg, tokenizer)
        return [*documents, new]
    directory = read_directory(module.pretrained, f"modules.{LANGUAGE}.pretrained")
    source, composite = directory.folder, composite_of(directory)
    other = has_another_tokenizer(directory, cfg, tokenizer)
    if composite is not None and other:
        raise _another_tokenizer(cfg, source)
    has_other_texts = other or has_another_template(directory, tokenizer)
    write = _files_writer(source, cfg, tokenizer, other=other, has_other_texts=has_other_texts)
    config = _with_rows(directory.config, cfg) | (special_ids(tokenizer) if other else {})
    document = Document(
        LANGUAGE, text, config, whole=whole, write_files=write, source=source, has_other_texts=has_other_texts
    )
    if composite is None:
        return [*documents, document]
    from encoders.transformers_media.tensors import structure_of  # imports transformers

    folder, structure = TensorFolder(source, directory.key), structure_of(str(source))
    next_to = [each for each in documents if each.source == source]
    document.extras = [carried_tensor(folder, name, name) for name in folder.tensors if structure.is_media(name)]
    for each in next_to:
        document.parts, document.what = [*document.parts, *each.parts], f"{each.name} and {document.what}"
        document.extras = [extra for extra in each.extras if structure.is_media(extra.name)]
        document.sources += each.sources
    return [*(each for each in documents if each not in next_to), document]


def _with_rows(config: Mapping[str, Any], cfg: ConfigContainer) -> dict[str, Any]:
    """Return config.json with the rows of the run's embedding, where they are there."""
    rows = {"vocab_size": cfg.llm.vocab_size}
    inner = {key: value | rows for key, value in config.items() if isinstance(value, dict) and key in TEXT_PARTS}
    return {**config, **inner, **(rows if "vocab_size" in config or not inner else {})}


def _another_tokenizer(cfg: ConfigContainer, source: Path) -> UserError:
    return UserError(
        f"data.tokenizer: {cfg.data.tokenizer} is not the tokenizer of {source}, whose processor and "
        "placeholders count on its own: a directory of this model cannot be written with another one"
    )


def _write_tokenizer(cfg: ConfigContainer, tokenizer: Tokenizer, to: Path) -> None:
    write_run_tokenizer(cfg, tokenizer, to)
    write_json(to / "generation_config.json", generation_config(tokenizer))


def _encoder(name: str, module: ModuleConfig) -> Document:
    try:
        published = published_encoder(module)
    except EncoderError as error:
        return _in_our_names(name, f"encoder of {name}", name, ENCODER, module.encoder, reason=str(error))
    weights = FAMILIES[module.encoder.family].weight_map(module.encoder).named(f"{ENCODER}{name}.")
    return Document(
        name,
        f"encoder of {name} ({published.config['model_type']})",
        published.config,
        [Written(name, weights, "")],
        class_tensors(published),
        write_files=lambda to: write_json(to / "preprocessor_config.json", published.preprocessor),
    )


def _projector(name: str, module: ModuleConfig, language_width: int) -> Document:
    """Return a projector by the names of an equivalent connector, or by ours."""
    place, what = f"{name}.projector", f"projector of {name}"
    width = module.encoder.joined_width(module.projector.merge)
    published = connector(module.projector, width, language_width)
    if published is None:
        return _in_our_names(place, what, name, PROJECTOR, module.projector)
    model, weights = published
    return Document(
        place,
        f"{what} (safetensors by the names of {model}'s connector, transformers has no class for it alone)",
        {OWN: asdict(module.projector) | {"connector": model}},
        [Written(name, weights.named(f"{PROJECTOR}0."))],
        is_plain=True,
    )


def _in_our_names(place: str, what: str, module: str, begins: str, spec: Any, reason: str = "") -> Document:
    because = f": {reason}" if reason else ""
    return Document(
        place,
        f"{what} (safetensors by our names, transformers has no class for it{because})",
        {OWN: asdict(spec)},
        whole=[Whole(module, begins)],
        is_plain=True,
    )

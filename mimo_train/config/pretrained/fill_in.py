"""`pretrained: DIR` -> the keys that follow from the directory, in a composed config."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from encoders.errors import EncoderError
from encoders.joined.spec import PARTS as JOINED
from encoders.projectors.spec import ProjectorSpec
from encoders.registry import FAMILIES
from encoders.transformers_media.video_keys import VideoKeys
from mimo_train.config.errors import ConfigError, Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained import unsupported
from mimo_train.config.pretrained.adapter import adapter_keys
from mimo_train.config.pretrained.as_is import is_tower, keys_as_is, media_half, native_encoder_faults
from mimo_train.config.pretrained.composites import COMPOSITES, ENCODERS, Composite, composite_of
from mimo_train.config.pretrained.composites.of_transformers import PROJECTOR as OF_TRANSFORMERS
from mimo_train.config.pretrained.composites.of_transformers import OfTransformers
from mimo_train.config.pretrained.composites.qwen_vl import video_keys
from mimo_train.config.pretrained.directory import TOKENIZER_FILES, Directory, read_directory
from mimo_train.config.pretrained.hub import model_keys
from mimo_train.config.read_values import shown_plain
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import PlaceholderConfig
from mimo_train.config.transformers_llm import TransformersLlm, is_causal_language_model
from mimo_train.families.config_json import language_keys
from mimo_train.families.registry import is_family

CHOICES = {
    "llm": {"name", "dropout", "init_std", "router_balancing", "router_aux_loss", "router_z_loss"},
    "encoder": {
        *("name", "dropout", "init_std", "layer_scale"),
        *("resize", "interpolation", "shortest_edge", "min_pixels", "max_pixels", "max_patches"),
        *("max_seconds", "pad_clips", "reads_videos", "video", "sound"),
    },
    "projector": {"name"},
    "placeholder": {"start", "end", "mark"},
}
"""Keys by part that a user may set to another value than the directory's: no weight depends on them."""
PROJECTOR: dict[str, Any] = {"norm": "", "bias": True, "newline": False, "resampler": {"latents": 0}}
"""Default projector keys of a directory."""
CONSTANTS = ("normalization", "layernorm_epsilon")
"""Keys of an encoder that its weights were trained with, and that its config.json may lack."""
ANY_SIZE = ("dinov2", "dinov3")
"""Families of encoders for which `image_size` is such a key too."""


def directories(plain: dict[str, Any]) -> dict[str, Directory]:
    """Return the directory of each module that has one.

    Raises:
        ConfigError: a directory cannot be read, the directory of all modules has no part for a module, or a value that
            is read here or in `fill_in` has the wrong type.
    """
    misshapen = list(_misshapen(plain))
    if misshapen:
        raise ConfigError(misshapen)
    modules = plain.get("modules") or {}
    of_all = plain.get("pretrained") or ""
    if of_all and not modules:
        raise ConfigError([Fault("pretrained", "the config has no modules that it could fill")])
    by_module = {}
    for name, module in modules.items():
        path = (module or {}).get("pretrained") or ""
        if path or of_all:
            key = f"modules.{name}.pretrained" if path else "pretrained"
            directory = by_module[name] = read_directory(str(path or of_all), key)
            reasons = unsupported.LANGUAGE if name == LANGUAGE else unsupported.MEDIA
            if directory.model_type in reasons:
                text = f"a {directory.model_type} {reasons[directory.model_type]}, which is not supported"
                raise ConfigError([Fault(key, f"{directory.folder}: {text}. Choose another model")])
    alike = [name for name, directory in by_module.items() if directory.key == "pretrained" and name != LANGUAGE]
    # Anything else is rejected later, as no encoder.
    if len(alike) > 1 and by_module[alike[0]].model_type in {*COMPOSITES, *ENCODERS}:
        text = f"{of_all} has one encoder, and modules {', '.join(alike)} would all get it: give them their own"
        raise ConfigError([Fault("pretrained", f"{text}, modules.{alike[0]}.pretrained")])
    return by_module


def _misshapen(plain: dict[str, Any]) -> Iterator[Fault]:
    """Yield faults of values that should be mappings or texts, if they are read before the general type check."""
    yield from _misfits(plain, "", ("modules", "data"))
    modules = plain["modules"] if isinstance(plain.get("modules"), Mapping) else {}
    for name, module in modules.items():
        yield from _misfits(modules, "modules", (name,))
        if isinstance(module, Mapping):
            yield from _misfits(module, f"modules.{name}", ("encoder", "projector", "llm", "lora", "placeholder"))
    for section, name, key in model_keys(plain):
        yield from _misfits(section, key.rpartition(".")[0], (), (name,))


def _misfits(
    plain: Mapping[str, Any], prefix: str, mappings: Sequence[str], texts: Sequence[str] = ()
) -> Iterator[Fault]:
    """Yield type faults of these keys of `plain`, which may be absent or empty."""
    for kind, wanted, keys in ((Mapping, "a mapping of keys", mappings), (str | int | float, "a text", texts)):
        for key in keys:
            value = plain.get(key)
            if value not in (None, "") and (not isinstance(value, kind) or isinstance(value, bool)):
                yield Fault(f"{prefix}.{key}".lstrip("."), f"must be {wanted}, is {shown_plain(value)}")


def pretrained_folders(cfg: ConfigContainer) -> dict[str, str]:
    """Return the directories with weights of a new run, by key; the first key for a repeated directory."""
    folders: dict[str, str] = {}
    for name, module in cfg.modules.items():
        of_module = {f"modules.{name}.pretrained": module.pretrained}
        for part in JOINED:
            of_module[f"modules.{name}.encoder.{part}_pretrained"] = getattr(module.encoder, f"{part}_pretrained", "")
        folders |= {key: folder for key, folder in of_module.items() if folder and folder not in folders.values()}
    return folders


def replaced_parts(directories: Mapping[str, Directory]) -> list[str]:
    """Return the keys of the parts that come from directories; group choices for these parts are ignored."""
    parts = []
    for name, directory in directories.items():
        if name == LANGUAGE:
            parts.append(f"modules.{name}.llm")
            continue
        parts.append(f"modules.{name}.encoder")
        if has_projector(directory):
            parts.append(f"modules.{name}.projector")
    return parts


def parts_there(cfg: ConfigContainer) -> set[tuple[str, str]]:
    """Return (module, part) of what a new run reads from directories; part is llm, encoder or projector. Missing
    directories count as nothing, as in a resumed run."""
    parts = set()
    for name, module in cfg.modules.items():
        joined = [getattr(module.encoder, f"{part}_pretrained", "") for part in JOINED]
        if all(folder and Path(folder).is_dir() for folder in joined):
            parts.add((name, "encoder"))
        if not module.pretrained or not Path(module.pretrained).is_dir():
            continue
        parts.add((name, "llm" if name == LANGUAGE else "encoder"))
        if name != LANGUAGE and has_projector(read_directory(module.pretrained, f"modules.{name}.pretrained")):
            parts.add((name, "projector"))
    return parts


def all_parts(cfg: ConfigContainer) -> set[tuple[str, str]]:
    """Return (module, part) of everything with weights, named as in `parts_there`."""
    return {(name, part) for name in cfg.modules for part in ("llm", "encoder", "projector")}


def has_projector(directory: Directory) -> bool:
    """True if a directory holds a projector between its encoder and its language model."""
    composite = composite_of(directory)
    return isinstance(composite, OfTransformers) or (composite is not None and composite.projector is not None)


def fill_in(plain: dict[str, Any], directories: Mapping[str, Directory], *, tokenizer_is_given: bool) -> None:
    """Set the keys of every module with a directory; keys that are set already must agree.

    Raises:
        ConfigError: an unsupported family, or keys that contradict the directory, with both values.
    """
    faults: list[Fault] = []
    halves: dict[tuple[Path, str], str] = {}
    modules = plain["modules"] = dict(plain.get("modules") or {})  # absent where all of it came from groups
    for name, directory in directories.items():
        module = modules[name] = dict(modules.get(name) or {})
        module["pretrained"] = str(directory.folder)
        implementation = str(module.get("implementation") or "")
        faults += _repeated_half(name, directory, implementation, halves)
        for part, keys in _parts(name, directory, implementation).items():
            values = dict(module.get(part) or {})
            faults += _contradictions(f"modules.{name}.{part}", part, values, keys, directory)
            module[part] = {**keys, **values}
        if name != LANGUAGE and LANGUAGE in directories and directories[LANGUAGE].folder == directory.folder:
            keys, values = (
                _placeholder(name, directory, implementation),
                {name: text for name, text in (module.get("placeholder") or {}).items() if text},
            )
            faults += _contradictions(f"modules.{name}.placeholder", "placeholder", values, keys, directory)
            module["placeholder"] = {**keys, **values}
        elif media_half(name, directory, implementation):
            text = f"is {directory.folder}, whose {name} need its own language model"
            faults.append(Fault(directory.key, f"{text}: set modules.{LANGUAGE}.pretrained to it too"))
        faults += _fill_in_adapter(name, module, directory)
        if name == LANGUAGE:
            if "model_config" in module["llm"]:
                module["implementation"] = module.get("implementation") or "transformers"
                faults += native_encoder_faults(directory, directories, modules)
            rows = _parts(name, directory, implementation)["llm"]["vocab_size"]
            faults += _frozen_rows(module, rows, directory)
    language = directories.get(LANGUAGE)
    if language is not None and not tokenizer_is_given:
        if not language.has_tokenizer:
            text = (
                f"{language.folder} has no tokenizer, by which its weights were trained (one of "
                f"{', '.join(TOKENIZER_FILES)}): give the folder of its own, or one that you choose (`bytes` trains "
                "its first rows anew)"
            )
            faults.append(Fault("data.tokenizer", text))
        plain["data"] = {**(plain.get("data") or {}), "tokenizer": str(language.folder)}
    if faults:
        raise ConfigError(faults)


def changed_choices(cfg: ConfigContainer, name: str) -> Iterator[str]:
    """Yield the keys by which an encoder reads its items differently from the files of its directory."""
    module = cfg.modules[name]
    if name == LANGUAGE or not module.pretrained or not Path(module.pretrained).is_dir():
        return
    directory = read_directory(module.pretrained, f"modules.{name}.pretrained")
    keys = _parts(name, directory, module.implementation).get("encoder", {})
    for field in fields(module.encoder):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        chosen, value = getattr(module.encoder, field.name), keys.get(field.name, default)
        if field.name in CHOICES["encoder"] - {"name", "dropout", "init_std", "layer_scale"} and chosen != value:
            yield f"modules.{name}.encoder.{field.name} is {chosen} in this run and {value} in the exported files"


def _repeated_half(
    name: str, directory: Directory, implementation: str, halves: dict[tuple[Path, str], str]
) -> Iterator[Fault]:
    """Yield the fault of a second module for one media half; `halves`: modules by directory and kind of media."""
    try:
        half = media_half(name, directory, implementation)
        kind = half.kind(name) if half is not None and len(half.kinds) > 1 else ""
    except EncoderError:
        return  # named with the keys of the module
    other = halves.setdefault((directory.folder, kind), name) if half is not None else name
    if other != name:
        text = f"is {directory.folder}, whose media half modules.{other} has already"
        more = ". A module for its audio needs a name that begins with audio" if kind == "image" else ""
        yield Fault(f"modules.{name}.pretrained", f"{text}. Remove one of them{more}")


def _frozen_rows(module: Mapping[str, Any], rows: int, directory: Directory) -> Iterator[Fault]:
    """Yield the fault of embedding rows added next to adapters, unless they are trained: they would stay random."""
    llm, lora = module["llm"], module.get("lora") or {}
    vocab_size, rank, saved = llm["vocab_size"], lora.get("rank", 0), lora.get("modules_to_save")
    tables = ["embed_tokens"] if llm.get("tie_embeddings") else ["embed_tokens", "lm_head"]
    if saved not in (tables, tables[::-1]) and {type(vocab_size), type(rank)} == {int} and rank > 0 < vocab_size - rows:
        yield Fault(
            f"modules.{LANGUAGE}.llm.vocab_size",
            f"adds {vocab_size - rows} rows to the {rows} of {directory.folder}, and they would stay random: "
            f"modules.{LANGUAGE}.lora.rank {rank} freezes the embedding. Set modules.{LANGUAGE}.lora.modules_to_save="
            f"[{', '.join(tables)}], or use a tokenizer with at most {rows} tokens of text",
        )


def fill_in_joined(plain: dict[str, Any]) -> None:
    """Set the keys of joined encoders with their own directories. Raises ConfigError as `fill_in`."""
    faults: list[Fault] = []
    for name, module in (plain.get("modules") or {}).items():
        encoder = (module or {}).get("encoder")
        if not isinstance(encoder, dict) or encoder.get("family") != "joined":
            continue
        for part in JOINED:
            place = f"modules.{name}.encoder.{part}"
            folder = str(encoder.get(f"{part}_pretrained") or "")
            values = encoder.get(part) or {}
            if folder and isinstance(values, dict):
                directory = read_directory(folder, f"{place}_pretrained")
                keys = _parts(name, directory)["encoder"]
                faults += _contradictions(place, "encoder", values, keys, directory)
                encoder[part] = {**keys, **values}
    if faults:
        raise ConfigError(faults)


def _fill_in_adapter(name: str, module: dict[str, Any], directory: Directory) -> list[Fault]:
    """Set the keys of `lora` that follow from the adapter that a module starts with."""
    values = dict(module.get("lora") or {})
    folder = values.get("adapter")
    if not folder:
        return []
    key = f"modules.{name}.lora.adapter"
    part = module["llm" if name == LANGUAGE else "encoder"]
    # Layers behind the feature layer are not built.
    last = part.get("feature_layer", -1)
    layers = part.get("num_layers", 0)  # not of a class of transformers
    keys = adapter_keys(str(folder), name, layers, layers + (1 + last if isinstance(last, int) else 0), key)
    module["lora"] = {**keys, **values}
    # No weight depends on dropout.
    return [
        Fault(
            f"modules.{name}.lora.{lora_key}",
            f"is {values[lora_key]!r}, and the adapter in {folder} has {value!r}: remove it",
        )
        for lora_key, value in keys.items()
        if lora_key in values and lora_key != "dropout" and values[lora_key] != value
    ]


def _parts(name: str, directory: Directory, implementation: str = "") -> dict[str, dict[str, Any]]:
    try:
        composite, media = composite_of(directory), media_half(name, directory, implementation)
        if media is not None:
            names = {"name": directory.folder.name}
            return {"encoder": media.media_keys(name), "projector": names | PROJECTOR | OF_TRANSFORMERS}
        if is_tower(name, directory, implementation):
            from encoders.transformers_media.tower_reader import tower_keys

            return {"encoder": {**tower_keys(str(directory.folder)), "name": directory.name}}
        config = composite.part(directory.config, name) if composite else directory.config
    except EncoderError as error:
        raise ConfigError([Fault(directory.key, f"{directory.folder}: {error}")]) from error
    if name == LANGUAGE:
        as_is = implementation == "transformers"
        if not as_is and implementation != "native" and not is_family(config.get("model_type")):
            as_is = isinstance(composite, OfTransformers) or is_causal_language_model(config.get("model_type"))
        if as_is:
            return {"llm": keys_as_is(directory)}
        try:
            return {"llm": {"name": directory.name, **language_keys(config)}}
        except ConfigError as error:
            wrong = [f"{directory.folder}: {fault.key}: {fault.message}" for fault in error.faults]
            remedy = f". Or set modules.{LANGUAGE}.implementation=transformers, which is data parallel only"
            wrong[-1] += remedy if not implementation and is_family(config.get("model_type")) else ""
            raise ConfigError([Fault(directory.key, message) for message in wrong]) from error
    family = next((family for family, how in FAMILIES.items() if config["model_type"] in how.readers), None)
    if family is None:
        kinds = sorted(ENCODERS)
        text = f"{directory.folder} is of family {config['model_type']!r}, which is no encoder that can be read"
        more = f"; a language model is modules.{LANGUAGE}" if is_family(config["model_type"]) else ""
        raise ConfigError([Fault(directory.key, f"{text}; these can: {', '.join(kinds)}{more}")])
    try:
        keys: dict[str, Any] = {"name": directory.name, "family": family}
        preprocessor: Mapping[str, Any] = directory.preprocessor
        if composite is not None and composite.preprocessor is not None:
            preprocessor = composite.preprocessor(directory.config, preprocessor)
        keys |= FAMILIES[family].read(config, preprocessor)
        defaults = {field.name: field.default for field in fields(FAMILIES[family].spec)}
        keys = {name: defaults[name] for name in CONSTANTS if name in defaults} | keys
        if issubclass(FAMILIES[family].spec, VideoKeys) and composite is not None and composite.pad_id is not None:
            keys |= video_keys(directory.folder, composite.pad_id(directory.config), directory.has_tokenizer)
        if composite is not None and composite.encoder_keys is not None:
            keys |= composite.encoder_keys(directory.config, FAMILIES[family].spec, keys)
        parts = {"encoder": keys}
        if composite is not None and composite.projector is not None:
            parts["projector"] = {"name": directory.name, **PROJECTOR, **composite.projector(directory.config)}
    except EncoderError as error:
        raise ConfigError([Fault(directory.key, f"{directory.folder}: {error}")]) from error
    return parts


def _placeholder(name: str, directory: Directory, implementation: str) -> dict[str, str]:
    """Return the placeholder of a module's media in a directory's tokenizer, as far as config.json names it."""
    composite, media = composite_of(directory) or Composite(""), media_half(name, directory, implementation)
    if media is not None:
        try:
            return media.placeholder_keys(name)
        except EncoderError as error:
            raise ConfigError([Fault(directory.key, str(error))]) from error
    if composite.pad_id is None or not directory.has_tokenizer:
        return dict(composite.placeholder)
    number = composite.pad_id(directory.config)
    token = directory.token(number)
    if token is None:
        text = f"{directory.folder}: config.json has {number} as the id of an image's tokens, and its tokenizer none"
        raise ConfigError([Fault(directory.key, f"{text} of this id: copy the directory again")])
    return {**composite.placeholder, "pad": token}


def _contradictions(
    prefix: str, part: str, values: Mapping[str, Any], keys: Mapping[str, Any], directory: Directory
) -> list[Fault]:
    return [
        Fault(
            f"{prefix}.{key}",
            f"is {values[key]!r}, and {directory.folder / 'config.json'} makes it {value!r}: remove the key, or "
            f"{directory.key}",
        )
        for key, value in keys.items()
        if key in values and key not in CHOICES[part] and not _enlarges(part, key, values, keys)
        if not _are_alike(values[key], value, _spec(part, keys), key)
        if key != "image_size" or keys.get("family") not in ANY_SIZE
    ]


def _spec(part: str, keys: Mapping[str, Any]) -> type:
    llm = TransformersLlm if "model_config" in keys else LlmSpec
    specs: dict[str, type] = {"llm": llm, "projector": ProjectorSpec}
    return specs.get(part) or (FAMILIES[keys["family"]].spec if part == "encoder" else PlaceholderConfig)


def _are_alike(configured: Any, value: Any, spec: type, key: str) -> bool:
    """True if two values of a field of `spec` are equal, with defaults for missing keys (a saved config has all)."""
    if configured == value or not (isinstance(configured, Mapping) and isinstance(value, Mapping)):
        return bool(configured == value)
    made = next(field.default_factory for field in fields(spec) if field.name == key)
    default = made() if made is not MISSING else None
    if not is_dataclass(default) or isinstance(default, type):
        return False
    return {**asdict(default), **configured} == {**asdict(default), **value}


def _enlarges(part: str, key: str, values: Mapping[str, Any], keys: Mapping[str, Any]) -> bool:
    return (part, key) == ("llm", "vocab_size") and isinstance(values[key], int) and values[key] > keys[key]

"""Write the tables of docs/models.md from the registries of models that a directory of `transformers` may hold.

    python scripts/model_tables.py           # exit code 1 if the page is not current
    python scripts/model_tables.py --write   # make it current

For developers, as key_tables.py.
"""

import dataclasses
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # this checkout, whichever is installed

from encoders.registry import FAMILIES  # noqa: E402
from mimo_train.config.keys import rules_of  # noqa: E402
from mimo_train.config.llm_spec import RopeScaling  # noqa: E402
from mimo_train.config.pretrained import unsupported  # noqa: E402
from mimo_train.config.pretrained.composites import COMPOSITES  # noqa: E402
from mimo_train.config.transformers_llm import (  # noqa: E402
    TransformersLlm,
    Unsupported,
    causal_classes,
    saved_config,
)
from mimo_train.families import config_json  # noqa: E402
from mimo_train.families.registry import FAMILIES as LANGUAGE_FAMILIES  # noqa: E402
from mimo_train.families.registry import is_family  # noqa: E402
from scripts.key_tables import check_or_write, filled  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
VERSION_4 = ROOT / "benchmarks" / "export_loads_in_transformers_4.py"
WRITE = "python scripts/model_tables.py --write"


def parts() -> dict[str, str]:
    """Return the text between the markers, by their name."""
    return {
        "version": "\n".join(_version()),
        "language": "\n".join(_language()),
        "language-refused": "\n".join(_language_refused()),
        "encoders": "\n".join(_encoders()),
        "types": "\n".join(_types()),
    }


def current(page: str) -> str:
    """Return the text of the page with current parts. Raises Undescribed as `key_tables.current`."""
    return filled(page, parts(), PAGE.name)


def pinned_version(package: str = "transformers") -> str:
    """Return the version of a package in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = chain(project["dependencies"], *project["optional-dependencies"].values())
    return next(need.partition("==")[2] for need in needs if need.startswith(f"{package}=="))


def version_4() -> str:
    """Return the version 4 of `transformers` that the benchmark installs."""
    match = re.search(r"transformers==(4[.0-9]+)", VERSION_4.read_text())
    assert match is not None, VERSION_4
    return match[1]


TIERS = ("native", "mixed", "as it is")


class Tier(NamedTuple):
    """How a type of transformers is trained."""

    name: str
    """One of TIERS; empty: not at all."""
    media: tuple[str, ...] = ()
    """Kinds of media that it reads."""
    reason: str = ""
    """Why it is not trained, a clause."""


def types_of_parts() -> dict[str, str]:
    """Return the class of each type of transformers that reads media, by its auto mappings. Imports transformers."""
    from transformers.models.auto import modeling_auto as auto

    classes = {**auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    further = auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES  # mostly encoders with decoders
    return classes | {kind: further[kind] for kind in ("audioflamingo3", "musicflamingo")}


def tier_of_parts(kind: str, class_name: str) -> Tier:
    """Return the tier of a type that reads media, by its default config."""
    from transformers import CONFIG_MAPPING

    from encoders.transformers_media import directory

    if kind in unsupported.MEDIA:
        return Tier("", reason=unsupported.MEDIA[kind])
    composite = COMPOSITES.get(kind)
    if composite is not None and composite.projector is not None:
        return Tier("native", ("audio" if composite.encoder.startswith("audio") else "image",))
    config = CONFIG_MAPPING[kind](architectures=[class_name])
    if hasattr(config, directory.THINKER):
        config = getattr(config, directory.THINKER)
    for reason in directory.unsupported(config):
        return Tier("", reason=reason)
    media = tuple(directory.kinds_of(config))
    if not config.sub_configs and kind in causal_classes():
        return tier_of_text(kind)
    if not media or not directory.text_key(config):
        return Tier("")
    return Tier("mixed" if is_family(config.get_text_config(decoder=True).model_type) else "as it is", media)


def tier_of_text(kind: str) -> Tier:
    """Return the tier of a type of a causal language model."""
    if kind in unsupported.LANGUAGE:
        return Tier("", reason=unsupported.LANGUAGE[kind])
    if is_family(kind):
        return Tier("native")
    return Tier("as it is" if _is_read(kind) else "")


def _is_read(kind: str) -> bool:
    """True if the default config of a type of a causal language model has the sizes that are required. Decoders of
    types with an encoder, such as BartForCausalLM, are saved without it."""
    from transformers import CONFIG_MAPPING

    try:
        return (
            TransformersLlm(
                model_config=saved_config(CONFIG_MAPPING[kind]().to_dict() | {"is_encoder_decoder": False})
            ).sizes.num_layers
            > 0
        )
    except Unsupported:
        return False


def _version() -> Iterator[str]:
    yield "| tested with | what |"
    yield "|---|---|"
    yield f"| `transformers` {pinned_version()} | everything below, with random weights |"
    record = "[record](../benchmarks/export_loads_in_transformers_4_cpu2_2026-11-22.md)"
    yield f"| `transformers` {version_4()} | loads an export with the same logits ({record}) |"
    yield f"| `peft` {pinned_version('peft')} | adapters, import and export |"
    yield ""


def _language() -> Iterator[str]:
    yield from ["| native | `model_type` |", "|---|---|"]
    for row, kinds in (
        ("language models", [kind for kind, family in LANGUAGE_FAMILIES.items() if family.architecture]),
        ("parts of larger models", [kind for kind, family in LANGUAGE_FAMILIES.items() if not family.architecture]),
    ):
        yield f"| {row} | {_listed(kinds)} |"
    yield ""


def _language_refused() -> Iterator[str]:
    rope = next(rules_of(field).choices for field in RopeScaling.__dataclass_fields__.values() if field.name == "kind")
    values = {name: [shown(value) for value in allowed] for name, allowed in config_json.NEVER.items()}
    values |= {"hidden_act": list(config_json.ACTIVATIONS), "rope_type": list(rope)}
    yield from ["| key of `config.json` | values that can be read |", "|---|---|"]
    for name, allowed in values.items():
        texts = ["absent" if value == "None" else f"`{value}`" for value in allowed]
        texts += ["[NF4 of bitsandbytes](frozen.md#qlora)"] * (name == "quantization_config")
        yield f"| `{name}` | {', '.join(texts)} |"
    yield ""


def _encoders() -> Iterator[str]:
    yield from [
        "| `encoder.family` | `model_type` | parallel |",
        "|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        if not family.readers:
            continue
        kinds = ", ".join(f"`{kind}`" for kind in family.readers)
        # States of all layers are needed on one stage where some of them go to the language model.
        stages = "" if "deepstack" in {field.name for field in dataclasses.fields(family.spec)} else "`pp`, "
        parallel = "`dp`" if family.is_plain else f"`tp`, {stages}`dp`, `sp`"
        yield f"| [`{name}`](configuration.md#family-{name}) | {kinds} | {parallel} |"
    yield ""
    written = [f"`{name}`" for name, family in FAMILIES.items() if family.writer]
    yield from [f"Exportable without a directory: {', '.join(written)}.", ""]
    plain = [name for name, family in FAMILIES.items() if family.is_plain]
    for name in plain:
        yield f"- `{name}`: {inspect.getdoc(FAMILIES[name].spec).split('. ')[0].rstrip('.').replace(chr(10), ' ')}."
    yield ""


@cache
def tiers_of_types() -> tuple[dict[str, Tier], dict[str, Tier]]:
    """Return the tier of every type that reads media, and of every other type of a causal language model."""
    of_parts = {kind: tier_of_parts(kind, name) for kind, name in types_of_parts().items()}
    return of_parts, {kind: tier_of_text(kind) for kind in sorted(causal_classes().keys() - of_parts.keys())}


def _types() -> Iterator[str]:
    tiers, texts = tiers_of_types()
    yield from ["| tier | reads | types |", "|---|---|---|"]
    rows: dict[tuple[int, str, str], list[str]] = {}
    for kind, tier in tiers.items():
        if tier.name:
            rows.setdefault((TIERS.index(tier.name), tier.name, ", ".join(tier.media) or "text"), []).append(kind)
    for kind, tier in texts.items():
        if tier.name:
            rows.setdefault((len(TIERS) + TIERS.index(tier.name), tier.name, "text"), []).append(kind)
    for (_, name, reads), types in sorted(rows.items()):
        yield f"| {name} | {reads} | {_listed(types)} |"
    yield from ["", "| unsupported, because the model | types |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for kind, tier in (*tiers.items(), *texts.items()):
        if not tier.name:
            reasons.setdefault(tier.reason, []).append(kind)
    yield from (f"| {reason} | {_listed(types)} |" for reason, types in reasons.items())
    yield ""


def _listed(types: list[str]) -> str:
    return ", ".join(f"`{kind}`" for kind in sorted(types))


def shown(value: Any) -> str:
    """Return a value in JSON."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def main(arguments: list[str]) -> int:
    """Check the page, or write it; return the exit code."""
    return check_or_write(PAGE, current, WRITE, arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""The families of language models, by `model_type` of config.json. Installed packages add theirs by entry points."""

from functools import cache
from importlib.metadata import entry_points

from mimo_train.config.errors import ConfigError, UserError
from mimo_train.families.base import Family, fault
from mimo_train.families.cohere import COHERE2
from mimo_train.families.deepseek import DEEPSEEK_V3, DOTS1, GLM4_MOE_LITE, HY_V3, KIMI_K2
from mimo_train.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT
from mimo_train.families.glm import GLM, GLM4, GLM4_MOE, GLM4V_MOE_TEXT, GLM4V_TEXT, GLM_OCR_TEXT
from mimo_train.families.gpt_oss import GPT_OSS
from mimo_train.families.granite import GRANITE
from mimo_train.families.llama import CWM, ERNIE4_5, LLAMA, MINISTRAL, MISTRAL, MIXTRAL, SEED_OSS
from mimo_train.families.olmo import EXAONE4, OLMO2, OLMO3, OLMOE
from mimo_train.families.phi3 import PHI3
from mimo_train.families.qwen import (
    QWEN2,
    QWEN2_5_OMNI_TEXT,
    QWEN2_5_VL_TEXT,
    QWEN2_MOE,
    QWEN2_VL_TEXT,
    QWEN3,
    QWEN3_MOE,
    QWEN3_OMNI_MOE_TEXT,
    QWEN3_VL_MOE_TEXT,
    QWEN3_VL_TEXT,
)
from mimo_train.families.qwen3_5 import QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT
from mimo_train.families.smollm3 import SMOLLM3

GROUP = "mimo_train.families"
"""Entry point group in which installed packages register a family: `MODEL_TYPE = "package.module:FAMILY"`."""

FAMILIES: dict[str, Family] = {
    family.type: family
    for family in (
        LLAMA,
        MISTRAL,
        MIXTRAL,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        QWEN2_5_VL_TEXT,
        QWEN3_VL_TEXT,
        GEMMA2,
        GEMMA3_TEXT,
        GEMMA,
        MINISTRAL,
        CWM,
        SEED_OSS,
        QWEN2_MOE,
        QWEN2_VL_TEXT,
        QWEN2_5_OMNI_TEXT,
        GLM4_MOE,
        DOTS1,
        HY_V3,
        DEEPSEEK_V3,
        KIMI_K2,
        GLM4_MOE_LITE,
        QWEN3_VL_MOE_TEXT,
        QWEN3_OMNI_MOE_TEXT,
        QWEN3_5_TEXT,
        QWEN3_5_MOE_TEXT,
        QWEN3_NEXT,
        SMOLLM3,
        PHI3,
        GRANITE,
        ERNIE4_5,
        GLM,
        GLM4,
        GLM4V_TEXT,
        GLM4V_MOE_TEXT,
        GPT_OSS,
        OLMO2,
        OLMO3,
        COHERE2,
        GLM_OCR_TEXT,
        OLMOE,
        EXAONE4,
    )
}
"""The families of this package. An export of a model made here is of the first that supports it."""


def is_family(kind: object) -> bool:
    """True if `kind` is the `model_type` of a family."""
    return kind in FAMILIES or kind in _installed()


def family_of(kind: object) -> Family:
    """Return the family of a `model_type`.

    Raises:
        ConfigError: there is none.
        UserError: several packages have it, or the entry point leads to no family of this type.
    """
    entries = _installed().get(kind, []) if isinstance(kind, str) else []
    if len(entries) + (kind in FAMILIES) > 1:
        places = " and ".join([*(["mimo-train"] if kind in FAMILIES else []), *entries])
        raise UserError(f"model_type {kind!r}: {places} register it as a family. Keep one, uninstall the others")
    if kind in FAMILIES:
        return FAMILIES[str(kind)]
    if not entries:
        known = ", ".join([*FAMILIES, *_installed()])
        raise ConfigError([fault("model_type", kind, f"of language models, these can be read: {known}")])
    return _loaded(str(kind))


@cache
def _installed() -> dict[str, list[str]]:
    entries: dict[str, list[str]] = {}
    for point in entry_points(group=GROUP):
        entries.setdefault(point.name, []).append(point.value)
    return entries


def _loaded(kind: str) -> Family:
    (point,) = entry_points(group=GROUP, name=kind)
    try:
        family = point.load()
    except Exception as error:  # a user's module may raise anything
        raise UserError(
            f"model_type {kind!r}: importing {point.value} fails: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(family, Family) or family.type != kind:
        raise UserError(
            f"model_type {kind!r}: the entry point {point.value} must be a mimo_train.families.base.Family of this "
            f"type, is {getattr(family, 'type', family)!r}"
        )
    return family

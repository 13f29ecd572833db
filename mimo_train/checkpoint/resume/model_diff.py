"""Whether weights are of the model that a config describes: the keys that shape or interpret them. Imports no torch.

Every key of `encoder`, `projector`, `llm` and `lora` is compared, also those that are added to them some day, but for
the few that are named here.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from mimo_train.checkpoint.resume.key_diff import key_changes
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_data import DataConfig
from mimo_train.config.schema_modules import LoraConfig, ModuleConfig

MAY_CHANGE = {
    "name",
    "dropout",
    "init_std",
    "max_positions",
    "max_seconds",
    "router_aux_loss",
    "router_balancing",
    "router_z_loss",
}
"""Keys that neither shape weights nor interpret them: a run may go on with others."""

MAY_CHANGE_IN_A_NEW_RUN = MAY_CHANGE | {
    "image_size",
    "max_pixels",
    "min_pixels",
    "resize",
    "rope_base",
    "rope_scaling",
}
"""Keys that a new run may set otherwise for the weights it begins with: larger pictures, longer texts."""

SPECS = ("encoder", "projector", "llm")
"""Keys of a module that say what it is made of."""


def model_changes(before: Mapping[str, Any], now: ConfigContainer, *, new_run: bool = False) -> Iterator[str]:
    """Sentences with key, old and new value, one for each difference.

    Args:
        before: the config that the weights are of, as a checkpoint's record holds it. A key that it lacks was added
            later, and means its default.
        now: the config that asks for them.
        new_run: whether only the weights are taken (`checkpoint.weights`). Then modules may be left out, and adapters
            be added.

    Raises:
        KeyError, TypeError, AttributeError: `before` is no config.
    """
    modules: Mapping[str, Any] = before["modules"]
    misfit = _other_modules(list(modules), list(now.modules), new_run)
    if misfit:
        yield misfit
        return
    free = MAY_CHANGE_IN_A_NEW_RUN if new_run else MAY_CHANGE
    for name, module in now.modules.items():
        yield from _spec_changes(modules[name], module, f"modules.{name}", free)
        yield from _adapter_changes(modules[name].get("lora") or {}, module, f"modules.{name}.lora", new_run)
    length = before.get("data", {}).get("sequence_length", DataConfig().sequence_length)
    if now.language.llm and now.language.llm.position == "learned" and length != now.data.sequence_length:
        yield f"data.sequence_length was {length}, is {now.data.sequence_length}, with learned positions"


def module_changes(before: Mapping[str, Any], source: str, now: ModuleConfig, prefix: str) -> Iterator[str]:
    """Sentences as of `model_changes`, about one module whose weights a new run takes.

    Args:
        before: the config that the weights are of.
        source: name of the module there.
        prefix: key of the module here.

    Raises:
        KeyError, TypeError, AttributeError: `before` is no config, or has no such module.
    """
    was = before["modules"][source]
    yield from _spec_changes(was, now, prefix, MAY_CHANGE_IN_A_NEW_RUN)
    yield from _adapter_changes(was.get("lora") or {}, now, f"{prefix}.lora", True)


def _other_modules(before: list[str], now: list[str], new_run: bool) -> str:
    """How the modules differ; their order matters where the tokens of their media are numbered and joined."""
    encoders, left = [name for name in now if name != LANGUAGE], [name for name in before if name != LANGUAGE]
    if new_run and encoders:
        left = [name for name in left if name in encoders]
    if encoders == left:
        return ""
    order = " in this order" if sorted(encoders) == sorted(left) else ""
    return f"modules were {', '.join(before)}, are {', '.join(now)}{order}"


def _spec_changes(before: Mapping[str, Any], module: ModuleConfig, prefix: str, free: Set[str]) -> Iterator[str]:
    for part in SPECS:
        was, spec = before.get(part), getattr(module, part)
        if (was is None) != (spec is None):
            yield f"{prefix}.{part} {'was not there' if was is None else 'is gone'}"
        elif was is not None and was.get("family", "") != getattr(spec, "family", ""):
            yield f"{prefix}.{part}.family was {was.get('family')}, is {getattr(spec, 'family', None)}"
        elif was is not None:
            yield from key_changes(was, spec, f"{prefix}.{part}", free)


def _adapter_changes(was: Mapping[str, Any], module: ModuleConfig, prefix: str, new_run: bool) -> Iterator[str]:
    before, now = was.get("rank", LoraConfig().rank), module.lora.rank
    if not before and (not now or new_run):
        return
    if before and not now:
        yield f"{prefix}.rank was {before}, is 0, so that its adapters would be lost"
        return
    more = new_run and set(was.get("targets", ())) <= set(module.lora.targets)
    yield from key_changes(was, module.lora, prefix, MAY_CHANGE | {"adapter"} | ({"targets"} if more else set()))

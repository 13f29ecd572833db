"""What fits where no layout of a run does: the same run with adapters, or on more GPUs."""

from collections.abc import Iterator
from dataclasses import replace

from mimo_train.config.errors import ConfigError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.estimate.memory import GIB
from mimo_train.preflight.plan.search import Request, fullest_rank, require_sound

RANK = 16
"""Of the adapters that are tried."""
DOUBLINGS = 6
"""How often the number of GPUs is doubled."""


def alternatives(cfg: ConfigContainer, request: Request) -> str:
    """Return sentences that say what fits, or that more or larger GPUs are needed."""
    return " ".join(_sentences(cfg, request)) or "Use more or larger GPUs."


def _sentences(cfg: ConfigContainer, request: Request) -> Iterator[str]:
    adapted = _with_adapters(cfg)
    if adapted is not None and (memory := fullest_rank(adapted, request)):
        key = f"modules.{LANGUAGE}.lora.rank={RANK}"
        yield f"With LoRA on the language model ({key}) it fits, with {memory / GIB:.3g} GiB a rank."
    for doubling in range(1, DOUBLINGS + 1):
        gpus = request.gpus * 2**doubling
        if memory := fullest_rank(cfg, replace(request, gpus=gpus)):
            yield f"On {gpus} x {request.device.name} it fits as it is, with {memory / GIB:.3g} GiB a rank."
            return


def _with_adapters(cfg: ConfigContainer) -> ConfigContainer | None:
    """The run with adapters on its language model; None where it has them, or cannot have them."""
    language = cfg.language
    if language.lora.rank:
        return None
    adapted = replace(language, lora=replace(language.lora, rank=RANK), freeze=[], freeze_until={})
    changed = replace(cfg, modules={**cfg.modules, LANGUAGE: adapted})
    try:
        require_sound(changed)
    except ConfigError:
        return None
    return changed

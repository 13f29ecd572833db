"""Which layers of a run `train.compile` can compile: those that `mimo_train.models.dense_layer` computes. Imports no
torch."""

from collections.abc import Iterator

from encoders.plain.spec import PlainSpec
from mimo_train.config.errors import Fault
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer


def compiled_modules(cfg: ConfigContainer) -> list[str]:
    """Names of the modules whose layers are compiled."""
    return [name for name in cfg.modules if cfg.compile_of(name) == "layers"]


def compile_remark(cfg: ConfigContainer) -> str:
    """What a run says before its first step, which waits for the compiler; empty where nothing is compiled."""
    compiled = compiled_modules(cfg)
    if not compiled:
        return ""
    layers = " and ".join(f"modules.{name}" for name in compiled)
    return (
        f"train.compile: the layers of {layers} are compiled in the first step, which takes seconds to minutes longer"
    )


def compile_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Why layers of this run cannot be compiled, of a config whose sizes and layouts have no fault."""
    for name in compiled_modules(cfg):
        key = f"modules.{name}.compile" if cfg.modules[name].compile else "train.compile"
        if why := _not_plain_because(cfg, name):
            yield Fault(
                key,
                f"is layers, and only layers that one rank computes in plain calls of torch are compiled: {why}; set "
                f"modules.{name}.compile=none",
            )


def _not_plain_because(cfg: ConfigContainer, name: str) -> str:
    module, key = cfg.modules[name], f"modules.{name}"
    if module.layout.tp > 1:
        return f"{key}.layout.tp is {module.layout.tp}, which sends inside them"
    if module.lora.rank > 0:
        return f"{key}.lora.rank is {module.lora.rank}, and adapters are beside them"
    if cfg.fp8_of(name) != "none":
        return f"{key} has fp8 ({cfg.fp8_of(name)}), which is of Transformer Engine's layers"
    if cfg.recompute_of(name) == "selective":
        return f"{key} has recompute selective, which is inside them"
    if name == LANGUAGE and cfg.optim.overlap_param_gather:
        return "optim.overlap_param_gather waits for weights inside them"
    if module.llm is not None:
        llm = module.llm
        odd = {"num_experts": llm.num_experts, "dropout": llm.dropout, "post_norms": llm.post_norms}
        return next((f"{key}.llm.{field} is {value}" for field, value in odd.items() if value), "")
    if isinstance(module.encoder, PlainSpec):
        return f"{key}.encoder.family {module.encoder.family} is a torch module of its own"
    for part in module.encoder.parts.values():
        if part.dropout or part.layer_scale:
            return f"{key}.encoder has {'dropout' if part.dropout else 'layer_scale'} in its layers"
    return ""

"""The linear layers that get adapters (`lora.targets`), and the parameters of these adapters.

Megatron-Core fuses projections: `linear_qkv` is queries, keys and values, a gated `linear_fc1` is gate and up. An
adapter goes next to the whole layer or next to single projections, each with its own A and B, as in PEFT.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec

from encoders.key_rules import nearest
from encoders.plain.spec import PlainSpec
from mimo_train.config.errors import Fault
from mimo_train.config.parts import ADAPTED, LANGUAGE, PARTS, SAVED, parts_of
from mimo_train.config.schema_modules import BLOCK, LoraConfig, ModuleConfig
from mimo_train.config.transformers_llm import MODEL, TransformersLlm, parameters_of
from mimo_train.layout.ranks import stage_layers
from mimo_train.models.blocks.base import WHOLE, Linear
from mimo_train.models.blocks.encoder_layer import encoder_layer

_PROJECTOR = PARTS["projector"].removesuffix(".*")
_EXAMPLES = 4
"""Maximum number of names that a message gives as examples."""


@dataclass(frozen=True)
class AdaptedLinear:
    """A linear layer with adapters."""

    linear: Linear
    projections: tuple[str, ...]
    """The projections with an adapter, in the order of the weight's rows; (WHOLE,) is one adapter for the layer."""

    def parameters(self, lora: LoraConfig, tp: int = 1, ep: int = 1, etp: int = 1) -> int:
        """Return the parameters on one rank. Each adapter has A [rank, inputs], B [rows, rank] and, with DoRA, [rows].
        Tensor parallelism, of experts that over `etp` ranks, divides the dimension along which the weight is split."""
        linear, rank, of_row = self.linear, lora.rank, lora.rank + lora.dora
        tp = etp if linear.experts else tp
        inputs = linear.inputs if linear.column else linear.inputs // tp
        rows = [linear.rows(projection) // (tp if linear.column else 1) for projection in self.projections]
        copies = linear.experts // ep if linear.experts else 1
        return copies * sum(rank * inputs + of_row * row_count for row_count in rows)


def layers_name(module: str) -> str:
    """Return the name of a module's list of transformer layers."""
    return "decoder.layers" if module == LANGUAGE else f"encoders.{module}.layers.layers"


def linears(name: str, module: ModuleConfig, language_width: int) -> list[Linear]:
    """Return the linear layers that can have adapters: those of transformer layers in order, then of the projector.
    Routers have none. `language_width`: output width of the projector."""
    if isinstance(module.llm, TransformersLlm):
        of_class = parameters_of(module.llm.model_config).linears
        return [
            Linear(MODEL + path, inputs, ((path.rpartition(".")[2], rows),), layer=0)
            for path, (rows, inputs) in of_class.items()
        ]
    if isinstance(module.encoder, PlainSpec):
        return []
    if module.encoder and len(module.encoder.parts) > 1:
        return _projector_linears(module, language_width)  # and here for the encoders
    layers = module.llm.layers() if module.llm else [encoder_layer(module.encoder)] * module.encoder.built_layers
    result = [
        linear
        for number, layer in enumerate(layers)
        for block in layer.blocks
        for linear in block.linears(f"{layers_name(name)}.{number}", number)
    ]
    return result if name == LANGUAGE else result + _projector_linears(module, language_width)


def _layers(module: ModuleConfig) -> int:
    if isinstance(module.llm, TransformersLlm):
        return 1  # in one stage
    return module.llm.num_layers if module.llm else module.encoder.built_layers


def _projector_linears(module: ModuleConfig, language_width: int) -> list[Linear]:
    width, name = module.encoder.joined_width(module.projector.merge), f"{_PROJECTOR}.0.encoder"
    if module.projector.kind == "none":
        return []
    if module.projector.kind == "linear":
        return [Linear(name, width, (("encoder", language_width),))]
    middle = module.projector.ffn_hidden_size or language_width
    up = (("gate_proj", middle), ("up_proj", middle)) if module.projector.gated else (("linear_fc1", middle),)
    return [
        Linear(f"{name}.linear_fc1", width, up),
        Linear(f"{name}.linear_fc2", middle, (("linear_fc2", language_width),), column=False),
    ]


def adapted_linears(name: str, module: ModuleConfig, language_width: int) -> dict[str, AdaptedLinear]:
    """Return the linear layers with adapters by name, for a module without faults. Arguments as in `linears`."""
    adapters = {}
    for linear in linears(name, module, language_width) if module.lora.rank else ():
        named = {projection for pattern in _targets(module) for projection in _matches(pattern, linear)}
        if named:
            order = (WHOLE, *(projection for projection, _ in linear.projections))
            adapters[linear.name] = AdaptedLinear(linear, tuple(each for each in order if each in named))
    return adapters


def adapts_projector(adapters: dict[str, AdaptedLinear]) -> bool:
    """True if a linear layer of the projector has an adapter."""
    return any(adapter.linear.layer is None for adapter in adapters.values())


def adapter_parameters(
    name: str,
    module: ModuleConfig,
    language_width: int,
    *,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    stage: int = 0,
    stages: int = 1,
    vpp: int = 1,
) -> tuple[int, int]:
    """Return the adapter parameters of a module on one rank of a pipeline stage, without and of experts; the projector
    is on the last stage."""
    local_layers: set[int | None] = {*stage_layers(_layers(module), stage, stages, vpp)}
    local_layers |= {None} if stage == stages - 1 else set()
    adapters = adapted_linears(name, module, language_width).values()
    counts = [0, 0]
    for adapter in adapters:
        if adapter.linear.layer in local_layers:
            counts[adapter.linear.experts > 0] += adapter.parameters(module.lora, tp, ep, etp)
    return counts[0], counts[1]


def quantized_parameters(
    name: str,
    module: ModuleConfig,
    language_width: int,
    *,
    tp: int = 1,
    ep: int = 1,
    etp: int = 1,
    stage: int = 0,
    stages: int = 1,
    vpp: int = 1,
) -> tuple[int, int]:
    """Return the quantized parameters of a module on one rank of a pipeline stage, and those of its largest weight."""
    if not module.lora.quantization:
        return 0, 0
    local_layers = {*stage_layers(_layers(module), stage, stages, vpp)}
    total = largest = 0
    for linear in linears(name, module, language_width):
        if linear.layer in local_layers:
            size = linear.rows() * linear.inputs // (etp if linear.experts else tp)
            total += size * (linear.experts // ep if linear.experts else 1)
            largest = max(largest, size)
    return total, largest


def _quantization_faults(name: str, module: ModuleConfig, candidates: list[Linear]) -> Iterator[Fault]:
    """Yield the fault of a linear layer whose inputs on a rank are not whole blocks."""
    key, layout = f"modules.{name}.lora.quantization", module.layout
    if isinstance(module.llm, TransformersLlm):
        yield Fault(key, f"requires a native model. Set modules.{name}.implementation=native, or remove it")
        return
    if find_spec("bitsandbytes") is None:
        yield Fault(key, "requires bitsandbytes. Install the extra qlora: pip install 'mimo-train[qlora]'")
    for linear in candidates:
        ranks = 1 if linear.column else layout.etp if linear.experts else layout.tp
        if linear.layer is not None and linear.inputs % (BLOCK * ranks):
            yield Fault(
                key,
                f"nf4 has a scale for {BLOCK} inputs of a row, and {linear.name} has {linear.inputs} inputs over "
                f"{ranks} ranks. Use {'a smaller ' if ranks > 1 else 'other sizes, or remove it'}"
                f"{('etp' if linear.experts else 'tp') if ranks > 1 else ''}",
            )
            return


def adapter_faults(name: str, module: ModuleConfig, language_width: int) -> Iterator[Fault]:
    """Yield faults of targets that match nothing or overlap, and of frozen parts with adapters, for valid sizes."""
    lora, prefix, targets = module.lora, f"modules.{name}", _targets(module)
    if isinstance(module.encoder, PlainSpec) or lora.rank <= 0 or not lora.targets or next(lora.faults(""), None):
        return
    candidates = linears(name, module, language_width)
    if lora.quantization:
        yield from _quantization_faults(name, module, candidates)
    unmatched = [pattern for pattern in targets if not any(_matches(pattern, linear) for linear in candidates)]
    experts = getattr(module.llm, "num_experts", 0)
    of_experts = [pattern for pattern in unmatched if pattern in ("linear_fc1", "linear_fc2")]
    if of_experts and experts:
        dense = [
            linear.name.rpartition(".")[2]
            for linear in candidates
            if linear.layer is not None and not _is_expert(linear)
        ]
        yield Fault(
            f"{prefix}.lora.targets",
            f"{' and '.join(of_experts)} belong to the {experts} experts, which get adapters by the name experts. Set "
            f"{prefix}.lora.targets=[{', '.join(dict.fromkeys(dense))}, experts]",
        )
    elif unmatched:
        yield Fault(
            f"{prefix}.lora.targets", f"{unmatched[0]!r} matches no linear layer. {_near(unmatched[0], candidates)}"
        )
    adapters = adapted_linears(name, module, language_width)
    if any(adapter.linear.experts for adapter in adapters.values()):
        for key, is_set in (("dora", lora.dora), ("dropout", lora.dropout > 0)):
            if is_set:
                yield Fault(
                    f"{prefix}.lora.{key}",
                    f"is not supported with adapters of experts (PEFT has no form for it). Set it to "
                    f"{'false' if key == 'dora' else 0}, or remove experts from {prefix}.lora.targets",
                )
    for adapter in adapters.values():
        path = adapter.linear.name
        if WHOLE in adapter.projections and len(adapter.projections) > 1:
            yield Fault(
                f"{prefix}.lora.targets",
                f"{path} is named as a whole, and its {' and '.join(adapter.projections[1:])} too: adapters are next "
                f"to {path.rpartition('.')[2]} or next to its projections; remove one of the targets",
            )
            break
    tp = module.layout.tp
    shared = [each.linear for each in adapters.values() if each.linear.cut_groups and each.linear.groups % tp]
    if shared:
        yield Fault(
            f"{prefix}.layout.tp",
            f"tp {tp} does not divide the {shared[0].groups} key heads of {shared[0].name}, which has an adapter: use "
            f"a divisor of {shared[0].groups}, or other {prefix}.lora.targets",
        )
    yield from _frozen_adapters(name, module, adapters)


def _frozen_adapters(name: str, module: ModuleConfig, adapters: dict[str, AdaptedLinear]) -> Iterator[Fault]:
    prefix = f"modules.{name}"
    for entry in (*parts_of(name), "*"):
        pattern = PARTS.get(entry, entry)
        if entry in module.freeze and any(fnmatchcase(path, pattern) for path in adapters):
            yield Fault(
                f"{prefix}.freeze",
                f"{entry!r} freezes the adapters of {prefix}.lora.rank {module.lora.rank} too: remove it, the other "
                "weights are frozen as it is",
            )
            return
    for saved in module.lora.modules_to_save:
        entry = next((each for each in module.freeze if fnmatchcase(SAVED.get(saved, ""), PARTS.get(each, each))), "")
        if entry:
            text = f"{entry!r} freezes {saved} of {prefix}.lora.modules_to_save too. Remove it from one of them"
            yield Fault(f"{prefix}.freeze", text)
            return


def _targets(module: ModuleConfig) -> list[str]:
    """Return `lora.targets`; by default all linear layers of the transformer layers that can have adapters."""
    return ["*"] if module.lora.targets == list(ADAPTED) else module.lora.targets


def _matches(pattern: str, linear: Linear) -> set[str]:
    of_projector = pattern.startswith(_PROJECTOR)
    if of_projector != (linear.layer is None):
        return set()
    if _is_expert(linear):
        if pattern in ("experts", "shared_experts"):
            return {WHOLE} if f".{pattern}." in linear.name else set()
        if "experts" not in pattern:
            return set()
    by_path = of_projector or "." in pattern
    projections = {
        projection
        for name, projection in linear.names().items()
        if fnmatchcase(name if by_path else name.rpartition(".")[2], pattern)
    }
    return {WHOLE} if WHOLE in projections else projections


def _is_expert(linear: Linear) -> bool:
    """True for experts and shared experts, which only patterns with the word experts match."""
    return "experts." in linear.name


def _near(pattern: str, candidates: list[Linear]) -> str:
    names = [name for linear in candidates for name in linear.names()]
    if "." not in pattern:
        last = [name.rpartition(".")[2] for linear in candidates if linear.layer is not None for name in linear.names()]
        return nearest(pattern, dict.fromkeys((*(name for name in ADAPTED if name in last), *last)))
    near = nearest(pattern, names)
    return near if near.startswith("Did") else f"Names look like {', '.join(names[:_EXAMPLES])}"

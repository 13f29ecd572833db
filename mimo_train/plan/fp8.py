"""Which layers of a run have fp8 (`train.fp8`), what that asks of sizes, and what it costs. Imports no torch."""

from collections.abc import Iterator

from encoders.plain.spec import PlainSpec
from encoders.spec import GATED, EncoderSpec, built_layers, encoders_in, layer_options
from mimo_train.config.fault import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.plan.layout import stage_layers

FP8_BYTES = 2
"""Bytes of a weight's copies in fp8: one by rows for the forward pass, one by columns for the gradient of the input."""

_IN_BF16 = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def fp8_unit(recipe: str) -> int:
    """What the widths and the rows of a product in fp8 must be multiples of: matrix units take 16, scales of `mxfp8`
    are of 32 numbers each."""
    return 32 if recipe == "mxfp8" else 16


def has_fp8(cfg: ConfigContainer) -> dict[str, str]:
    """The recipe of each module whose layers have fp8."""
    recipes = {name: cfg.fp8_of(name) for name in cfg.modules}
    return {name: recipe for name, recipe in recipes.items() if recipe != "none"}


def row_unit(cfg: ConfigContainer) -> int:
    """What the rows of the language model's text that one rank has must be multiples of, so that sequence-parallel
    ranks can gather theirs; rows that nobody gathers are padded where they are multiplied."""
    recipe = cfg.fp8_of(LANGUAGE)
    return 1 if recipe == "none" or not cfg.language.layout.sp else fp8_unit(recipe)


def torch_layers_because(cfg: ConfigContainer, name: str) -> str:
    """Why the layers of a module are torch's where Transformer Engine is installed; empty: they are not."""
    module = cfg.modules[name]
    if module.lora.rank > 0:
        return f"modules.{name}.lora.rank is {module.lora.rank}, and adapters are beside torch's layers"
    if module.llm is not None:
        if module.llm.attention_softcap:
            return f"modules.{name}.llm.attention_softcap caps scores, which is torch's attention"
        if module.llm.window and module.layout.cp > 1:
            return f"modules.{name}.llm.window with layout.cp {module.layout.cp} is torch's attention"
        return ""
    if isinstance(module.encoder, PlainSpec):
        return f"modules.{name}.encoder.family {module.encoder.family} is a plain torch module"
    if any(layer_options(part)["full_attention"] is not None for part in encoders_in(module.encoder).values()):
        return f"modules.{name}.encoder has attention inside windows, which is torch's"
    return ""


def fp8_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Why layers of this run cannot have fp8, of a config whose sizes and layouts have no fault."""
    if "delayed" in {cfg.train.fp8, *(module.fp8 for module in cfg.modules.values())}:
        yield Fault(
            "train.fp8",
            "delayed scales by a history of largest values, which Transformer Engine keeps in a pickle and checkpoints "
            "here have none; it is summed over ranks that run other modules, too: use tensorwise",
        )
    recipes = has_fp8(cfg)
    for name in _IN_BF16:
        if (number := getattr(cfg.train, name)) and not recipes:
            yield Fault(f"train.{name}", f"is {number}, and no module has fp8: set it to 0, or set train.fp8")
    for name, recipe in recipes.items():
        key = f"modules.{name}.fp8" if cfg.modules[name].fp8 else "train.fp8"
        none = f"set modules.{name}.fp8=none"
        if cfg.train.precision != "bf16":
            yield Fault(key, f"is {recipe}, and train.precision {cfg.train.precision}: set that to bf16, or {none}")
        if cfg.run.device == "cpu":
            yield Fault(key, f"is {recipe}, which is of Transformer Engine on CUDA, and run.device is cpu: {none}")
        if why := torch_layers_because(cfg, name):
            yield Fault(key, f"is {recipe}, and the layers cannot be Transformer Engine's: {why}; {none}")
        elif name == LANGUAGE and cfg.llm.num_experts:
            yield Fault(
                key, f"is {recipe}, and layers with experts (num_experts {cfg.llm.num_experts}) have none: {none}"
            )
        else:
            yield from _size_faults(cfg, name, recipe, key)


def _size_faults(cfg: ConfigContainer, name: str, recipe: str, key: str) -> Iterator[Fault]:
    module, unit = cfg.modules[name], fp8_unit(recipe)
    tp = module.layout.tp
    for what, layers, widths in _widths(cfg, name):
        wrong = {field: width for field, width in widths.items() if width % tp or width // tp % unit}
        for field, width in wrong.items():
            yield Fault(
                key,
                f"{recipe} needs widths of multiples of {unit} on each rank, and {what}{field} {width} over tp {tp} is "
                f"{width / tp:g}: change one, or set modules.{name}.fp8=none",
            )
        for field in _IN_BF16:
            most = layers // module.layout.pp
            if (number := getattr(cfg.train, field)) > most:
                yield Fault(
                    f"train.{field}",
                    f"is {number}, and a stage of {what.rstrip('.')} has {most} layers: use at most that",
                )
    if not module.layout.sp:
        return
    if name == LANGUAGE:
        parts = tp * unit * (2 * module.layout.cp if module.layout.cp > 1 else 1)
        if cfg.data.sequence_length % parts:
            yield Fault(
                "data.sequence_length",
                f"is {cfg.data.sequence_length}; with modules.{name}.layout.sp and {key} {recipe} each rank has a "
                f"multiple of {unit} rows of it: use a multiple of {parts}",
            )
        return
    for part in encoders_in(module.encoder).values():
        if (tokens := part.token_unit(module.projector.merge)) % (tp * unit):
            yield Fault(
                f"modules.{name}.layout.sp",
                f"with {key} {recipe} each of tp {tp} ranks needs a multiple of {unit} rows, and a {part.medium} has "
                f"{tokens} tokens inside the encoder: set sp to false, or modules.{name}.fp8=none",
            )


def _widths(cfg: ConfigContainer, name: str) -> Iterator[tuple[str, int, dict[str, int]]]:
    """(key, layers, widths of products that tp divides and of those that it does not, times tp) of each stack of layers
    of a module."""
    module, tp = cfg.modules[name], cfg.modules[name].layout.tp
    if module.llm is not None:
        llm: LlmSpec = module.llm
        yield (
            f"modules.{name}.llm.",
            llm.num_layers,
            {
                "hidden_size": llm.hidden_size * tp,
                "ffn_hidden_size": llm.ffn_hidden_size,
                "queries": llm.query_width,
                "queries, keys and values": llm.qkv_width,
            },
        )
        return
    for part, spec in encoders_in(module.encoder).items():
        place = f"modules.{name}.encoder.{part}." if part else f"modules.{name}.encoder."
        widths = {"hidden_size": spec.hidden_size * tp, "ffn_hidden_size": spec.ffn_hidden_size}
        yield place, built_layers(spec), {**widths, "queries": spec.hidden_size}


def fp8_weight_bytes(cfg: ConfigContainer, name: str, stage: int, *, tp: int, stages: int, vpp: int = 1) -> int:
    """Bytes of the copies in fp8 of a module's weights on one rank of a pipeline stage, kept from one step to the
    next."""
    if cfg.fp8_of(name) == "none":
        return 0
    if name == LANGUAGE:
        llm = cfg.llm
        up = (2 if llm.is_gated else 1) * llm.ffn_hidden_size
        each = llm.hidden_size * (llm.qkv_width + llm.query_width + up + llm.ffn_hidden_size)
        own = stage_layers(llm.num_layers, stage, stages, vpp if stages > 1 else 1)
        return FP8_BYTES * each // tp * _in_fp8(cfg, own, llm.num_layers)
    total = 0
    for spec in encoders_in(cfg.modules[name].encoder).values():
        layers = built_layers(spec)
        total += FP8_BYTES * _matrices(spec) // tp * _in_fp8(cfg, stage_layers(layers, stage, stages), layers)
    return total


def _matrices(spec: EncoderSpec) -> int:
    """Numbers in the matrices of a layer of an encoder."""
    up = (2 if spec.activation == GATED else 1) * spec.ffn_hidden_size
    return spec.hidden_size * (4 * spec.hidden_size + up + spec.ffn_hidden_size)


def _in_fp8(cfg: ConfigContainer, own: list[int], layers: int) -> int:
    """How many of these layers, of so many, are in fp8."""
    first, behind = cfg.train.num_layers_at_start_in_bf16, layers - cfg.train.num_layers_at_end_in_bf16
    return sum(first <= layer < behind for layer in own)


def described(cfg: ConfigContainer) -> str:
    """What of a run is in fp8, in words; empty: nothing."""
    recipes = has_fp8(cfg)
    if not recipes:
        return ""
    ends = [getattr(cfg.train, name) for name in _IN_BF16]
    but = f", but for the first {ends[0]} and the last {ends[1]} of each" if any(ends) else ""
    modules = ", ".join(f"{name} {recipe}" for name, recipe in recipes.items())
    return f"layers in fp8: {modules}{but}; all else in {cfg.train.precision}"

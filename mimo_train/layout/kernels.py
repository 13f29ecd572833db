"""Kernels of the layers of a run: Transformer Engine in fp8 (`train.fp8`) and compiled layers (`train.compile`)."""

from collections.abc import Iterable, Iterator

from encoders.plain.spec import PlainSpec
from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_train import recompute_parts
from mimo_train.config.transformers_llm import TransformersLlm

NOT_PLAIN = ("post_norms", "rope_interleaved", "activation_clamp", "glu_offset", "parallel_block")
"""Keys of a language model whose layers `mimo_train.models.dense_layer` does not compute."""

_IN_BF16 = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")


def fp8_unit(recipe: str) -> int:
    """Return the unit of widths and rows of fp8 matmuls: 16 for tensor cores, 32 for the scales of `mxfp8`."""
    return 32 if recipe == "mxfp8" else 16


def has_fp8(cfg: ConfigContainer) -> dict[str, str]:
    """Return the fp8 recipe of each module with fp8 layers."""
    recipes = {name: cfg.fp8_of(name) for name in cfg.modules}
    return {name: recipe for name, recipe in recipes.items() if recipe != "none"}


def row_unit(cfg: ConfigContainer) -> int:
    """Return the unit of text rows on one rank of the language model: sequence-parallel ranks gather rows, and other
    rows are padded in the matmul."""
    recipe = cfg.fp8_of(LANGUAGE)
    return 1 if recipe == "none" or not cfg.language.layout.sp else fp8_unit(recipe)


def torch_layers_because(cfg: ConfigContainer, name: str) -> str:
    """Return why a module uses torch layers even if Transformer Engine is installed; empty if it does not."""
    module = cfg.modules[name]
    if isinstance(module.llm, TransformersLlm):
        return f"modules.{name} is a class of transformers as it is"
    if module.lora.rank > 0:
        return f"modules.{name}.lora.rank is {module.lora.rank}, and adapters require torch's layers"
    if "norms" in recompute_parts(cfg.recompute_of(name)):
        return f"recompute=norms of modules.{name} requires torch's layers"
    if name == LANGUAGE and cfg.bidirectional:
        return f"modules.{name} has tokens that see each other, whose mask requires torch's layers"
    if module.llm is not None:
        if module.llm.torch_norms:
            return f"modules.{name}.llm.{module.llm.torch_norms} requires torch's layers"
        blocks = (block for layer in module.llm.layers() for block in layer.blocks)
        because = (block.needs_torch(module.layout.cp) for block in blocks)
        return next((f"modules.{name}.{reason}" for reason in because if reason), "")
    if isinstance(module.encoder, PlainSpec):
        return f"modules.{name}.encoder.family {module.encoder.family} is a plain torch module"
    if any(part.full_attention is not None for part in module.encoder.parts.values()):
        return f"modules.{name}.encoder has window attention, which requires torch's layers"
    return ""


def fp8_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of fp8, for a config without faults of sizes and layouts."""
    if "delayed" in {cfg.train.fp8, *(module.fp8 for module in cfg.modules.values())}:
        yield Fault(
            "train.fp8",
            "delayed is not supported: its history of largest values is a pickle of Transformer Engine, which "
            "checkpoints do not hold, and is reduced over ranks of other modules. Use tensorwise",
        )
    recipes = has_fp8(cfg)
    for name in _IN_BF16:
        if (number := getattr(cfg.train, name)) and not recipes:
            yield Fault(f"train.{name}", f"is {number}, and no module has fp8. Set it to 0, or set train.fp8")
    for name, recipe in recipes.items():
        key = f"modules.{name}.fp8" if cfg.modules[name].fp8 else "train.fp8"
        off = f"set modules.{name}.fp8=none"
        if cfg.train.precision != "bf16":
            yield Fault(key, f"{recipe} requires train.precision=bf16 (is {cfg.train.precision}). Set it, or {off}")
        if cfg.run.device == "cpu":
            yield Fault(key, f"{recipe} requires CUDA and Transformer Engine (run.device is cpu). S{off[1:]}")
        if reason := torch_layers_because(cfg, name):
            yield Fault(key, f"{recipe} requires layers of Transformer Engine: {reason}. S{off[1:]}")
        else:
            yield from _size_faults(cfg, name, recipe, key)


def _size_faults(cfg: ConfigContainer, name: str, recipe: str, key: str) -> Iterator[Fault]:
    module, unit = cfg.modules[name], fp8_unit(recipe)
    tp = module.layout.tp
    for prefix, layers, widths in _widths(cfg, name):
        for field, (width, axis, ranks) in widths.items():
            if width % (ranks * unit):
                over = f" over {axis} {ranks} is {width / ranks:g}" if axis else ""
                yield Fault(
                    key,
                    f"{recipe} requires widths that are multiples of {unit} on each rank, got {prefix}{field} "
                    f"{width}{over}. Change one, or set modules.{name}.fp8=none",
                )
        for field in _IN_BF16:
            most = layers // module.layout.pp
            if (number := getattr(cfg.train, field)) > most:
                yield Fault(
                    f"train.{field}",
                    f"is {number}, and a stage of {prefix.rstrip('.')} has {most} layers. Use at most that",
                )
    if not module.layout.sp:
        return
    if name == LANGUAGE:
        parts = tp * unit * (2 * module.layout.cp if module.layout.cp > 1 else 1)
        if cfg.data.sequence_length % parts:
            yield Fault(
                "data.sequence_length",
                f"is {cfg.data.sequence_length}; with modules.{name}.layout.sp and {key}={recipe} each rank must have "
                f"a multiple of {unit} rows. Use a multiple of {parts}",
            )
        return
    for part in module.encoder.parts.values():
        if (tokens := part.token_unit(module.projector.merge)) % (tp * unit):
            yield Fault(
                f"modules.{name}.layout.sp",
                f"with {key} {recipe} each of tp {tp} ranks needs a multiple of {unit} rows; each {part.medium} has "
                f"{tokens} tokens inside the encoder: set sp to false, or modules.{name}.fp8=none",
            )


def _widths(cfg: ConfigContainer, name: str) -> Iterator[tuple[str, int, dict[str, tuple[int, str, int]]]]:
    """Yield (key prefix, layers, matmul widths) for each stack of layers of a module. A width comes with the axis that
    divides it, and the size of this axis."""
    module, layout = cfg.modules[name], cfg.modules[name].layout
    tp = ("tp", layout.tp)
    if module.llm is not None:
        llm: LlmSpec = module.llm
        widths = {"hidden_size": (llm.hidden_size, "", 1)}
        ranks = {"tp": layout.tp, "etp": layout.etp or layout.tp}
        for block in (block for layer in llm.layers() for block in layer.blocks):
            widths |= {field: (width, axis, ranks[axis]) for field, (width, axis) in block.widths().items()}
        yield f"modules.{name}.llm.", llm.num_layers, widths
        return
    for part, spec in module.encoder.parts.items():
        place = f"modules.{name}.encoder.{part}." if part else f"modules.{name}.encoder."
        yield (
            place,
            spec.built_layers,
            {
                "hidden_size": (spec.hidden_size, "", 1),
                "ffn_hidden_size": (spec.ffn_hidden_size, *tp),
                "queries": (spec.hidden_size, *tp),
            },
        )


def layers_in_fp8(cfg: ConfigContainer, numbers: Iterable[int], layers: int) -> list[int]:
    """Return the layers among `numbers` that are in fp8, for a module with fp8 and `layers` layers."""
    first, end = cfg.train.num_layers_at_start_in_bf16, layers - cfg.train.num_layers_at_end_in_bf16
    return [layer for layer in numbers if first <= layer < end]


def fp8_text(cfg: ConfigContainer) -> str:
    """Return a phrase about the fp8 layers; empty if there are none."""
    recipes = has_fp8(cfg)
    if not recipes:
        return ""
    ends = [getattr(cfg.train, name) for name in _IN_BF16]
    but = f", but for the first {ends[0]} and the last {ends[1]} of each" if any(ends) else ""
    modules = ", ".join(f"{name} {recipe}" for name, recipe in recipes.items())
    return f"layers in fp8: {modules}{but}; all else in {cfg.train.precision}"


def recompute_part_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield parts of layers to recompute that a module does not have, for a config without faults of sizes."""
    for name, module in cfg.modules.items():
        key = f"modules.{name}.recompute" if module.recompute else "train.recompute"
        recompute = cfg.recompute_of(name)
        parts = recompute_parts(recompute)
        of_module = f"modules.{name}." if module.offload_activations else "train."
        if cfg.offload_of(name) and recompute == "full":
            text = f"layers is not supported with recompute=full of {name}. Set one of them to none, or recompute parts"
            yield Fault(f"{of_module}offload_activations", text)
        foreign = isinstance(module.llm, TransformersLlm) or (
            isinstance(module.encoder, PlainSpec) and bool(module.offload_activations)
        )
        if cfg.offload_of(name) and foreign:
            text = f"layers requires Megatron-Core's layers, which {name} does not have. Set none"
            yield Fault(f"{of_module}offload_activations", text)
        if parts and cfg.fp8_of(name) != "none":
            yield Fault(key, f"{'+'.join(parts)} is not supported with fp8 of {name}. Set none, selective or full")
        if module.llm is None or isinstance(module.llm, TransformersLlm):
            if "experts" in parts and module.recompute:
                yield Fault(key, f"experts: {name} has no experts. Remove them")
            continue
        llm = module.llm
        missing = {
            "experts": "" if llm.num_experts else f"modules.{name}.llm.num_experts is 0",
            "norms": "" if llm.pre_norms else f"modules.{name}.llm.pre_norms is false",
            "mlp": "all layers have experts" if llm.num_experts and not llm.dense_layers else "",
        }
        for part in parts:
            if reason := missing.get(part):
                yield Fault(key, f"{part}: {reason}. Remove {part}")


def compiled_modules(cfg: ConfigContainer) -> list[str]:
    """Return the names of the modules with compiled layers."""
    return [name for name in cfg.modules if cfg.compile_of(name) == "layers"]


def compile_remark(cfg: ConfigContainer) -> str:
    """Return a note about the compile time of the first step; empty if nothing is compiled."""
    compiled = compiled_modules(cfg)
    if not compiled:
        return ""
    layers = " and ".join(f"modules.{name}" for name in compiled)
    return (
        f"train.compile: the layers of {layers} are compiled in the first step, which takes seconds to minutes longer"
    )


def compile_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of `compile`, for a config without faults of sizes and layouts."""
    for name in compiled_modules(cfg):
        key = f"modules.{name}.compile" if cfg.modules[name].compile else "train.compile"
        if reason := _not_plain_because(cfg, name):
            yield Fault(key, f"layers is not supported with {reason}. Set modules.{name}.compile=none")


def _not_plain_because(cfg: ConfigContainer, name: str) -> str:
    """Return the option that prevents plain torch layers on one rank; empty if there is none."""
    module, key = cfg.modules[name], f"modules.{name}"
    if module.layout.tp > 1:
        return f"tensor parallel ({key}.layout.tp is {module.layout.tp})"
    if module.lora.rank > 0:
        return f"adapters ({key}.lora.rank is {module.lora.rank})"
    if cfg.fp8_of(name) != "none":
        return f"fp8 ({cfg.fp8_of(name)} for {key})"
    if (recompute := cfg.recompute_of(name)) not in ("none", "full"):
        return f"recompute={recompute} (of {key})"
    if name == LANGUAGE and cfg.optim.overlap_param_gather:
        return "optim.overlap_param_gather, which waits for weights inside layers"
    if isinstance(module.llm, TransformersLlm):
        return f"a class of transformers as it is ({key}.implementation)"
    if module.llm is not None:
        llm = module.llm
        if llm.residual_multiplier != 1:
            return f"{key}.llm.residual_multiplier={llm.residual_multiplier:g}"
        names = ("num_experts", "kv_lora_rank", "dropout", *NOT_PLAIN)
        return next((f"{key}.llm.{name}={value}" for name in names if (value := getattr(llm, name))), "")
    if isinstance(module.encoder, PlainSpec):
        return f"{key}.encoder.family {module.encoder.family}, a plain torch module"
    for part in module.encoder.parts.values():
        if part.dropout or part.layer_scale:
            return f"{'dropout' if part.dropout else 'layer_scale'} in layers of {key}.encoder"
    return ""

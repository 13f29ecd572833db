"""Which kernels the layers of a run use: fp8 matmuls of Transformer Engine (`train.fp8`), compiled layers
(`train.compile`), and what keeps them from it."""

from collections.abc import Iterable, Iterator

from encoders.plain.spec import PlainSpec
from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer

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
    if any(part.full_attention is not None for part in module.encoder.parts.values()):
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
        else:
            yield from _size_faults(cfg, name, recipe, key)


def _size_faults(cfg: ConfigContainer, name: str, recipe: str, key: str) -> Iterator[Fault]:
    module, unit = cfg.modules[name], fp8_unit(recipe)
    tp = module.layout.tp
    for what, layers, widths in _widths(cfg, name):
        for field, (width, axis, ranks) in widths.items():
            if width % (ranks * unit):
                over = f" over {axis} {ranks} is {width / ranks:g}" if axis else ""
                yield Fault(
                    key,
                    f"{recipe} needs widths of multiples of {unit} on each rank, and {what}{field} {width}{over}: "
                    f"change one, or set modules.{name}.fp8=none",
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
    for part in module.encoder.parts.values():
        if (tokens := part.token_unit(module.projector.merge)) % (tp * unit):
            yield Fault(
                f"modules.{name}.layout.sp",
                f"with {key} {recipe} each of tp {tp} ranks needs a multiple of {unit} rows, and a {part.medium} has "
                f"{tokens} tokens inside the encoder: set sp to false, or modules.{name}.fp8=none",
            )


def _widths(cfg: ConfigContainer, name: str) -> Iterator[tuple[str, int, dict[str, tuple[int, str, int]]]]:
    """(key, layers, widths of matmuls) of each stack of layers of a module; a width with the axis of ranks that divide
    it and their number, 1 of none."""
    module, layout = cfg.modules[name], cfg.modules[name].layout
    tp = ("tp", layout.tp)
    if module.llm is not None:
        llm: LlmSpec = module.llm
        widths = {
            "hidden_size": (llm.hidden_size, "", 1),
            "queries": (llm.query_width, *tp),
            "queries, keys and values": (llm.qkv_width, *tp),
        }
        if not llm.num_experts or llm.dense_layers:
            widths["ffn_hidden_size"] = (llm.ffn_hidden_size, *tp)
        if llm.num_experts:
            field = "expert_ffn_hidden_size" if llm.expert_ffn_hidden_size else "ffn_hidden_size of an expert,"
            widths[field] = (llm.expert_width, "etp", layout.etp or layout.tp)
            widths["shared_expert_ffn_hidden_size"] = (llm.shared_expert_ffn_hidden_size, *tp)
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


def layers_in_fp8(cfg: ConfigContainer, own: Iterable[int], layers: int) -> list[int]:
    """Which of these layers of a module with fp8 are in it, of so many that the module has."""
    first, behind = cfg.train.num_layers_at_start_in_bf16, layers - cfg.train.num_layers_at_end_in_bf16
    return [layer for layer in own if first <= layer < behind]


def described(cfg: ConfigContainer) -> str:
    """What of a run is in fp8, in words; empty: nothing."""
    recipes = has_fp8(cfg)
    if not recipes:
        return ""
    ends = [getattr(cfg.train, name) for name in _IN_BF16]
    but = f", but for the first {ends[0]} and the last {ends[1]} of each" if any(ends) else ""
    modules = ", ".join(f"{name} {recipe}" for name, recipe in recipes.items())
    return f"layers in fp8: {modules}{but}; all else in {cfg.train.precision}"


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

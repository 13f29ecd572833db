"""Faults of modules: missing parts, invalid sizes, and sizes that parallel sizes do not divide."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from fnmatch import fnmatchcase

from data.text_format import plural
from encoders.base import joint_faults
from encoders.plain.spec import PlainSpec
from encoders.transformers_media.spec import ProcessorSpec
from mimo_train.config.errors import Fault
from mimo_train.config.keys import value_faults
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE, PARTS
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig, ModuleConfig
from mimo_train.config.transformers_llm import MODEL, TransformersLlm, Unsupported, parameters_of
from mimo_train.layout.batch import pack_length
from mimo_train.layout.ranks import layers_of_stage
from mimo_train.models.blocks.base import tp_faults


def language_faults(llm: LlmSpec, layout: LayoutConfig, key: str) -> Iterator[Fault]:
    """Yield faults of the parallel sizes of a language model whose own sizes have none; `key`: of its module."""
    blocks = dict.fromkeys(block for layer in llm.layers() for block in layer.blocks)
    yield from dict.fromkeys(fault for block in blocks for fault in block.layout_faults(layout, key))
    if layout.vpp > 1:
        yield from _interleaving_faults(llm, layout, key)
    elif layout.pp > llm.num_layers:
        yield Fault(
            f"{key}.layout.pp",
            f"pp {layout.pp} is more than the {plural(llm.num_layers, 'layer')} of {key}.llm.num_layers: each stage "
            "needs one",
        )
    if not llm.num_experts:
        for axis in ("ep", "etp"):
            if getattr(layout, axis) > 1:
                yield Fault(
                    f"{key}.layout.{axis}",
                    f"{axis} is {getattr(layout, axis)}, but the model has no experts ({key}.llm.num_experts is 0): "
                    "set it to 1, or pick a mixture of experts such as llm@modules.language.llm=gpt_tiny_moe",
                )


def as_is_faults(layout: LayoutConfig, key: str) -> Iterator[Fault]:
    """Yield faults of the parallel sizes of a language model of transformers; `key`: of its module."""
    for axis in ("tp", "pp", "cp", "ep", "etp", "vpp"):
        if (size := getattr(layout, axis)) > 1:
            yield Fault(
                f"{key}.layout.{axis}",
                f"is {size}, but a language model of transformers as it is (implementation transformers) is data "
                f"parallel only. Set {axis}=1 and raise dp, or choose a family that is native (docs/models.md)",
            )


def fsdp_faults(module: ModuleConfig, key: str) -> Iterator[Fault]:
    """Yield faults of `layout.fsdp`; `key`: of the module."""
    if not module.layout.fsdp:
        return
    place = f"{key}.layout.fsdp"
    if not isinstance(module.llm or module.encoder, TransformersLlm | ProcessorSpec):
        yield Fault(
            place,
            "is true, which requires a class of transformers as it is (implementation transformers). Set it to false, "
            "and tp, pp or ep to divide the weights",
        )
    if module.lora.dora:
        yield Fault(
            place, f"is true, and the magnitudes of {key}.lora.dora need whole weights. Set one of them to false"
        )
    for name in ("feature_cache.dir", "prefetch_microbatches"):
        section, _, field = name.rpartition(".")
        if getattr(getattr(module, section) if section else module, field):
            yield Fault(place, f"is true, and {key}.{name} computes features apart from a step. Remove one of them")


def encoder_faults(module: ModuleConfig, key: str) -> Iterator[Fault]:
    """Yield faults of the parallel sizes of an encoder whose own sizes have none; `key`: of its module."""
    layout, encoder = module.layout, module.encoder
    if isinstance(encoder, PlainSpec):
        plain = f"encoder.family {encoder.family} is a torch module that every rank has as a whole"
        for axis in ("tp", "pp"):
            if (size := getattr(layout, axis)) > 1:
                yield Fault(
                    f"{key}.layout.{axis}",
                    f"{plain}, without Megatron-Core's layers: {axis} is {size}, set it to 1 and raise dp "
                    "(docs/your-encoder.md)",
                )
        yield from _axis_faults(layout, key)
        return
    if len(parts := encoder.parts) > 1:
        of_parts = [fault for part in parts.values() for fault in encoder_faults(replace(module, encoder=part), key)]
        yield from (fault for at, fault in enumerate(of_parts) if fault not in of_parts[:at])
        return
    yield from tp_faults(
        layout.tp, key, num_attention_heads=encoder.num_attention_heads, ffn_hidden_size=encoder.ffn_hidden_size
    )
    if layout.pp > (layers := encoder.built_layers):
        yield Fault(
            f"{key}.layout.pp",
            f"pp {layout.pp} is more than the {plural(layers, 'layer')} of {key}.encoder.num_layers: each stage needs "
            "one",
        )
    yield from _axis_faults(layout, key)
    if layout.sp and (tokens := encoder.token_unit(module.projector.merge)) % layout.tp:
        medium = encoder.medium
        have = f"{medium}s of any size have multiples of" if encoder.sizes_vary else f"each {medium} has"
        yield Fault(
            f"{key}.layout.sp",
            f"{have} {tokens} tokens inside the encoder, which tp {layout.tp} does not divide into equal parts: set sp "
            f"to false, or change tp, or {key}.{', '.join(encoder.token_unit_fields)}",
        )


def projector_faults(module: ModuleConfig, width: int, name: str) -> Iterator[Fault]:
    """Yield faults of a projector whose own sizes have none; `width`: the language model's; `name`: of its module."""
    projector, tp, key = module.projector, module.layout.tp, f"modules.{name}"
    resampler, place = projector.resampler, f"{key}.projector"
    if projector.kind == "none":
        if module.encoder.joined_width(projector.merge) != width:
            text = f"is none, and features of {module.encoder.hidden_size} do not fit a language model of {width}"
            yield Fault(f"{place}.kind", f"{text}: set it to mlp or linear")
        return
    if projector.kind == "linear":
        sizes = {f"modules.{LANGUAGE}.llm.hidden_size": width}
    else:
        sizes = {f"{place}.ffn_hidden_size": projector.ffn_hidden_size or width}
    if resampler.latents:
        sizes[f"{place}.resampler.num_attention_heads"] = resampler.num_attention_heads
        sizes[f"{place}.resampler.num_query_groups"] = resampler.key_heads
        sizes[f"{place}.resampler.ffn_hidden_size"] = resampler.ffn_width(width)
        if not resampler.head_size and width % resampler.num_attention_heads:
            yield Fault(
                f"{place}.resampler.num_attention_heads",
                f"{resampler.num_attention_heads} does not divide the language model's hidden size {width}: change it, "
                f"or set {place}.resampler.head_size",
            )
    others = {
        f"a resampler makes {resampler.latents} of however many": resampler.latents,
        "those of tiles (encoder.resize tiles) are put in lines": projector.newline,
    }
    keeping = {"feature_cache.dir": module.feature_cache.dir, "prefetch_microbatches": module.prefetch_microbatches}
    for reason in [reason for reason, on in others.items() if on]:
        for kept in [name for name, on in keeping.items() if on]:
            yield Fault(f"{key}.{kept}", f"keeps features by their rows in the sequence, and {reason}: leave it out")
    yield from tp_faults(tp, key, **sizes)


_ENCODER_AXES = {
    "cp": "an encoder reads whole images or clips, context parallel does not apply",
    "ep": "an encoder has no experts, expert parallel does not apply",
    "etp": "an encoder has no experts, expert tensor parallel does not apply",
    "vpp": "encoders are not interleaved",
}


def _axis_faults(layout: LayoutConfig, key: str) -> Iterator[Fault]:
    for axis, reason in _ENCODER_AXES.items():
        if (size := getattr(layout, axis)) > 1:
            yield Fault(f"{key}.layout.{axis}", f"{reason}, is {size}: set it to 1")


def _interleaving_faults(llm: LlmSpec, layout: LayoutConfig, key: str) -> Iterator[Fault]:
    if layout.pp == 1:
        yield Fault(
            f"{key}.layout.vpp",
            f"vpp {layout.vpp} interleaves the stages of a pipeline, and pp is 1: set vpp to 1, or raise pp",
        )
    chunks = layout.pp * layout.vpp
    if llm.num_layers % chunks:
        yield Fault(
            f"{key}.layout.vpp",
            f"{plural(llm.num_layers, 'layer')} ({key}.llm.num_layers) are not equal parts of pp {layout.pp} x vpp "
            f"{layout.vpp} "
            f"= {chunks} chunks: use a divisor of the layers of a stage, or a number of layers that {chunks} divides",
        )


def bidirectional_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of language models in which some tokens see later ones (`encoder.bidirectional`)."""
    if not cfg.bidirectional:
        return
    key, module = f"modules.{LANGUAGE}", cfg.language
    what = "tokens of an image that see each other" if cfg.bidirectional == "items" else "a prefix whose tokens do"
    if module.layout.cp > 1:
        yield Fault(
            f"{key}.layout.cp",
            f"is {module.layout.cp}, and a sequence with {what} cannot be cut. Set it to 1, or use tp with sp",
        )
    if isinstance(module.llm, TransformersLlm) and cfg.bidirectional == "prefix":
        yield Fault(f"{key}.implementation", f"transformers is not supported with {what}. Set it to native")
    elif isinstance(module.llm, TransformersLlm) and cfg.data.pack:
        text = f"the class of transformers as it is mixes documents with {what}. Set it to false"
        yield Fault("data.pack", f"is true, but {text}")


def deepstack_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of modules and layouts that cannot carry the features of `encoder.deepstack`. These arrive with the
    input features, on the first stage of the language model."""
    llm, stages, chunks = cfg.llm, cfg.language.layout.pp, cfg.language.layout.vpp
    first = layers_of_stage(llm.num_layers, 0, stages * chunks)
    for name, module in cfg.encoders.items():
        layers = len(module.encoder.deepstack)
        if not layers:
            continue
        key = f"modules.{name}"
        if first < layers:
            yield Fault(
                f"modules.{LANGUAGE}.layout.pp",
                f"{key} gives features to the first {layers} layers, and the first of {stages * chunks} "
                f"{'model chunks (pp x vpp)' if chunks > 1 else 'stages'} has {first} of {llm.num_layers}: lower pp"
                f"{' or vpp' if chunks > 1 else ''}",
            )
        if module.encoder.deepstack_width != llm.hidden_size:
            yield Fault(
                f"{key}.encoder.deepstack_width",
                f"must be modules.{LANGUAGE}.llm.hidden_size {llm.hidden_size}, is {module.encoder.deepstack_width}",
            )
        if module.layout.pp > 1:
            yield Fault(
                f"{key}.layout.pp",
                f"features of encoder.deepstack {module.encoder.deepstack} come from layers of all stages, and one "
                f"sends its last states alone: set pp to 1 (is {module.layout.pp})",
            )
        if module.projector.latents:
            yield Fault(
                f"{key}.projector.kind",
                f"makes {module.projector.latents} tokens of each {module.encoder.medium}, and features of encoder."
                "deepstack belong to those of patches: use mlp or linear, or set encoder.deepstack to []",
            )


def module_faults(name: str, module: ModuleConfig) -> Iterator[Fault]:
    layout, prefix = module.layout, f"modules.{name}"
    wrong_sizes = list(layout.faults(f"{prefix}.layout"))
    yield from wrong_sizes
    if wrong_sizes:
        return
    wrong_parts = list(_part_faults(name, module))
    yield from wrong_parts
    if wrong_parts:
        return
    if module.llm is not None:
        wrong_spec = list(module.llm.faults(f"{prefix}.llm"))
    else:
        wrong_spec = _spec_faults(module, prefix)
    yield from wrong_spec
    if wrong_spec:
        return
    yield from fsdp_faults(module, prefix)
    if isinstance(module.llm, TransformersLlm):
        yield from as_is_faults(layout, prefix)
    elif module.llm:
        yield from language_faults(module.llm, layout, prefix)
    else:
        yield from encoder_faults(module, prefix)


def _spec_faults(module: ModuleConfig, prefix: str) -> list[Fault]:
    encoder, projector = module.encoder, module.projector
    # Sizes that are not finite would raise in the arithmetic below.
    faults = [*value_faults(encoder, f"{prefix}.encoder"), *value_faults(projector, f"{prefix}.projector")]
    faults += value_faults(projector.resampler, f"{prefix}.projector.resampler")
    for name, part in encoder.parts.items():
        faults += value_faults(part, f"{prefix}.encoder.{name}") if name and is_dataclass(part) else []
    if faults:
        return faults
    single = [(f"encoder.{field}", text) for field, text in encoder.faults()]
    single += [(f"projector.{field}", text) for field, text in projector.faults()]
    return [Fault(f"{prefix}.{field}", text) for field, text in single or joint_faults(encoder, projector)]


def layer_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of options that require Megatron-Core layers, for plain torch encoders, joined encoders and language
    models of transformers."""
    if LANGUAGE in cfg.modules and isinstance(cfg.language.llm, TransformersLlm):
        yield from _as_is_option_faults(cfg)
    for name, module in cfg.encoders.items():
        if not isinstance(module.encoder, PlainSpec):
            if module.lora.rank > 0 and len(module.encoder.parts) > 1:
                yield Fault(
                    f"modules.{name}.lora.rank",
                    f"is {module.lora.rank}, and encoders that are joined have no adapters: set it to 0, and "
                    "freeze=[encoder] if they should stay as they are",
                )
            continue
        prefix, reason = f"modules.{name}", f"encoder.family {module.encoder.family} is a plain torch module"
        if module.lora.rank > 0:
            yield Fault(
                f"{prefix}.lora.rank",
                f"{reason}, and adapters go next to Megatron-Core's linear layers, of which it has none: set it to 0 "
                f"(is {module.lora.rank}), and freeze=[encoder] if the module should stay as it is",
            )
        if (recompute := cfg.recompute_of(name)) not in ("none", "full"):
            yield Fault(
                f"{prefix}.recompute",
                f"{reason}, and {recompute} recomputes parts of Megatron-Core's layers, of which it has none: "
                "set it to none, or to full for the whole module",
            )


def _as_is_option_faults(cfg: ConfigContainer) -> Iterator[Fault]:
    """Yield faults of options that a language model of transformers does not have, for a readable model."""
    key = f"modules.{LANGUAGE}"
    why = "requires Megatron-Core's layers, and the model is a class of transformers as it is"
    try:
        parameters = parameters_of(cfg.language.llm.model_config)
    except Unsupported:
        return  # `TransformersLlm.faults` reports it
    recompute = cfg.recompute_of(LANGUAGE)
    if recompute not in ("none", "full"):
        yield Fault(f"{key}.recompute", f"{recompute} {why}. Set none, or full")
    elif recompute == "full" and not parameters.can_recompute:
        yield Fault(f"{key}.recompute", "full is not supported by this class of transformers. Set none")
    names = [MODEL + name for name in parameters.shapes]
    for field in ("freeze", "freeze_until"):
        for entry in getattr(cfg.language, field):
            if not any(fnmatchcase(name, PARTS.get(entry, entry)) for name in names):
                yield Fault(f"{key}.{field}", f"{entry!r} matches no parameter; names look like {', '.join(names[:3])}")
    if cfg.optim.overlap_grad_reduce:
        yield Fault(
            "optim.overlap_grad_reduce",
            "is true, but parameters of a class of transformers as it is may get no gradient in a step, for which "
            "other ranks would wait. Set it to false",
        )
    if cfg.data.pack and parameters.is_recurrent:
        yield Fault(
            "data.pack",
            "is true, but the recurrent layers of this class of transformers mix the documents of a row. Set it to "
            "false",
        )
    if cfg.data.pack and parameters.chooses_tokens:
        yield Fault(
            "data.pack",
            "is true, but this class of transformers, which chooses the tokens that it attends to, gives "
            "other numbers for a row of documents than for each alone. Set it to false",
        )
    if cfg.data.pack and 0 < parameters.chunk < (row := pack_length(cfg)):
        yield Fault(
            "data.pack_length",
            f"a row has {row} tokens, and this class of transformers cuts attention after each {parameters.chunk} of a "
            "row, not of a document. Use at most that, or data.pack=false",
        )
    for name, module in cfg.encoders.items():
        if module.encoder.deepstack and not parameters.has_deepstack:
            yield Fault(f"modules.{name}.encoder.deepstack", f"{why}. Choose another encoder")
        if cfg.data.pack and (cfg.llm.mrope_section or getattr(module.encoder, "axes", False)):
            yield Fault(
                "data.pack",
                f"is true, but the language model of transformers as it is does not tell documents from the positions "
                f"on several axes of modules.{name}. Set it to false",
            )


def _part_faults(name: str, module: ModuleConfig) -> Iterator[Fault]:
    prefix, parts = f"modules.{name}", ("encoder", "projector")
    if name == LANGUAGE:
        if module.llm is None:
            yield Fault(
                f"{prefix}.llm",
                "the language module needs an llm: pick one, for example llm@modules.language.llm=gpt_tiny",
            )
        for part in parts:
            if getattr(module, part) is not None:
                yield Fault(f"{prefix}.{part}", "the language module has no encoder and no projector: remove this key")
        return
    if module.llm is not None and module.encoder is None and module.projector is None:
        text = f"only the module named {LANGUAGE!r} has an llm: give it this name, or remove modules.{name}"
        yield Fault(f"{prefix}.llm", text)
        return
    for part in parts:
        if getattr(module, part) is None:
            yield Fault(f"{prefix}.{part}", f"missing: every module but {LANGUAGE!r} has an encoder and a projector")
    if module.llm is not None:
        yield Fault(f"{prefix}.llm", f"only the module named {LANGUAGE!r} has an llm: remove this key")

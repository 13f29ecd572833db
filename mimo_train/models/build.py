"""Build the modules of a run on this rank: a `MimoModel`, or a plain GPT if `language` is the only module."""

import warnings
from collections.abc import Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.transformer.enums import AttnMaskType, ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from encoders.registry import family_of
from mimo_train.config.parts import LANGUAGE, PARTS, SAVED
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_train import recompute_parts
from mimo_train.config.transformers_llm import TransformersLlm, TransformersSizes
from mimo_train.cpu.grad_accumulation import InPlaceGradients
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.layout.adapters import adapted_linears, adapts_projector
from mimo_train.layout.ranks import RunLayout
from mimo_train.models.dense_layer import compile_layers
from mimo_train.models.encoder_module import EncoderModule, Projector
from mimo_train.models.fp8 import require_fp8
from mimo_train.models.freeze import freeze, let_biases_learn, let_recomputed_layers_learn
from mimo_train.models.fusions import FusedGradients
from mimo_train.models.heads import ModelHook, make_value_model
from mimo_train.models.language_model import SeededGPTModel
from mimo_train.models.layers import language_layers, layer_spec, projector_submodules
from mimo_train.models.lora.adapters import freeze_base, start_magnitudes
from mimo_train.models.mimo import PlacedMimoModel
from mimo_train.models.norms import norm_class
from mimo_train.models.parameters import drawn_in_parts, modules_of
from mimo_train.models.sharding import ShardedModule
from mimo_train.models.transformer_config import encoder_config, language_config, projector_config, resampler_config
from mimo_train.parallel import device
from mimo_train.parallel.grad_reduction import InOrderReduction
from mimo_train.parallel.groups import RunGroups

_LAYERS_OF_CHUNK = (get_transformer_layer_offset, get_num_layers_to_build)
"""Functions of (config, chunk, stage): the number of a model chunk's first layer, and its number of layers."""

_POSITIONS = {"rope": "rope", "learned": "learned_absolute"}
"""Megatron-Core's names of position kinds."""


def build_model(
    cfg: ConfigContainer,
    layout: RunLayout,
    groups: RunGroups,
    *,
    vocab_size: int,
    special_token_ids: dict[str, int],
    device: torch.device,
    te: bool,
    pre_wrap_hook: ModelHook | None = None,
    undrawn: Set[tuple[str, str]] = frozenset(),
) -> list[MegatronModule]:
    """Build the part of the model on this rank, on `device`, each module wrapped in Megatron-Core's DDP.

    Args:
        vocab_size: tokens of the tokenizer, before padding.
        special_token_ids: token id of the placeholders of each encoder module's features.
        te: True for layers of Transformer Engine.
        pre_wrap_hook: changes the language model's chunks before they are frozen and wrapped (see `models.heads`).
        undrawn: (module, part) of weights that are loaded afterwards: they are not drawn and their memory is not
            touched. Part is llm, encoder or projector. Adapters are always drawn.

    Returns:
        The model chunks of this rank: `MimoModel`s (attributes `language_model` and `modality_submodules`), or wrapped
        GPT models; none on a rank without a module.

    Raises:
        UserError: fp8 or compiled layers are not possible with these layers.
    """
    require_fp8(cfg, te)
    if not groups.collections:
        return []
    if cfg.traits.value_head:
        pre_wrap_hook = _with_value_head(cfg, layout, pre_wrap_hook)
    language_specs = _language_specs(cfg, layout, groups, vocab_size, te, (LANGUAGE, "llm") not in undrawn)
    with warnings.catch_warnings(), drawn_in_parts():
        warnings.filterwarnings("ignore", message=".*experimental and still under active development.*")
        if not cfg.encoders:
            chunks = [spec.module(**spec.params) for spec in language_specs]
            if not layout.language.fsdp:
                chunks = [chunk.to(device) for chunk in chunks]
            _prepare_for_training(chunks, cfg, LANGUAGE)
            chunks = pre_wrap_hook(chunks) if pre_wrap_hook else chunks
            freeze(chunks, cfg.language.freeze, f"modules.{LANGUAGE}.freeze", groups.collections[LANGUAGE].pp)
            compile_layers(chunks, cfg, LANGUAGE, device.type)
            return [_wrap(chunk, groups, LANGUAGE, cfg, layout) for chunk in chunks]
        language = groups.collections.get(LANGUAGE)
        models: list[MegatronModule] = []
        for chunk_spec in language_specs:
            # The first chunk has the encoders.
            names = () if models else tuple(cfg.encoders)
            models.append(
                PlacedMimoModel(
                    MimoModelConfig(
                        language_model_spec=chunk_spec,
                        modality_submodules_spec={
                            name: _encoder_spec(cfg, layout, groups, name, te, undrawn) for name in names
                        },
                        special_token_ids=special_token_ids,
                        module_to_grid_map={name: groups.grids[name] for name in (*names, LANGUAGE)},
                    ),
                    cp_group=language.cp if language else None,
                    tp_group=language.tp if language else None,
                )
            )
    for name, chunks in modules_of(models).items():
        for chunk in chunks if not layout.modules[name].fsdp else ():
            chunk.to(device)
        _prepare_for_training(chunks, cfg, name)
    if pre_wrap_hook and language:
        for model, chunk in zip(models, pre_wrap_hook([model.language_model for model in models]), strict=True):
            model.language_model = chunk
    for name, chunks in modules_of(models).items():
        for chunk in chunks:
            _tell_tensor_parallel_group(chunk, groups.collections[name].tp)
        freeze(chunks, cfg.modules[name].freeze, f"modules.{name}.freeze", groups.collections[name].pp)
        compile_layers(chunks, cfg, name, device.type)
        wrapped = [_wrap(chunk, groups, name, cfg, layout) for chunk in chunks]
        if name == LANGUAGE:
            for model, chunk in zip(models, wrapped, strict=True):
                model.language_model = chunk
        else:
            (models[0].modality_submodules[name],) = wrapped
    for model in models:
        model.model_type = ModelType.encoder_or_decoder
    return models


def _with_value_head(cfg: ConfigContainer, layout: RunLayout, hook: ModelHook | None) -> ModelHook:
    """Return a hook that replaces the output layer by a value head, and calls `hook` afterwards."""
    replace_head = make_value_model(cfg.llm.hidden_size, layout.language.sp)
    return (lambda chunks: hook(replace_head(chunks))) if hook else replace_head


def _prepare_for_training(chunks: list[MegatronModule], cfg: ConfigContainer, name: str) -> None:
    """Freeze all but adapters if the module has any, and start their magnitudes. Let biases next to frozen weights, and
    recomputed layers after them, learn. A head that a hook adds afterwards is trained."""
    if cfg.modules[name].lora.rank:
        saved = {SAVED[each] for each in cfg.modules[name].lora.modules_to_save}
        freeze_base(chunks, PARTS["llm" if name == LANGUAGE else "encoder"], saved)
        if adapts_projector(adapted_linears(name, cfg.modules[name], cfg.llm.hidden_size)):
            freeze_base(chunks, PARTS["projector"])
        for chunk in chunks:
            start_magnitudes(chunk)
    if isinstance(cfg.modules[name].llm, TransformersLlm):
        for chunk in chunks:
            chunk.freeze_unused()
    let_biases_learn(chunks)
    recompute = cfg.recompute_of(name)
    if recompute == "full" or "experts" in recompute_parts(recompute):
        let_recomputed_layers_learn(chunks)


def _tell_tensor_parallel_group(module: torch.nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Set the TP group of submodules that have none. Otherwise Megatron-Core describes their weights to checkpoints
    with its global group (0.19.2, transformer/module.py:80-84), which on shared ranks is the language model's."""
    for child in module.modules():
        if isinstance(child, MegatronModule) and not hasattr(child, "tp_group"):
            child.tp_group = tp_group


def _language_specs(
    cfg: ConfigContainer, layout: RunLayout, groups: RunGroups, vocab_size: int, te: bool, drawn: bool
) -> list[ModuleSpec]:
    """Return one spec for each model chunk of this rank's stage; they share the config that the schedule reads."""
    pgs = groups.collections.get(LANGUAGE)
    if pgs is None:  # ranks of encoders do not interleave
        language = replace(layout.language, vpp=1)
        layout = replace(layout, modules={**layout.modules, LANGUAGE: language})
    llm, config = cfg.llm, language_config(cfg, layout)
    config.perform_initialization = drawn
    params = {"config": config, "max_sequence_length": cfg.data.sequence_length}
    if isinstance(llm, TransformersSizes) and pgs is not None:
        from mimo_train.models.transformers_lm import TransformersLanguageModel  # imports transformers

        return [ModuleSpec(module=TransformersLanguageModel, params=params | {"pg_collection": pgs})]
    if pgs is None:
        return [ModuleSpec(module=SeededGPTModel, params=params)]
    stage, last, chunks = pgs.pp.rank(), pgs.pp.size() - 1, layout.language.vpp
    layers = language_layers(llm, config, te)
    params |= {
        "vocab_size": embedding_rows(llm, vocab_size),
        "tokens": llm.vocab_size or vocab_size,
        "share_embeddings_and_output_weights": llm.tie_embeddings,
        # Text alone needs one axis: all axes would be equal.
        "position_embedding_type": "mrope" if llm.mrope_section and cfg.encoders else _POSITIONS[llm.position],
        "rotary_base": llm.rope_base,
        # MimoModel joins text and media first and splits along the sequence afterwards.
        "scatter_embedding_sequence_parallel": not cfg.encoders,
        "pg_collection": pgs,
    }
    final_norm = norm_class(te and llm.norm_bias)
    specs = []
    for chunk in range(chunks):
        vp_stage = chunk if chunks > 1 else None
        first, count = (function(config, vp_stage, stage) for function in _LAYERS_OF_CHUNK)
        chunk_params = {
            "transformer_layer_spec": TransformerBlockSubmodules(layers[first : first + count], final_norm),
            "pre_process": stage == 0 and chunk == 0,
            "post_process": stage == last and chunk == chunks - 1,
            "vp_stage": vp_stage,
        }
        specs.append(ModuleSpec(module=SeededGPTModel, params=params | chunk_params))
    return specs


def _encoder_spec(
    cfg: ConfigContainer, layout: RunLayout, groups: RunGroups, name: str, te: bool, undrawn: Set[tuple[str, str]]
) -> ModuleSpec:
    pgs = groups.collections.get(name)
    if pgs is None:
        return ModuleSpec(module=EncoderModule)
    module, module_layout = cfg.modules[name], layout.modules[name]
    config = encoder_config(cfg, module_layout)
    projection = projector_config(cfg, module_layout)
    config.perform_initialization = (name, "encoder") not in undrawn
    resampler = resampler_config(cfg, module_layout)
    projection.perform_initialization = resampler.perform_initialization = (name, "projector") not in undrawn
    encoder = ModuleSpec(
        module=family_of(module.encoder.family).load(),
        params={"config": config, "spec": module.encoder, "merge": module.projector.merge, "pg_collection": pgs},
    )

    def layers(config: TransformerConfig) -> dict[str, Any]:
        return {"layer_spec": layer_spec(config, AttnMaskType.no_mask, te), "norm": norm_class(te)}

    parts = module.encoder.parts
    if len(parts) == 1:
        encoder.params |= layers(config)
    else:
        builders = {}
        for part, spec in parts.items():
            part_config = encoder_config(cfg, module_layout, part)
            part_config.perform_initialization = config.perform_initialization
            params = encoder.params | {"config": part_config, "spec": spec} | layers(part_config)
            builders[part] = partial(family_of(spec.family).load(), **params)
        encoder.params["parts"] = builders
    if module.projector.kind == "none":
        return ModuleSpec(module=EncoderModule, params={"pg_collection": pgs}, submodules={"encoders": {name: encoder}})
    projector = ModuleSpec(
        module=Projector,
        params={
            "config": projection,
            "spec": module.projector,
            "resampler_config": resampler,
            "norm": norm_class(te),
            "submodules": projector_submodules(
                module.projector.kind, te, adapted=adapts_projector(projection.adapters)
            ),
            "projector_type": {"mlp": "mlp", "linear": "affine"}[module.projector.kind],
            "input_size": module.encoder.joined_width(module.projector.merge),
            "pg_collection": pgs,
        },
    )
    return ModuleSpec(
        module=EncoderModule,
        params={"pg_collection": pgs},
        submodules={"encoders": {name: encoder}, "input_projections": [projector]},
    )


def _wrap(
    module: MegatronModule,
    groups: RunGroups,
    name: str,
    cfg: ConfigContainer,
    layout: RunLayout,
) -> DistributedDataParallel | ShardedModule:
    config = module.config if name == LANGUAGE else module.encoders[name].config
    if layout.modules[name].fsdp:
        return ShardedModule(config, module, groups.collections[name].dp_cp, f"modules.{name}")
    # The language model's wrapper requires a gradient of every parameter in every step, and its parameters are gathered
    # in forward. An encoder may not run in a step.
    every_step = name == LANGUAGE and not cfg.modules[name].freeze_until
    overlaps = cfg.optim.overlap_grad_reduce and (every_step or name != LANGUAGE)
    is_on_cpu = cfg.run.cpu_kernels and device.current().type == "cpu"
    wrapper = InPlaceGradients if is_on_cpu else FusedGradients
    return (InOrderReduction if overlaps and not every_step else wrapper)(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=cfg.optim.distributed_optimizer,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=every_step and cfg.optim.overlap_param_gather,
            check_for_nan_in_grad=False,
        ),
        module=module,
        pg_collection=groups.collections[name],
    )

"""Builds Megatron-Core's `TransformerConfig` of each module from its spec and layout."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.base import GATED, LayeredSpec
from encoders.plain.spec import PlainSpec
from encoders.projectors.spec import ProjectorSpec
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.transformers_llm import TransformersSizes
from mimo_train.layout.adapters import adapted_linears, layers_name, linears
from mimo_train.layout.fusions import activation_reason, fusions_of, module_fuses
from mimo_train.layout.ranks import ModuleLayout, RunLayout, layers_of_stage
from mimo_train.models.documents import documents_of_media
from mimo_train.models.fusions import activation_options, fusion_options
from mimo_train.models.offload import Offload
from mimo_train.models.parameters import draw_by, seed_for
from mimo_train.models.recompute import recompute_options
from mimo_train.parallel import device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""dtype of weights and activations by `train.precision`."""

_DELTA = (
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
)
"""Sizes of Gated DeltaNet, as in Megatron-Core."""


def language_config(cfg: ConfigContainer, layout: RunLayout) -> TransformerConfig:
    """Return the language model's config, which also drives the schedule on every rank."""
    llm = cfg.llm
    if isinstance(llm, TransformersSizes):
        return _of_class(cfg, layout, llm)
    config = _config(
        cfg,
        layout.language,
        num_layers=llm.num_layers,
        hidden_size=llm.hidden_size,
        num_attention_heads=llm.num_attention_heads,
        num_query_groups=llm.key_heads,
        kv_channels=llm.v_head_dim or llm.head_width,
        ffn_hidden_size=llm.ffn_hidden_size,
        normalization=llm.normalization,
        layernorm_epsilon=llm.layernorm_epsilon,
        layernorm_zero_centered_gamma=llm.zero_centered_norms,
        gated_linear_unit=llm.is_gated,
        **activation_options(llm.activation, _fuses_activation(cfg, LANGUAGE)),
        activation_func_clamp_value=llm.activation_clamp or None,
        glu_linear_offset=llm.glu_offset,
        add_bias_linear=llm.bias,
        add_qkv_bias=llm.bias or llm.qkv_bias,
        softmax_scale=llm.attention_scale_size**-0.5 if llm.attention_scale_size else None,
        mrope_section=llm.mrope_section or None,
        rotary_interleaved=llm.rope_interleaved,
        **_windows(llm),
        # With it Megatron-Core sums gradients of these norms over tensor-parallel ranks, over which others are cut.
        qk_layernorm=llm.qk_norm and not llm.qk_norm_over_heads,
        attention_output_gate=llm.attention_output_gate,
        **{name: getattr(llm, name) for name in _DELTA},
        hidden_dropout=llm.dropout,
        attention_dropout=llm.dropout,
        init_method_std=llm.init_std,
        # Schedules of several modules exchange shapes, which the dense default dispatcher of MoE rejects.
        variable_seq_lengths=bool(cfg.encoders) and layout.language.vpp == 1,
        moe_token_dispatcher_type="alltoall",
        **_interleaving(layout.language),
        **_uneven_stages(llm.num_layers, layout.language.pp),
        **_expert_sizes(llm, layout.language),
        **_fp8(cfg, LANGUAGE),
    )
    config.norm_bias, config.parallel_block = llm.norm_bias, llm.parallel_block
    config.llm, config.attention_softcap, config.packed = llm, llm.attention_softcap, cfg.data.pack
    config.deepstack, config.bidirectional, config.added = _deepstack(cfg), cfg.bidirectional, _added(cfg)
    return config


def _of_class(cfg: ConfigContainer, layout: RunLayout, llm: TransformersSizes) -> TransformerConfig:
    """Return the config of a class of transformers: only width, type, seed and recomputation matter."""
    config = _config(
        cfg,
        layout.language,
        num_layers=llm.num_layers,
        hidden_size=llm.hidden_size,
        num_attention_heads=1,
        kv_channels=1,
        init_method_std=llm.init_std,
        variable_seq_lengths=bool(cfg.encoders),
        moe_token_dispatcher_type="alltoall",
    )
    config.llm, config.packed, config.added = llm, cfg.data.pack, _added(cfg)
    config.deepstack, config.bidirectional = _deepstack(cfg), cfg.bidirectional
    return config


def _added(cfg: ConfigContainer) -> set[str]:
    """Return the encoders whose features are added to embeddings."""
    return {name for name, module in cfg.encoders.items() if module.encoder.adds_features}


def _deepstack(cfg: ConfigContainer) -> int:
    """Return the number of layers that get features of encoders."""
    return max((len(module.encoder.deepstack) for module in cfg.encoders.values()), default=0)


def _windows(llm: LlmSpec) -> dict[str, Any]:
    """Return the window and the layers that have it, in the options that core attention of either kind reads."""
    if not llm.window:
        return {}
    # In Megatron-Core: tokens before and after a token that it attends to.
    return {
        "window_size": (llm.window - 1, 0),
        "window_attn_skip_freq": [int(llm.window_of(layer) > 0) for layer in range(llm.num_layers)],
    }


def _uneven_stages(num_layers: int, stages: int) -> dict[str, Any]:
    return {"num_layers_in_first_pipeline_stage": layers_of_stage(num_layers, 0, stages)} if num_layers % stages else {}


def _interleaving(layout: ModuleLayout) -> dict[str, Any]:
    """Return the options of interleaved stages, whose two directions are sent separately. In one batch between two
    stages Megatron-Core 0.19.2 mistakes a gradient for an activation (p2p_communication.py:16)."""
    if layout.vpp == 1:
        return {}
    return {
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def _expert_sizes(llm: LlmSpec, layout: ModuleLayout) -> dict[str, Any]:
    if not llm.num_experts:
        return {}
    with_experts = [int(llm.has_experts(layer)) for layer in range(llm.num_layers)]
    return {
        "num_moe_experts": llm.num_experts,
        **({"moe_layer_freq": with_experts} if llm.dense_layers else {}),
        "moe_router_topk": llm.experts_per_token,
        "moe_ffn_hidden_size": llm.expert_width,
        "moe_shared_expert_intermediate_size": llm.shared_expert_ffn_hidden_size or None,
        "moe_shared_expert_gate": llm.shared_expert_gate,
        "moe_router_load_balancing_type": llm.router_balancing,
        "moe_aux_loss_coeff": 0.0 if llm.router_balancing == "none" else llm.router_aux_loss,
        "moe_z_loss_coeff": llm.router_z_loss or None,
        "moe_router_pre_softmax": llm.softmax_over_all_experts,
        "moe_router_score_function": llm.router_score_function,
        "moe_router_enable_expert_bias": llm.router_bias,
        "moe_router_num_groups": llm.router_groups or None,
        "moe_router_group_topk": llm.router_groups_per_token or None,
        "moe_router_topk_scaling_factor": None if llm.router_scaling_factor == 1 else llm.router_scaling_factor,
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _fp8(cfg: ConfigContainer, name: str) -> dict[str, Any]:
    """Return the fp8 options of a module's layers. Weights, optimizer state and checkpoints are not fp8."""
    recipe, train = cfg.fp8_of(name), cfg.train
    if recipe == "none":
        return {}
    first, last = train.num_layers_at_start_in_bf16, train.num_layers_at_end_in_bf16
    return {
        # Gradients are e5m2 with one scale for a whole tensor, which needs its range.
        "fp8": "hybrid" if recipe == "tensorwise" else "e4m3",
        "fp8_recipe": recipe,
        "first_last_layers_bf16": first + last > 0,
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
    }


def encoder_config(cfg: ConfigContainer, layout: ModuleLayout, part: str = "") -> TransformerConfig:
    """Return the config of one encoder's transformer layers. `part` is one of the joined encoders
    (`EncoderSpec.parts`); empty: the encoder itself."""
    full_encoder = cfg.modules[layout.name].encoder
    if isinstance(full_encoder, PlainSpec) or (not part and len(full_encoder.parts) > 1):
        return _without_layers(cfg, layout)
    encoder: LayeredSpec = full_encoder.parts[part]
    layers = encoder.built_layers
    config = _config(
        cfg,
        layout,
        num_layers=layers,
        hidden_size=encoder.hidden_size,
        num_attention_heads=encoder.num_attention_heads,
        num_query_groups=encoder.num_attention_heads,
        ffn_hidden_size=encoder.ffn_hidden_size,
        normalization=encoder.normalization,
        layernorm_epsilon=encoder.layernorm_epsilon,
        gated_linear_unit=encoder.activation == GATED,
        **activation_options(encoder.activation, _fuses_activation(cfg, layout.name, encoder.activation)),
        add_bias_linear=True,
        hidden_dropout=encoder.dropout,
        attention_dropout=encoder.dropout,
        init_method_std=encoder.init_std,
        **_uneven_stages(layers, layout.pp),
        **_fp8(cfg, layout.name),
    )
    config.layer_scale, config.full_attention = encoder.layer_scale, encoder.full_attention
    config.packed, config.documents = True, documents_of_media  # media of several sizes are one row
    if part:
        config.init_seed = seed_for(cfg.run.seed, layout.name, part)
    return config


def _without_layers(cfg: ConfigContainer, layout: ModuleLayout) -> TransformerConfig:
    """Return the config of an encoder without its own transformer layers: plain torch, or several joined encoders. Only
    width, type, seed and recomputation matter."""
    width = cfg.modules[layout.name].encoder.hidden_size
    sizes = {"num_layers": layout.pp, "hidden_size": width, "ffn_hidden_size": width * layout.tp}
    return _config(cfg, layout, **sizes, num_attention_heads=layout.tp, kv_channels=1)


def projector_config(cfg: ConfigContainer, layout: ModuleLayout) -> TransformerConfig:
    """Return the config of an encoder's projector, which is on one stage and reads whole sequences. Its hidden size is
    the language model's."""
    projector: ProjectorSpec = cfg.modules[layout.name].projector
    layout = replace(layout, pp=1, sp=False)
    llm = cfg.llm
    return _config(
        cfg,
        layout,
        num_layers=1,
        hidden_size=llm.hidden_size,
        num_attention_heads=layout.tp,  # a projector has no attention; the config requires heads that tp divides
        kv_channels=1,
        ffn_hidden_size=projector.ffn_hidden_size or llm.hidden_size,
        gated_linear_unit=projector.gated,
        **activation_options(
            projector.activation, _fuses_activation(cfg, layout.name, projector.activation, projector.bias)
        ),
        add_bias_linear=projector.bias,
        normalization=projector.norm or "LayerNorm",
        init_method_std=llm.init_std,
    )


def resampler_config(cfg: ConfigContainer, layout: ModuleLayout) -> TransformerConfig:
    """Return the config of the layers of a projector's resampler, as wide as the language model."""
    resampler, width = cfg.modules[layout.name].projector.resampler, cfg.llm.hidden_size
    if not resampler.latents:
        return projector_config(cfg, layout)
    return _config(
        cfg,
        replace(layout, pp=1, sp=False),
        num_layers=resampler.num_layers,
        hidden_size=width,
        num_attention_heads=resampler.num_attention_heads,
        num_query_groups=resampler.key_heads,
        kv_channels=resampler.head_width(width),
        ffn_hidden_size=resampler.ffn_width(width),
        normalization=resampler.normalization,
        layernorm_epsilon=resampler.layernorm_epsilon,
        gated_linear_unit=resampler.activation == GATED,
        **activation_options(
            resampler.activation, _fuses_activation(cfg, layout.name, resampler.activation, bias=False)
        ),
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=cfg.llm.init_std,
    )


def _fuses_activation(cfg: ConfigContainer, name: str, activation: str = "", bias: bool = True) -> bool:
    """True if layers of a module fuse their activation; `activation`: of an encoder, a projector or a resampler."""
    kind = device.current().type
    if activation:
        return module_fuses(cfg, name, "activation", kind) and not activation_reason(activation, bias=bias)
    return not fusions_of(cfg, name, kind)["activation"]


def _config(cfg: ConfigContainer, layout: ModuleLayout, **sizes: Any) -> TransformerConfig:
    dtype = DTYPES[cfg.train.precision]
    config = TransformerConfig(
        **sizes,
        **recompute_options(cfg.recompute_of(layout.name)),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Messages between stages are in the order of their stream: the host need not wait for each of them
        # (p2p_communication.py:419 in Megatron-Core 0.19.2; True is for NCCL before 2.7).
        batch_p2p_sync=False,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        # Weights are drawn on the CPU, each rank's part (`initial_weights`): the same model at every layout.
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **fusion_options(cfg, layout.name),
    )
    draw_by(config)
    config.offload = Offload() if cfg.offload_of(layout.name) else None
    config.init_seed = seed_for(cfg.run.seed, layout.name)
    config.lora = cfg.modules[layout.name].lora
    module = cfg.modules[layout.name]
    config.adapters = adapted_linears(layout.name, module, cfg.llm.hidden_size)
    of_module = linears(layout.name, module, cfg.llm.hidden_size) if module.lora.quantization else []
    config.quantized = {linear.name: linear for linear in of_module if linear.layer is not None}
    config.layers_name = layers_name(layout.name)
    config.cpu_kernels, config.recompute = cfg.run.cpu_kernels, cfg.recompute_of(layout.name)
    config.max_logits = cfg.train.max_logits_mib * 2**20
    # Only these layers can be compiled.
    config.dense_layers = cfg.run.cpu_kernels or cfg.compile_of(layout.name) == "layers"
    return config

"""Language models that transformers makes, tiny and of odd sizes, with norms and biases that matter."""

from pathlib import Path
from typing import Any

import numpy as np

from mimo_train.families.registry import FAMILIES as REGISTERED

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    # In no sample: transformers gives its embedding no gradient.
    "pad_token_id": 210,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQUENCE, SAMPLES = 24, 4
DOCUMENTS = (10, 24, 1, 13)
"""Tokens of the documents of a packed row, each the beginning of a sample."""
_AXES = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1000.0}
_INTERLEAVED = _AXES | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 6.0, "original_max_position_embeddings": 20}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SIGMOID = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
_LATENT = {"kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8}
_DELTA = {
    # Norms of narrow keys make rounding larger: with weights of 0.15 transformers itself is 8e-6 off in its gradients.
    "initializer_range": 0.05,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_SHARED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
_GEMMA = {"query_pre_attn_scalar": 20, "sliding_window": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": None},
    "llama, attention bias, linear": {
        "model_type": "llama",
        "attention_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    },
    "llama, all biases, dynamic": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    },
    "llama, tied, llama3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": _LLAMA3 | {"low_freq_factor": 1.2, "high_freq_factor": 3.5},
    },
    "llama, yarn": {"model_type": "llama", "rope_parameters": _YARN | {"attention_factor": 1.3, "beta_fast": 8.0}},
    "mistral, window, yarn": {
        "model_type": "mistral",
        "sliding_window": 7,
        "rope_parameters": _YARN | {"mscale": 0.8, "mscale_all_dim": 0.3, "truncate": False},
    },
    "mixtral": {"model_type": "mixtral", "sliding_window": 9, **_EXPERTS},
    "qwen2, window in some layers": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3, biases, one key head": {
        "model_type": "qwen3",
        "attention_bias": True,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen3_moe, a dense layer": {
        "model_type": "qwen3_moe",
        "mlp_only_layers": [1],
        "moe_intermediate_size": 24,
        **_EXPERTS,
    },
    "qwen3_moe, every second layer": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
        **_EXPERTS,
    },
    "seed_oss": {
        "model_type": "seed_oss",
        "attention_out_bias": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "ministral": {
        "model_type": "ministral",
        "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "cwm": {"model_type": "cwm", "sliding_window": 5},
    "qwen2_moe, windows": {
        "model_type": "qwen2_moe",
        "use_sliding_window": True,
        "sliding_window": 6,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen2_vl_text": {"model_type": "qwen2_vl_text", "head_dim": None, "rope_parameters": _AXES},
    "qwen2_5_omni_text": {
        "model_type": "qwen2_5_omni_text",
        "tie_word_embeddings": False,
        "rope_parameters": _AXES | {"mrope_section": [2, 3, 3]},
    },
    "gemma": {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"},
    "qwen3_5": {
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 1,
        "attention_bias": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        **_DELTA,
        "rope_parameters": _PARTIAL,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "rope_parameters": _PARTIAL,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_experts": 4,
        **_DELTA,
        **_SHARED,
    },
    "qwen3_next, a dense layer": {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [1],
        "num_experts": 4,
        **_DELTA,
        **_SHARED,
    },
    "gemma2": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        **_GEMMA,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        **_GEMMA,
    },
    "glm4_moe, biases, head norms": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        **_SIGMOID,
    },
    "dots1, groups, a window": {
        "model_type": "dots1",
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "sliding_window": 7,
        "max_window_layers": 2,
        "first_k_dense_replace": 1,
        **_SIGMOID,
    },
    "deepseek_v3, yarn, groups": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 6,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 20,
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        **_SIGMOID,
        **_LATENT,
    },
    "glm4_moe_lite, no query latents": {
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 6,
        "q_lora_rank": None,
        **_SIGMOID,
        **_LATENT,
    },
    "qwen3_vl_moe_text, a dense layer": {
        "model_type": "qwen3_vl_moe_text",
        "tie_word_embeddings": False,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 24,
        "rope_parameters": _INTERLEAVED,
        **_EXPERTS,
    },
    "qwen3_omni_moe_text": {
        "model_type": "qwen3_omni_moe_text",
        "tie_word_embeddings": False,
        "norm_topk_prob": False,
        "moe_intermediate_size": 24,
        "rope_parameters": _INTERLEAVED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "smollm3, windows": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 7,
    },
    "phi3, half of a head": {
        "model_type": "phi3",
        "sliding_window": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.5,
        "attention_bias": True,
    },
    "ernie4_5, biases, yarn": {
        "model_type": "ernie4_5",
        "use_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": _YARN,
    },
    "glm, no biases": {"model_type": "glm", "attention_bias": False},
    "glm4": {"model_type": "glm4", "num_key_value_heads": 1},
    "glm4v_text": {
        "model_type": "glm4v_text",
        "head_dim": 8,
        "rope_parameters": _PARTIAL | {"mrope_section": [1, 0, 1]},
    },
    "glm4v_moe_text": {
        "model_type": "glm4v_moe_text",
        "n_shared_experts": 1,
        "rope_parameters": _PARTIAL,
        **_SIGMOID,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "sliding_window": 6,
        "swiglu_limit": 0.6,
        "intermediate_size": 24,
        "rope_parameters": _YARN | {"truncate": False},
        **_EXPERTS,
    },
    "olmo2, biases": {"model_type": "olmo2", "attention_bias": True},
    "olmo3, yarn": {
        "model_type": "olmo3",
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": _YARN | {"attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "glm_ocr_text": {"model_type": "glm_ocr_text", "rope_parameters": _PARTIAL},
    "exaone4": {
        "model_type": "exaone4",
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "olmoe": {"model_type": "olmoe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "cohere2": {
        "model_type": "cohere2",
        "logit_scale": 0.3,
        "sliding_window": 6,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "hy_v3, a dense layer": {
        "model_type": "hy_v3",
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}
"""Configs by name: what differs from SIZES."""


def tokens() -> np.ndarray:
    """[samples, sequence + 1], ids."""
    return np.random.default_rng(7).integers(0, SIZES["pad_token_id"], (SAMPLES, SEQUENCE + 1))


def make(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Save each model in a folder of its name; returns logits, those of `DOCUMENTS` alone, hidden states by layer,
    loss, gradients by tensor and gradient norm of each.

    The config that we write must give the model again: logits and all.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    return {name: _one(folder / name, name) for name in names}


def made(name: str, **sizes: Any) -> Any:
    """A model of transformers.

    Args:
        sizes: other than SIZES.
    """
    import torch
    import transformers

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**SIZES | FAMILIES[name] | sizes)
    model = with_output_layer(config) if _is_part(name) else _causal(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or parameter_name.endswith("_bias"):
                # Strong decays are differences of large sums, of which rounding is 1e-5 in fp32.
                mean = 0 if parameter_name.endswith(("bias", "A_log")) else parameter
                parameter.copy_(torch.randn_like(parameter) * 0.3 + mean)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model


def _is_part(name: str) -> bool:
    """True if transformers has the model only as a part of larger ones."""
    return not REGISTERED[FAMILIES[name]["model_type"]].architecture


def _causal(config: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def with_output_layer(config: Any) -> Any:
    """The language model of a larger model, as a causal language model."""
    import torch
    from transformers import conversion_mapping, modeling_outputs
    from transformers.models.glm4v.modeling_glm4v import Glm4vTextModel
    from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeTextModel
    from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrTextModel
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerTextModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

    parts = {
        "glm4v_text": Glm4vTextModel,
        "glm_ocr_text": GlmOcrTextModel,
        "glm4v_moe_text": Glm4vMoeTextModel,
        "qwen2_vl_text": Qwen2VLTextModel,
        "qwen2_5_omni_text": Qwen2_5OmniThinkerTextModel,
        "qwen3_vl_moe_text": Qwen3VLMoeTextModel,
        "qwen3_omni_moe_text": Qwen3OmniMoeThinkerTextModel,
    }

    class Causal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.config = config
            self.model = parts[config.model_type]._from_config(config, attn_implementation="eager")
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        def forward(self, input_ids, output_hidden_states=False):
            output = self.model(input_ids=input_ids, output_hidden_states=output_hidden_states)
            logits = self.lm_head(output.last_hidden_state)
            return modeling_outputs.CausalLMOutput(logits=logits, hidden_states=output.hidden_states)

        def save_pretrained(self, folder: Path, **options: Any) -> None:
            if config.model_type == "glm4v_moe_text":  # registered for the larger model alone
                experts = conversion_mapping.get_checkpoint_conversion_mapping("glm4v_moe")
                conversion_mapping.register_checkpoint_conversion_mapping(config.model_type, experts, overwrite=True)
            self.model.save_pretrained(folder, state_dict=self.state_dict(), **options)

    return Causal()


def _one(folder: Path, name: str) -> dict[str, Any]:
    import torch
    import transformers

    from mimo_train.families.config_json import language_config_json, language_spec

    model = made(name)
    model.save_pretrained(folder, max_shard_size="60KB")
    ids = torch.from_numpy(tokens())
    output = model(input_ids=ids[:, :-1], output_hidden_states=True)
    logits = output.logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        if not _is_part(name):
            written = language_config_json(language_spec(model.config.to_dict()), model.config.model_type)
            # An export adds the tokenizer's.
            special = {name: SIZES[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
            again = _causal(transformers.AutoConfig.for_model(**written | special))
            again.load_state_dict(model.state_dict())
            assert torch.equal(again(input_ids=ids[:, :-1]).logits, logits), written
        alone = [model(input_ids=ids[row : row + 1, :length]).logits[0] for row, length in enumerate(DOCUMENTS)]
    return {
        "logits": logits.detach().numpy(),
        "documents": torch.cat(alone).numpy(),
        "states": [state.detach().numpy() for state in output.hidden_states],
        "loss": loss.item(),
        "gradients": gradients,
        "norm": float(np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in gradients.values()))),
    }

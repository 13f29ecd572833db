"""Spellings that several families share: biases, and experts behind a softmax router."""

from dataclasses import dataclass

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import Config, Keys, Spelling, rejected

NEXT_TOKENS = ("model.layers.{layers}.*",)
"""`Family.carried` of models with a layer of multi-token prediction behind all others."""


@dataclass(frozen=True)
class Biases(Spelling):
    """Keys of config.json for biases; empty: the family has none."""

    qkv: str = ""
    """Of queries, keys and values."""
    proj: str = ""
    """Of attention's output projection."""
    mlp: str = ""
    """Of the feed-forward block."""

    def read(self, config: Config, keys: Keys) -> Keys:
        qkv, proj, mlp = (bool(name and config.get(name)) for name in (self.qkv, self.proj, self.mlp))
        if mlp and not (qkv and proj):
            raise rejected(self.mlp, True, "the model here has it with attention_bias only")
        return {"bias": mlp, "qkv_bias": qkv and not mlp, "proj_bias": proj and not mlp}

    def write(self, spec: LlmSpec) -> Keys:
        values = {self.mlp: spec.bias, self.proj: spec.bias or spec.proj_bias, self.qkv: spec.bias or spec.qkv_bias}
        return {name: value for name, value in values.items() if name}


ATTENTION_BIAS = Biases(qkv="attention_bias", proj="attention_bias")
"""The usual key of biases of attention."""


@dataclass(frozen=True)
class SoftmaxExperts(Spelling):
    """Experts behind a softmax router, all of `intermediate_size`, whose probabilities are renormalised."""

    number: str = "num_local_experts"
    """Key of the number of experts."""

    def read(self, config: Config, keys: Keys) -> Keys:
        return self._router(config, "num_experts_per_tok", True) | {"expert_ffn_hidden_size": 0, "dense_layers": []}

    def write(self, spec: LlmSpec) -> Keys:
        return {
            self.number: spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token,
            "output_router_logits": False,
            "intermediate_size": spec.expert_width,
            "router_jitter_noise": 0.0,
        }

    def _router(self, config: Config, key: str, renormalise: bool) -> Keys:
        """Return the keys of a router that can learn; `key`: of config.json, to name."""
        if renormalise and config["num_experts_per_tok"] == 1:
            raise rejected(key, config[key], "the weight of a single expert would always be 1")
        return {
            "num_experts": config[self.number],
            "experts_per_token": config["num_experts_per_tok"],
            "router_renormalise": renormalise,
        }


@dataclass(frozen=True)
class QwenExperts(SoftmaxExperts):
    """Experts of `moe_intermediate_size` behind a softmax router, in some layers."""

    shared: str = ""
    """Key of the width of a shared expert with a gate; empty: none."""

    def read(self, config: Config, keys: Keys) -> Keys:
        dense, step = set(config["mlp_only_layers"] or ()), config["decoder_sparse_step"]
        layers = range(config["num_hidden_layers"])
        keys = self._router(config, "norm_topk_prob", config["norm_topk_prob"]) | {
            "expert_ffn_hidden_size": config["moe_intermediate_size"],
            "dense_layers": [layer for layer in layers if layer in dense or (layer + 1) % step],
        }
        if not self.shared:
            return keys
        return keys | {"shared_expert_ffn_hidden_size": config[self.shared], "shared_expert_gate": True}

    def write(self, spec: LlmSpec) -> Keys:
        return {
            self.number: spec.num_experts,
            "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token,
            "output_router_logits": False,
            "moe_intermediate_size": spec.expert_width,
            "norm_topk_prob": not spec.softmax_over_all_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(spec.dense_layers),
            **({self.shared: spec.shared_expert_ffn_hidden_size} if self.shared else {}),
        }

"""Experts behind a sigmoid router with biases, and shared experts, in config.json (DeepSeek-V3 and its successors)."""

from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.base import Config, Keys, Spelling, fault

DENSE, SPARSE = "dense", "sparse"
"""Kinds of layers in `mlp_layer_types`."""

CHOICE: dict[str, tuple] = {
    "scoring_func": (None, "sigmoid", "noaux_tc"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
}
"""Supported values of keys that only classes outside of `transformers` read."""


@dataclass(frozen=True)
class SigmoidExperts(Spelling):
    """Experts of `moe_intermediate_size`, and shared ones that make one of several times this width. The scores of the
    chosen experts are renormalised and multiplied."""

    number: str = "n_routed_experts"
    """Key of the number of experts."""
    shared: str = "n_shared_experts"
    """Key of the number of shared experts."""
    scale: str = "routed_scaling_factor"
    """Key of the factor of the scores."""
    groups: bool = True
    """True if the class reads `n_group`, `topk_group` and `norm_topk_prob`."""
    first_dense: str = ""
    """Key of the number of dense layers before all others; empty: `mlp_layer_types` has the kinds of all layers."""

    def faults(self, config: Config) -> Iterator[Fault]:
        for name in (self.number, self.shared, "num_experts_per_tok", "moe_intermediate_size"):
            if type(config[name]) is not int or config[name] < 1:
                yield fault(name, config[name], "a whole number of at least 1 is needed")
                return
        chosen, groups = config["num_experts_per_tok"], self._groups(config)
        if self.groups and bool(config["norm_topk_prob"]) != (chosen > 1):
            yield fault(
                "norm_topk_prob",
                config["norm_topk_prob"],
                f"the model here has {chosen > 1} with num_experts_per_tok {chosen}: weights of several experts are "
                "renormalised, and the weight of a single one would always be 1",
            )
        if groups[0] and chosen != 2 * groups[1]:
            yield fault("topk_group", groups[1], f"must be half of num_experts_per_tok {chosen} here")
        kinds, layers = config.get("mlp_layer_types"), config["num_hidden_layers"]
        if not self.first_dense and kinds is not None and (len(kinds) != layers or set(kinds) - {DENSE, SPARSE}):
            yield fault("mlp_layer_types", kinds, f"{DENSE} or {SPARSE} for each of {layers} layers is needed")

    def read(self, config: Config, keys: Keys) -> Keys:
        groups, width = self._groups(config), config["moe_intermediate_size"]
        return {
            "num_experts": config[self.number],
            "experts_per_token": config["num_experts_per_tok"],
            "expert_ffn_hidden_size": width,
            "shared_expert_ffn_hidden_size": width * config[self.shared],
            "dense_layers": self._dense(config),
            "router_score_function": "sigmoid",
            "router_renormalise": True,
            "router_bias": True,
            "router_groups": groups[0],
            "router_groups_per_token": groups[1],
            "router_scaling_factor": float(config[self.scale]),
        }

    def write(self, spec: LlmSpec) -> Keys:
        keys: Keys = {
            self.number: spec.num_experts,
            self.shared: spec.shared_expert_ffn_hidden_size // spec.expert_width,
            self.scale: spec.router_scaling_factor,
            "num_experts_per_tok": spec.experts_per_token,
            "moe_intermediate_size": spec.expert_width,
            "output_router_logits": False,
        }
        if self.groups:
            keys |= {"n_group": spec.router_groups or 1, "topk_group": spec.router_groups_per_token or 1}
            keys["norm_topk_prob"] = spec.experts_per_token > 1
        if self.first_dense:
            return keys | {self.first_dense: len(spec.dense_layers)}
        kinds = [SPARSE if spec.has_experts(layer) else DENSE for layer in range(spec.num_layers)]
        return keys | {"mlp_layer_types": kinds}

    def _groups(self, config: Config) -> tuple[int, int]:
        """Return the number of groups, and of those that a token uses; (0, 0) if it may use all."""
        groups, chosen = (config.get(name) or 1 for name in ("n_group", "topk_group"))
        return (groups, chosen) if self.groups and chosen < groups else (0, 0)

    def _dense(self, config: Config) -> list[int]:
        layers = config["num_hidden_layers"]
        if self.first_dense:
            return list(range(min(config[self.first_dense] or 0, layers)))
        kinds = config.get("mlp_layer_types")
        return [0] if kinds is None else [layer for layer in range(layers) if kinds[layer] == DENSE]

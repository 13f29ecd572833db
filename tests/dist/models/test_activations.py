"""Recomputed parts of layers, and activations on the host: the numbers of a run that keeps everything."""

from collections import Counter

import pytest

from tests.dist.ranks import run_ranks
from tests.dist.runs import config, largest_difference
from tests.dist.steps import Steps, whole

LLM = "modules.language.llm."
EXPERTS = tuple(
    f"{LLM}{key}" for key in ("num_experts=4", "experts_per_token=2", "expert_ffn_hidden_size=24", "router_z_loss=1e-3")
)
BIASES = (f"{LLM}bias=true", f"{LLM}normalization=LayerNorm")
CASES = {
    "biases": ("gpt_tiny", 1, BIASES, ("train.recompute=attention+mlp",)),
    "norms": ("gpt_tiny", 1, BIASES, ("train.recompute=norms",)),
    "dropout of adapters": (
        *("gpt_tiny", 2),
        ("layout=language_tp2", "modules.language.lora.rank=2", "modules.language.lora.dropout=0.3"),
        ("train.recompute=attention+mlp",),
    ),
    "experts, frozen embedding": (
        *("gpt_tiny", 1),
        (*EXPERTS, "modules.language.freeze=[embedding.*]", f"{LLM}tie_embeddings=false"),
        ("train.recompute=experts+norms",),
    ),
    "an encoder and a stage": (
        *("vlm_digits", 2),
        ("layout=two_processes",),
        ("modules.images.recompute=mlp+attention+norms", "modules.language.recompute=mlp+norms"),
    ),
    "offloaded stages": (
        "gpt_tiny",
        2,
        ("layout=language_pp2",),
        ("train.offload_activations=layers", "train.recompute=attention+norms"),
    ),
    "offloaded, soft caps, fused": (
        *("gpt_tiny", 1),
        (f"{LLM}attention_softcap=5", "train.fusions.activation=always"),
        ("train.offload_activations=layers", "train.recompute=selective"),
    ),
}
"""(config, ranks, overrides, what is recomputed or offloaded) by name."""


def _curve(cfg) -> tuple[list[tuple], Counter]:
    """Return the curve of three steps, and the numbers of calls of blocks and of copies back."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.moe.router import TopKRouter

    from mimo_train.models import offload, recompute

    calls: Counter[str] = Counter()
    offload.LEAST_BYTES = 1
    for kind, name in (
        (SelfAttention, "forward"),
        (MLP, "forward"),
        (TopKRouter, "forward"),
        (offload._Saved, "fetch"),
        (recompute._NormOutput, "view"),
    ):
        original = getattr(kind, name)

        def counted(self, *args, original=original, kind=kind, **kwargs):
            calls[kind.__name__] += 1
            return original(self, *args, **kwargs)

        setattr(kind, name, counted)
    return Steps(cfg).train(3), calls


@pytest.mark.parametrize("name", CASES)
def test_numbers_do_not_change(name, digits, prose, tmp_path):
    model, ranks, overrides, changes = CASES[name]
    demo = prose if model == "gpt_tiny" else digits
    sizes = ("train.global_batch_size=16", "train.micro_batch_size=4")

    def curves(folder: str, *more: str) -> tuple[list, Counter]:
        results = run_ranks(_curve, ranks, config(model, tmp_path / folder, demo, *sizes, *overrides, *more))
        return whole([curve for curve, _ in results]), sum((calls for _, calls in results), Counter())

    (kept, before), (changed, after) = curves("kept"), curves("changed", *changes)
    assert largest_difference(kept, changed) == (0, 0)
    text = " ".join(changes)
    assert (after["SelfAttention"] > before["SelfAttention"]) == ("attention" in text), (before, after)
    assert (after["MLP"] > before["MLP"]) == ("mlp" in text or "experts" in text), (before, after)
    assert (after["TopKRouter"] > before["TopKRouter"]) == ("experts" in text), (before, after)
    assert (after["_NormOutput"] > 0) == ("norms" in text), after
    assert (after["_Saved"] > 0) == ("offload" in text), after

"""Memory that `check` estimates from sizes alone is that of the tensors that a dry run counts."""

import os

import pytest

from mimo_train.estimate.memory import rank_memory, run_memory
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.inputs.datasets import tokenizer_of
from mimo_train.layout.run import resolve
from tests.dist.preflight.dry_run.test_dry_run import HALF, IMAGES, LANGUAGE, _dry
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

# Layers wide enough that they, and not lists of token ids, are what is counted; every row full.
WIDE = (
    "modules.language.llm.num_layers=4",
    "modules.language.llm.hidden_size=256",
    "modules.language.llm.ffn_hidden_size=704",
    "modules.language.llm.num_attention_heads=8",
    "modules.language.llm.num_query_groups=0",
    "modules.language.llm.head_size=0",
    "train.global_batch_size=32",
    "data.pad=sequence",
)
ENCODER = ("modules.images.encoder.hidden_size=256", "modules.images.encoder.ffn_hidden_size=1024",
           "modules.images.encoder.num_layers=4")  # fmt: skip
GATED = ("modules.language.llm.activation=swiglu", "modules.language.llm.ffn_hidden_size=2048")
TP_SP = (f"{LANGUAGE}tp=2", f"{LANGUAGE}sp=true")
NO_LOGITS = ("train.max_logits_mib=0", "modules.language.llm.vocab_size=32000", "train.micro_batch_size=16")
MOE = "llm@modules.language.llm=gpt_tiny_moe"
LATENT_SIZES = {
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
LATENT = tuple(f"modules.language.llm.{name}={size}" for name, size in LATENT_SIZES.items())
CASES = {
    "fp32": ("gpt_tiny", 0, ()),
    "tp sp, stages": ("gpt_tiny", 2, (*TP_SP, f"{LANGUAGE}pp=2", HALF)),
    "first of four stages": ("gpt_tiny", 0, (f"{LANGUAGE}pp=4", HALF)),
    "inner stage": ("gpt_tiny", 2, (f"{LANGUAGE}pp=4", HALF)),
    "interleaved": ("gpt_tiny", 0, (f"{LANGUAGE}pp=2", f"{LANGUAGE}vpp=2", HALF)),
    "cp": ("gpt_tiny", 1, (f"{LANGUAGE}cp=2", *TP_SP, HALF)),
    "experts": ("gpt_tiny", 0, (MOE, f"{LANGUAGE}dp=4", f"{LANGUAGE}ep=2", HALF)),
    "experts, etp": ("gpt_tiny", 0, (MOE, *TP_SP, f"{LANGUAGE}etp=2", HALF)),
    "recompute": ("gpt_tiny", 0, ("train.recompute=full", HALF)),
    "recomputed blocks": ("gpt_tiny", 0, ("train.recompute=attention+mlp", HALF)),
    "recomputed mlp, tp sp": ("gpt_tiny", 0, (*TP_SP, "train.recompute=mlp", HALF)),
    "recomputed norms": ("gpt_tiny", 0, ("train.recompute=norms", HALF)),
    "recomputed blocks and norms, tp sp": ("gpt_tiny", 0, (*TP_SP, "train.recompute=attention+norms", HALF)),
    "recomputed norms of experts": ("gpt_tiny", 0, (MOE, "train.recompute=norms", HALF)),
    "recomputed experts": ("gpt_tiny", 0, (MOE, "train.recompute=experts", HALF)),
    "offloaded": ("gpt_tiny", 0, ("data.sequence_length=512", f"{LANGUAGE}pp=2", "train.offload_activations=layers",
                                  HALF)),
    "offloaded, recomputed": ("gpt_tiny", 0, ("data.sequence_length=512", "train.offload_activations=layers",
                                              "train.recompute=mlp+norms", HALF)),
    "single operations": ("gpt_tiny", 0, (*GATED, "train.fusions.activation=never", HALF)),
    "replicated optimizer": ("gpt_tiny", 0, (f"{LANGUAGE}dp=2", "optim.distributed_optimizer=false", HALF)),
    "divided optimizer": ("gpt_tiny", 0, (f"{LANGUAGE}dp=2", HALF)),
    "all logits": ("gpt_tiny", 0, ("train.logits=all", "modules.language.llm.vocab_size=32000", HALF)),
    "no logits": ("gpt_tiny", 0, (*NO_LOGITS, "train.logits=all", HALF)),
    "no logits, capped, tp sp": ("gpt_tiny", 0, (*NO_LOGITS, "modules.language.llm.logit_softcap=30", *TP_SP, HALF)),
    "no logits, untied, fp32": ("gpt_tiny", 0, (*NO_LOGITS, "modules.language.llm.tie_embeddings=false")),
    "no logits, frozen": ("vlm_digits", 1, (*NO_LOGITS, "train.logits=all", "modules.images.freeze=[encoder]", HALF,
                                            "modules.language.freeze=[llm]")),
    "no logits, stages": ("gpt_tiny", 1, (*NO_LOGITS, f"{LANGUAGE}pp=2", HALF)),
    "head norms": ("gpt_tiny", 0, ("modules.language.llm.num_query_groups=2", "modules.language.llm.qk_norm=true",
                                   HALF)),
    "norms behind": ("gpt_tiny", 0, ("modules.language.llm.post_norms=true", *GATED, HALF)),
    "few tokens": ("gpt_tiny", 0, ("train.micro_batch_size=1", "data.sequence_length=32", HALF)),
    "packed": ("gpt_tiny", 0, ("data.pad=microbatch", "data.pack=true", HALF)),
    "packed, grouped, tp": ("gpt_tiny", 1, ("data.pad=microbatch", "data.pack=true", *TP_SP, HALF,
                                            "modules.language.llm.num_query_groups=2")),
    "latents": ("gpt_tiny", 0, (*LATENT, HALF)),
    "latents, tp sp": ("gpt_tiny", 0, (*LATENT, *TP_SP, HALF)),
    "latents, packed": ("gpt_tiny", 0, (*LATENT, "data.pad=microbatch", "data.pack=true", HALF)),
    "pairs": ("vlm_digits", 1, ("train.task=simpo", "train.micro_batch_size=4", HALF)),
    "value head": ("vlm_digits", 1, ("train.task=reward", "train.micro_batch_size=4", HALF,
                                     "modules.language.llm.vocab_size=32000",
                                     "modules.language.llm.tie_embeddings=false")),
    "adapters": ("vlm_digits", 1, ("modules.language.lora.rank=4", HALF)),
    "quantized, embedding": ("gpt_tiny", 0, (
        *(f"modules.language.lora.{name}" for name in ("rank=4", "quantization=nf4", "modules_to_save=[embed_tokens]")),
        HALF,
    )),
    "frozen": ("vlm_digits", 1, ("modules.images.freeze=[encoder]", "modules.language.freeze=[llm]", HALF)),
    "shared": ("vlm_digits", 0, ("placement.mode=shared", f"{IMAGES}dp=4", f"{LANGUAGE}tp=2", f"{LANGUAGE}dp=2", HALF,
                                 *ENCODER)),
    "encoder": ("vlm_digits", 0, (f"{IMAGES}tp=2", f"{LANGUAGE}pp=2", HALF, *ENCODER)),
}  # fmt: skip
"""Every one was tried; these by default, and all with MIMO_ALL_LAYOUTS=1."""
DEFAULT = ("tp sp, stages", "no logits", "cp", "packed", "shared")
DEMOS = {"vlm_digits": "digits", "gpt_tiny": "prose"}


@pytest.mark.parametrize("name", CASES if os.environ.get("MIMO_ALL_LAYOUTS") else DEFAULT)
def test_estimated_memory_is_that_of_the_tensors(name, request, tmp_path):
    config_name, rank, overrides = CASES[name]
    demo = request.getfixturevalue("pairs" if name in ("pairs", "value head") else DEMOS[config_name])
    run = resolve(config(config_name, tmp_path, demo, *WIDE, *overrides))
    (found,) = run_ranks(_dry, 1, run, rank)
    assert not hasattr(found, "what"), found.what + found.trace
    rows = embedding_rows(run.cfg.llm, tokenizer_of(run.cfg).vocab_size)
    estimate = rank_memory(run_memory(run, rows))[rank]
    counted = found.categories
    for category in ("weights", "gradients", "optimizer"):
        # Each tensor takes whole blocks of 512 bytes.
        assert getattr(estimate, category) == pytest.approx(counted.get(category, 0), rel=0.01, abs=1024), category
    used = sum(counted.get(category, 0) for category in ("activations", "logits", "communication"))
    bound = 0.05 * found.peak
    assert estimate.activations + estimate.work == pytest.approx(used, abs=bound)
    assert estimate.total == pytest.approx(found.peak, abs=bound)

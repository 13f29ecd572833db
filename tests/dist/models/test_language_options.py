"""Options of families in a run with images: the layout changes no number, and a checkpoint has all of them."""

import torch

from tests.dist.models.test_packed import LATENT_SIZES
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole

LLM = "modules.language.llm."
OPTIONS = (
    f"{LLM}num_layers=3",
    f"{LLM}num_query_groups=1",
    f"{LLM}head_size=12",
    f"{LLM}partial_rotary_factor=0.5",
    f"{LLM}no_rope_layers=[2]",
    f"{LLM}vocab_size=300",
    f"{LLM}tie_embeddings=true",
    f"{LLM}qkv_bias=true",
    f"{LLM}proj_bias=true",
    f"{LLM}qk_norm=true",
    f"{LLM}zero_centered_norms=true",
    f"{LLM}post_norms=true",
    f"{LLM}activation=geglu",
    f"{LLM}scale_embeddings=true",
    f"{LLM}residual_multiplier=0.7",
    f"{LLM}window=6",
    f"{LLM}full_attention_layers=[1]",
    f"{LLM}local_rope_base=500",
    f"{LLM}rope_scaling.kind=linear",
    f"{LLM}rope_scaling.factor=2",
    f"{LLM}attention_scale_size=20",
    f"{LLM}attention_softcap=2",
    f"{LLM}logit_softcap=5",
    "train.iters=20",
    "optim.decay=constant",
    "optim.warmup_iters=0",
)
EXPERTS = (
    f"{LLM}attention_softcap=0",
    f"{LLM}proj_bias=false",
    f"{LLM}num_experts=4",
    f"{LLM}experts_per_token=2",
    f"{LLM}expert_ffn_hidden_size=16",
    f"{LLM}shared_expert_ffn_hidden_size=16",
    f"{LLM}router_score_function=sigmoid",
    f"{LLM}router_bias=true",
    f"{LLM}router_groups=2",
    f"{LLM}router_groups_per_token=1",
    f"{LLM}router_scaling_factor=2.5",
    f"{LLM}dense_layers=[0]",
)
LATENT = (
    *(f"{LLM}{size}" for size in LATENT_SIZES),
    f"{LLM}num_layers=3",
    f"{LLM}rope_scaling.kind=yarn",
    f"{LLM}rope_scaling.original_positions=16",
    f"{LLM}rope_scaling.factor=2",
    f"{LLM}post_norms=true",
    "train.recompute=full",
    "train.iters=20",
    "optim.decay=constant",
    "optim.warmup_iters=0",
)
BIASES = (
    "train.iters=20",
    "optim.decay=constant",
    "optim.warmup_iters=0",
    f"{LLM}bias=true",
    f"{LLM}num_experts=4",
    f"{LLM}attention_sinks=true",
    f"{LLM}window=6",
    f"{LLM}full_attention_layers=[1]",
    f"{LLM}activation=quick_geglu",
    f"{LLM}activation_clamp=0.2",
    f"{LLM}glu_offset=1",
    f"{LLM}qk_norm=true",
    f"{LLM}qk_norm_over_heads=true",
)
DELTA = (
    f"{LLM}num_query_groups=2",
    f"{LLM}attention_output_gate=true",
    f"{LLM}linear_attention_layers=[0]",
    f"{LLM}linear_num_key_heads=2",
    f"{LLM}linear_num_value_heads=4",
    f"{LLM}linear_key_head_dim=16",
    f"{LLM}linear_value_head_dim=12",
    f"{LLM}linear_conv_kernel_dim=3",
)
ONE = "layout=one_process"
TP2 = (ONE, "modules.images.layout.tp=2", "modules.language.layout.tp=2", "modules.language.layout.sp=true")
IMAGES_TP2 = ("modules.images.layout.tp=2",)
IMAGES_DP2 = ("modules.images.layout.dp=2",)
PIPELINE = ("layout=images_tp2_language_pp2",)


def _curve(cfg, steps: int) -> list[tuple]:
    return Steps(cfg).train(steps)


def _saved_after(cfg, steps: int) -> str:
    run = Steps(cfg)
    run.train(steps)
    return str(run.save())


def _with_biases(cfg, steps: int) -> tuple[str, list[tuple]]:
    """A checkpoint, and the curve, of a run whose routers have biases."""
    from mimo_train.models.parameters import modules_of, router_biases

    run = Steps(cfg)
    chunks = modules_of(run.model).get("language", [])
    biases = {name: bias for chunk in chunks for name, bias in router_biases(chunk).items()}
    for number, name in enumerate(sorted(biases)):
        biases[name].copy_(torch.linspace(-1.0, 1.0, 4).roll(number))
    before = {name: bias.clone() for name, bias in biases.items()}
    curve = run.train(steps)
    assert biases and all(torch.equal(bias, before[name]) for name, bias in biases.items()), "biases moved"
    return str(run.save()), curve


def _close(one: list[tuple], other: list[tuple]) -> bool:
    return max(largest_difference(one, other)) < TOLERANCE


def test_layouts_give_the_numbers_of_one_process_and_read_each_other_s_checkpoints(digits, tmp_path):
    def tiny(name: str, *overrides: str):
        return config("vlm_digits", tmp_path / name, digits, *OPTIONS, *overrides)

    straight = whole(run_ranks(_curve, 1, tiny("one", ONE), 3))
    assert straight[-1][1] < straight[0][1], "it learns"
    assert _close(straight, whole(run_ranks(_curve, 4, tiny("pp2", *PIPELINE), 3)))
    folder = run_ranks(_saved_after, 2, tiny("tp2", *TP2), 2)[0]
    resumed = tiny("resumed", ONE, f"checkpoint.resume={folder}")
    again = [(step + 2, loss, norm) for step, loss, norm in whole(run_ranks(_curve, 1, resumed, 1))]
    assert _close(straight[2:], again)


def test_latent_attention_gives_the_numbers_of_one_process(digits, tmp_path):
    """Without sequence parallelism, in stages, and over context-parallel ranks; checkpoints go between them."""

    def tiny(name: str, *overrides: str):
        return config("vlm_digits", tmp_path / name, digits, *LATENT, *overrides)

    straight = whole(run_ranks(_curve, 1, tiny("one", ONE), 3))
    assert straight[-1][1] < straight[0][1], "it learns"
    assert _close(straight, whole(run_ranks(_curve, 4, tiny("pp2", *PIPELINE), 3)))
    folder = run_ranks(_saved_after, 2, tiny("tp2", ONE, "modules.language.layout.tp=2", *IMAGES_TP2), 2)[0]
    resumed = tiny("resumed", ONE, "modules.language.layout.cp=2", *IMAGES_DP2, f"checkpoint.resume={folder}")
    again = [(step + 2, loss, norm) for step, loss, norm in whole(run_ranks(_curve, 2, resumed, 1))]
    assert _close(straight[2:], again)


def test_experts_in_some_layers_give_the_numbers_of_one_process(digits, tmp_path):
    """Biases of routers choose experts, stay as they are in training, and are in checkpoints."""

    def tiny(name: str, *overrides: str):
        return config("vlm_digits", tmp_path / name, digits, *OPTIONS, *EXPERTS, *overrides)

    ((_, points),) = run_ranks(_with_biases, 1, tiny("one", ONE), 3)
    straight = whole([points])
    without = whole(run_ranks(_curve, 1, tiny("without", ONE), 1))
    assert not _close(straight[:1], without), "biases change nothing"
    folder = run_ranks(_with_biases, 2, tiny("tp2", *TP2), 2)[0][0]
    resumed = tiny("resumed", ONE, f"checkpoint.resume={folder}")
    again = [(step + 2, loss, norm) for step, loss, norm in whole(run_ranks(_curve, 1, resumed, 1))]
    assert _close(straight[2:], again)


def test_biases_of_experts_sinks_and_norms_over_heads_give_the_numbers_of_one_process(prose, tmp_path):
    def tiny(name: str, *overrides: str):
        return config("gpt_tiny", tmp_path / name, prose, "layout=language_one", *BIASES, *overrides)

    straight = whole(run_ranks(_curve, 1, tiny("one"), 3))
    assert straight[-1][1] < straight[0][1], "it learns"
    tp2 = ("layout=language_tp2", "modules.language.layout.sp=true")
    folder = run_ranks(_saved_after, 2, tiny("tp2", *tp2), 2)[0]
    resumed = tiny("resumed", "layout=language_ep2", f"checkpoint.resume={folder}")
    again = [(step + 2, loss, norm) for step, loss, norm in whole(run_ranks(_curve, 2, resumed, 1))]
    assert _close(straight[2:], again)


def _learned(cfg, steps: int) -> set[str]:
    run = Steps(cfg)
    before = run.parameters()
    run.train(steps)
    return {name for name, value in run.parameters().items() if (value != before[name]).any()}


def test_adapters_leave_biases_of_routers_and_sinks_as_they_are(prose, tmp_path):
    lora = ("modules.language.lora.rank=2", "modules.language.lora.targets=[linear_qkv]", "layout=language_one")
    (learned,) = run_ranks(_learned, 1, config("gpt_tiny", tmp_path, prose, *BIASES, *lora), 2)
    assert learned and all(".linear_qkv.lora_" in name for name in learned), learned


def test_delta_nets_give_the_numbers_of_one_process_and_read_each_other_s_checkpoints(prose, tmp_path):
    """Differences of rounding grow from step to step in such layers, at the usual rate of these tests fivefold."""

    def tiny(name: str, *overrides: str):
        constant = ("train.iters=20", "optim.decay=constant", "optim.warmup_iters=0", "optim.lr=0.01")
        return config("gpt_tiny", tmp_path / name, prose, "layout=language_one", *constant, *DELTA, *overrides)

    straight = whole(run_ranks(_curve, 1, tiny("one"), 3))
    folder = run_ranks(_saved_after, 2, tiny("tp2", "layout=language_tp2"), 2)[0]
    continued = whole(run_ranks(_curve, 1, tiny("resumed", f"checkpoint.resume={folder}"), 1))
    assert _close(straight[2:], [(step + 2, loss, norm) for step, loss, norm in continued])

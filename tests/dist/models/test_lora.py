"""Low-rank adapters: a run begins as without them, trains nothing else, and the layout does not change its numbers."""

from pathlib import Path

import pytest

from mimo_train.estimate.parameters import module_parameters
from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole

STEPS = 4
LANGUAGE = ("modules.language.lora.rank=4",)
BOTH = (*LANGUAGE, "modules.images.lora.rank=2", "modules.images.lora.targets=[linear_qkv, linear_fc2]")

GPT_LAYOUTS = {
    "tp2, sequence parallel": ("layout=language_tp2", "modules.language.layout.sp=true"),
    "pp2, two chunks a stage": ("layout=language_pp2_vpp2",),
    "cp2": ("layout=language_one", "modules.language.layout.cp=2"),
    "dp2, plain optimizer": ("layout=language_dp2", "optim.distributed_optimizer=false"),
    "dp2, full recompute": ("layout=language_dp2", "train.recompute=full"),
}
VLM_LAYOUTS = {
    "vision pp2 tp2, sequence parallel + language 1": (
        "layout=two_processes",
        "modules.images.layout.pp=2",
        "modules.images.layout.tp=2",
        "modules.images.layout.sp=true",
    ),
    "vision tp2 + language pp2": ("layout=images_tp2_language_pp2",),
    "vision dp2 + language dp2, packed": ("layout=images_dp2_language_dp2", "data.pack=true"),
}
DORA = (
    *("modules.language.lora.rank=3", "modules.language.lora.dora=true", "modules.language.lora.rslora=true"),
    "modules.language.lora.targets=[q_proj, v_proj, '*.layers.[0-1].*.linear_proj', linear_fc1, down_proj]",
    "modules.language.llm.num_query_groups=2",
    *("modules.images.lora.rank=2", "modules.images.lora.dora=true"),
    "modules.images.lora.targets=[k_proj, linear_fc2, input_projections*]",
)
DORA_LAYOUTS = {
    "vision tp2 sequence parallel + language tp2 pp2": (
        "layout=images_tp2_language_pp2",
        "modules.images.layout.sp=true",
        "modules.language.layout.tp=2",
        "modules.language.layout.sp=true",
    ),
    "vision on the ranks of language, tp2": (
        "placement.mode=shared",
        "modules.images.layout.tp=2",
        "modules.language.layout.tp=2",
    ),
}
EXPERTS = ("llm@modules.language.llm=gpt_tiny_moe", "modules.language.llm.expert_ffn_hidden_size=48")
OF_ATTENTION = ("modules.language.lora.targets=[linear_qkv, linear_proj]",)
OF_EXPERTS = ("modules.language.llm.shared_expert_ffn_hidden_size=64",)
OF_EXPERTS += ("modules.language.lora.targets=[linear_qkv, experts, shared_experts]",)
_SIZES = ("num_key_heads=2", "num_value_heads=4", "key_head_dim=16", "value_head_dim=12")
DELTA = (
    *(f"modules.language.llm.linear_{key}" for key in ("attention_layers=[1]", *_SIZES)),
    "modules.language.llm.attention_output_gate=true",
    *("modules.language.lora.rank=3", "modules.language.lora.dora=true"),
    "modules.language.lora.targets=[q_proj, in_proj_qkv, in_proj_b, out_proj]",
    "optim.lr=0.1",  # differences of rounding grow from step to step in such layers
)
QUANTIZED = ("modules.language.lora.quantization=nf4", "modules.language.lora.dora=true")
QUANTIZED += ("modules.language.lora.targets=[linear_qkv, linear_fc2]", "modules.language.llm.num_layers=4")
QUANTIZED += tuple(f"modules.language.llm.{name}=128" for name in ("hidden_size", "ffn_hidden_size"))
QUANTIZED += ("modules.language.llm.num_attention_heads=4", "modules.language.llm.dense_layers=[0, 2]")
QUANTIZED += ("llm@modules.language.llm=gpt_tiny_moe", "modules.language.llm.expert_ffn_hidden_size=128")
SAVED = ("modules.language.lora.modules_to_save=[embed_tokens]", "modules.language.llm.num_layers=4")
PATCHES = "modules.images.encoder.patch_size=12"  # 16 in an image, which sequence parallelism can divide
MODELS = {
    "gpt_tiny": (("layout=language_one", "modules.language.llm.num_layers=4", *LANGUAGE), GPT_LAYOUTS),
    "gpt_tiny, experts": (
        ("layout=language_one", *EXPERTS, *LANGUAGE, *OF_ATTENTION),
        {"ep2 of dp2": ("layout=language_ep2",)},
    ),
    "gpt_tiny, adapted experts": (
        ("layout=language_one", *EXPERTS, *LANGUAGE, *OF_EXPERTS),
        {
            "ep2 of dp2": ("layout=language_ep2",),
            "tp2 ep2": (*GPT_LAYOUTS["tp2, sequence parallel"], "modules.language.layout.ep=2"),
            "tp2 etp2": (*GPT_LAYOUTS["tp2, sequence parallel"], "modules.language.layout.etp=2"),
        },
    ),
    "gpt_tiny, delta nets, dora": (
        ("layout=language_one", *DELTA),
        {"tp2, sequence parallel": GPT_LAYOUTS["tp2, sequence parallel"]},
    ),
    "gpt_tiny, quantized": (
        ("layout=language_one", *LANGUAGE, *QUANTIZED),
        {"tp2, sequence parallel": GPT_LAYOUTS["tp2, sequence parallel"], "pp2": ("layout=language_pp2_vpp2",)},
    ),
    "gpt_tiny, saved": (
        ("layout=language_one", *LANGUAGE, *SAVED),
        {"tp2": ("layout=language_tp2",), "pp2": ("layout=language_pp2_vpp2",)},
    ),
    "vlm_digits": (("layout=one_process", "modules.images.encoder.num_layers=2", PATCHES, *BOTH), VLM_LAYOUTS),
    "vlm_digits, dora": (
        ("layout=one_process", "modules.images.encoder.num_layers=2", PATCHES, *DORA),
        DORA_LAYOUTS,
    ),
}


@pytest.fixture(scope="module")
def tiny(digits, prose, tmp_path_factory):
    """Makes a config of a model of `MODELS` in a folder of its own."""

    def make(model: str, *overrides: str, run_dir: Path | None = None):
        name = model.partition(",")[0]
        demo = digits if name.startswith("vlm") else prose
        picked = (*MODELS[model][0], *overrides)
        last = max(index for index, override in enumerate(picked) if override.startswith("layout="))
        picked = [one for index, one in enumerate(picked) if index == last or not one.startswith("layout=")]
        folder = run_dir or tmp_path_factory.mktemp("run")
        return config(name, folder, demo, "train.iters=20", "optim.warmup_iters=0", *picked)

    return make


def _curve_and_changes(cfg) -> tuple[list[tuple], dict[str, bool], dict[str, int]]:
    """Curve, which parameters changed, and how many numbers the adapters and the gradient buffers have."""
    import torch

    from mimo_train.models.parameters import modules_of

    run = Steps(cfg)
    before = run.parameters()
    curve = run.train(STEPS)
    after = run.parameters()
    kept = {
        "gradients": sum(
            buffer.grad_data.numel()
            for chunks in modules_of(run.model).values()
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ),
        "saved": sum(value.numel() for name, value in before.items() if "word_embeddings" in name),
        "adapters": sum(value.numel() for name, value in before.items() if "lora_" in name),
        "projector": sum(
            value.numel() for name, value in before.items() if "input_projections" in name and "lora_" not in name
        ),
    }
    return curve, {name: not torch.equal(before[name], after[name]) for name in before}, kept


def model_targets(model: str) -> str:
    """The overrides of a model of `MODELS`, as one text."""
    return " ".join(MODELS[model][0])


def _run(cfg) -> list[tuple]:
    return run_ranks(_curve_and_changes, resolve(cfg).layout.world_size, cfg)


@pytest.fixture(scope="module")
def one_process(tiny) -> dict[str, list[tuple]]:
    return {model: _run(tiny(model)) for model in MODELS}


def curve_of(ranks: list[tuple]) -> list[tuple[int, float, float]]:
    return whole([curve for curve, _, _ in ranks])


@pytest.mark.parametrize("model", [model for model in MODELS if "quantized" not in model])
def test_a_run_begins_with_the_loss_of_the_model_without_adapters(model, tiny, one_process):
    none = ("modules.language.lora.rank=0", "modules.language.lora.modules_to_save=[]")
    without = tiny(model, *none, *(["modules.images.lora.rank=0"] * model.startswith("vlm")))
    first, with_adapters = curve_of(_run(without))[0], curve_of(one_process[model])[0]
    assert first[1] == pytest.approx(with_adapters[1], rel=TOLERANCE)  # layers with adapters sum in another order
    # Magnitudes may have larger gradients than the weights they are of.
    assert "dora" in model or first[2] > with_adapters[2], "the gradient is that of the adapters alone"


@pytest.mark.parametrize("model", MODELS)
def test_nothing_but_adapters_and_projector_is_trained(model, tiny, one_process):
    ((curve, changed, kept),) = one_process[model]
    trained = {name for name, moved in changed.items() if moved}
    # A projector with adapters is frozen but for these.
    whole_projector = "input_projections*" not in model_targets(model)
    meant = {name for name in changed if "lora_" in name or (whole_projector and "input_projections" in name)}
    meant |= {name for name in changed if "saved" in model and "word_embeddings" in name}
    assert trained == meant and any("lora_a" in name for name in meant)
    # Four steps at the small rate of the delta nets are less than batches differ by.
    assert "delta" in model or curve[-1][0] < curve[0][0], "adapters learn"
    # Buffers end on a multiple of 128 numbers or so.
    kept["gradients"] -= kept["saved"] * ("saved" in model)
    assert 0 <= kept["gradients"] - kept["adapters"] - kept["projector"] * whole_projector < 1024
    cfg = tiny(model)
    counts = [module_parameters(cfg, name, vocab=0) for name in cfg.modules]
    assert (
        sum(counted[part].trainable for counted in counts for part in ("adapters", "experts") if part in counted)
        == kept["adapters"]
    )


@pytest.mark.parametrize(
    ("model", "title"),
    [(model, title) for model, (_, layouts) in MODELS.items() for title in layouts],
)
def test_layout_gives_the_numbers_of_one_process(model, title, tiny, one_process):
    ranks = _run(tiny(model, *MODELS[model][1][title]))
    assert max(largest_difference(curve_of(one_process[model]), curve_of(ranks))) < TOLERANCE
    parts = ("lora_", "proj", *(["word_embeddings", "output_layer"] if "saved" in model else []))
    for _, changed, _ in ranks:
        assert not [name for name, moved in changed.items() if moved and not any(part in name for part in parts)]


def _saved_after(cfg, steps: int) -> str:
    run = Steps(cfg)
    run.train(steps)
    return str(run.save())


def _curve(cfg, steps: int) -> list[tuple]:
    return Steps(cfg).train(steps)


@pytest.mark.parametrize(
    "model", ["gpt_tiny", "gpt_tiny, delta nets, dora", "gpt_tiny, adapted experts", "gpt_tiny, quantized"]
)
def test_adapters_come_back_on_another_tensor_parallel_size(model, tiny, tmp_path):
    constant = "optim.decay=constant"
    straight = whole(run_ranks(_curve, 1, tiny(model, constant), 4))
    two = tiny(model, constant, *GPT_LAYOUTS["tp2, sequence parallel"], run_dir=tmp_path / "two")
    (folder, _) = run_ranks(_saved_after, 2, two, 2)
    resumed = tiny(model, constant, f"checkpoint.resume={folder}", run_dir=tmp_path / "one")
    continued = whole(run_ranks(_curve, 1, resumed, 2))
    again = [(step + 2, loss, norm) for step, loss, norm in continued]
    assert max(largest_difference(straight[2:], again)) < TOLERANCE


def _evaluated(cfg, merge: bool) -> tuple[float, int]:
    """Loss of the next step, and adapters that are not zero."""
    from mimo_train.models.lora.adapters import merge_lora

    run = Steps(cfg)
    if merge:
        merge_lora(run.model)
    left = sum(bool(value.any()) for name, value in run.parameters().items() if name.endswith("lora_b"))
    return run.train(1)[0][0], left


def test_adapters_start_from_the_weights_of_a_run_without_and_can_be_merged(tiny, tmp_path):
    plain = tiny("gpt_tiny", "modules.language.lora.rank=0", run_dir=tmp_path / "plain")
    (weights,) = run_ranks(_saved_after, 1, plain, 3)
    started = tiny("gpt_tiny", f"checkpoint.weights={weights}", "layout=language_tp2", run_dir=tmp_path / "tuned")
    same = tiny("gpt_tiny", "modules.language.lora.rank=0", f"checkpoint.weights={weights}", run_dir=tmp_path / "same")
    ((with_adapters, none_yet), _) = run_ranks(_evaluated, 2, started, False)
    ((without, _),) = run_ranks(_evaluated, 1, same, False)
    assert with_adapters == pytest.approx(without, rel=1e-6) and none_yet == 0
    (folder, _) = run_ranks(_saved_after, 2, started, 3)
    resumed = tiny("gpt_tiny", "layout=language_tp2", f"checkpoint.resume={folder}", run_dir=tmp_path / "resumed")
    ((beside, several), _) = run_ranks(_evaluated, 2, resumed, False)
    ((merged, none), _) = run_ranks(_evaluated, 2, resumed, True)
    assert merged == pytest.approx(beside, rel=1e-6)
    assert several > 0 and none == 0

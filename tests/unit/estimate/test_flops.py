import dataclasses

import pytest

from encoders.native.vit.patch_spec import VisionSpec
from encoders.native.whisper.spec import WhisperSpec
from encoders.projectors.spec import ProjectorSpec
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.estimate.flops import Flops, StepFlops, count
from mimo_train.estimate.matmuls import Matmul, Media, encoder_matmuls, language_matmuls
from mimo_train.estimate.parameters import language_parameters
from tests.unit.configs import changed, load

DENSE = LlmSpec(
    num_layers=2, hidden_size=4, num_attention_heads=2, num_query_groups=1, ffn_hidden_size=8, activation="swiglu"
)
IMAGE = VisionSpec(
    image_size=4, patch_size=2, hidden_size=2, num_layers=3, num_attention_heads=1, ffn_hidden_size=5, class_token=False
)


ONE = Media(4, 4, 16)


def forward(products: list[Matmul]) -> float:
    return sum(product.forward + product.attention for product in products)


def test_windows_and_heads_of_their_own_width_by_hand():
    spec = dataclasses.replace(DENSE, head_size=3, window=2, full_attention_layers=[1])
    # Heads of 3: q 6, k and v 3 each. qkv 4*12=48, output 6*4=24, up 64, down 32: 168 weights a layer.
    # Pairs of 7 tokens: 7*8/2 = 28 in the second layer, 1 + 6*2 = 13 in the first; 4*6 FLOPs each.
    assert forward(language_matmuls(spec, 7, vocab=0)) == 2 * 7 * 2 * 168 + (28 + 13) * 24


def test_experts_count_as_often_as_a_token_passes_one():
    spec = LlmSpec(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        ffn_hidden_size=8,
        activation="gelu",
        num_experts=6,
        experts_per_token=2,
        expert_ffn_hidden_size=3,
        shared_expert_ffn_hidden_size=5,
        shared_expert_gate=True,
    )
    # Attention weights 4*16 = 64 with its core 16; router 4*6 = 24; two experts of 2*4*3 = 24; shared 2*4*5 = 40;
    # its gate 4.
    assert forward(language_matmuls(spec, 1, vocab=0)) == 2 * (64 + 24 + 2 * 24 + 40 + 4) + 16


def test_a_large_model_trains_for_about_six_flops_per_weight_and_token():
    spec = LlmSpec(num_layers=16, hidden_size=2048, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=8192)
    vocab = 128256
    weights = language_parameters(spec, vocab, 128) - (2 * 16 + 1) * 2048
    per_token = count(language_matmuls(spec, 128, vocab), upstream=False).model / 128
    assert per_token == pytest.approx(6 * weights, rel=0.01)
    assert per_token > 6 * weights


def test_a_class_token_takes_part_in_the_layers_only():
    spec = VisionSpec(**{**vars(IMAGE), "class_token": True})
    # 5 tokens in the layers: 2*5*36 = 360, attention 4*25*2 = 200; patches and projected tokens stay 4.
    products = encoder_matmuls("images", spec, ProjectorSpec(kind="linear"), 6, Media(4, 5, 25))
    assert forward(products) == 192 + 3 * (360 + 200) + 2 * 4 * 12


def test_a_clip_through_encoder_and_projector_by_hand():
    sizes = {"hidden_size": 2, "num_layers": 3, "num_attention_heads": 1, "ffn_hidden_size": 5}
    spec = WhisperSpec(num_mels=7, **sizes)
    # 4 frames of 2 windows: 8*3*7*2 = 336 and 4*3*2*2 = 48 multiplications; layers as above; 2 tokens of 4 numbers.
    products = encoder_matmuls("clips", spec, ProjectorSpec(kind="linear", merge=2), 6, ONE)
    assert forward(products) == 2 * (336 + 48) + 3 * (288 + 128) + 2 * 2 * 4 * 6


LANGUAGE = language_matmuls(DENSE, 7, vocab=10)
LAYERS, CORE, OUTPUT = 2 * 7 * 2 * 144, 2 * 448, 560


def test_adapters_let_gradients_pass_from_the_first_of_them_on_by_hand():
    # In the frozen second layer, the first matmul with an adapter computes no gradient of its input, since nothing
    # before it is trained; all later ones do.
    frozen, first = ["*"], "decoder.layers.1.mlp.linear_fc1.weight"
    products = {product.name: product.forward for product in LANGUAGE}
    behind = products["decoder.layers.1.mlp.linear_fc2.weight"] + OUTPUT
    assert count(LANGUAGE, frozen, upstream=False, adapted=[first]).model == LAYERS + CORE + OUTPUT + behind
    # Full recompute reruns layers from the first matmul that gradients reach.
    again = count(LANGUAGE, frozen, upstream=False, adapted=[first], recompute="full").hardware
    assert again == LAYERS + CORE + OUTPUT + behind + products[first] + behind - OUTPUT


def test_a_step_with_adapters_by_hand():
    adapted = changed({"modules.language.lora.rank": 2}, "gpt_tiny")
    spec, length = adapted.language.llm, 16
    products = language_matmuls(spec, length, 384, logits=0)
    layers, core = sum(one.forward for one in products), sum(one.attention for one in products)
    (done,) = StepFlops(adapted, vocab=384)(texts={length: 1}, counts={}, loads={}, pairs={}, step=1).values()
    # All weights are frozen, and nothing needs the gradient of the first matmul's input. All attention cores are
    # behind an adapter.
    first = next(one.forward for one in products if one.forward)
    assert done.model == 2 * layers - first + 3 * core


def test_experts_of_a_step_by_hand():
    sizes = {"num_experts": 6, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "router_balancing": "none"}
    cfg = changed({f"modules.language.llm.{key}": value for key, value in sizes.items()}, "gpt_tiny")
    llm, length = cfg.language.llm, 16
    h, q, k, f = llm.hidden_size, llm.head_width * llm.num_attention_heads, llm.head_width * llm.key_heads, 24
    gated = 2 if llm.activation == "swiglu" else 1
    weights = h * (q + 2 * k) + q * h + h * 6 + 2 * (h * gated * f + f * h)
    expected = 3 * llm.num_layers * (2 * length * weights + 2 * q * length * (length + 1))
    flops = StepFlops(cfg, vocab=384)(texts={length: 1}, counts={}, loads={}, pairs={}, step=1)
    assert flops["language"].model == expected, "two of six experts a token, however many a rank holds"


def test_a_step_counts_its_samples_and_the_images_that_are_there():
    flops = StepFlops(load("vlm_digits"), vocab=384)
    one = flops(texts={64: 1}, **images([[1]]), step=1)
    step = flops(texts={64: 4}, **images([[0, 3], [1, 0]]), step=1)
    assert step["language"].model == 4 * one["language"].model
    assert step["images"].model == 4 * one["images"].model > 0
    assert flops(texts={64: 4}, **images([[0, 0], [0, 0]]), step=1)["images"] == Flops()


def test_images_of_a_step_count_as_each_alone():
    """Includes different sizes, with class tokens and merged: a 4 x 6 and a 2 x 2 grid of patches."""
    vision = {"encoder.class_token": True, "encoder.resize": "native", "projector.merge": 2}
    cfg = changed({f"modules.images.{key}": value for key, value in vision.items()})
    module, width = cfg.modules["images"], cfg.language.llm.hidden_size
    alone = sum(
        count(
            encoder_matmuls("images", module.encoder, module.projector, width, Media(p, p + 1, (p + 1) ** 2)),
            upstream=False,
        ).model
        for p in (24, 4)
    )
    step = StepFlops(cfg, vocab=384)(
        texts={64: 2}, counts={"images": [[6, 1]]}, loads={"images": [[25, 5]]}, pairs={"images": [[625, 25]]}, step=1
    )
    assert step["images"].model == pytest.approx(alone, rel=1e-12)


def images(numbers: list[list[int]]) -> dict:
    """Return the data plan of these numbers of images, with 9 patches each, per sample."""
    each = {"counts": 9, "loads": 9, "pairs": 81}
    return {name: {"images": [[value * number for number in part] for part in numbers]} for name, value in each.items()}


def test_freezing_ends_with_its_step_and_reaches_the_modules_behind():
    cfg = changed({"modules.images.freeze_until": {"encoder": 10, "projector": 10}, "modules.language.freeze": ["llm"]})
    flops = StepFlops(cfg, vocab=384)
    before, after = (flops(texts={64: 1}, **images([[1]]), step=step) for step in (10, 11))
    ratios = {name: after[name].model / before[name].model for name in before}
    assert 2.5 < ratios["images"] < 3 and 2 < ratios["language"] < 2.5


def test_a_plain_gpt_has_one_module():
    cfg, length = load("gpt_tiny"), 16
    flops, whole = (StepFlops(one, vocab=384) for one in (cfg, changed({"train.logits": "all"}, "gpt_tiny")))
    texts = {"texts": {length: 2}, "counts": {}, "loads": {}, "pairs": {}, "step": 1}
    assert whole(**texts) == {"language": count(language_matmuls(cfg.language.llm, length, 384), upstream=False) * 2}
    # Forward, and in backward the gradients of the weight and of the input.
    assert flops.of_logit(1) == Flops(*[3 * 2 * cfg.language.llm.hidden_size * 384] * 2)
    assert flops(**texts)["language"] + flops.of_logit(1) * (2 * length) == whole(**texts)["language"]

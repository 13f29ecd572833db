import pytest

from encoders.spec import ProjectorSpec, VisionSpec
from mimo_train.config import LlmSpec
from mimo_train.metrics.accounting import StepTimer, encoder_flops_per_image, flops_per_token, tokens_per_step


def test_tokens_per_step():
    assert tokens_per_step(32, 96) == 3072


def test_flops_per_token_by_hand():
    spec = LlmSpec(
        num_layers=2, hidden_size=4, num_attention_heads=2, num_query_groups=1, ffn_hidden_size=8, activation="swiglu"
    )
    # Heads of 2: q 4, k and v 2 each. qkv 4*8=32, output 4*4=16, up 4*16=64, down 8*4=32: 144 weights a layer.
    # Attention over (7+1)/2 = 4 positions on average: 4*4*4 = 64. Output layer: 2*4*10 = 80.
    assert flops_per_token(spec, sequence_length=7, vocab_size=10) == 3 * (2 * (2 * 144 + 64) + 80)


def test_flops_per_token_without_swiglu_and_without_grouped_queries():
    spec = LlmSpec(num_layers=1, hidden_size=4, num_attention_heads=2, ffn_hidden_size=8, activation="gelu")
    # qkv 4*12=48, output 16, up 32, down 32: 128 weights. Attention over one position: 16.
    assert flops_per_token(spec, sequence_length=1, vocab_size=0) == 3 * (2 * 128 + 16)


def test_flops_per_token_are_near_six_per_weight_for_a_large_model():
    spec = LlmSpec(num_layers=16, hidden_size=2048, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=8192)
    vocab = 128256
    weights = spec.num_parameters(vocab, 128) - (2 * 16 + 1) * 2048
    assert flops_per_token(spec, 128, vocab) == pytest.approx(6 * weights, rel=0.01)
    assert flops_per_token(spec, 128, vocab) > 6 * weights


SPEC = VisionSpec(
    image_size=4, patch_size=2, hidden_size=2, num_layers=3, num_attention_heads=1, ffn_hidden_size=5, class_token=False
)


@pytest.mark.parametrize(
    ("projector", "weights", "tokens"),
    [
        (ProjectorSpec(kind="linear"), 2 * 6, 4),
        (ProjectorSpec(kind="mlp"), 2 * 6 + 6 * 6, 4),
        (ProjectorSpec(kind="mlp", ffn_hidden_size=7, merge=2), 8 * 7 + 7 * 6, 1),
    ],
)
def test_encoder_flops_by_hand(projector, weights, tokens):
    # 4 patches of 12 numbers: 2*4*12*2 = 192. A layer: weights 4*4 + 2*2*5 = 36, 2*4*36 = 288; attention 4*16*2 = 128.
    expected = 3 * (192 + 3 * (288 + 128) + 2 * tokens * weights)
    assert encoder_flops_per_image(SPEC, projector, language_width=6) == expected


def test_a_class_token_takes_part_in_the_layers_only():
    spec = VisionSpec(**{**vars(SPEC), "class_token": True})
    linear = ProjectorSpec(kind="linear")
    # 5 tokens in the layers: 2*5*36 = 360, attention 4*25*2 = 200; patches and projected tokens stay 4.
    assert encoder_flops_per_image(spec, linear, 6) == 3 * (192 + 3 * (360 + 200) + 2 * 4 * 12)


def test_step_timer_gives_the_step_and_the_median_of_its_window():
    now = 0.0
    timer = StepTimer(tokens=100, window=3, clock=lambda: now)
    results = []
    for seconds in (1.0, 2.0, 10.0, 2.0, 2.0):
        now += 5.0  # an evaluation between the steps
        timer.start()
        now += seconds
        results.append(timer.stop())
    assert [result["step_seconds"] for result in results] == [1.0, 2.0, 10.0, 2.0, 2.0]
    assert [result["tokens_per_second"] for result in results] == [100, 100 / 1.5, 50, 50, 50]


def test_step_timer_counts_from_stop_to_stop_without_start():
    now = 0.0
    timer = StepTimer(tokens=100, clock=lambda: now)
    now = 4.0
    assert timer.stop() == {"step_seconds": 4.0, "tokens_per_second": 25.0}
    now = 6.0
    assert timer.stop()["step_seconds"] == 2.0

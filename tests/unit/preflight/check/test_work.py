"""The table of work: floating point operations of each kind of rank, by hand and as parts of a whole."""

import pytest

from mimo_train.estimate.flops import module_work
from mimo_train.layout.run import resolve
from mimo_train.preflight.check.report import Report
from mimo_train.preflight.check.tables import add_work, flops_of_ranks, flops_text
from tests.unit.configs import load
from tests.unit.preflight.check.printed import run

ROWS = 384
"""Of the embedding."""


def flops(name: str, *overrides: str, **media: float) -> dict[tuple[int, ...], dict[str, float]]:
    found = flops_of_ranks(resolve(load(name, *overrides)), ROWS, media)
    return {(ranks.start, ranks.stop): modules for ranks, modules in found.items()}


def of_language(cfg) -> tuple[float, float]:
    """FLOPs of a sample through one layer, and of its logits, forward and backward: thrice the forward pass."""
    llm, length = cfg.llm, cfg.data.sequence_length
    gates = 3 if llm.is_gated else 2
    weights = 4 * llm.hidden_size**2 + gates * llm.hidden_size * llm.ffn_hidden_size
    pairs = length * (length + 1) / 2
    return 3 * (2 * length * weights + 4 * llm.hidden_size * pairs), 3 * 2 * length * llm.hidden_size * ROWS


def of_encoder(cfg, forward_only: bool = False) -> tuple[float, float, float]:
    """FLOPs of a picture through the embedding of patches, whose input needs no gradient, one layer, the projector."""
    encoder, projector = cfg.modules["images"].encoder, cfg.modules["images"].projector
    patches, hidden, width = 16, encoder.hidden_size, cfg.llm.hidden_size
    embedding = 2 * patches * 3 * encoder.patch_size**2 * hidden
    weights = 4 * hidden**2 + 2 * hidden * encoder.ffn_hidden_size
    layer = 2 * patches * weights + 4 * hidden * patches**2
    behind = 2 * patches * sum(projector.matrices(hidden, width).values())
    return (embedding, layer, behind) if forward_only else (2 * embedding, 3 * layer, 3 * behind)


def test_by_hand():
    cfg = load("vlm_digits")
    layer, logits = of_language(cfg)
    embedding, encoder_layer, projector = of_encoder(cfg)
    found = flops("vlm_digits")
    assert found == {
        (0, 1): {"images": pytest.approx(32 * (embedding + 3 * encoder_layer + projector))},
        (1, 2): {"language": pytest.approx(32 * (4 * layer + logits))},
    }
    # Two stages; the last one has the logits. Two replicas, each with half of the samples, in ranks of tp 2.
    staged = flops("vlm_digits", *(f"modules.language.layout.{size}=2" for size in ("pp", "tp", "dp")))
    assert staged[1, 5] == {"language, stage 1 of 2": pytest.approx(8 * 2 * layer)}
    assert staged[5, 9] == {"language, stage 2 of 2": pytest.approx(8 * (2 * layer + logits))}


def test_what_is_frozen_adapted_or_computed_again():
    cfg = load("vlm_digits")
    embedding, encoder_layer, projector = of_encoder(cfg, forward_only=True)
    _, _, trained = of_encoder(cfg)
    frozen = flops("vlm_digits", "modules.images.freeze=[encoder]")[0, 1]["images"]
    # Linear layers of Megatron-Core give the gradient of their input, asked for or not.
    assert frozen == pytest.approx(32 * (embedding + 3 * encoder_layer + trained))
    layer, logits = of_language(cfg)
    full = flops("vlm_digits", "modules.language.recompute=full")[1, 2]["language"]
    assert full == pytest.approx(32 * (4 * layer * 4 / 3 + logits))
    adapted = flops("vlm_digits", "modules.language.lora.rank=4")[1, 2]["language"]
    assert adapted < 32 * (4 * layer + logits)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("vlm_digits", ["layout=images_dp2_language_dp2"]),
        ("vlm_digits", ["layout=images_tp2_language_pp2"]),
        ("vlm_digits", ["layout=images_pp2_language_one"]),
        ("vlm_digits", ["placement.mode=shared", "modules.images.layout.dp=2", "modules.language.layout.tp=2"]),
        ("gpt_tiny", ["layout=language_cp2"]),
        ("gpt_tiny", ["layout=language_pp2_vpp2"]),
        ("gpt_tiny", ["llm@modules.language.llm=gpt_tiny_moe", "layout=language_ep2"]),
        ("mixed_tiny", ["placement.mode=disjoint"]),
        ("recipes/qwen2_5_vl_lora", ["layout=pictures_64", "data.tokenizer=bytes"]),
    ],
)
def test_ranks_together_do_the_work_of_all_modules(name, overrides):
    cfg = load(name, *overrides)
    total = sum(module_work(cfg, module, ROWS, 1.0).whole.total for module in cfg.modules)
    found = flops_of_ranks(resolve(cfg), ROWS, {})
    ranks = sum(len(ranks) * sum(modules.values()) for ranks, modules in found.items())
    assert ranks == pytest.approx(cfg.train.global_batch_size * total)


def test_media_of_a_sample():
    one, two = (flops("vlm_digits", images=number)[0, 1]["images"] for number in (1.0, 2.0))
    assert two == pytest.approx(2 * one)


def test_encoders_without_media_have_nothing_to_do():
    together = "placement.first_rank={images: 0, audio: 0, language: 1}"
    run, report = resolve(load("mixed_tiny", "placement.mode=disjoint", together)), Report()
    add_work(report, run, ROWS, {"images": 0.0, "audio": 0.0})
    (table,) = report.tables
    assert table.rows[0] == ("images + audio", "0", "0 FLOP", "0%") and table.rows[1][-1] == "100%"


def test_the_table(capsys):
    _, out, _ = run(capsys, "vlm_digits", "modules.language.layout.pp=2", "run.device=cpu")
    found = flops("vlm_digits", "modules.language.layout.pp=2")
    most = found[2, 3]["language, stage 2 of 2"]
    table = out[out.index("Work of a rank") :].splitlines()
    assert table[1].split("  ")[0].strip() == "modules"
    for line, title, number, share in (
        (table[2], "images", flops_text(found[0, 1]["images"]), found[0, 1]["images"] / most),
        (table[3], "language, stage 1 of 2", "", found[1, 2]["language, stage 1 of 2"] / most),
        (table[4], "language, stage 2 of 2", flops_text(most), 1.0),
    ):
        assert line.strip().startswith(title) and number in line and line.rstrip().endswith(f"{share:.0%}")
    _, shared, _ = run(capsys, "vlm_digits", "layout=one_process")
    (parts,) = flops("vlm_digits", "layout=one_process").values()
    share = parts["images"] / sum(parts.values())
    assert f"images ({share:.0%}) + language ({1 - share:.0%})" in shared
    _, unknown, _ = run(capsys, "vlm_digits", "--without-data")
    assert "without the output layer of language" in unknown and "without the output layer" not in out


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 FLOP"), (12, "12 FLOP"), (3.5e8, "350 MFLOP"), (1.25e12, "1.25 TFLOP"), (1.25e18, "1,250 PFLOP")],
)
def test_numbers_for_people(number, text):
    assert flops_text(number) == text

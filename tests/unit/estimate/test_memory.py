"""Memory and parameter arithmetic against numbers worked out by hand."""

import pytest

from mimo_train.estimate import activations, memory, parameters
from mimo_train.estimate.memory import Memory
from mimo_train.layout.ranks import pipeline_stages
from mimo_train.layout.run import in_flight
from mimo_train.models.blocks.attention.spec import Attention
from mimo_train.models.blocks.base import Layer, Share
from mimo_train.models.blocks.mlp.spec import Mlp
from mimo_train.preflight.check.tables import bubble
from tests.unit.layout.sizes import EXPERTS, SMALL_LAYER, resolved


@pytest.mark.parametrize(
    ("sizes", "bytes_per_sbh"), [({}, 34), ({"tp": 8}, 10 + 24 / 8), ({"tp": 8, "sp": True}, 34 / 8)]
)
def test_a_layer_keeps_what_the_paper_says(sizes, bytes_per_sbh):
    """Korthikanti et al. 2022 in half precision, without the attention scores: s b h (10 + 24 / t), 34 s b h / t."""
    layer = Layer(1024, Attention(1024, 16, 16, 64), Mlp(1024, 4096, gated=False), dropout=True)
    assert layer.kept(Share(2048, 2, **sizes)) == 2048 * 1024 * bytes_per_sbh


def _layer(*, gated: bool = True, rope: bool = False, heads: tuple[int, int, int] = (2, 1, 4), **options) -> Layer:
    """A layer of hidden size 8 and feed-forward width 16; heads: queries, keys, width."""
    return Layer(8, Attention(8, *heads, rope=rope), Mlp(8, 16, gated), **options)


def test_a_gated_layer_with_few_key_heads_keeps_less_attention_and_more_feed_forward():
    # Per token: 4 h in full = 128 bytes; (2 h + 2 k + 5 f) = 104 numbers = 416 bytes over tp.
    assert _layer().kept(Share(10, 4)) == 10 * (128 + 416)
    halves = _layer(heads=(4, 2, 2))
    assert halves.kept(Share(10, 4, tp=2)) == 10 * (128 + 208)
    assert halves.kept(Share(10, 4, tp=2, sp=True)) == 10 * (64 + 208)
    # Rotated queries and keys: h + k = 12 numbers = 48 bytes more.
    assert _layer(rope=True).kept(Share(10, 4)) == 10 * (128 + 416 + 48)
    # On one rank both halves of the gated block are views: f = 16 numbers less.
    assert _layer().kept(Share(10, 4, plain=True)) == 10 * (128 + 416 - 64)
    # Documents by one kernel: 4 h + 5 f = 112 numbers, rotated or not.
    assert _layer(rope=True).kept(Share(10, 4, whole_rows=True)) == 10 * (128 + 448)


def test_what_families_keep_besides_by_hand():
    heads = 6, 3, 2
    # Per token: 4 h in full = 128 bytes; 2 q + 2 k + 2 f = 68 numbers = 272 bytes; norms after the parts 2 h = 64.
    assert _layer(gated=False, heads=heads).kept(Share(10, 4)) == 10 * (128 + 272)
    assert _layer(gated=False, heads=heads, post_norms=True).kept(Share(10, 4)) == 10 * (192 + 272)
    # 4 heads of 2 samples, 6 x 6 scores, 8 bytes each; over two ranks of each kind.
    capped = Attention(8, 4, 4, 2, softcap=5.0)
    assert capped.scores(6, 2, tp=1, cp=1) == 2 * 4 * 36 * 8
    assert capped.scores(6, 2, tp=2, cp=2) == 2 * 2 * 18 * 8


@pytest.mark.parametrize(
    ("options", "of_matrices", "of_embedding"),
    [
        ((), 8, 8),
        (("optim.name=lion", "optim.moments=bf16"), 2, 2),
        (("optim.name=muon",), 4, 8),
        (("optim.name=muon", "optim.moments=8bit"), 1 + 4 / 256, 2 + 8 / 256),
        (("optim.name=adafactor",), 0, 0),
        (("optim.name=adafactor", "optim.ema=0.9"), 4, 4),
    ],
)
def test_states_of_optimizers_by_hand(options, of_matrices, of_embedding):
    fixed = ("layout=language_one", "train.precision=bf16", "modules.language.llm.tie_embeddings=false")
    run = resolved(*fixed, *options, config="gpt_tiny")
    (stage,) = memory.stage_memory(run, "language", 384)
    embedding = 2 * 384 * run.cfg.llm.hidden_size  # and output layer
    others = parameters.module_parameters(run.cfg, "language", 384)["llm"].total - embedding
    expected = others * (4 + of_matrices) + embedding * (4 + of_embedding)
    assert stage.memory.optimizer == pytest.approx(expected, abs=2)
    if any("adafactor" in option for option in options):
        return
    (offloaded,) = memory.stage_memory(
        resolved(*fixed, *options, "optim.offload=true", config="gpt_tiny"), "language", 384
    )
    assert offloaded.memory.optimizer == 4 * (others + embedding)
    assert offloaded.memory.host == pytest.approx(stage.memory.optimizer - offloaded.memory.optimizer, abs=2)


@pytest.mark.parametrize(
    ("options", "bytes_of_parameter"),
    [
        ((), 0),
        (("optim.moments=8bit",), 8),
        (("optim.moments=bf16", "optim.offload=true"), 8 + 4),
        (("optim.name=lion",), 8),
        (("optim.name=muon",), 4),
    ],
)
def test_an_update_takes_memory_when_activations_do_not(options, bytes_of_parameter):
    run = resolved("layout=language_one", *options, config="gpt_tiny")
    (stage,) = memory.stage_memory(run, "language", 384)
    parameters_ = stage.memory.weights // 4 - (384 * run.cfg.llm.hidden_size if "muon" in str(options) else 0)
    assert stage.memory.update == bytes_of_parameter * parameters_
    kept = Memory(weights=1, gradients=1, optimizer=1, activations=5, work=2)
    assert kept.total == (kept + Memory(update=7)).total == (kept + Memory(update=9)).total - 2


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_capped_scores_are_kept_unless_they_are_computed_again(recompute):
    overrides = ("layout=language_one", f"train.recompute={recompute}")
    plain = resolved(*overrides, config="gpt_tiny")
    capped = resolved(*overrides, "modules.language.llm.attention_softcap=5", config="gpt_tiny")
    (without,), (kept,) = (memory.stage_memory(run, "language", 384) for run in (plain, capped))
    sizes = plain.cfg.data.sequence_length, plain.cfg.train.micro_batch_size
    scores = capped.cfg.llm.layer(0).mixer.scores(*sizes, tp=1, cp=1)
    more, work = (getattr(kept.memory, part) - getattr(without.memory, part) for part in ("activations", "work"))
    if recompute == "none":
        assert more == plain.cfg.llm.num_layers * scores and work == 0
    else:
        assert more == 0 < work <= scores  # scores of the layer that is recomputed


def test_masks_of_tokens_that_see_later_ones_by_hand(monkeypatch):
    options = ("layout=one_process", "data.sequence_length=70", "train.micro_batch_size=2")
    causal = resolved(*options)
    assert memory.mask_bytes(causal.cfg) == 0
    monkeypatch.setattr(type(causal.cfg.modules["images"].encoder), "bidirectional", "items")
    # Two samples of 70 x 70 in fp32; another mask for layers with a window; the square of a packed row.
    assert memory.mask_bytes(causal.cfg) == 2 * 70**2 * 4
    windows = resolved(*options, "modules.language.llm.window=8", "train.precision=bf16").cfg
    assert memory.mask_bytes(windows) == 2 * (2 * 70**2) * 2
    assert memory.mask_bytes(resolved(*options, "data.pack=true", "data.pack_length=200").cfg) == 200**2 * 4


def test_work_of_a_layer_by_hand():
    # 100 tokens: gradients at both ends 2 x 8, and of both halves 2 x 16 numbers.
    assert _layer().work(Share(100, 2)) == 100 * (16 + 32) * 2
    assert _layer(gated=False).work(Share(100, 2)) == 100 * (16 + 16) * 2
    assert _layer().work(Share(100, 2, tp=2, sp=True)) == 100 * (8 + 8 + 16) * 2
    # One token: the gradient of 8 x 32 weights, after three times 16 numbers are freed.
    assert _layer().work(Share(1, 2)) == (16 + 8 * 32 - 3 * 16) * 2
    assert _layer().work(Share(1, 2, frozen=True)) == (16 + 32) * 2


def test_logits_count_in_their_precision_and_as_fp32_softmax():
    # Two inputs of 8 numbers, and 100 logits, for 10 tokens.
    assert activations.output_work(10, hidden=8, vocab=100, precision="bf16") == 10 * (2 * 8 * 2 + 100 * (2 + 4))
    assert activations.output_work(10, hidden=8, vocab=100, precision="fp32", tp=4) == 10 * (2 * 8 * 4 + 25 * 8)
    # Selected positions are a copy; gathered ones are there in full, twice.
    assert activations.output_work(10, 8, 100, "bf16", chosen=True) == 10 * (3 * 8 * 2 + 100 * (2 + 4))
    assert activations.output_work(10, 8, 100, "bf16", tp=2, sp=True) == 10 * (3 * 8 * 2 + 50 * (2 + 4))
    # For one token the gradient of 8 x 100 weights is larger than its softmax.
    assert activations.output_work(1, 8, 100, "bf16") == 2 * 8 * 2 + 100 * 2 + 8 * 100 * 2
    # A teacher's logits of a block, both over the temperature, and their difference.
    without, taught = (
        activations.output_work(10, 8, 100, "bf16", most_logits=0, has_teacher=it) for it in (False, True)
    )
    assert taught - without == 10 * 100 * 3 * 4


def test_activations_of_experts_by_hand():
    # 10 tokens with 2 experts each: rows of the input and six times the width; router with three numbers of 4 bytes
    # per expert; shared expert as a dense block.
    routed, router, shared = 20 * (8 + 6 * 12) * 2, 10 * 3 * 4 * 4, 10 * 5 * 6 * 2
    block = EXPERTS.layer(0).feed_forward
    assert block.kept(Share(10, 2)) == (0, routed + router + shared)
    # Two ranks that share tokens and experts: half the tokens, which also exist before they are gathered, and all
    # rows of half the width.
    _, halves = block.kept(Share(10, 2, tp=2, etp=2, sp=True))
    assert halves == 20 * (8 + 6 * 6) * 2 + 10 * 8 * 2 + router // 2 + shared // 2


def test_states_of_experts_are_sharded_over_their_replicas():
    one = resolved("llm@modules.language.llm=gpt_tiny_moe", "layout=language_dp2", config="gpt_tiny")
    two = resolved("llm@modules.language.llm=gpt_tiny_moe", "layout=language_ep2", config="gpt_tiny")
    ((replicated,), (dealt,)) = (memory.stage_memory(run, "language", 384) for run in (one, two))
    half = parameters.expert_parameters(one.cfg.language.llm) // 2
    assert replicated.memory.weights - dealt.memory.weights == 4 * half
    assert replicated.memory.optimizer == dealt.memory.optimizer
    assert replicated.memory.activations == dealt.memory.activations


def test_without_the_distributed_optimizer_every_replica_keeps_all_states():
    run = resolved("llm@modules.language.llm=gpt_tiny_moe", "layout=language_ep2", config="gpt_tiny")
    (divided,) = memory.stage_memory(run, "language", 384)
    run.cfg.optim.distributed_optimizer = False
    (whole,) = memory.stage_memory(run, "language", 384)
    assert whole.memory.optimizer == 2 * whole.memory.weights > divided.memory.optimizer


def test_one_module_keeps_less_by_its_own_recomputation():
    run = resolved()
    kept = {}
    for own in ("none", "full"):
        run.cfg.modules["language"].recompute = own
        stages = [memory.stage_memory(run, name, 384)[0].memory.activations for name in ("images", "language")]
        kept[own] = stages
    assert kept["full"][0] == kept["none"][0] and kept["full"][1] < kept["none"][1]


def test_a_frozen_model_trains_no_experts():
    run = resolved("llm@modules.language.llm=gpt_tiny_moe", "modules.language.freeze=[llm]")
    counts = parameters.module_parameters(run.cfg, "language", 384)
    assert set(counts) == {"llm", "experts"}
    assert all(count.trainable == 0 < count.total for count in counts.values())


def test_memory_of_an_encoder_in_stages():
    """The projector is on the last stage; earlier stages keep activations for more microbatches."""
    run = resolved("layout=two_processes", "modules.images.layout.pp=2", "modules.images.encoder.num_layers=4")
    whole = resolved("layout=two_processes", "modules.images.encoder.num_layers=4")
    first, last = memory.stage_memory(run, "images", 384)
    (one,) = memory.stage_memory(whole, "images", 384)
    assert (first.ranks, last.ranks) == ((0,), (1,))
    assert first.memory.weights + last.memory.weights == one.memory.weights
    assert pipeline_stages(run.layout) == 3
    assert [in_flight(run, "images", stage) for stage in (0, 1)] == [3, 2]
    counts = parameters.module_parameters(run.cfg, "images", 384, stage=0, stages=2)
    assert set(counts) == {"encoder"}


@pytest.mark.parametrize(
    ("overrides", "stages", "share"),
    [
        (["layout=two_processes"], 2, 1 / 5),  # 4 microbatches
        (["layout=language_pp2"], 3, 2 / 6),
        (["layout=one_process"], 1, 0.0),
        (["layout=language_dp2"], 2, 1 / 3),  # 2 microbatches
    ],
)
def test_bubble(overrides, stages, share):
    run = resolved(*overrides)
    assert pipeline_stages(run.layout) == stages
    assert bubble(run) == pytest.approx(share)


def test_microbatches_in_flight_fall_towards_the_last_stage():
    run = resolved("layout=language_pp2")
    assert in_flight(run, "images", 0) == 3
    assert [in_flight(run, "language", stage) for stage in (0, 1)] == [2, 1]
    few = resolved("layout=language_pp2", "train.global_batch_size=16")
    assert in_flight(few, "images", 0) == 2  # no more than there are
    shared = resolved("layout=one_process")
    assert in_flight(shared, "images", 0) == in_flight(shared, "language", 0) == 1


def test_interleaving_fills_the_bubble_and_keeps_more_chunks():
    run = resolved("layout=language_pp2_vpp2", config="gpt_tiny")
    assert run.batch.num_microbatches == 2
    assert bubble(run) == pytest.approx(1 / 5)  # 2 x 2 chunks
    # Warm-up of stage 0: 2 x 1 + 1 x 2 of one chunk, plus one; at most 2 x 2.
    assert [in_flight(run, "language", stage) for stage in (0, 1)] == [4, 3]
    shared, disjoint = (
        resolved("layout=language_pp2", "modules.language.layout.vpp=2", "train.global_batch_size=64", *more)
        for more in (["modules.images.layout.pp=1", "placement.first_rank={images: 0, language: 0}"], [])
    )
    assert [in_flight(run, "images", 0) for run in (shared, disjoint)] == [4, 4]
    assert [in_flight(run, "language", stage) for run in (shared, disjoint) for stage in (0, 1)] == [5, 3, 5, 3]
    assert [bubble(run) for run in (shared, disjoint)] == pytest.approx([1 / 17, 3 / 19])


def test_memory_of_a_language_rank_by_hand(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(
        "modules: {language: {llm: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, ffn_hidden_size: 16}}}\n"
        "data: {sequence_length: 4}\n"
        "train: {global_batch_size: 6, micro_batch_size: 3}\n"
    )
    run = resolved(config=str(file))
    (stage,) = memory.stage_memory(run, "language", vocab=10)
    parameters = 2 * SMALL_LAYER + 8 + 80
    tokens = 12
    layer = tokens * 4 * (4 * 8 + 4 * 8 + 2 * 8 + 3 * 16)  # with a fused activation
    end = tokens * (3 * 8 * 4 + 10 * 4) + tokens * 10 * 4
    # The gradient of the output layer waits for that of the embedding, which is tied to it.
    work = max(end, 4 * (tokens * 2 * 8 + max(tokens * 32, 8 * 32 - tokens * 3 * 16)) + 10 * 8 * 4)
    assert stage.ranks == (0,)
    assert stage.memory == Memory(4 * parameters, 4 * parameters, 8 * parameters, 2 * layer, work)


def test_memory_of_an_encoder_grows_with_images_and_shrinks_when_frozen():
    run = resolved("layout=images_dp2_language_dp1")
    (one,) = memory.stage_memory(run, "images", 384, media_per_sample=1.0)
    (two,) = memory.stage_memory(run, "images", 384, media_per_sample=2.0)
    assert two.memory.activations == 2 * one.memory.activations
    assert two.memory.weights == one.memory.weights
    frozen_run = resolved("layout=images_dp2_language_dp1", "modules.images.freeze=[encoder]")
    (frozen,) = memory.stage_memory(frozen_run, "images", 384)
    assert frozen.memory.weights == one.memory.weights
    assert frozen.memory.gradients < one.memory.gradients
    assert frozen.memory.activations < one.memory.activations


def test_an_encoder_that_computes_ahead_works_on_several_microbatches():
    own = ("layout=images_dp2_language_dp1", "encoder@modules.images.encoder=vit_tiny_native")
    plain, ahead = (
        memory.stage_memory(
            run := resolved(*own, "modules.images.freeze=[encoder]", f"modules.images.prefetch_microbatches={number}"),
            "images",
            384,
        )[0].memory
        for number in (0, 3)
    )
    images = run.cfg.modules["images"]
    merge = images.projector.merge
    width, rows = images.encoder.joined_width(merge), images.encoder.most_features(merge)
    assert ahead.work == 3 * plain.work > 0
    assert ahead.activations - plain.activations == 5 * run.batch.microbatch_samples // 2 * rows * width * 4


def test_a_gated_layer_with_norms_or_scales_behind_its_parts_keeps_copies_of_its_halves():
    """Such a layer is not `mimo_train.models.dense_layer`'s, since its additions are not plain: 5 f, not 4 f."""
    gated = ("layout=language_one", "modules.language.llm.activation=swiglu", "run.device=cpu")
    runs = [resolved(*gated, f"modules.language.llm.post_norms={on}", config="gpt_tiny") for on in ("false", "true")]
    (plain,), (normed,) = (memory.stage_memory(run, "language", 384) for run in runs)
    llm, tokens = runs[0].cfg.llm, runs[0].batch.microbatch_samples * runs[0].cfg.data.sequence_length
    each = tokens * (2 * llm.hidden_size + llm.ffn_hidden_size) * 4
    assert normed.memory.activations - plain.memory.activations == llm.num_layers * each
    overrides = ("encoder@modules.images.encoder=dinov3_vitl16", "modules.images.encoder.image_size=64", gated[-1])
    kept = {}
    for activation in ("gelu", "swiglu"):
        run = resolved(*overrides, f"modules.images.encoder.activation={activation}")
        (stage,) = memory.stage_memory(run, "images", 384)
        kept[activation] = stage.memory.activations
    encoder, flying = run.cfg.modules["images"].encoder, in_flight(run, "images", 0)
    media = run.batch.microbatch_samples
    tokens = media * encoder.most_inner_tokens(1)
    more = kept["swiglu"] - kept["gelu"]
    assert more == encoder.num_layers * tokens * 3 * encoder.ffn_hidden_size * 4 * flying

"""Cached and prefetched features: the same numbers, and no forward pass of the encoder where its features are known."""

from pathlib import Path

import pytest

from mimo_train.config.errors import UserError
from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole

EPOCH = 6
"""Steps of an epoch: 96 samples of 16."""


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """A demo that is passed through quickly."""
    from data.demo.make import make_demo

    return make_demo(tmp_path_factory.mktemp("few"), train_samples=96, held_out_samples=8, shards=2)


def vlm(demo: Path, run_dir: Path, *overrides: str):
    return config(
        "vlm_digits", run_dir, demo, "train.iters=40", "optim.warmup_iters=0",
        # In order: the first samples of the second epoch are read while the last ones of the first are computed.
        "data.shuffle=false", "train.global_batch_size=16", "train.micro_batch_size=4",
        "modules.images.freeze=[encoder]", *overrides,
    )  # fmt: skip


def cached(folder: Path, *overrides: str) -> tuple[str, ...]:
    return (f"modules.images.feature_cache.dir={folder}", *overrides)


def _watched(cfg, steps: int) -> tuple[list[tuple], list[int], list[int]]:
    """Curve, and by step the images that the encoder of this rank saw, and those that were read."""
    from data.samples.shard_dataset import ShardDataset
    from encoders.native.vit.model import VisionTransformer

    seen, read = [0], [0]
    forward, read_media = VisionTransformer.forward, ShardDataset.read_media

    def counted(self, pixels, *arguments, **options):
        seen[-1] += len(pixels)
        return forward(self, pixels, *arguments, **options)

    def counted_read(self, number, *which):
        items, fault = read_media(self, number, *which)
        read[-1] += len(items)
        return items, fault

    VisionTransformer.forward, ShardDataset.read_media = counted, counted_read
    run, curve = Steps(cfg), []
    for _ in range(steps):
        seen.append(0)
        read.append(0)
        curve += run.train(1)
    run.session.data.close()
    return curve, seen[1:], read


def differ(one: list[tuple], other: list[tuple]) -> float:
    """Largest relative difference of losses and gradient norms."""
    return max(largest_difference(one, other))


def watched(cfg, steps: int = 2 * EPOCH):
    ranks = run_ranks(_watched, resolve(cfg).layout.world_size, cfg, steps)
    return whole([curve for curve, _, _ in ranks]), [seen for _, seen, _ in ranks], [read for _, _, read in ranks]


@pytest.mark.parametrize("layout", ["one_process", "images_dp2_language_dp1", "images_tp2_language_pp2"])
def test_the_second_epoch_runs_no_encoder_and_gives_the_same_numbers(layout, few, tmp_path):
    layout = f"layout={layout}"
    plain, all_seen, _ = watched(vlm(few, tmp_path / "plain", layout))
    curve, seen, read = watched(vlm(few, tmp_path / "cached", layout, *cached(tmp_path / "features")))
    assert differ(curve, plain) < TOLERANCE
    encoders = [rank for rank in range(len(seen)) if sum(all_seen[rank])]
    for rank in encoders:
        assert seen[rank][:EPOCH] == all_seen[rank][:EPOCH] and sum(seen[rank][EPOCH:]) == 0
        assert sum(read[rank][EPOCH + 1 :]) == 0, "no pixels are read either"
    # Another run on the same weights and layout begins with all features.
    again, seen, _ = watched(vlm(few, tmp_path / "again", layout, *cached(tmp_path / "features")), EPOCH)
    assert differ(again, plain[:EPOCH]) < TOLERANCE and not sum(map(sum, seen))


@pytest.mark.parametrize(
    "change",
    ["run.seed=77", "modules.images.encoder.image_size=32", "modules.images.encoder.pixel_mean=[0.4, 0.4, 0.4]"],
    ids=["weights", "size", "pixels"],
)
def test_other_weights_and_other_transforms_have_features_of_their_own(change, few, tmp_path):
    shared = cached(tmp_path / "features")
    watched(vlm(few, tmp_path / "first", "layout=one_process", *shared), 1)
    plain, all_seen, _ = watched(vlm(few, tmp_path / "plain", "layout=one_process", change), 2)
    curve, seen, _ = watched(vlm(few, tmp_path / "changed", "layout=one_process", change, *shared), 2)
    assert seen == all_seen and differ(curve, plain) < TOLERANCE


def _differing(cfg, steps: int) -> tuple[list[tuple], list[int], list[int]]:
    """`_watched`, where each rank of a tensor-parallel group misses other features."""
    import os
    from zlib import crc32

    from mimo_train.training.step.feature_cache import FeatureCache

    read, rank = FeatureCache.read, int(os.environ["RANK"])

    def forgetful(self, key):
        return None if crc32(key.encode()) % 3 == rank % 3 else read(self, key)

    FeatureCache.read = forgetful
    return _watched(cfg, steps)


def test_ranks_that_find_different_features_agree(few, tmp_path):
    overrides = "layout=images_tp2_language_pp2", *cached(tmp_path / "features")
    plain, all_seen, _ = watched(vlm(few, tmp_path / "full", *overrides), EPOCH)
    ranks = run_ranks(_differing, 4, vlm(few, tmp_path / "part", *overrides), EPOCH)
    assert differ(whole([curve for curve, _, _ in ranks]), plain) < TOLERANCE
    assert ranks[0][1] == ranks[1][1] and 0 < sum(ranks[0][1]) < sum(all_seen[0])


def _order(cfg, steps: int) -> tuple[list[tuple], list[str]]:
    """Curve, and what an encoder's rank did, in order: computing a microbatch at its turn or ahead."""
    from mimo_train.models.encoder_module import EncoderModule

    done = []
    compute, ahead = EncoderModule._features, EncoderModule.encode_ahead

    def counted(self, *arguments):
        done.append("now")
        return compute(self, *arguments)

    def counted_ahead(self, *arguments):
        ahead(self, *arguments)
        done[-1] = "ahead"

    EncoderModule._features, EncoderModule.encode_ahead = counted, counted_ahead
    return Steps(cfg).train(steps), done


@pytest.mark.parametrize(
    ("layout", "frozen", "together", "dealt"),
    [
        ("two_processes", "[encoder, projector]", 1, "samples"),
        ("images_tp2_language_pp2", "[encoder]", 2, "samples"),
        ("images_dp2_language_dp2", "[encoder]", 3, "images"),
    ],
    ids=["one microbatch, wholly frozen", "tp2 and pp2", "images are dealt over three microbatches"],
)
def test_prefetching_changes_no_number(layout, frozen, together, dealt, few, tmp_path):
    layout, frozen = f"layout={layout}", f"modules.images.freeze={frozen}"
    plain, ahead = (
        vlm(few, tmp_path / f"{bound}", layout, frozen, f"modules.images.prefetch_microbatches={bound}", *changes)
        for bound, changes in ((0, ()), (together, [f"modules.images.balance={dealt}"]))
    )
    ranks = resolve(plain).layout.world_size
    world = run_ranks(_order, ranks, plain, 3)
    assert not any("ahead" in done for _, done in world)
    curve = whole([curve for curve, _ in world])
    world = run_ranks(_order, ranks, ahead, 3)
    difference = differ(whole([curve for curve, _ in world]), curve)
    assert difference < TOLERANCE if together > 1 else difference == 0
    microbatches = resolve(ahead).batch.num_microbatches
    passes = -(-microbatches // together)
    for done in (done for _, done in world if done):
        # Nothing is there for the first microbatch; later ones and those of the next steps are ahead of their turn.
        assert done[0] == "now" and done.count("now") == 1 and done.count("ahead") >= 2 * passes
        assert len(done) <= 1 + 3 * passes + 1, "no microbatch is computed twice, and one pass at most for later"


def test_prefetched_features_come_from_the_cache_too(few, tmp_path):
    overrides = "layout=two_processes", "modules.images.prefetch_microbatches=2", *cached(tmp_path / "features")
    plain, _, _ = watched(vlm(few, tmp_path / "plain", "layout=two_processes"))
    curve, seen, _ = watched(vlm(few, tmp_path / "cached", *overrides))
    assert differ(curve, plain) < TOLERANCE
    assert sum(seen[0][EPOCH:]) == 0


def _evaluated_twice(cfg) -> tuple[dict, dict, list[int]]:
    """Two evaluations, and the images that the encoder saw in each."""
    from encoders.native.vit.model import VisionTransformer

    seen, forward = [], VisionTransformer.forward

    def counted(self, pixels, *arguments, **options):
        seen[-1] += len(pixels)
        return forward(self, pixels, *arguments, **options)

    VisionTransformer.forward = counted
    run, values = Steps(cfg), []
    for _ in range(2):
        seen.append(0)
        values.append(run.session.held_out.evaluate())
    return *values, seen


def test_an_evaluation_is_served_from_the_cache(few, tmp_path):
    held_out = f"data.validation_shards={few}/held_out"
    cfg = vlm(few, tmp_path / "run", "layout=one_process", held_out, *cached(tmp_path / "features"))
    ((first, second, seen),) = run_ranks(_evaluated_twice, 1, cfg)
    assert second == pytest.approx(first, rel=1e-6) and seen[0] > 0 == seen[1]


def _refused(cfg) -> str:
    try:
        Steps(cfg)
    except UserError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_made_is_named_on_every_rank(few, tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "features"
    cfg = vlm(few, tmp_path, "layout=images_tp2_language_pp2", *cached(folder))
    said = run_ranks(_refused, 4, cfg)
    assert len(set(said)) == 1 and f"modules.images.feature_cache.dir: cannot make {folder} (Not a dir" in said[0]

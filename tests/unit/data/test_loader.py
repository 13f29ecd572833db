import threading

import pytest
import torch

from data.errors import TooManyBadSamples
from data.loader import StepLoader
from data.order.step import Batching, Reader
from tests.tars import write_tar
from tests.unit.data.helpers import chat, encode_image, images, media_of, text_of

BOTH = (Reader("language", 0, 1), Reader("images", 0, 1))
BATCHING = Batching(global_batch_size=8, microbatch_samples=4)


def steps(data, readers=BOTH, batching=BATCHING, **options):
    with StepLoader(data, batching, readers, **{"limit": 5, "workers": 0, **options}) as loader:
        return list(loader)


def equal(first, second):
    """Whether two batches are the same, tensor by tensor."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


def same_steps(first, second):
    assert [step.first_sample for step in first] == [step.first_sample for step in second]
    for one, two in zip(first, second, strict=True):
        assert equal(one.microbatches, two.microbatches) and one.token_counts == two.token_counts
        assert one.bad.tolist() == two.bad.tolist()


def pixels(microbatch, module="images"):
    inner = microbatch["modality_inputs"][module]
    return [] if inner is None else list(inner[module]["pixels"])


def test_a_step_holds_its_samples_in_order(dataset):
    data = dataset(keep_text=True)
    (step,) = steps(data, consumed_samples=8, limit=1)
    assert step.first_sample == 8 and len(step.microbatches) == 2 and step.bad.shape == (8,) and not step.bad.any()
    media = sum(map(sum, step.token_counts["images"]))
    shown = f"StepBatch(samples 8 to 15, images {media} tokens, 2 microbatches of [4, 24], [4, 24] tokens, 0 bad)"
    assert repr(step) == shown
    with pytest.raises(KeyError, match="tokens: not in this microbatch. It has .*labels.*'tokens' is 'input_ids' here"):
        step.microbatches[0]["tokens"]
    for at, microbatch in enumerate(step.microbatches):
        numbers = list(range(8 + 4 * at, 12 + 4 * at))
        assert microbatch["sample_numbers"].tolist() == numbers
        texts = [text_of(data, number) for number in numbers]
        assert microbatch["input_ids"].tolist() == [text.input_ids.tolist() for text in texts]
        assert microbatch["labels"].tolist() == [text.labels.tolist() for text in texts]
        assert microbatch["loss_mask"].tolist() == [text.loss_mask.tolist() for text in texts]
        assert microbatch["questions"] == [text.questions for text in texts]
        expected = [image for number in numbers for image in media_of(data, number, "images")]
        assert equal(pixels(microbatch), expected)
        assert step.token_counts["images"][at] == [data.token_counts(number)["images"] for number in numbers]


def test_workers_and_prefetching_change_nothing(dataset, monkeypatch):
    first = steps(dataset())
    for workers, ahead in ((1, 1), (0, 3), (3, 2), (2, 7)):
        monkeypatch.setattr("data.loader._STEPS_AHEAD", ahead)
        same_steps(first, steps(dataset(), workers=workers))


def test_without_threads_nothing_is_read_before_its_step(dataset):
    data = dataset()
    with StepLoader(data, BATCHING, BOTH, workers=0) as loader:
        assert not data.reader.bytes_read
        read = [sum(data.reader.bytes_read.values()) for _ in zip(range(3), loader, strict=False)]
    alone = [dataset() for _ in range(3)]
    for number, other in enumerate(alone):
        steps(other, limit=number + 1)
    assert read == [sum(other.reader.bytes_read.values()) for other in alone]


def test_resuming_anywhere_gives_the_rest_also_over_an_epochs_end(dataset):
    whole = steps(dataset(), limit=6)  # 48 samples of epochs of 13
    for done in range(6):
        same_steps(whole[done:], steps(dataset(), consumed_samples=8 * done, limit=6 - done, workers=2))
    # And with another batch size from a point where both end: the samples go on where the count says.
    numbers = [n for step in whole for part in step.microbatches for n in part["sample_numbers"].tolist()]
    other = steps(dataset(), batching=Batching(12, 6), consumed_samples=24, limit=2)
    assert numbers[24:] == [n for step in other for part in step.microbatches for n in part["sample_numbers"].tolist()]


@pytest.mark.parametrize("language", [1, 2, 4])
@pytest.mark.parametrize("vision", [1, 2, 4])
def test_data_parallel_slices_make_up_the_whole(dataset, language, vision):
    whole = steps(dataset())
    text = [steps(dataset(), [Reader("language", rank, language)]) for rank in range(language)]
    media = [steps(dataset(), [Reader("images", rank, vision)]) for rank in range(vision)]
    for at, step in enumerate(whole):
        for micro, expected in enumerate(step.microbatches):
            for name in ("input_ids", "labels", "loss_mask", "position_ids", "sample_numbers"):
                parts = [rank[at].microbatches[micro][name] for rank in text]
                assert torch.equal(torch.cat(parts), expected[name])
            slices = [rank[at].microbatches[micro] for rank in media]
            assert equal([item for part in slices for item in pixels(part)], pixels(expected))
            with_images = [
                number
                for number, count in zip(
                    expected["sample_numbers"].tolist(), step.token_counts["images"][micro], strict=True
                )
                if count
            ]
            assert torch.cat([part["sample_numbers"] for part in slices]).tolist() == with_images
        # Every rank knows the counts of all samples, its own or not.
        assert all(rank[at].token_counts == step.token_counts for rank in [*text, *media])


def test_each_rank_reads_only_its_members(dataset):
    language, vision = dataset(), dataset()
    for step in steps(language, [Reader("language", 0, 2)], workers=2):
        of_text = {"input_ids", "labels", "loss_mask", "position_ids", "lengths", "sample_numbers"}
        assert set(step.microbatches[0]) == of_text
    for step in steps(vision, [Reader("images", 1, 2)], workers=2):
        assert set(step.microbatches[0]) == {"modality_inputs", "sample_numbers"}
    assert set(language.reader.bytes_read) == {"json"}
    assert vision.reader.bytes_read and "json" not in vision.reader.bytes_read


def test_a_rank_that_reads_nothing_still_gets_counts(dataset):
    data = dataset()
    (step,) = steps(data, [], limit=1)
    assert step.token_counts == steps(dataset(), limit=1)[0].token_counts and not data.reader.bytes_read
    assert [part["sample_numbers"].tolist() for part in step.microbatches] == [[], []]


def test_microbatches_without_images_and_with_several_sizes(tmp_path, dataset):
    members = [(f"{n}.json", chat("q", "a")) for n in range(2)]
    for n, height in ((2, 10), (3, 30)):
        members += [(f"{n}.png", encode_image(height, 8, "PNG")), (f"{n}.json", chat("<image>q", "a"))]
    shard = write_tar(tmp_path / "s.tar", members)
    native = images()
    native = type(native)("images", "image", "<image>", lambda height, width: 2, lambda height, width: (height, width))
    data = dataset(shards=shard, media=(native,), shuffle=False)
    (step,) = steps(data, batching=Batching(4, 2), limit=1)
    assert step.microbatches[0]["modality_inputs"] == {"images": None}
    ragged = step.microbatches[1]["modality_inputs"]["images"]["images"]["pixels"]
    assert [tuple(item.shape) for item in ragged] == [(3, 10, 8), (3, 30, 8)]
    assert step.token_counts == {"images": [[0, 0], [2, 2]]}


def faulty(tmp_path, dataset, **options):
    """16 samples; the image of number 3 and the record of number 9 are broken."""
    good, members = encode_image(16, 16, seed=2), []
    for n in range(16):
        members.append((f"{n:02d}.jpg", good[: -len(good) // 8] if n == 3 else good))
        members.append((f"{n:02d}.json", b"{" if n == 9 else chat("<image>q", "a")))
    return dataset(shards=write_tar(tmp_path / "f.tar", members), shuffle=False, **options)


@pytest.mark.parametrize("workers", [0, 3])
def test_bad_samples_keep_order_and_shapes(tmp_path, dataset, workers):
    data = faulty(tmp_path, dataset, max_bad_samples=2)
    first, second = steps(data, limit=2, workers=workers)
    assert [first.bad.nonzero()[0].tolist(), second.bad.nonzero()[0].tolist()] == [[3], [1]]
    assert all(part["input_ids"].shape == (4, 24) and len(pixels(part)) == 4 for part in first.microbatches)
    assert not first.microbatches[0]["loss_mask"][3].any() and first.microbatches[0]["loss_mask"][2].any()
    assert not pixels(first.microbatches[0])[3].any()
    assert not second.microbatches[0]["loss_mask"][1].any()
    placeholder = data.tokenizer.placeholder_id("<image>")
    for step in (first, second):
        for part in step.microbatches:
            assert (part["input_ids"] == placeholder).sum(1).tolist() == [4] * 4
    assert data.bad_samples.count == 2


def test_each_rank_reports_what_it_found(tmp_path, dataset):
    text = steps(faulty(tmp_path, dataset, max_bad_samples=2), [Reader("language", 0, 1)], limit=2)
    media = steps(faulty(tmp_path, dataset, max_bad_samples=2), [Reader("images", 0, 1)], limit=2)
    assert [step.bad.nonzero()[0].tolist() for step in text] == [[], [1]]
    assert [step.bad.nonzero()[0].tolist() for step in media] == [[3], []]


@pytest.mark.parametrize("workers", [0, 3])
def test_errors_surface_at_their_step_and_end_the_loader(tmp_path, dataset, workers):
    data = faulty(tmp_path, dataset, max_bad_samples=1)
    loader = StepLoader(data, BATCHING, BOTH, workers=workers)
    assert next(loader).bad.sum() == 1  # read ahead, but not counted: the bad sample of the next step
    assert data.bad_samples.count == 1
    with pytest.raises(TooManyBadSamples, match="key '09'"):
        next(loader)
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data_")]


@pytest.mark.parametrize("workers", [0, 2])
def test_errors_that_are_of_no_sample_pass_as_they_are(dataset, monkeypatch, workers):
    data = dataset()
    monkeypatch.setattr(data.tokenizer, "encode", lambda text: 1 / 0)
    with pytest.raises(ZeroDivisionError), StepLoader(data, BATCHING, BOTH, workers=workers) as loader:
        next(loader)


def test_every_thread_reads_of_one_microbatch(dataset, monkeypatch):
    data, together = dataset(), threading.Barrier(2, timeout=20)
    read, waiting = data.read_text, iter(range(2))

    def read_beside_another(number):
        if number % 2 == 0 and next(waiting, None) is not None:
            together.wait()  # breaks, with an error, where no other thread comes
        return read(number)

    monkeypatch.setattr(data, "read_text", read_beside_another)
    (step,) = steps(data, batching=Batching(4, 4), workers=2, limit=1)
    assert step.microbatches[0]["sample_numbers"].tolist() == [0, 1, 2, 3]
    assert together.n_waiting == 0 and not together.broken and next(waiting, None) is None


def test_close_joins_threads_and_limit_ends(dataset):
    loader = StepLoader(dataset(), BATCHING, BOTH, workers=3, limit=2)
    assert len(list(loader)) == 2 and list(loader) == []
    loader.close()
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data_")]


def test_unfit_readers_are_refused(dataset):
    for readers in ([Reader("language", 0, 3)], [Reader("sound", 0, 1)], [BOTH[0], BOTH[0]]):
        with pytest.raises(AssertionError):
            StepLoader(dataset(), BATCHING, readers)
    for sizes in ((8, 3), (0, 1), (8, 0)):
        with pytest.raises(AssertionError):
            Batching(*sizes)
    with pytest.raises(AssertionError):
        Reader("language", 2, 2)


def test_reads_are_announced_before_they_begin(dataset, monkeypatch):
    """Whatever the threads do: what is announced too late is read twice, and kept for nobody."""
    there, announced = dataset(), []
    monkeypatch.setattr(there, "is_remote", True)
    told = threading.current_thread
    monkeypatch.setattr(there, "expect_samples", lambda wanted: announced.extend((told(), *w) for w in wanted))
    with StepLoader(there, Batching(4, 2), [Reader("language", 0, 1)], workers=2, limit=1) as steps:
        assert len([*steps]) == 1
    assert announced == [(told(), number, {}, True) for number in range(4)]

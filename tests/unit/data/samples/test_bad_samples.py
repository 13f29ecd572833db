"""The budget of bad samples, and who is in it."""

import threading
from pathlib import Path

import pytest

from data.errors import TooManyBadSamples
from data.samples.bad_samples import BadSample, BadSamples, require_budget


def bad(number: int) -> BadSample:
    return BadSample(number, Path("a.tar"), f"k{number}", "cannot decode")


@pytest.mark.parametrize(("count", "allowed"), [(0, 0), (1, 1), (3, 7)])
def test_a_budget_that_is_not_spent_is_no_error(count, allowed):
    require_budget(count, allowed, bad(1))


@pytest.mark.parametrize(
    ("count", "allowed", "example", "said"),
    [
        (1, 0, bad(4), "data.max_bad_samples: 1 bad sample, 0 allowed, for example a.tar, key 'k4': cannot decode. "),
        (8, 7, None, "data.max_bad_samples: 8 bad samples, 7 allowed. Repair the shards (`mimo-train shards verify` "),
    ],
)
def test_a_spent_budget_names_the_key_the_numbers_and_the_remedy(count, allowed, example, said):
    with pytest.raises(TooManyBadSamples) as caught:
        require_budget(count, allowed, example)
    assert str(caught.value).startswith(said) and str(caught.value).endswith("or raise data.max_bad_samples")


def test_each_number_counts_once_also_when_threads_find_it_at_once():
    samples = BadSamples(allowed=5)
    assert samples.latest is None and samples.count == 0

    def find():
        for number in (3, 1, 3, 2):
            samples.record(bad(number))

    threads = [threading.Thread(target=find) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    samples.record(bad(0))
    assert samples.count == 4 and all(number in samples for number in range(4)) and 4 not in samples
    assert samples.latest == bad(0)
    samples.record(bad(4))
    with pytest.raises(TooManyBadSamples, match="6 bad samples, 5 allowed, for example .* key 'k5'"):
        samples.record(bad(5))

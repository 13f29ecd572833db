"""Answers: which tokens are drawn, text as it becomes certain, and where a model comes from."""

import pytest
import torch

from data.text.tokens import build_tokenizer
from mimo_train.config.errors import UserError
from mimo_train.evaluation.generation.answers import UNDECODED, Sampler, TextStream, distribution
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.evaluation.generation.source import on_ranks
from mimo_train.layout.run import resolve
from tests.unit.configs import load

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 2.0, -3.0])


def probabilities(logits: torch.Tensor, **options) -> dict[int, float]:
    left, tokens = distribution(logits, Sampling(**{"temperature": 1.0, **options}))
    assert float(left.sum()) == pytest.approx(1)
    return dict(zip(tokens.tolist(), left.tolist(), strict=True))


def drawn(count: int, logits: torch.Tensor = LOGITS, **options) -> list[int]:
    sampler = Sampler(Sampling(**options))
    return [sampler(logits) for _ in range(count)]


def test_all_tokens_have_the_probability_of_the_softmax():
    expected = LOGITS.double().div(0.7).softmax(0)
    assert probabilities(LOGITS, temperature=0.7) == pytest.approx(dict(enumerate(expected.tolist())))


def test_frequencies_are_the_probabilities():
    count = 20_000
    tokens, expected = drawn(count, temperature=1.3, top_k=4, top_p=0.9, seed=3), {1: 0.37, 4: 0.37, 3: 0.26}
    exact = probabilities(LOGITS, temperature=1.3, top_k=4, top_p=0.9)
    assert exact == pytest.approx(expected, abs=0.02)
    for token, probability in exact.items():
        deviation = (probability * (1 - probability) / count) ** 0.5
        assert abs(tokens.count(token) / count - probability) < 5 * deviation
    assert set(tokens) == set(exact)


def test_top_k_takes_that_many_and_the_lower_of_equal_ones():
    assert list(probabilities(LOGITS, top_k=1)) == [1]
    assert list(probabilities(LOGITS, top_k=3)) == [1, 4, 3]
    assert len(probabilities(LOGITS, top_k=100)) == len(LOGITS)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.999])
def test_top_p_takes_the_smallest_set(seed, top_p):
    logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed))
    whole, left = probabilities(logits), probabilities(logits, top_p=top_p)
    chosen = sorted((whole[token] for token in left), reverse=True)
    assert sum(chosen) >= top_p > sum(chosen[:-1])
    assert min(chosen) >= max((whole[token] for token in whole.keys() - left), default=0)


def test_top_p_is_of_what_top_k_left():
    even = torch.zeros(4)
    # Of two tokens with a half each one is enough for 0.5; of four with a quarter, two.
    assert list(probabilities(even, top_k=2, top_p=0.5)) == [0]
    assert list(probabilities(even, top_p=0.5)) == [0, 1]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1e-300}, {"temperature": 5.0, "top_k": 1}, {"temperature": 5.0, "top_p": 1e-9}]
)
def test_what_leaves_one_token_is_greedy(options):
    assert drawn(20, torch.tensor([-1e4, 3.0, 1e4, 2.0]), **options) == [2] * 20


def test_a_seed_draws_the_same_tokens_and_none_draws_others():
    options = {"temperature": 2.0}
    assert drawn(40, seed=7, **options) == drawn(40, seed=7, **options) != drawn(40, seed=8, **options)
    assert drawn(40, **options) != drawn(40, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, torch.nan], [torch.inf, 0.0], [-torch.inf, -torch.inf]])
def test_what_is_not_finite_is_no_answer(logits, temperature):
    with pytest.raises(UserError, match="not finite"):
        drawn(1, torch.tensor(logits), temperature=temperature)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
        ({"top_p": 1.1}, "--top-p"),
    ],
)
def test_options_out_of_range_are_named(options, named):
    with pytest.raises(UserError, match=named):
        Sampling(**options)


BYTES = build_tokenizer("bytes")


def pieces(tokens: list[int], tokenizer=BYTES) -> list[str]:
    """What is written at each token, and at the end."""
    written: list[str] = []
    stream = TextStream(tokenizer, lambda text: written.append(written.pop() + text))
    for token in tokens:
        written.append("")
        stream.add(token)
    written.append("")
    stream.end()
    assert "".join(written) == stream.text or tokenizer is not BYTES
    return written


def test_a_character_of_several_tokens_appears_with_its_last():
    assert pieces(list("aé€😀".encode())) == ["a", "", "é", "", "", "€", "", "", "", "😀", ""]


def test_white_space_waits_for_what_follows():
    assert pieces(list(b" a  b \n")) == ["", "a", "", "", "  b", "", "", ""]


@pytest.mark.parametrize("raw", [b"\xff", b"a\xff\xfeb\xc3", b"\xe2\x82", b"\xc3 \xa9", "\ufffdx".encode()])
def test_bytes_that_are_no_character_are_shown_once_nothing_can_complete_them(raw):
    written = pieces(list(raw))
    assert "".join(written) == raw.decode("utf-8", "replace").strip()


def test_special_tokens_are_no_text():
    assert pieces([BYTES.pad_id, *b"ok", BYTES.role_ids("user")[0]]) == ["", "o", "k", "", ""]


class WholeRuns:
    """As tokenizers that fall back to bytes do it: a run of bytes is text only if all of it is."""

    def decode(self, ids):
        try:
            return bytes(ids).decode()
        except UnicodeDecodeError:
            return UNDECODED * len(list(ids))


def test_text_that_changes_for_a_while_is_not_repeated():
    assert pieces(list("€é!".encode()), WholeRuns()) == ["", "", "€", "", "é", "!", ""]


class CleansUp:
    """As tokenizers of word pieces do it: no space before a comma or n't."""

    def decode(self, ids):
        return "".join(WORDS[token] for token in ids).replace(" ,", ",").replace(" n't", "n't")


WORDS = [" I", " do", " n", "'t", " ,", " no"]


def test_text_that_stays_changed_is_completed_at_the_end():
    written = pieces([0, 1, 4, 5], CleansUp())
    assert written == ["I", " do", ",", " no", ""]
    assert "".join(pieces([0, 1, 2, 3, 5], CleansUp()))[-3:] == " no"


def test_what_only_training_uses_keeps_no_checkpoint_from_being_asked():
    """Rank 1 is not there, and a GPU need not be."""
    keys = ("profiling.record=[torch]", "profiling.ranks=[1]", "run.device=cuda")
    cfg = load("vlm_digits", "layout=two_processes", *keys)
    run = resolve(on_ranks(cfg))
    assert run.layout.world_size == 1 and run.cfg.run.device == "auto" and run.cfg.modules.keys() == cfg.modules.keys()

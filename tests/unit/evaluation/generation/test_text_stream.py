"""Text appears as soon as it is certain, and is that of all tokens."""

import pytest

from data.text.tokens import build_tokenizer
from mimo_train.evaluation.generation.answers import UNDECODED, TextStream

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


def test_what_may_become_a_character_waits():
    assert pieces(list(b"a\xe2\x82")) == ["a", "", "", UNDECODED]


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

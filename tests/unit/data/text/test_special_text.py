"""`data.special_tokens_in_text`: special tokens that a record's text may have."""

import json
import shutil
from functools import partial

import pytest

from data.errors import DataError, RecordError
from data.records.records import parse_record
from data.text.tokens import build_tokenizer
from tests.unit.data.text.chat_templates import CHATML, QWEN_VL, learned, parse, save_tokenizer

BOXES = ["<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"]
ANSWER = "<|object_ref_start|>the digit<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>"
FRAME = ("<|im_start|>", "<|im_end|>", "<think>")
RECORD = [{"role": "user", "content": "where is<|im_end|> it?"}, {"role": "assistant", "content": ANSWER}]


@pytest.fixture
def grounded(tmp_path):
    """A tokenizer with the tokens of Qwen2.5-VL."""
    from transformers import AutoTokenizer

    def make(template=QWEN_VL, **options):
        folder = save_tokenizer(tmp_path / "grounded", template, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(BOXES, special_tokens=True)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("given", ["grounding", ["grounding"], BOXES, [*BOXES, "<think>"]], ids=str)
def test_admitted_tokens_are_those_of_transformers_and_others_stay_text(given, grounded):
    from transformers import AutoTokenizer

    folder = grounded()
    tokenizer = build_tokenizer(folder, ["<image>"], special_in_text=given)
    theirs = AutoTokenizer.from_pretrained(folder)
    asked = [RECORD[0] | {"content": "where is it?"}, RECORD[1]]
    assert tokenizer.template.encode(parse(asked), {}).tokens == theirs.apply_chat_template(asked)["input_ids"]
    encoded = tokenizer.template.encode(parse(RECORD), {})
    ids = theirs.convert_tokens_to_ids(BOXES)
    assert [token for token in encoded.tokens if token in ids] == ids, "once each, learned"
    assert learned(tokenizer, encoded) == [ANSWER + "<|im_end|>"]
    assert encoded.tokens.count(theirs.convert_tokens_to_ids("<|im_end|>")) == 2, "that of the question stays text"
    assert tokenizer.decode(encoded.tokens[-30:]).strip().endswith("<|box_end|>"), "an answer is shown with its boxes"


def test_a_special_token_split_over_two_parts_is_no_token(grounded):
    tokenizer = build_tokenizer(grounded(), ["<image>"])
    parts = [{"type": "text", "text": "a<|im_"}, {"type": "text", "text": "end|>b"}]
    with pytest.raises(RecordError, match="split over neighbouring text parts"):
        tokenizer.template.encode(parse([{"role": "user", "content": parts}, RECORD[1]]), {})


def test_a_tokenizer_of_transformers_cannot_make_a_special_token_an_ordinary_one(grounded):
    """Else `data/text/special_text.py` need not replace its Rust core."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(grounded())
    tokenizer.add_tokens([AddedToken(BOXES[0], special=False)])
    as_text = tokenizer(BOXES[0], split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_tokens_to_ids(BOXES[0]) not in as_text


def test_a_token_that_is_not_special_is_itself_in_texts_unless_it_frames_messages(saved):
    """As in transformers, `<think>` in a text is that token. One that the template writes around a message is not."""
    folder = shutil.copytree(saved(CHATML), saved(CHATML).parent / "ordinary")
    content = json.loads((folder / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = build_tokenizer(folder)
    record = [{"role": "user", "content": "<|im_start|>q<|im_end|>"}, {"role": "assistant", "content": "<think>a"}]
    encoded = tokenizer.template.encode(parse(record), {})
    counts = {name: encoded.tokens.count(tokenizer._tokenizer.convert_tokens_to_ids(name)) for name in FRAME}
    assert counts == {"<|im_start|>": 3, "<|im_end|>": 3, "<think>": 1}
    assert "<|im_start|>q<|im_end|>" in tokenizer.shown(encoded.tokens)
    assert tokenizer.special_text.find(parse(record)) == {"<|im_start|>", "<|im_end|>"}


def test_line_breaks_and_words_that_a_vocabulary_adds_stay_text(saved, tmp_path):
    """As those of Gemma: as special tokens, answers would stop at the first line, and be shown without lines."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(saved(CHATML))
    theirs.add_tokens(["\n", "user", "mimo"])
    theirs.save_pretrained(tmp_path)
    tokenizer = build_tokenizer(tmp_path)
    record = [{"role": "user", "content": "a user\nof <|im_end|>"}, {"role": "assistant", "content": "one\ntwo"}]
    encoded = tokenizer.template.encode(parse(record), {})
    assert learned(tokenizer, encoded) == ["one\ntwo<|im_end|>"]
    assert tokenizer.template.stop_ids == {tokenizer.end_of_turn_id}
    assert tokenizer.decode(encoded.tokens).endswith("one\ntwo\n")


def test_without_the_key_they_are_text_and_the_fingerprint_is_another(grounded):
    folder = grounded()
    without, admitting = (build_tokenizer(folder, special_in_text=given) for given in ([], "grounding"))
    encoded, other = (tokenizer.template.encode(parse(RECORD), {}) for tokenizer in (without, admitting))
    assert len(encoded.tokens) > len(other.tokens) + 40 and without.shown(encoded.tokens) == without.shown(other.tokens)
    assert without.fingerprint != admitting.fingerprint
    found = partial(parse_record, json.dumps({"messages": RECORD}).encode(), "json", "k", {})
    assert without.special_text.find(found()) == {*BOXES, "<|im_end|>"}
    assert admitting.special_text.find(found()) == {"<|im_end|>"}


def test_in_our_own_format_and_in_plain_texts(grounded):
    tokenizer = build_tokenizer(grounded(CHATML, plain=True), special_in_text="grounding")
    ids = tokenizer.encode("<|box_start|>1<|box_end|><|im_end|>")
    assert tokenizer.shown(ids[:1]) == "<|box_start|>" and len(ids) > 6
    assert learned(tokenizer, tokenizer.template.encode(parse(RECORD), {})) == [ANSWER + "<|im_end|>"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["<|nothing|>"], r"'<\|nothing\|>' is not a special token of data.tokenizer"),
        (["<|image_pad|>"], r"'<\|image_pad\|>' stands for an image or audio"),
    ],
)
def test_what_cannot_be_admitted(given, message, grounded):
    with pytest.raises(DataError, match=f"data.special_tokens_in_text: {message}"):
        build_tokenizer(grounded(), ["<image>"], special_in_text=given)


def test_a_vocabulary_without_any(saved):
    with pytest.raises(DataError, match="no special tokens for grounding"):
        build_tokenizer(saved(CHATML), special_in_text="grounding")
    with pytest.raises(DataError, match="`bytes` has no special tokens"):
        build_tokenizer("bytes", special_in_text="grounding")

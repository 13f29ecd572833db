"""Our own format by hand: tokens, labels and the loss mask of conversations, and what it has no place for."""

from functools import partial

import numpy as np
import pytest

from data.collate import collate, stand_in, to_sample
from data.errors import RecordError
from data.records.conversation import Conversation
from data.text.tokens import build_tokenizer
from tests.media_tokens import item_of
from tests.unit.data.text.chat_templates import CALL, SCHEMA, TALKS, llava, messages, parse

BYTES = build_tokenizer("bytes", ["<image>", "<dino>"])
IMAGE, DINO = BYTES.placeholder_id("<image>"), BYTES.placeholder_id("<dino>")
PAD, BEGIN, END = BYTES.pad_id, BYTES.begin_id, BYTES.end_of_turn_id
USER, ASSISTANT, SYSTEM = (BYTES.role_ids(role)[0] for role in ("user", "assistant", "system"))


def sample(conversation, media=None, length=32):
    return to_sample(conversation, BYTES, media or {}, length, 5, "k7")


def one_image(tokens=3):
    return {"image": [[item_of([IMAGE] * tokens)]]}


def test_labels_and_loss_mask_by_hand():
    conversation = parse(llava(("human", "<image>q"), ("gpt", "ab"), ("human", "r"), ("gpt", "c")), image=1)
    result = sample(conversation, one_image(3), length=20)
    tokens = [BEGIN, USER, IMAGE, IMAGE, IMAGE, ord("q"), END, ASSISTANT, ord("a"), ord("b"), END]
    tokens += [USER, ord("r"), END, ASSISTANT, ord("c"), END]
    assert result.input_ids.tolist() == tokens + [PAD] * 3
    assert result.labels.tolist() == tokens[1:] + [PAD] * 4
    #                                     B  U  I  I  I  q  E  A  a  b  E  U  r  E  A  c  E  padding
    assert result.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0]
    assert (result.length, result.number) == (17, 5)
    assert result.input_ids.dtype == result.labels.dtype == np.int64 and result.loss_mask.dtype == np.float32


def test_plain_text_carries_loss_everywhere():
    result = sample(parse(b"abc", "txt", image=0), length=6)
    assert result.input_ids.tolist() == [BEGIN, 97, 98, 99, END, PAD]
    assert result.labels.tolist() == [97, 98, 99, END, PAD, PAD]
    assert result.loss_mask.tolist() == [1, 1, 1, 1, 0, 0]


def test_placeholders_in_an_assistant_turn_carry_no_loss():
    conversation = parse(llava(("human", "q"), ("gpt", "x<image>y")), image=1)
    result = sample(conversation, one_image(2))
    assert result.labels[result.loss_mask == 1].tolist() == [ord("x"), ord("y"), END]


def test_truncation_cuts_text_behind_the_media_only():
    conversation = parse(llava(("human", "<image>question"), ("gpt", "answer")), image=1)
    whole = sample(conversation, one_image(3), length=40)
    for length in range(5, 40):
        cut = sample(conversation, one_image(3), length=length)
        for name in ("input_ids", "labels", "loss_mask"):
            assert getattr(cut, name).tolist() == getattr(whole, name)[:length].tolist()
        assert (cut.input_ids == IMAGE).sum() == 3
    for length in range(1, 5):
        with pytest.raises(RecordError, match=rf"k7.*data\.sequence_length is {length}: needed 5, given {length}"):
            sample(conversation, one_image(3), length=length)


def test_stand_in_has_the_placeholders_and_no_loss():
    result = stand_in(BYTES, {"image": [[item_of([IMAGE] * 2), item_of([DINO] * 1)]]}, 5, 9)
    assert result.input_ids.tolist() == [IMAGE, IMAGE, DINO, PAD, PAD] and not result.loss_mask.any()


def test_prompt_ends_where_the_answer_begins():
    conversation = parse(llava(("human", "<image>q"), ("gpt", "a")), image=1)
    prompt = BYTES.template.prompt(Conversation(conversation.turns[:1]), one_image(2))
    whole = sample(conversation, one_image(2)).input_ids.tolist()
    assert prompt == whole[: len(prompt)] and whole[len(prompt)] == ord("a")


def test_collate_shapes():
    batch = collate([sample(parse(b"abc", "txt", image=0), length=8)] * 3)
    assert batch.pop("lengths") == (5, 5, 5)
    assert {name: (tuple(value.shape), str(value.dtype)) for name, value in batch.items()} == {
        "input_ids": ((3, 8), "torch.int64"),
        "labels": ((3, 8), "torch.int64"),
        "loss_mask": ((3, 8), "torch.float32"),
        "position_ids": ((3, 8), "torch.int64"),
    }
    assert batch["position_ids"][2].tolist() == list(range(8))


def test_our_own_format_refuses_what_it_would_lose():
    tokenizer = build_tokenizer("bytes")
    encode = partial(tokenizer.template.encode, media={})
    talk = messages(TALKS["one turn"])
    assert encode(parse({"messages": talk, "tools": []})).tokens == encode(parse(talk)).tokens
    assert encode(parse([talk[0], talk[1] | {"name": "x"}])).tokens == encode(parse(talk)).tokens
    for record, word in (
        ({"messages": talk, "tools": [SCHEMA]}, "tools"),
        ([talk[0], {"role": "assistant", "tool_calls": [CALL]}], "tool_calls"),
        ([talk[0], talk[1] | {"reasoning_content": "r"}], "reasoning_content"),
        ([*talk, {"role": "tool", "content": "3"}], "role 'tool'"),
    ):
        with pytest.raises(RecordError, match=f"{word}.*no place"):
            encode(parse(record))

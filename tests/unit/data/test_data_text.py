"""Tokenizers, records, and what becomes of a conversation."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from data.collate import collate, encode_prompt, stand_in, to_sample
from data.errors import DataError, RecordError
from data.records.conversation import Conversation, Part, Turn
from data.records.records import parse_record
from data.text.tokens import build_tokenizer

BYTES = build_tokenizer("bytes", ["<image>", "<dino>"])
IMAGE, DINO = BYTES.placeholder_id("<image>"), BYTES.placeholder_id("<dino>")
PAD, BEGIN, END = BYTES.pad_id, BYTES.begin_id, BYTES.end_of_turn_id
USER, ASSISTANT, SYSTEM = (BYTES.role_ids(role)[0] for role in ("user", "assistant", "system"))


def parse(record, images=0, extension="json", **media):
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_record(raw, extension, "k7", {"image": images, **media})


def llava(*turns):
    return {"conversations": [{"from": name, "value": text} for name, text in turns]}


def sample(conversation, media=None, length=32):
    return to_sample(conversation, BYTES, media or {}, length, 5, "k7")


def one_image(tokens=3):
    return {"image": [[(IMAGE, tokens)]]}


# Tokenizers


def test_byte_tokenizer_ids():
    assert BYTES.encode("aé") == [97, 0xC3, 0xA9] and BYTES.decode([97, 0xC3, 0xA9, END, PAD, IMAGE]) == "aé"
    specials = [PAD, BEGIN, END, USER, ASSISTANT, SYSTEM, IMAGE, DINO]
    assert specials == list(range(256, 264)) and (BYTES.vocab_size, BYTES.text_size) == (264, 262)
    assert build_tokenizer("bytes", [f"<{n}>" for n in range(59)]).vocab_size == 262 + 59
    assert BYTES.encode("\ud800") == [ord("?")]
    with pytest.raises(DataError, match="<audio>"):
        BYTES.placeholder_id("<audio>")
    with pytest.raises(DataError, match="its own placeholder"):
        build_tokenizer("bytes", ["<image>", "<image>"])


@pytest.fixture(scope="module")
def saved_tokenizer(tmp_path_factory):
    """A folder with a byte-level BPE tokenizer, made here; `make(markers)` adds special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def make(*extra, eos="<eos>", **special):
        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        names = [name for name in (eos, *special.values(), *extra) if name]
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=names, initial_alphabet=alphabet, show_progress=False
        )
        core.train_from_iterator(["which digit is green", "read the digits"], trainer)
        folder = tmp_path_factory.mktemp("tokenizer")
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, **special).save_pretrained(folder)
        return folder

    return make


def test_a_placeholder_that_a_model_writes_asks_for_no_features():
    tokenizer = build_tokenizer("bytes", ["<image>"])
    assert tokenizer.as_text(tokenizer.placeholder_id("<image>")) == tokenizer.pad_id
    assert [tokenizer.as_text(token) for token in (0, 65, tokenizer.end_of_turn_id)] == [
        0,
        65,
        tokenizer.end_of_turn_id,
    ]


def test_hugging_face_tokenizer_without_markers(saved_tokenizer):
    tokenizer = build_tokenizer(saved_tokenizer(), ["<image>"])
    text = "which digit is <image> <eos> é?"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.placeholder_id("<image>") not in ids and tokenizer.end_of_turn_id not in ids
    assert tokenizer.decode([*tokenizer.encode("7"), tokenizer.end_of_turn_id, tokenizer.vocab_size + 9]) == "7"
    assert tokenizer.begin_id is None and tokenizer.pad_id == tokenizer.end_of_turn_id
    assert tokenizer.decode(tokenizer.role_ids("assistant")) == "assistant:\n"
    assert tokenizer.vocab_size == tokenizer.placeholder_id("<image>") + 1, "the placeholder is the last id"
    assert tokenizer.text_size == tokenizer.vocab_size - 1, "which no text has"


def test_hugging_face_tokenizer_with_markers(saved_tokenizer):
    folder = saved_tokenizer("<|user|>", "<|assistant|>", "<|system|>", "<image>", bos_token="<bos>", pad_token="<pad>")
    tokenizer = build_tokenizer(folder, ["<image>"])
    markers = [tokenizer.role_ids(role) for role in ("user", "assistant", "system")]
    assert all(len(marker) == 1 for marker in markers)
    ids = {tokenizer.begin_id, tokenizer.pad_id, tokenizer.end_of_turn_id, tokenizer.placeholder_id("<image>")}
    assert len(ids) == 4 and not ids & set(tokenizer.encode("<bos><pad><image><|user|>"))
    turns = (Turn("user", (Part("image"), Part("text", "read"))), Turn("assistant", (Part("text", "the digits"),)))
    media = {"image": [[(tokenizer.placeholder_id("<image>"), 2)]]}
    result = to_sample(Conversation(turns), tokenizer, media, 40, 0, "k")
    learned = result.labels[result.loss_mask == 1].tolist()
    assert learned == [*tokenizer.encode("the digits"), tokenizer.end_of_turn_id]


def test_all_ids_are_below_the_size_of_a_vocabulary_with_gaps(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<eos>": 0, "which": 7, "digit": 900}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>").save_pretrained(tmp_path)
    tokenizer = build_tokenizer(tmp_path, ["<image>"])
    ids = [*tokenizer.encode("which digit"), tokenizer.placeholder_id("<image>")]
    assert 900 in ids and max(ids) < tokenizer.vocab_size
    assert tokenizer.decode([*ids, 5, tokenizer.vocab_size]) == "which digit"


def test_hugging_face_tokenizer_serves_threads(saved_tokenizer):
    tokenizer = build_tokenizer(saved_tokenizer(), ["<image>"])
    texts = [f"which digit is <image> {n}" for n in range(400)]
    with ThreadPoolExecutor(4) as pool:
        assert [tokenizer.decode(ids) for ids in pool.map(tokenizer.encode, texts)] == texts


def test_tokenizers_are_told_apart_by_their_fingerprints(saved_tokenizer, tmp_path):
    """Also where they have the same tokens with other ids, or other merges; not where the folder is another one."""
    folder = saved_tokenizer()
    core = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, merges = core["model"]["vocab"], core["model"]["merges"]
    vocabulary |= {"a": vocabulary["b"], "b": vocabulary["a"]}
    merges[:] = merges[::-1]
    folders = {name: shutil.copytree(folder, tmp_path / name) for name in ("moved", "ids", "merges")}
    for name, change in (("ids", {"vocab": vocabulary}), ("merges", {"merges": merges})):
        other = json.loads((folder / "tokenizer.json").read_text())
        other["model"] |= change
        (folders[name] / "tokenizer.json").write_text(json.dumps(other))
    found = {name: build_tokenizer(place, ["<image>"]) for name, place in folders.items()}
    same = build_tokenizer(folder, ["<image>"])
    assert found["moved"].fingerprint == same.fingerprint
    assert found["moved"].vocabulary_fingerprint == same.vocabulary_fingerprint
    several = {same, found["ids"], found["merges"], build_tokenizer("bytes", ["<image>"])}
    assert len({tokenizer.vocabulary_fingerprint for tokenizer in several}) == len(several)
    placeholders = [build_tokenizer("bytes", names) for names in ([], ["<image>"], ["<image>", "<audio>"])]
    assert len({tokenizer.fingerprint for tokenizer in (*several, *placeholders)}) == len(several) + 2
    assert {tokenizer.vocabulary_fingerprint for tokenizer in placeholders} == {"bytes"}


def test_tokenizers_that_cannot_serve(saved_tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"data\.tokenizer.*EOS"):
        build_tokenizer(saved_tokenizer(eos=None))
    with pytest.raises(DataError, match=r"data\.tokenizer"):
        build_tokenizer(tmp_path / "nowhere")


# Records


def test_llava_and_messages_mean_the_same():
    first = parse(llava(("system", "s"), ("human", "<image>\nq"), ("gpt", "a")), images=1)
    parts = [{"type": "image", "image": "x.jpg"}, {"type": "text", "text": "q"}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "a"},
    ]
    assert parse({"messages": messages}, images=1) == first
    assert [turn.role for turn in first.turns] == ["system", "user", "assistant"]
    assert first.turns[1].parts == (Part("image"), Part("text", "q"))


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("<image>\nq", [None, "q"]),
        ("q\n<image>", ["q", None]),
        ("<image>\n<image>\r\nq", [None, None, "q"]),
        ("a\n<image>\nb", ["a", None, "b"]),
        ("<image>\n\nq", [None, "\nq"]),
        ("Is <image> like <image>?\n", ["Is ", None, " like ", None, "?\n"]),
    ],
)
def test_a_line_break_next_to_a_marker_separates_and_is_no_text(text, pieces):
    parts = tuple(Part("image") if piece is None else Part("text", piece) for piece in pieces)
    assert parse(llava(("human", text), ("gpt", "a")), images=pieces.count(None)).turns[0].parts == parts


def test_captions():
    assert parse(b"a cat", 2, "txt") == parse({"caption": "a cat"}, 2) == parse({"text": "a cat"}, 2)
    turns = parse(b"a cat", 2, "txt").turns
    assert [(turn.role, len(turn.parts)) for turn in turns] == [("user", 2), ("assistant", 1)]
    assert parse(b"\xef\xbb\xbfprose", 0, "txt").turns == (Turn("plain", (Part("text", "prose"),)),)


def test_text_of_typed_parts_is_literal():
    content = [{"type": "text", "text": "what is <image>?"}]
    record = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a tag"}]}
    assert parse(record).count("image") == 0


@pytest.mark.parametrize(
    ("record", "images", "words"),
    [
        (llava(("human", "<image><image>q"), ("gpt", "a")), 1, ["2 image placeholder", "1 image member"]),
        (llava(("human", "q"), ("gpt", "a")), 3, ["0 image placeholder", "3 image member"]),
        (llava(("human", "<audio>q"), ("gpt", "a")), 0, ["1 audio", "no module"]),
        (llava(("human", "q")), 0, ["no assistant turn"]),
        (llava(("bird", "q"), ("gpt", "a")), 0, ["bird", r"conversations\[0\]"]),
        ({"conversations": []}, 0, ["not a list"]),
        ({"messages": [{"role": "user"}]}, 0, ["content"]),
        ({"messages": [{"role": "user", "content": [{"type": "film"}]}]}, 0, ["film"]),
        ({"messages": [{"role": "user", "content": 7}]}, 0, ["neither text nor"]),
        ({"messages": [{"role": [], "content": "q"}]}, 0, ["unknown role"]),
        ({"image": "x"}, 0, ["none of conversations", "image"]),
        ([1], 0, ["list"]),
        (b"{broken", 0, ["not JSON"]),
        (b"\xff\xfe", 0, ["not UTF-8"]),
        (b"[" * 100000, 0, ["not JSON"]),
    ],
)
def test_record_errors_name_the_key_and_the_cause(record, images, words):
    with pytest.raises(RecordError, match="k7") as caught:
        parse(record, images)
    for word in words:
        assert re.search(word, str(caught.value)), (word, str(caught.value))


# Tokens, labels, loss mask


def test_labels_and_loss_mask_by_hand():
    conversation = parse(llava(("human", "<image>q"), ("gpt", "ab"), ("human", "r"), ("gpt", "c")), images=1)
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
    result = sample(parse(b"abc", 0, "txt"), length=6)
    assert result.input_ids.tolist() == [BEGIN, 97, 98, 99, END, PAD]
    assert result.labels.tolist() == [97, 98, 99, END, PAD, PAD]
    assert result.loss_mask.tolist() == [1, 1, 1, 1, 0, 0]


def test_captions_learn_the_text_only():
    result = sample(parse(b"hi", 1, "txt"), one_image(2), length=12)
    assert result.labels[result.loss_mask == 1].tolist() == [*b"hi", END]


def test_placeholders_in_an_assistant_turn_carry_no_loss():
    conversation = parse(llava(("human", "q"), ("gpt", "x<image>y")), images=1)
    result = sample(conversation, one_image(2))
    assert result.labels[result.loss_mask == 1].tolist() == [ord("x"), ord("y"), END]


def test_two_modules_share_each_picture():
    media = {"image": [[(IMAGE, 2), (DINO, 1)], [(IMAGE, 1), (DINO, 3)]]}
    result = sample(parse(llava(("human", "<image>a<image>"), ("gpt", "b")), images=2), media)
    expected = [BEGIN, USER, IMAGE, IMAGE, DINO, ord("a"), IMAGE, DINO, DINO, DINO, END, ASSISTANT, ord("b"), END]
    assert result.input_ids[: result.length].tolist() == expected


def test_truncation_cuts_text_behind_the_media_only():
    conversation = parse(llava(("human", "<image>question"), ("gpt", "answer")), images=1)
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
    result = stand_in(BYTES, {"image": [[(IMAGE, 2), (DINO, 1)]]}, 5, 9)
    assert result.input_ids.tolist() == [IMAGE, IMAGE, DINO, PAD, PAD] and not result.loss_mask.any()


def test_prompt_ends_where_the_answer_begins():
    conversation = parse(llava(("human", "<image>q"), ("gpt", "a")), images=1)
    prompt = encode_prompt(conversation.turns[:1], BYTES, one_image(2))
    whole = sample(conversation, one_image(2)).input_ids.tolist()
    assert prompt == whole[: len(prompt)] and whole[len(prompt)] == ord("a")


def test_collate_shapes():
    batch = collate([sample(parse(b"abc", 0, "txt"), length=8)] * 3)
    assert {name: (tuple(value.shape), str(value.dtype)) for name, value in batch.items()} == {
        "input_ids": ((3, 8), "torch.int64"),
        "labels": ((3, 8), "torch.int64"),
        "loss_mask": ((3, 8), "torch.float32"),
        "position_ids": ((3, 8), "torch.int64"),
    }
    assert batch["position_ids"][2].tolist() == list(range(8))

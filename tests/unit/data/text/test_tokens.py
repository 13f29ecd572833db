"""Tokenizers: ids and texts, special tokens, fingerprints, and folders that cannot be used."""

import json
import shutil

import pytest

from data.collate import to_sample
from data.errors import DataError
from data.records.conversation import Conversation, Part, Turn
from data.text.tokens import build_tokenizer
from tests.media_tokens import item_of
from tests.unit.data.text.chat_templates import CHATML, save_tokenizer

BYTES = build_tokenizer("bytes", ["<image>", "<dino>"])
IMAGE, DINO = BYTES.placeholder_id("<image>"), BYTES.placeholder_id("<dino>")
PAD, BEGIN, END = BYTES.pad_id, BYTES.begin_id, BYTES.end_of_turn_id
USER, ASSISTANT, SYSTEM = (BYTES.role_ids(role)[0] for role in ("user", "assistant", "system"))


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


def test_a_placeholder_that_a_model_writes_is_read_as_padding():
    assert [BYTES.as_text(token) for token in (IMAGE, 0, 65, END)] == [PAD, 0, 65, END]


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
    media = {"image": [[item_of([tokenizer.placeholder_id("<image>")] * 2)]]}
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


def test_a_tokenizer_of_sentence_piece_names_the_package_that_reads_it(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    monkeypatch.setattr("data.text.tokenizer_files.find_spec", lambda name: None)
    with pytest.raises(
        DataError, match="tokenizer.model is SentencePiece's, which is not .* pip install sentencepiece"
    ):
        build_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_was_cut_short_or_is_a_pointer_of_git_lfs_is_named(name, tmp_path):
    """transformers may pass over such a file and read the vocabulary from others."""
    folder = save_tokenizer(tmp_path / "tokenizer", CHATML)
    whole = (folder / name).read_bytes()
    for text, words in (
        (whole[: len(whole) // 2], rf"is truncated \(it has {len(whole) // 2} bytes\). Copy it again"),
        (b"", r"is truncated \(it has 0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 7\n", "is a Git-LFS pointer, .*: run `git lfs pull`"),
    ):
        (folder / name).write_bytes(text)
        with pytest.raises(DataError, match=f"^data.tokenizer: {folder}/{name} {words}"):
            build_tokenizer(str(folder))
    (folder / name).write_bytes(whole)
    build_tokenizer(str(folder))

"""Tokenizers of runs as files of `transformers`: the same ids, the same conversations, the same tokens learned."""

import json

import pytest

from data.errors import DataError
from data.records.conversation import Conversation, Part, Turn
from data.text.placeholders import Placeholder
from data.text.tokenizer_directory import make_readable_by_version_4, write_tokenizer
from data.text.tokens import build_tokenizer
from tests.unit.data.chat_templates import CHATML, LLAMA, save_tokenizer

PICTURE = Placeholder("<image>", "image")
TURNS = (
    ("system", ["Be brief."]),
    ("user", ["Is ", None, "\nlike ", None, "?"]),
    ("assistant", ["Yes, näht 好 \x00."]),
    ("user", ["Why?"]),
)


def conversation(roles=("system", "user", "assistant")) -> Conversation:
    """Turns with pictures where a text is None."""
    return Conversation(
        tuple(
            Turn(role, tuple(Part("image") if text is None else Part("text", text) for text in texts))
            for role, texts in TURNS
            if role in roles
        )
    )


def messages(roles=("system", "user", "assistant")) -> list[dict]:
    """The same, as transformers takes it."""
    return [{"role": role, "content": [_part(text) for text in texts]} for role, texts in TURNS if role in roles]


def _part(text: str | None) -> dict[str, str]:
    return {"type": "image"} if text is None else {"type": "text", "text": text}


def written(tokenizer, source, folder):
    """What transformers reads of the files."""
    from transformers import AutoTokenizer

    folder.mkdir()
    write_tokenizer(tokenizer, str(source), folder, {"image": [tokenizer.placeholder_id("<image>")]})
    return AutoTokenizer.from_pretrained(folder)


def same_conversations(ours, theirs, **options) -> None:
    """One token for each picture, as the chat template itself writes it."""
    pad = ours.placeholder_id("<image>")
    media = {"image": [[(pad, 1)], [(pad, 1)]]}
    found = theirs.apply_chat_template(
        messages(), return_dict=True, return_assistant_tokens_mask=options.get("mask", False)
    )
    encoded = ours.template.encode(conversation(), media)
    assert found["input_ids"] == encoded.tokens
    if options.get("mask"):
        assert [bool(one) for one in found["assistant_masks"]] == encoded.learned
    prompt = theirs.apply_chat_template(messages(), add_generation_prompt=True, return_dict=True)
    assert prompt["input_ids"] == ours.template.prompt(conversation(), media)


def test_the_byte_tokenizer(tmp_path):
    ours = build_tokenizer("bytes", [PICTURE])
    theirs = written(ours, "bytes", tmp_path / "out")
    text = "".join(map(chr, range(0x250))) + "好 \U0001f600"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.decode([*ours.encode("a"), 256, 258, 200], skip_special_tokens=True) == ours.decode([97, 200])
    names = (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id)
    assert names == (ours.pad_id, ours.begin_id, ours.end_of_turn_id)
    assert theirs.convert_tokens_to_ids("<image>") == ours.placeholder_id("<image>")
    same_conversations(ours, theirs, mask=True)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]


def test_as_a_directory_the_byte_tokenizer_is_what_it_was(tmp_path):
    """A second run from it has the same ids for the same records, prompts and learned tokens."""
    ours = build_tokenizer("bytes", [PICTURE])
    written(ours, "bytes", tmp_path / "out")
    again = build_tokenizer(tmp_path / "out", [PICTURE])
    pad = ours.placeholder_id("<image>")
    media = {"image": [[(pad, 9)], [(pad, 9)]]}
    assert again.placeholder_id("<image>") == pad and again.vocab_size == ours.vocab_size
    one, other = (tokenizer.template.encode(conversation(), media) for tokenizer in (ours, again))
    assert (one.tokens, one.learned) == (other.tokens, other.learned)
    assert again.template.stop_ids == ours.template.stop_ids


@pytest.mark.parametrize("chat_template", ["auto", "own"])
def test_a_tokenizer_without_a_template_gets_ours_and_its_placeholder(chat_template, tmp_path):
    source = save_tokenizer(tmp_path / "source", CHATML, plain=chat_template == "auto")
    ours = build_tokenizer(source, [PICTURE], chat_template=chat_template)
    theirs = written(ours, source, tmp_path / "out")
    same_conversations(ours, theirs, mask=True)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast", "version 4 knows no other"


@pytest.mark.parametrize("template", [CHATML, LLAMA])
def test_a_template_that_knows_no_pictures_learns_to_take_them(template, tmp_path):
    source = save_tokenizer(tmp_path / "source", template)
    variables = {"date_string": "yesterday"} if template == LLAMA else {}
    ours = build_tokenizer(source, [PICTURE], template_variables=variables)
    same_conversations(ours, written(ours, source, tmp_path / "out"))


def test_what_version_5_has_saved_is_spelt_as_version_4_reads_it_too(tmp_path):
    """Version 4 takes `extra_special_tokens` for a mapping, and fails at a list."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    save_tokenizer(tmp_path, CHATML)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["extra_special_tokens"] == ["<image>"] and saved["tokenizer_class"] == "TokenizersBackend"
    make_readable_by_version_4(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "extra_special_tokens" not in settings and settings["additional_special_tokens"] == ["<image>"]
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    # Of this class version 4 makes `token_type_ids` otherwise, which `generate` and Qwen2-Audio reject.
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(again, PreTrainedTokenizerFast) and again.extra_special_tokens == ["<image>"]
    assert again.encode("a<image>b") == tokenizer.encode("a<image>b")


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

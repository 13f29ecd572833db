"""Files of a tokenizer as `transformers` keeps them, versions 4 and 5: of the byte tokenizer, and what a run has added
to another; and our own conversation format as a chat template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.text.templates import own_chat_template
from data.text.tokens import ROLES, ByteTokenizer, HuggingFaceTokenizer, Tokenizer

COPIED = (
    *("tokenizer*.json", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*.model", "*.tiktoken", "chat_template*", "*.py"),
)
"""Files of a folder that belong to its tokenizer."""
TEMPLATE = "chat_template.jinja"

GENERIC_CLASS = "PreTrainedTokenizerFast"
MODEL_INPUTS = ["input_ids", "attention_mask"]
"""Of the generic class version 4 makes `token_type_ids` too, unless told otherwise, and `generate` rejects them."""

_BYTE_MARKS = {256: "<|pad|>", 257: "<|begin|>", 258: "<|end|>"}


def write_tokenizer(tokenizer: Tokenizer, source: str, to: Path, media: Mapping[str, Sequence[int]]) -> None:
    """Write the files of a run's tokenizer, with the placeholders of its media and the chat template that it trains
    with.

    Args:
        source: `data.tokenizer`, a folder.
        media: kind -> ids of the pads of the modules that take it, in order.
    """
    if isinstance(tokenizer, ByteTokenizer):
        _write_bytes(tokenizer, to, [pad for pads in media.values() for pad in pads])
    else:
        assert isinstance(tokenizer, HuggingFaceTokenizer), type(tokenizer)
        for pattern in COPIED:
            for path in sorted(Path(source).glob(pattern)):
                shutil.copy2(path, to / path.name)
        pads = [pad for own in media.values() for pad in own]
        make_readable_by_version_4(to)
        _add_special(to, {pad: tokenizer.shown([pad]) for pad in pads})
    text = chat_template(tokenizer, media)
    if text is not None:
        for name in ("chat_template.json", TEMPLATE):
            (to / name).unlink(missing_ok=True)
        settings = _read(to / "tokenizer_config.json")
        if settings.pop("chat_template", None):
            _write(to / "tokenizer_config.json", settings)
        (to / TEMPLATE).write_text(text)


def chat_template(tokenizer: Tokenizer, media: Mapping[str, Sequence[int]]) -> str | None:
    """The chat template that a run trains with; None where it is that of the tokenizer's files, as it is there. It
    takes contents of typed parts wherever a run has media."""
    if tokenizer.template.is_own:
        return _own_template(tokenizer)
    assert isinstance(tokenizer, HuggingFaceTokenizer), type(tokenizer)
    sources = tokenizer.template_sources
    unknown = [kind for kind in media if tokenizer.writes(kind) is None]
    if not unknown and tokenizer.template_is_its_own and not tokenizer.template_variables:
        return None
    given = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in tokenizer.template_variables.items())
    places = {kind: tokenizer.places[kind] for kind in unknown}
    return given + (_as_texts(places) if places else "") + sources["default"]


def _own_template(tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, ByteTokenizer):
        roles = {role: _mark(tokenizer.role_ids(role)) for role in ROLES}
        return own_chat_template(_BYTE_MARKS[257], roles, _BYTE_MARKS[258], tokenizer.places)
    assert isinstance(tokenizer, HuggingFaceTokenizer), type(tokenizer)
    return tokenizer.own_source


def _as_texts(places: Mapping[str, str]) -> str:
    """A beginning for templates that know no media: contents of parts become texts with the placeholders in them."""
    branches = "".join(
        f"{{%- elif part['type'] == '{kind}' -%}}{{%- set ns.text = ns.text + {json.dumps(text)} -%}}"
        for kind, text in places.items()
    )
    return (
        "{%- set ns = namespace(messages=[], text='') -%}{%- for message in messages -%}"
        "{%- if message['content'] is string or message['content'] is not iterable -%}"
        "{%- set ns.messages = ns.messages + [message] -%}{%- else -%}{%- set ns.text = '' -%}"
        "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}"
        "{%- set ns.text = ns.text + part['text'] -%}" + branches + "{%- endif -%}{%- endfor -%}"
        "{%- set ns.messages = ns.messages + [dict(message, content=ns.text)] -%}{%- endif -%}{%- endfor -%}"
        "{%- set messages = ns.messages -%}"
    )


def _mark(ids: Sequence[int]) -> str:
    """What the byte tokenizer's own ids are called in the files: text in brackets is what people write."""
    return "".join(_BYTE_MARKS.get(token) or f"<|{ROLES[token - 259]}|>" for token in ids)


def _write_bytes(tokenizer: ByteTokenizer, to: Path, pads: Sequence[int]) -> None:
    marks = {token: _mark([token]) for token in range(256, 259 + len(ROLES))}
    marks |= {pad: tokenizer.shown([pad]) for pad in pads}
    added = [_added(token, text) for token, text in sorted(marks.items())]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(_characters())}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    names = {"pad_token": tokenizer.pad_id, "bos_token": tokenizer.begin_id, "eos_token": tokenizer.end_of_turn_id}
    config = {
        "tokenizer_class": GENERIC_CLASS,
        "model_input_names": MODEL_INPUTS,
        **{name: marks[token] for name, token in names.items() if token is not None},
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {str(one["id"]): _without_id(one) for one in added},
    }
    _write(to / "tokenizer.json", content)
    _write(to / "tokenizer_config.json", config)


def _characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: its own where it can be printed, else one
    from 256 on in their order (GPT-2, Radford et al. 2019)."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


def _add_special(to: Path, tokens: Mapping[int, str]) -> None:
    """Add special tokens to the files of a tokenizer that has not all of them."""
    whole, config = to / "tokenizer.json", to / "tokenizer_config.json"
    settings = _read(config)
    if whole.is_file():
        content = _read(whole)
        there = {one["content"]: one for one in content["added_tokens"]}
        for token, text in tokens.items():
            if text in there:
                there[text]["special"] = True
            else:
                content["added_tokens"].append(_added(token, text))
        content["added_tokens"].sort(key=lambda one: one["id"])
        _write(whole, content)
    if "added_tokens_decoder" in settings or not whole.is_file():
        there = settings.setdefault("added_tokens_decoder", {})
        for token, text in tokens.items():
            there.setdefault(str(token), _without_id(_added(token, text)))["special"] = True
        _write(config, settings)


def make_readable_by_version_4(to: Path) -> None:
    """Rewrite what version 5 has saved so that version 4 reads it too.

    Version 5 names a class that version 4 does not know, for a tokenizer that both read. Of that class version 4 makes
    other inputs. Version 5 calls a list of tokens by what is a mapping in version 4; both read its older name."""
    config = to / "tokenizer_config.json"
    settings = found = _read(config)
    if settings.get("tokenizer_class") == "TokenizersBackend" and (to / "tokenizer.json").is_file():
        settings = settings | {"tokenizer_class": GENERIC_CLASS}
    if settings.get("tokenizer_class") == GENERIC_CLASS:
        settings = {"model_input_names": MODEL_INPUTS, **settings}
    if isinstance(settings.get("extra_special_tokens"), list):
        tokens = settings["extra_special_tokens"]
        settings = {name: value for name, value in settings.items() if name != "extra_special_tokens"}
        settings.setdefault("additional_special_tokens", tokens)
    if settings != found:
        _write(config, settings)


def _added(token: int, text: str) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **plain, "special": True}


def _without_id(added: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in added.items() if name != "id"}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

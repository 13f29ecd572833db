"""Write a run's tokenizer for `transformers` 4 and 5, with its placeholders and chat template."""

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
    *("*.model", "*.tiktoken", "tekken.json", "chat_template*", "*.py"),
)
TEMPLATE = "chat_template.jinja"

GENERIC_CLASS = "PreTrainedTokenizerFast"
MODEL_INPUTS = ["input_ids", "attention_mask"]
"""Without these, version 4 returns `token_type_ids` for the generic class, and `generate` rejects them."""

_BYTE_MARKS = {256: "<|pad|>", 257: "<|begin|>", 258: "<|end|>"} | {
    259 + at: f"<|{role}|>" for at, role in enumerate(ROLES)
}
"""Names of the byte tokenizer's special ids in the files. Bracketed names may occur in users' texts."""


def write_tokenizer(tokenizer: Tokenizer, source: str, to: Path, media: Mapping[str, Sequence[int]]) -> None:
    """Write the files of a run's tokenizer with its chat template, from the folder `source`.

    `media`: kind -> pad ids of the modules that take it, in order.
    """
    if isinstance(tokenizer, ByteTokenizer):
        _write_bytes(tokenizer, to)
    else:
        assert isinstance(tokenizer, HuggingFaceTokenizer), type(tokenizer)
        for pattern in COPIED:
            for path in sorted(Path(source).glob(pattern)):
                shutil.copy2(path, to / path.name)
        make_readable_by_version_4(to)
        _add_special(to, {pad: tokenizer.shown([pad]) for pads in media.values() for pad in pads})
    text = chat_template(tokenizer, media)
    if text is not None:
        for name in ("chat_template.json", TEMPLATE):
            (to / name).unlink(missing_ok=True)
        settings = _read(to / "tokenizer_config.json")
        if settings.pop("chat_template", None):
            _write(to / "tokenizer_config.json", settings)
        (to / TEMPLATE).write_text(text)


def chat_template(tokenizer: Tokenizer, media: Mapping[str, Sequence[int]]) -> str | None:
    """Return the chat template of a run, with typed parts if it has media; None if the files already have it."""
    if isinstance(tokenizer, ByteTokenizer):
        roles = {role: _BYTE_MARKS[tokenizer.role_ids(role)[0]] for role in ROLES}
        return own_chat_template(_BYTE_MARKS[257], roles, _BYTE_MARKS[258], tokenizer.places)
    assert isinstance(tokenizer, HuggingFaceTokenizer), type(tokenizer)
    if tokenizer.template.is_own:
        return tokenizer.own_source
    unknown = {kind: tokenizer.places[kind] for kind in media if tokenizer.writes(kind) is None}
    if not unknown and tokenizer.uses_its_template and not tokenizer.template_variables:
        return None
    variables = "".join(f"{{%- set {name} = {value!r} -%}}" for name, value in tokenizer.template_variables.items())
    return variables + (_parts_to_texts(unknown) if unknown else "") + tokenizer.template_sources["default"]


def _parts_to_texts(places: Mapping[str, str]) -> str:
    """Return a prefix for templates that do not know media. It turns typed parts into texts with placeholders."""
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


def _write_bytes(tokenizer: ByteTokenizer, to: Path) -> None:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    core = Core(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = [_BYTE_MARKS.get(token) or tokenizer.shown([token]) for token in range(256, tokenizer.vocab_size)]
    core.add_special_tokens(special)
    assert core.get_vocab_size() == tokenizer.vocab_size, special
    PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=_BYTE_MARKS[tokenizer.pad_id],
        bos_token=_BYTE_MARKS[257],
        eos_token=_BYTE_MARKS[tokenizer.end_of_turn_id],
        model_input_names=MODEL_INPUTS,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(to)
    make_readable_by_version_4(to)


def _add_special(to: Path, tokens: Mapping[int, str]) -> None:
    """Add special tokens to tokenizer files that may lack some."""
    vocabulary, config = to / "tokenizer.json", to / "tokenizer_config.json"
    settings = _read(config)
    if vocabulary.is_file():
        content = _read(vocabulary)
        added = {token["content"]: token for token in content["added_tokens"]}
        for token, text in tokens.items():
            added.setdefault(text, {"id": token} | _special_token(text))["special"] = True
        content["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
        _write(vocabulary, content)
    if "added_tokens_decoder" in settings or not vocabulary.is_file():
        decoder = settings.setdefault("added_tokens_decoder", {})
        for token, text in tokens.items():
            decoder.setdefault(str(token), _special_token(text))["special"] = True
        _write(config, settings)


def make_readable_by_version_4(to: Path) -> None:
    """Make files that version 5 saved readable by version 4.

    Version 5 names a class that version 4 lacks, although both read the tokenizer; version 4 also returns other inputs.
    Version 5 stores a token list under a name that is a mapping in version 4; both read its older name.
    """
    config = to / "tokenizer_config.json"
    settings = before = _read(config)
    if settings.get("tokenizer_class") == "TokenizersBackend" and (to / "tokenizer.json").is_file():
        settings = settings | {"tokenizer_class": GENERIC_CLASS}
    if settings.get("tokenizer_class") == GENERIC_CLASS:
        settings = {"model_input_names": MODEL_INPUTS, **settings}
    if isinstance(settings.get("extra_special_tokens"), list):
        settings = dict(settings)
        settings.setdefault("additional_special_tokens", settings.pop("extra_special_tokens"))
    if settings != before:
        _write(config, settings)


def _special_token(text: str) -> dict[str, Any]:
    return {"content": text, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

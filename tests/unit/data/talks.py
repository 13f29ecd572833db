"""Conversations for tests of chat templates."""

import json

from data.records.records import parse_record

SCHEMA = {"type": "function", "function": {"name": "count", "description": 'of "things"', "parameters": {}}}


TALKS = {
    "one turn": [("user", "which digit is green?"), ("assistant", "three 😀")],
    "several turns": [
        ("user", " read the digits \n"),
        ("assistant", "3, 4\n\nand 5 "),
        ("user", "assistant"),
        ("assistant", "assistant\n"),
        ("user", "é"),
        ("assistant", "3"),
    ],
    "system text": [("system", "Answer in digits."), ("user", "which?"), ("assistant", "3")],
}


def messages(talk) -> list[dict]:
    return [{"role": role, "content": text} for role, text in talk]


def parse(record: list | dict, **media: int):
    record = {"messages": record} if isinstance(record, list) else record
    return parse_record(json.dumps(record).encode(), "json", "k7", media)


def learned(tokenizer, encoded) -> list[str]:
    """Every run of learned tokens as text."""
    runs, before = [], False
    for token, yes in zip(encoded.tokens, encoded.learned, strict=True):
        if yes and not before:
            runs.append([])
        if yes:
            runs[-1].append(token)
        before = yes
    return [tokenizer.shown(run) for run in runs]

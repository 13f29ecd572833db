"""Chat template of a Hugging Face tokenizer: conversation -> tokens and loss mask.

Tokens equal those of transformers' `apply_chat_template`: of the tokenizer for text, of the processor with media. The
processor prepends the tokenizer's first special token (`<s>`) if the template does not. One exception: special tokens
in a record's text stay text, so a record cannot forge a role tag or placeholder.

Every token that touches a `{% generation %}` block is learned. Without blocks, answer i lies between the messages
before i, rendered with the generation prompt, and the messages up to i. Both texts must be prefixes of the
conversation. The answer's last special token ends the turn; line breaks behind it are not learned. If a template
changes earlier answers, e.g. drops reasoning, the conversation's text counts, up to the token that ends a turn.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from data.errors import DataError, RecordError
from data.records.conversation import Conversation, Turn
from data.text.chat_renderer import ANSWER, QUESTION, Chat, ChatRenderer, Messages, common_prefix
from data.text.placeholders import NOUNS, Placeholder, Places
from data.text.special_text import SpecialText
from data.text.templates import OWN, Encoded, MediaTokens, Vocabulary, encode_plain, media_identity, require_place
from data.text_format import plural

_ADD_BLOCKS = "Set data.chat_template to a file with {% generation %} around what the assistant writes"


@dataclass(frozen=True)
class _Span:
    """Characters of an answer."""

    first: int
    end: int
    turn: int
    """Index of the message."""
    is_exact: bool = True
    """False if `end` is only a limit: the answer ends with the first token that ends a turn."""


@dataclass(frozen=True)
class _Tokens:
    """Token ids with the first and end character of each."""

    ids: list[int]
    firsts: list[int]
    ends: list[int]

    def within(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of tokens that touch characters [first, end)."""
        return bisect_right(self.ends, first), bisect_left(self.firsts, end)


class JinjaTemplate:
    """A `templates.Template` that renders with Jinja."""

    def __init__(
        self,
        renderer: ChatRenderer,
        tokenizer: Any,
        vocabulary: Vocabulary,
        placeholders: Sequence[Placeholder],
        *,
        is_own: bool = False,
    ) -> None:
        """
        Args:
            tokenizer: the fast transformers tokenizer, with all placeholders in its vocabulary.
            vocabulary: our tokenizer around it, for texts without roles.
            placeholders: resolved placeholders.
            is_own: True for our own format.

        Raises:
            DataError: answers cannot be located.
        """
        # Two copies: the option belongs to the object, and threads use both.
        self._core, self._text_core = (_copy_core(tokenizer.backend_tokenizer, text) for text in (False, True))
        self._renderer, self._vocabulary = renderer, vocabulary
        self._places = Places(placeholders)
        self._marks = {item.kind: item.mark for item in reversed(placeholders) if item.kind}
        special = {at: token.content for at, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._pads = {tokenizer.convert_tokens_to_ids(item.pad) for item in placeholders}
        self._special_ids = (special.keys() | {vocabulary.end_of_turn_id}) - self._pads
        self._special_text = SpecialText(special.values())
        self.name, self.is_own = OWN if is_own else f"of {renderer.origin}", is_own
        self.stop_ids: frozenset[int] = frozenset([vocabulary.end_of_turn_id])
        self.notes: tuple[str, ...] = ()
        self._begin = _ids_in_front(tokenizer) if placeholders else []
        begins = f" begins with {self._begin}" if self._begin else ""
        self.identity = f"{renderer.identity} {media_identity(placeholders)}{begins}"
        self._try()

    def encode(self, conversation: Conversation, media: MediaTokens) -> Encoded:
        """See `templates.Template.encode`."""
        plain = encode_plain(conversation, self._vocabulary)
        if plain is not None:
            return plain
        chat, stand_ins = self._chat(conversation)
        find_spans = self._spans_of_blocks if chat.template.has_blocks else self._spans_by_prefix
        text, spans = find_spans(chat, conversation.turns)
        return self._encode(text, spans, conversation, media, stand_ins, ends_known=chat.template.has_blocks)

    def prompt(self, conversation: Conversation, media: MediaTokens) -> list[int]:
        """See `templates.Template.prompt`."""
        chat, stand_ins = self._chat(conversation)
        return self._encode(self._text(chat, chat.messages, prompt=True), [], conversation, media, stand_ins).tokens

    def _chat(self, conversation: Conversation) -> tuple[Chat, dict[str, str]]:
        """Return the conversation for the template, and private character -> hidden special token."""
        if self.is_own:
            require_place(conversation)
        conversation, stand_ins = self._special_text.hide(conversation)
        return self._renderer.chat(conversation, self._marks), stand_ins

    def _text(self, chat: Chat, messages: Messages, *, prompt: bool = False) -> str:
        return self._places.write(chat.render(messages, prompt=prompt)[0])

    def _spans_of_blocks(self, chat: Chat, turns: Sequence[Turn]) -> tuple[str, list[_Span]]:
        rendered, blocks = chat.render()
        text, spans, at = "", list[_Span](), 0
        for (first, end), number in zip(blocks, _messages_of_blocks(chat, blocks, turns), strict=True):
            text += self._places.write(rendered[at:first])
            block, at = self._places.write(rendered[first:end]), end
            if block and turns[number].has_loss:
                spans.append(_Span(len(text), len(text) + len(block), number))
            text += block
        return text + self._places.write(rendered[at:]), spans

    def _spans_by_prefix(self, chat: Chat, turns: Sequence[Turn]) -> tuple[str, list[_Span]]:
        text, spans = self._text(chat, chat.messages), list[_Span]()
        for at, message in enumerate(chat.messages):
            if message["role"] != "assistant" or not turns[at].has_loss:
                continue
            before = self._text(chat, chat.messages[:at], prompt=True)
            if not text.startswith(before) or (spans and len(before) < spans[-1].end):
                raise RecordError(
                    f"the chat template of {self._renderer.origin} writes the messages before message {at} differently "
                    f"once there is an answer (from character {common_prefix(before, text)} on), so what the assistant "
                    f"wrote is unknown. {_ADD_BLOCKS}"
                )
            spans.append(self._answer(chat, text, at, len(before)))
        return text, spans

    def _answer(self, chat: Chat, text: str, at: int, first: int) -> _Span:
        if at + 1 == len(chat.messages):
            return _Span(first, len(text), at)
        with_answer = self._text(chat, chat.messages[: at + 1])
        if text.startswith(with_answer):
            return _Span(first, len(with_answer), at)
        # Vary the next message: text that stays equal may belong to the answer.
        following = chat.messages[at + 1]
        other = following | {"content": "b" if str(following.get("content"))[:1] == "a" else "a"}
        limit = common_prefix(self._text(chat, [*chat.messages[: at + 1], other]), text)
        return _Span(first, max(first, limit), at, is_exact=False)

    def _encode(
        self,
        text: str,
        spans: Sequence[_Span],
        conversation: Conversation,
        media: MediaTokens,
        stand_ins: Mapping[str, str],
        ends_known: bool = False,
    ) -> Encoded:
        """Return the tokens of a text with `spans` learned. Pads are repeated for each token of their media.
        `ends_known`: True if spans end where answers do, as those of generation blocks."""
        places = self._places.find(text)
        for kind, noun in NOUNS.items():
            parts, written = conversation.count(kind), sum(place[0] == kind for place in places)
            if parts != written:
                raise RecordError(
                    f"the chat template writes {self._marks.get(kind, kind)!r} {plural(written, 'time')} for "
                    f"{plural(parts, f'{kind} part')} of the record: it has no place for {noun} there"
                )
        remaining = {kind: iter(members) for kind, members in media.items()}
        items = [next(remaining[kind]) for kind, _, _ in places]
        if any(item.start or item.end for of_modules in items for _, item in of_modules):
            text, moved = self._places.insert(text, places, [[item for _, item in of_place] for of_place in items])
            spans = [replace(span, first=moved(span.first), end=moved(span.end)) for span in spans]
            places = self._places.find(text)
        tokens = self._tokenize(text, stand_ins)
        learned, answers = [False] * len(tokens.ids), dict[int, int]()
        for span in spans:
            begin, end = tokens.within(span.first, span.end)
            if not ends_known:
                end = self._end_of_turn(text, tokens, begin, end, span)
            learned[begin:end] = [True] * (end - begin)
            answers.setdefault(span.turn, begin)
        for _, first, end in places:
            begin, end = tokens.within(first, end)
            learned[begin:end] = [False] * (end - begin)
        if not places:
            return Encoded(tokens.ids, learned, answers=[(at, turn) for turn, at in answers.items()])
        replacements = iter([item for of_place in items for item in of_place])
        repeats = np.ones(len(tokens.ids), dtype=np.int64)
        ids, end = list[int](), 0
        for at in (pads := [at for at, token in enumerate(tokens.ids) if token in self._pads]):
            _, (_, replacement, _) = next(replacements)
            ids += [*tokens.ids[end:at], *replacement]
            end, repeats[at] = at + 1, len(replacement)
        assert next(replacements, None) is None, "a pad for every module of every medium"
        starts = np.concatenate([[0], np.cumsum(repeats)])
        return Encoded(
            ids + tokens.ids[end:],
            np.repeat(learned, repeats).tolist(),
            media_end=int(starts[pads[-1] + 1]),
            answers=[(int(starts[at]), turn) for turn, at in answers.items()],
        )

    def _end_of_turn(self, text: str, tokens: _Tokens, begin: int, end: int, span: _Span) -> int:
        """Return the position after the token in [begin, end) that ends the turn."""
        if not span.is_exact:
            stop = next((at for at in range(begin, end) if tokens.ids[at] in self.stop_ids), None)
            if stop is None:
                raise RecordError(
                    f"the chat template of {self._renderer.origin} writes an earlier answer differently than a last "
                    f"one, and no token that ends it. {_ADD_BLOCKS}"
                )
            return stop + 1
        last = next((at for at in range(end - 1, begin - 1, -1) if tokens.ids[at] in self._special_ids), None)
        return end if last is None or text[tokens.ends[last] : span.end].strip() else last + 1

    def _tokenize(self, text: str, stand_ins: Mapping[str, str]) -> _Tokens:
        """Tokenize a text with prepended special tokens. Pieces with stand-ins are read as text."""
        encoding = self._core.encode(text, add_special_tokens=False)
        ids, pairs = encoding.ids, encoding.offsets
        if stand_ins:
            special = [at for at, token in enumerate(ids) if token in self._special_ids or token in self._pads]
            read, at, first = list[tuple[int, tuple[int, int]]](), 0, 0
            for place in [*special, len(ids)]:
                end = pairs[place][0] if place < len(ids) else len(text)
                if any(char in stand_ins for char in text[first:end]):
                    read += self._tokenize_piece(text[first:end], first, stand_ins)
                else:
                    read += zip(ids[at:place], pairs[at:place], strict=True)
                read += zip(ids[place : place + 1], pairs[place : place + 1], strict=True)
                at, first = place + 1, pairs[place][1] if place < len(ids) else end
            ids, pairs = [token for token, _ in read], [pair for _, pair in read]
        if ids[: len(self._begin)] != self._begin:
            ids, pairs = [*self._begin, *ids], [*[(0, 0)] * len(self._begin), *pairs]
        return _Tokens(ids, [first for first, _ in pairs], [end for _, end in pairs])

    def _tokenize_piece(
        self, piece: str, first: int, stand_ins: Mapping[str, str]
    ) -> list[tuple[int, tuple[int, int]]]:
        """Tokenize a piece at `first` as text with stand-ins restored. Offsets are those with stand-ins."""
        restored = "".join(stand_ins.get(char, char) for char in piece)
        places = [at for at, char in enumerate(piece) for _ in stand_ins.get(char, char)]
        encoding, skipped = self._text_core.encode(restored, add_special_tokens=False), 0
        if first:
            # SentencePiece prepends a space to a text. After a line break it does not.
            line = self._text_core.encode("\n", add_special_tokens=False).ids
            behind = self._text_core.encode("\n" + restored, add_special_tokens=False)
            if line and behind.ids[: len(line)] == line:
                encoding, skipped = behind, len(line)
        shift = 1 if skipped else 0
        tokens = []
        for token, (start, end) in zip(encoding.ids[skipped:], encoding.offsets[skipped:], strict=True):
            start, end = max(start - shift, 0), max(end - shift, 0)
            start = places[start] if start < len(places) else len(piece)
            tokens.append((token, (first + start, first + (places[end - 1] + 1 if end else 0))))
        return tokens

    def _try(self) -> None:
        """Encode a question and an answer to set `stop_ids` and `notes`."""
        try:
            both = self.encode(Conversation((QUESTION, ANSWER)), {})
            prompt = self.prompt(Conversation((QUESTION,)), {})
        except RecordError as error:
            raise DataError(f"data.chat_template: tried with a question and an answer: {error}") from error
        learned = [at for at, is_learned in enumerate(both.learned) if is_learned]
        if not learned:
            raise DataError(
                f"data.chat_template: the template of {self._renderer.origin} has nothing of an answer in a generation "
                "block. Put {% generation %} around what the assistant writes"
            )
        notes = []
        if both.tokens[learned[-1]] in self._special_ids:
            self.stop_ids |= {both.tokens[learned[-1]]}
        else:
            following = both.tokens[learned[-1] + 1 : learned[-1] + 2]
            self.stop_ids |= {token for token in following if token in self._special_ids}
            notes.append("no token that ends an answer is learned, so that generation may not stop by itself")
        if both.tokens[: len(prompt)] != prompt:
            notes.append("the last tokens of a prompt change once there is an answer")
        self.notes = tuple(notes)


def _messages_of_blocks(chat: Chat, blocks: Sequence[tuple[int, int]], turns: Sequence[Turn]) -> list[int]:
    """Return the message index of each generation block."""
    assistants = [at for at, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(blocks) == len(assistants) and all(turns[at].has_loss for at in assistants):
        return assistants
    numbers: list[int] = []
    before: list[int] = []
    for at in assistants:
        firsts = [first for first, _ in chat.render(chat.messages[: at + 1])[1]]
        kept = len(numbers)
        if len(firsts) <= kept:  # no block, or one that replaces an earlier message's
            moved = (number for number, (old, new) in enumerate(zip(before, firsts, strict=False)) if old != new)
            kept = next(moved, len(firsts))
        numbers, before = [*numbers[:kept], *[at] * (len(firsts) - kept)], firsts
    if len(numbers) != len(blocks):
        raise RecordError(
            f"the chat template writes {len(blocks)} generation blocks, but {len(numbers)} when messages are added one "
            "by one, so which message each belongs to is unknown"
        )
    return numbers


def _ids_in_front(tokenizer: Any) -> list[int]:
    bare, complete = (tokenizer.encode(QUESTION.text, add_special_tokens=special) for special in (False, True))
    return complete[: next((at for at in range(len(complete)) if complete[at : at + len(bare)] == bare), 0)]


def _copy_core(backend: Any, as_text: bool) -> Any:
    core = copy.deepcopy(backend)
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = as_text
    return core

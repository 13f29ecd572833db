"""The chat template of a Hugging Face tokenizer: conversation -> tokens and which of them are learned.

Tokens are those of transformers' `apply_chat_template`, of the tokenizer's for text alone, and where a run has media
of the processor's: this one puts in front what the tokenizer has in front of every text (`<s>`), unless the template
writes it. With one exception: what looks like a special token in a record's text stays text, so that a record cannot
forge a marker or a placeholder.

Learned is what stands in the template's generation blocks (`{% generation %}`); every token that touches a block
counts. Of a template without blocks, the answer at message i is what follows the rendering of the messages before it
with the generation prompt, up to the end of the rendering with it; both must be prefixes of the whole. The last special
token among them is the one that ends the turn, and line breaks behind it are not learned. Some templates write an
earlier answer otherwise than they wrote it when it was the last, for example without its reasoning: then what stands in
the whole conversation is learned, up to the token that ends a turn. Where even the prompt is no prefix, it is not known
what the assistant wrote, and the sample is bad.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from data.errors import DataError, RecordError
from data.records.conversation import Conversation
from data.text.chat_renderer import ANSWER, QUESTION, ChatRenderer, common_prefix
from data.text.placeholders import WORDS, Placeholder, Places
from data.text.special_text import SpecialText
from data.text.templates import OWN, Encoded, MediaTokens, Vocabulary, encode_plain, read_as, require_place
from data.text_format import plural


@dataclass(frozen=True)
class _Span:
    """Characters of an answer."""

    first: int
    end: int
    turn: int
    """Number of the message."""
    exact: bool = True
    """Whether it is all of it; else only so far can it reach."""


class JinjaTemplate:
    """See `data.templates.Template`."""

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
            tokenizer: of transformers, with all placeholders in its vocabulary.
            vocabulary: ours around it, for texts without roles.
            placeholders: with all of their texts.
            is_own: whether the template is that of our own format.

        Raises:
            DataError: the tokenizer has no Rust core, or it cannot be told what the assistant writes.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise DataError(
                f"data.chat_template: {renderer.origin} is no fast tokenizer, so it does not say which characters a "
                "token has: save it as one (tokenizer.json), or give data.chat_template=own"
            )
        # Two copies, because the option is one of the object and threads use both.
        self._core, self._plain_core = (_core(backend, as_text) for as_text in (False, True))
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
        self._begin = _in_front(tokenizer) if placeholders else []
        begins = f" begins with {self._begin}" if self._begin else ""
        self.identity = f"{renderer.identity} {read_as(placeholders)}{begins}"
        self._try()

    def encode(self, conversation: Conversation, media: MediaTokens) -> Encoded:
        """See `data.templates.Template.encode`."""
        plain = encode_plain(conversation, self._vocabulary)
        if plain is not None:
            return plain
        if self.is_own:
            require_place(conversation)
        conversation, stand_ins = self._special_text.hidden(conversation)
        name, tools = self._renderer.name_for(conversation), list(conversation.tools) or None
        messages = self._renderer.messages(name, conversation.turns, conversation.tools, self._marks)
        if self._renderer.has_markers[name]:
            text, blocks = self._renderer.render_spans(name, messages, tools)
            turns = self._turns_of_blocks(name, messages, tools, len(blocks), conversation)
            spans = [_Span(*block, turn) for block, turn in zip(blocks, turns, strict=True) if block[1] > block[0]]
            spans = [span for span in spans if conversation.turns[span.turn].has_loss]
        else:
            text = self._renderer.render(name, messages, tools)
            spans = self._answers(name, messages, tools, text, conversation)
        return self._tokens(
            text, spans, conversation, media, stand_ins, closed_by_marker=self._renderer.has_markers[name]
        )

    def prompt(self, conversation: Conversation, media: MediaTokens) -> list[int]:
        """See `data.templates.Template.prompt`."""
        if self.is_own:
            require_place(conversation)
        conversation, stand_ins = self._special_text.hidden(conversation)
        name, tools = self._renderer.name_for(conversation), list(conversation.tools) or None
        messages = self._renderer.messages(name, conversation.turns, conversation.tools, self._marks)
        text = self._renderer.render(name, messages, tools, prompt=True)
        return self._tokens(text, [], conversation, media, stand_ins).tokens

    def _turns_of_blocks(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        blocks: int,
        conversation: Conversation,
    ) -> list[int]:
        """Return the number of the message that each generation block belongs to."""
        assistants = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if blocks == len(assistants) and all(conversation.turns[at].has_loss for at in assistants):
            return assistants
        turns: list[int] = []
        before: list[int] = []
        for at in assistants:
            firsts = [first for first, _ in self._renderer.render_spans(name, messages[: at + 1], tools)[1]]
            kept = len(turns)
            if len(firsts) <= kept:  # the message has no block, or one in the place of an earlier message's
                moved = (n for n, pair in enumerate(zip(before, firsts, strict=False)) if len(set(pair)) > 1)
                kept = next(moved, len(firsts))
            turns, before = [*turns[:kept], *[at] * (len(firsts) - kept)], firsts
        if len(turns) != blocks:
            raise RecordError(
                f"the chat template writes {blocks} generation blocks, and {len(turns)} while the messages are added "
                "one by one, so it is not known which message each belongs to"
            )
        return turns

    def _answers(
        self,
        name: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        text: str,
        conversation: Conversation,
    ) -> list[_Span]:
        """Of a template without generation blocks: what the assistant has written in `text`."""
        spans: list[_Span] = []
        for at, message in enumerate(messages):
            if message["role"] != "assistant" or not conversation.turns[at].has_loss:
                continue
            before = self._renderer.render(name, messages[:at], tools, prompt=True)
            if not text.startswith(before) or (spans and len(before) < spans[-1].end):
                raise RecordError(
                    f"the chat template does not write the messages before message {at} as it does once there is an "
                    f"answer (from character {common_prefix(before, text)} on), so it is not known what the assistant "
                    "wrote: give data.chat_template=FILE with {% generation %} around it"
                )
            spans.append(self._answer(name, messages, tools, text, at, len(before)))
        return spans

    def _answer(
        self, name: str, messages: Sequence[Any], tools: Sequence[Any] | None, text: str, at: int, first: int
    ) -> _Span:
        if at + 1 == len(messages):
            return _Span(first, len(text), at)
        with_it = self._renderer.render(name, messages[: at + 1], tools)
        if text.startswith(with_it):
            return _Span(first, len(with_it), at)
        # Another text in the next message leaves as equal what cannot belong to it.
        following = messages[at + 1] | {"content": "b" if str(messages[at + 1].get("content"))[:1] == "a" else "a"}
        other = self._renderer.render(name, [*messages[: at + 1], following], tools)
        return _Span(first, max(first, common_prefix(other, text)), at, exact=False)

    def _tokens(
        self,
        text: str,
        spans: Sequence[_Span],
        conversation: Conversation,
        media: MediaTokens,
        stand_ins: Mapping[str, str],
        closed_by_marker: bool = False,
    ) -> Encoded:
        found = self._places.find(text)
        for kind, word in WORDS.items():
            wanted, written = conversation.count(kind), sum(place[0] == kind for place in found)
            if wanted != written:
                raise RecordError(
                    f"the chat template writes {self._marks.get(kind, kind)!r} {plural(written, 'time')} for "
                    f"{plural(wanted, f'{kind} part')} of the record: it has no place for {word} there"
                )
        places: list[tuple[int, int, int]] = []
        if found:
            text, places = self._places.written_out(text, found)
            spans = [replace(span, first=_moved(span.first, places), end=_moved(span.end, places)) for span in spans]
        ids, firsts, ends = self._encoded(text, stand_ins)
        learned, answers = [False] * len(ids), dict[int, int]()
        for span in spans:
            begin, limit = bisect_right(ends, span.first), bisect_left(firsts, span.end)
            if not closed_by_marker:
                limit = self._closed(text, ids, ends, begin, limit, span)
            learned[begin:limit] = [True] * (limit - begin)
            answers.setdefault(span.turn, begin)
        for first, end, _ in places:
            begin, limit = bisect_right(ends, first), bisect_left(firsts, end)
            learned[begin:limit] = [False] * (limit - begin)
        encoded = Encoded(ids, learned, answers=[(at, turn) for turn, at in answers.items()])
        if ids[: len(self._begin)] != self._begin:
            shift = len(self._begin)
            moved = [(at + shift, turn) for at, turn in encoded.answers]
            encoded = Encoded([*self._begin, *ids], [*[False] * shift, *learned], answers=moved)
        return self._spread(encoded, [place[0] for place in found], media) if found else encoded

    def _closed(self, text: str, ids: Sequence[int], ends: Sequence[int], begin: int, limit: int, span: _Span) -> int:
        """Behind the token that ends the turn among those from `begin` to before `limit`."""
        if not span.exact:
            stop = next((at for at in range(begin, limit) if ids[at] in self.stop_ids), None)
            if stop is None:
                raise RecordError(
                    "the chat template writes an earlier answer otherwise than a last one, and no token that ends it: "
                    "give data.chat_template=FILE with {% generation %} around what the assistant writes"
                )
            return stop + 1
        last = next((at for at in range(limit - 1, begin - 1, -1) if ids[at] in self._special_ids), None)
        return limit if last is None or text[ends[last] : span.end].strip() else last + 1

    def _spread(self, encoded: Encoded, kinds: Sequence[str], media: MediaTokens) -> Encoded:
        """Every pad as often as its medium takes tokens."""
        ids, learned = encoded.tokens, encoded.learned
        remaining = {kind: iter(members) for kind, members in media.items()}
        counts = iter([count for kind in kinds for count in next(remaining[kind])])
        found, at, answers = Encoded([], []), 0, encoded.answers
        for place, token in enumerate(ids):
            if token not in self._pads:
                continue
            found.tokens += ids[at:place]
            found.learned += learned[at:place]
            pad, number = next(counts)
            assert pad == token, "modules of a kind in the order of their placeholders"
            moved = len(found.tokens) - place
            found.answers += [(first + moved, turn) for first, turn in answers if at <= first <= place]
            found.add([pad] * number, False)
            found.media_end, at = len(found.tokens), place + 1
        assert next(counts, None) is None, "a pad for every module of every medium"
        found.answers += [(first + len(found.tokens) - at, turn) for first, turn in answers if first >= at]
        found.tokens += ids[at:]
        found.learned += learned[at:]
        return found

    def _encoded(self, text: str, stand_ins: Mapping[str, str]) -> tuple[list[int], list[int], list[int]]:
        """(ids, first character of each, behind the last)."""
        encoding = self._core.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets
        if stand_ins:
            return self._with_plain_pieces(text, ids, offsets, stand_ins)
        return ids, [first for first, _ in offsets], [end for _, end in offsets]

    def _with_plain_pieces(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]], stand_ins: Mapping[str, str]
    ) -> tuple[list[int], list[int], list[int]]:
        """As `_encoded`: pieces with a stand-in between the template's special tokens are encoded anew, as text."""
        found: tuple[list[int], list[int], list[int]] = ([], [], [])

        def add(token: int, first: int, end: int) -> None:
            for values, value in zip(found, (token, first, end), strict=True):
                values.append(value)

        at, piece = 0, 0
        special = [place for place, token in enumerate(ids) if token in self._special_ids or token in self._pads]
        for place in [*special, len(ids)]:
            end = offsets[place][0] if place < len(ids) else len(text)
            if any(char in stand_ins for char in text[piece:end]):
                for token, first, last in self._as_text(text[piece:end], stand_ins, inside=piece > 0):
                    add(token, piece + first, piece + last)
            else:
                for token, pair in zip(ids[at:place], offsets[at:place], strict=True):
                    add(token, *pair)
            if place < len(ids):
                add(ids[place], *offsets[place])
                piece = offsets[place][1]
            at = place + 1
        return found

    def _as_text(self, piece: str, stand_ins: Mapping[str, str], inside: bool) -> list[tuple[int, int, int]]:
        """(id, first character, behind the last) of a piece's tokens; characters as before its stand-ins are put
        back."""
        whole, places = "", []
        for at, char in enumerate(piece):
            restored = stand_ins.get(char, char)
            whole += restored
            places += [at] * len(restored)
        skipped = 0
        encoding = self._plain_core.encode(whole, add_special_tokens=False)
        if inside:
            # Tokenizers of SentencePiece put a space before a text's beginning, which this is not.
            line = self._plain_core.encode("\n", add_special_tokens=False).ids
            behind = self._plain_core.encode("\n" + whole, add_special_tokens=False)
            if line and behind.ids[: len(line)] == line:
                encoding, skipped = behind, len(line)
        shift = 1 if skipped else 0
        pairs = [(max(first - shift, 0), max(end - shift, 0)) for first, end in encoding.offsets[skipped:]]
        ends = [places[end - 1] + 1 if end else 0 for _, end in pairs]
        firsts = [places[first] if first < len(places) else len(piece) for first, _ in pairs]
        return list(zip(encoding.ids[skipped:], firsts, ends, strict=True))

    def _try(self) -> None:
        """Renders a question and an answer: which token ends a turn, and what `mimo-train check` should say."""
        try:
            whole = self.encode(Conversation((QUESTION, ANSWER)), {})
            prompt = self.prompt(Conversation((QUESTION,)), {})
        except RecordError as error:
            raise DataError(
                f"data.chat_template: the template of {self._renderer.origin}, tried with a question and an answer: "
                f"{error}"
            ) from error
        learned = [at for at, yes in enumerate(whole.learned) if yes]
        if not learned:
            raise DataError(
                f"data.chat_template: nothing of an answer is in a generation block of the template of "
                f"{self._renderer.origin}: put {{% generation %}} around what the assistant writes"
            )
        notes = []
        if whole.tokens[learned[-1]] in self._special_ids:
            self.stop_ids |= {whole.tokens[learned[-1]]}
        else:
            behind = whole.tokens[learned[-1] + 1 : learned[-1] + 2]
            self.stop_ids |= {token for token in behind if token in self._special_ids}
            notes.append("no token that ends an answer is learned, so that generation may not stop by itself")
        if whole.tokens[: len(prompt)] != prompt:
            notes.append("the last tokens of a prompt are others once there is an answer")
        self.notes = tuple(notes)


def _in_front(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts in front of a text."""
    text = QUESTION.parts[0].text
    bare, whole = (tokenizer.encode(text, add_special_tokens=special) for special in (False, True))
    at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
    return whole[:at]


def _core(backend: Any, as_text: bool) -> Any:
    core = copy.deepcopy(backend)
    core.no_truncation()
    core.no_padding()
    core.encode_special_tokens = as_text
    return core


def _moved(position: int, places: Sequence[tuple[int, int, int]]) -> int:
    """Where a character is after places were written out: moved by those that end at or before it."""
    shift = 0
    for _, end, moved in places:
        if end - moved > position:
            break
        shift = moved
    return position + shift

"""A conversation of several turns, with its history and its media."""

from collections.abc import Callable

from data.records.conversation import Part, Turn
from mimo_train.evaluation.generation.answers import Answer, Answers, nowhere
from mimo_train.evaluation.generation.prompts import Medium, Prompts, user_turn


class Chat:
    """One conversation. Every answer sees all turns before it, with their pictures and clips."""

    def __init__(self, prompts: Prompts, answers: Answers, system: str = ""):
        """
        Args:
            system: text of the turn before all others; empty for none.
        """
        self._prompts, self._answers, self._system = prompts, answers, system
        self.attached: list[Medium] = []
        """For the next message."""
        self.reset()

    def reset(self) -> None:
        """Begin again: forget all turns, and what was attached."""
        self._turns = [Turn("system", (Part("text", self._system),))] if self._system else []
        self._media: list[Medium] = []
        self.attached = []

    def say(self, text: str, write: Callable[[str], None] = nowhere, *, keep_interrupted: bool = False) -> Answer:
        """The answer to the next message, which takes what is attached. A message that fails is forgotten, with what
        was attached to it.

        Args:
            write, keep_interrupted: as for `Answers`.

        Raises:
            UserError: other places for media than media, or the conversation leaves no room for an answer.
        """
        attached, self.attached = self.attached, []
        turns, media = [*self._turns, user_turn(text, attached)], [*self._media, *attached]
        answer = self._answers(self._prompts.of_conversation(turns, media), write, keep_interrupted=keep_interrupted)
        self._turns, self._media = [*turns, Turn("assistant", (Part("text", answer.text),))], media
        return answer

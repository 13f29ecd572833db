"""How full the ranks of a layout are, which many candidates share parts of. Imports no torch."""

import math
from collections.abc import Callable, Mapping
from functools import cache

from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.config.schema_modules import LayoutConfig
from mimo_train.estimate.memory import Memory, memory_of_stage
from mimo_train.layout.batch import Batch
from mimo_train.layout.run import Run
from mimo_train.preflight.plan.candidate import Candidate
from mimo_train.preflight.plan.space import LanguageOption


class Fullest:
    """Bytes of the fullest rank of candidates.

    Attributes:
        least: bytes of the candidate that needs the fewest, of those that were looked at.
    """

    def __init__(
        self,
        cfg: ConfigContainer,
        vocab: int,
        media: Mapping[str, float],
        candidate: Callable[[LanguageOption, Mapping[str, LayoutConfig], frozenset[str]], Candidate],
    ):
        """
        Args:
            vocab: rows of the embedding.
            media: pictures or clips of each encoder in a sample.
            candidate: makes one of a language model, encoders, and names of those that share its ranks.
        """
        self._cfg, self._vocab, self._media, self._candidate = cfg, vocab, media, candidate
        self._memory = cache(self._memory_of)
        self.least = math.inf

    def of_language(self, option: LanguageOption) -> int:
        """Bytes of the fullest rank of the language model alone."""
        most = max(self._language(option, stage).total for stage in _stages(option.pp))
        self.least = min(self.least, most)
        return most

    def of(self, candidate: Candidate, option: LanguageOption) -> int:
        """Bytes of the fullest rank."""
        of_encoders = {
            name: [self._encoder(candidate, name, stage) for stage in {0, layout.pp - 1}]
            for name, layout in candidate.layouts.items()
            if name != LANGUAGE
        }
        first = sum((of_encoders[name][0] for name in candidate.shared), self._language(option, 0))
        found = [first.total, *(self._language(option, stage).total for stage in _stages(option.pp))]
        if candidate.together:
            pairs = zip(*(of_encoders[name] for name in candidate.apart), strict=True)
            found += [sum(each, Memory()).total for each in pairs]
        else:
            found += [one.total for name in candidate.apart for one in of_encoders[name]]
        most = max(found)
        self.least = min(self.least, most)
        return most

    def _language(self, option: LanguageOption, stage: int) -> Memory:
        return self._memory(LANGUAGE, option, None, True, stage)

    def _encoder(self, candidate: Candidate, name: str, stage: int) -> Memory:
        layout = candidate.layouts[name]
        sizes = layout.tp, layout.pp, layout.dp
        language, samples = candidate.language, candidate.micro_batch_size
        # What of the language model the memory of an encoder depends on.
        option = LanguageOption(
            1, language.pp, 1, language.dp, 1, 1, 1, False, samples, candidate.recompute,
            candidate.distributed_optimizer,
        )  # fmt: skip
        return self._memory(name, option, sizes, name in candidate.shared, stage)

    def _memory_of(
        self, name: str, option: LanguageOption, sizes: tuple[int, int, int] | None, shared: bool, stage: int
    ) -> Memory:
        others = {one: LayoutConfig() for one in self._cfg.encoders}
        if sizes is not None:
            others[name] = LayoutConfig(tp=sizes[0], pp=sizes[1], dp=sizes[2])
        inside = frozenset(others) if shared else frozenset(others) - {name}
        candidate = self._candidate(option, others, inside)
        cfg = candidate.config(self._cfg)
        run = Run(cfg, candidate.run_layout(cfg), Batch.of(cfg))
        media = self._media.get(name, 0.0)
        return memory_of_stage(run, name, stage, self._vocab, media)


def _stages(stages: int) -> set[int]:
    """The stages that differ in memory: the first, one behind it, the last."""
    return {0, min(1, stages - 1), stages - 1}

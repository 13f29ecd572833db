"""Choosing the next token from its logits.

Shape suffixes: V vocabulary, K the tokens that are left, the most likely first.
"""

import math

import torch

from mimo_train.config.errors import UserError
from mimo_train.evaluation.generation.options import Sampling


class Sampler:
    """Draws tokens, one after the other."""

    def __init__(self, sampling: Sampling):
        self._sampling, self._generator = sampling, torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits_V: torch.Tensor) -> int:
        """A token.

        Raises:
            UserError: a logit is not a number, or all are infinite.
        """
        best = int(logits_V.argmax())
        if not math.isfinite(float(logits_V[best])):
            raise UserError(
                f"the model's logits are not finite ({float(logits_V[best])} for token {best}): its weights are not "
                "usable, try an earlier checkpoint"
            )
        if not self._sampling.temperature:
            return best
        probabilities_K, tokens_K = distribution(logits_V.cpu(), self._sampling)
        return int(tokens_K[torch.multinomial(probabilities_K, 1, generator=self._generator)])


def distribution(logits_V: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [K] in float64 of the tokens [K] that can be drawn; of equally likely tokens the lower ids come
    first. The temperature must be above 0."""
    # The largest becomes 0, so that no temperature overflows.
    scaled_V = (logits_V.double() - logits_V.double().max()) / sampling.temperature
    scaled_K, tokens_K = scaled_V.sort(descending=True, stable=True)
    if sampling.top_k:
        scaled_K, tokens_K = scaled_K[: sampling.top_k], tokens_K[: sampling.top_k]
    probabilities_K = scaled_K.softmax(0)
    if sampling.top_p < 1:
        before_K = probabilities_K.cumsum(0) - probabilities_K
        left = max(1, int((before_K < sampling.top_p).sum()))
        probabilities_K, tokens_K = probabilities_K[:left] / probabilities_K[:left].sum(), tokens_K[:left]
    return probabilities_K, tokens_K

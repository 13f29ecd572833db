"""Arithmetic of throughput: tokens of a step, tokens per second, FLOPs. Imports no torch.

FLOPs count the matrix products only, a multiplication and an addition as two; norms, activations and softmax are left
out, as the field does. A product of a row with a (k x n) weight is 2kn forward. Backward takes two such products, one
for the gradient of the input and one for that of the weight, so training is three times the forward pass (Kaplan et
al. 2020, arXiv:2001.08361, section 2.1). The counts are of the model, not of the hardware: activations computed again
in backward do not count, and every weight is taken as trained.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

from encoders.spec import ProjectorSpec, VisionSpec, num_tokens
from mimo_train.config import LlmSpec


def tokens_per_step(global_batch_size: int, sequence_length: int) -> int:
    """Tokens of one optimizer step, padding and placeholders of media included: samples x tokens of a sample."""
    return global_batch_size * sequence_length


class StepTimer:
    """Seconds of the optimizer steps, and tokens per second from the median of the last few.

    The median, because a step that waits for a checkpoint or a cold cache would bend a mean for the whole window.
    """

    def __init__(self, tokens: int, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        """Time steps of `tokens` tokens over a window of `window` steps."""
        self._tokens = tokens
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=window)
        self._started = clock()

    def start(self) -> None:
        """Mark the start of a step, so that what happened since the last one (an evaluation) is not counted."""
        self._started = self._clock()

    def stop(self) -> dict[str, float]:
        """End the step and start the next: `step_seconds` of this step, `tokens_per_second` of the window."""
        now = self._clock()
        seconds, self._started = now - self._started, now
        self._seconds.append(seconds)
        median = statistics.median(self._seconds)
        return {"step_seconds": seconds, "tokens_per_second": self._tokens / median if median > 0 else 0.0}


def flops_per_token(llm: LlmSpec, sequence_length: int, vocab_size: int) -> float:
    """Training FLOPs of one token of the language model, forward and backward.

    Forward, per token, with h hidden size, q and k widths of all query and key heads, f feed-forward width, u the width
    of the first feed-forward product (2f with swiglu), S sequence length, L layers, V vocabulary:

        L * (2 * (h*(q + 2k) + q*h + h*u + f*h) + 4 * q * (S + 1) / 2) + 2 * h * V

    The attention term is q.k and weights.v, 2q each for a position attended to; under the causal mask a token attends
    to (S + 1) / 2 positions on average. Training is three times that. Sources: Chowdhery et al. 2022 (PaLM,
    arXiv:2204.02311), appendix B, for the form, which does not halve for the causal mask; Narayanan et al. 2021
    (arXiv:2104.04473), section 5.1, for counting the output layer. The embedding is a look-up and costs none.
    """
    hidden, ffn = llm.hidden_size, llm.ffn_hidden_size
    head = hidden // llm.num_attention_heads
    query = head * llm.num_attention_heads
    key = head * (llm.num_query_groups or llm.num_attention_heads)
    up = 2 * ffn if llm.activation == "swiglu" else ffn
    weights = hidden * (query + 2 * key) + query * hidden + hidden * up + ffn * hidden
    attention = 4 * query * (sequence_length + 1) / 2
    return 3 * (llm.num_layers * (2 * weights + attention) + 2 * hidden * vocab_size)


def encoder_flops_per_image(spec: VisionSpec, projector: ProjectorSpec, language_width: int) -> float:
    """Training FLOPs of one picture through a vision encoder and its projector, forward and backward.

    Forward, with P patches of p x p pixels in 3 channels, T = P tokens (one more with a class token), h hidden size,
    f feed-forward width, L layers, N projected tokens of width w = h * merge^2, d language width, m mlp width:

        2 * P * 3p^2 * h  +  L * (2 * T * (4h^2 + 2hf) + 4 * T^2 * h)  +  2 * N * (w*m + m*d)   (linear: 2 * N * w*d)

    Attention is over all tokens, so its term is not halved. Training is three times that. Same sources as
    `flops_per_token`; the shape of the layers is that of Dosovitskiy et al. 2020 (ViT, arXiv:2010.11929).
    """
    hidden = spec.hidden_size
    rows, columns = spec.grid(spec.image_size, spec.image_size)
    patches = rows * columns
    tokens = patches + (1 if spec.class_token else 0)
    embed = 2 * patches * 3 * spec.patch_size**2 * hidden
    layer = 2 * tokens * (4 * hidden**2 + 2 * hidden * spec.ffn_hidden_size) + 4 * tokens**2 * hidden
    width = hidden * projector.merge**2
    middle = projector.ffn_hidden_size or language_width
    weights = width * language_width if projector.kind == "linear" else middle * (width + language_width)
    projected = num_tokens(spec, projector, spec.image_size, spec.image_size)
    return 3 * float(embed + spec.num_layers * layer + 2 * projected * weights)

"""Keys of fused kernels: `train.fusions`."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults

FUSION = ("auto", "always", "never")
"""Values of a key of `train.fusions`."""

WITH_TRANSFORMER_ENGINE = ("rotary", "moe_permute", "moe_router")
"""Fusions whose kernels are Transformer Engine's, which run on CUDA only. The others are torch's."""


@dataclass
class FusionsConfig(Section):
    """Several operations of a layer as one kernel. `auto`: on CUDA, where the kernel is installed; `always`: on the CPU
    too, with an error where it is not installed; `never`."""

    activation: str = key("auto", choices=FUSION)
    """Bias and activation function of the feed-forward block (SwiGLU, GeGLU, GELU's tanh form; in experts SwiGLU and
    quick GeGLU)."""
    bias_dropout: str = key("auto", choices=FUSION)
    """Bias, dropout and the residual stream, in layers with a bias or dropout."""
    rotary: str = key("auto", choices=FUSION)
    """Rotary positions of queries and keys."""
    gradient_accumulation: str = key("auto", choices=FUSION)
    """Weight gradients, added to the fp32 gradient buffer by their matmul."""
    cross_entropy: str = key("auto", choices=FUSION)
    """The loss of all logits, in bf16."""
    moe_permute: str = key("auto", choices=FUSION)
    """Order tokens by their experts, and back."""
    moe_router: str = key("auto", choices=FUSION)
    """Scores, chosen experts and balancing losses of routers."""

    def faults(self, device: str, precision: str) -> Iterator[Fault]:
        """Yield invalid values; `device`: `run.device`, `precision`: `train.precision`."""
        yield from value_faults(self, "train.fusions")
        for name in WITH_TRANSFORMER_ENGINE:
            if getattr(self, name) == "always" and device == "cpu":
                text = "always requires Transformer Engine on CUDA (run.device is cpu). Use auto or never"
                yield Fault(f"train.fusions.{name}", text)
        if self.cross_entropy == "always" and precision != "bf16":
            text = f"always requires train.precision=bf16 (is {precision}). Use auto or never"
            yield Fault("train.fusions.cross_entropy", text)


FUSIONS = tuple(field.name for field in dataclasses.fields(FusionsConfig))
"""Names of all fusions."""

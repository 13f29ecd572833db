"""Two encoders as one: on every pipeline stage that of both.

Between stages the tokens of the two go side by side, the fewer filled up by zeros.

Shape suffixes as in `encoders.staged`.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.joined.spec import JoinedSpec
from encoders.staged import Size
from encoders.vit.model import VisionTransformer


class JoinedEncoder(VisionTransformer):
    """Pictures -> features of both encoders for each token, side by side: what one pipeline stage has of them.

    Args:
        config: its hidden size is that of both together.
        parts: by key of the spec, what builds this stage of each encoder.
        merge, pg_collection: as of `StagedEncoder`.
    """

    spec: JoinedSpec  # type: ignore[assignment]  # one spec for two vision transformers

    def __init__(
        self,
        config: TransformerConfig,
        spec: JoinedSpec,
        parts: Mapping[str, Callable[[], VisionTransformer]],
        merge: int,
        pg_collection: ProcessGroupCollection,
    ):
        MegatronModule.__init__(self, config=config)  # it has neither embeddings nor layers of its own
        self.spec, self.merge = spec, merge
        self._names = tuple(parts)
        for name, build in parts.items():
            self.add_module(name, build())
        stage, stages = pg_collection.pp.rank(), pg_collection.pp.size()
        self.is_first_stage, self.is_last_stage = stage == 0, stage == stages - 1

    @property
    def _parts(self) -> list[VisionTransformer]:
        return [getattr(self, name) for name in self._names]

    def _tokens(self, size: Size) -> int:
        return max(part._tokens(size) for part in self._parts)

    def _stage(self, inputs: torch.Tensor, size: Size) -> torch.Tensor:
        widths = [part.spec.hidden_size for part in self._parts]
        own = [inputs] * len(widths) if self.is_first_stage else inputs.split(widths, dim=-1)
        outputs = []
        for part, states in zip(self._parts, own, strict=True):
            hidden = states if self.is_first_stage else states[:, : part._tokens(size)]
            outputs.append(part._stage(hidden, size))
        if not self.is_last_stage:
            tokens = self._tokens(size)
            outputs = [F.pad(one, (0, 0, 0, tokens - one.size(1))) for one in outputs]
        return torch.cat(outputs, dim=-1)

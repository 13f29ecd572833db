"""Two encoders as one: every pipeline stage has a stage of both. Between stages their tokens are side by side, the
fewer padded by zeros. Shape suffixes as in `encoders.staged`."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from encoders.joined.spec import JoinedSpec
from encoders.native.vit.model import VisionTransformer
from encoders.staged import Size


class JoinedEncoder(VisionTransformer):
    """One pipeline stage of two encoders: images -> features of both for each token, side by side.

    Args:
        config: its hidden size is the sum of both.
        parts: {key of the spec: builder of this stage of the encoder}.
        merge, pg_collection: as in `StagedEncoder`.
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
        MegatronModule.__init__(self, config=config)  # without embeddings or layers
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

    def _run(
        self,
        media: torch.Tensor | Sequence[torch.Tensor] | None,
        sizes: Sequence[Size],
        hidden_states: torch.Tensor | None,
    ) -> torch.Tensor:
        parts, (size, *_) = self._parts, sizes  # all have one size
        received: Sequence[torch.Tensor | None] = [None] * len(parts)
        if not self.is_first_stage:
            assert hidden_states is not None, "a later stage makes its output of what the stage before gave"
            states_NTH = hidden_states.unflatten(0, (len(sizes), -1))
            widths = [part.spec.hidden_size for part in parts]
            received = [
                states[:, : part._tokens(size)].flatten(0, 1)
                for part, states in zip(parts, states_NTH.split(widths, dim=-1), strict=True)
            ]
        outputs = [part._run(media, sizes, states) for part, states in zip(parts, received, strict=True)]
        if not self.is_last_stage:
            tokens = self._tokens(size)
            images = [output.unflatten(0, (len(sizes), -1)) for output in outputs]
            outputs = [F.pad(output, (0, 0, 0, tokens - output.size(1))).flatten(0, 1) for output in images]
        return torch.cat(outputs, dim=-1)

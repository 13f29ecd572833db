"""Several modules as one model: Megatron-Core's `MimoModel`, at any placement of its modules."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.mimo.config.base_configs import MimoModelConfig
from megatron.core.models.mimo.config.role import ModuleStageInfo
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import unwrap_model

from encoders.base import EncoderSpec
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.models.documents import documents_of
from mimo_train.parallel.bridge.exchange import SharedBridge
from mimo_train.parallel.bridge.interleaved import InterleavedBridge, receive_features
from mimo_train.parallel.bridge.shapes import StepShapes
from mimo_train.parallel.context import sum_gradients


class PlacedMimoModel(MimoModel):
    """`MimoModel` in which an encoder may share the ranks of the language model's first stage while others do not.

    Megatron-Core 0.19.2 supports two cases: all modules on the same ranks, or every rank with either encoders or the
    language model (mimo/model/base.py:441-463). It treats a mix as the second case, without the language model.

    With interleaved stages there is one model for each chunk. The first chunk has the encoders. Chunks exchange
    activations as tensors.

    Attributes:
        shapes: shapes of the current step; set by the pipeline.
        shared_bridges: {encoder: bridge to the language model on the same ranks}; set by the pipeline. An encoder
            without one passes its features on unchanged: its samples are the language model's.
        interleaved_bridges: bridges from encoders on other ranks, which the first of several chunks calls; set by the
            pipeline.
    """

    def __init__(
        self,
        mimo_config: MimoModelConfig,
        cp_group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(mimo_config, cp_group, tp_group)
        self.shapes = StepShapes()
        self.shared_bridges: dict[str, SharedBridge] = {}
        self.interleaved_bridges: list[InterleavedBridge] = []
        self._cp_group = cp_group
        if self.config.virtual_pipeline_model_parallel_size and self.role.has_language_module:
            chunk = unwrap_model(self.language_model)
            self.role.modules[LANGUAGE] = ModuleStageInfo(chunk.pre_process, chunk.post_process)

    def set_input_tensor(self, input_tensor: list[Any]) -> None:
        """Take what the schedule received: tensors by module, or an activation [S, B, H] of interleaved stages."""
        (received,) = input_tensor
        if isinstance(received, torch.Tensor):
            received = {LANGUAGE: received}
        super().set_input_tensor([received])

    def _build_colocated_communicators(self) -> None:
        """Build no communicators of Megatron-Core, which need equal counts in every sample. See `shared_bridges`."""

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        modality_inputs: dict[str, dict[str, Any]] | None = None,
        documents: Sequence[int] | None = None,
        blocks: torch.Tensor | None = None,
        feature_rows: dict[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor | dict[str, torch.Tensor], torch.Tensor | None]:
        """Run the modules on this rank: encoders first, then the language model.

        Args:
            input_ids, position_ids, labels, loss_mask: [batch, sequence], on the language model's ranks.
            modality_inputs: {encoder module: arguments of its encoder}, None if the microbatch has no media.
            documents: ends of the documents of a packed row; batch is 1. Features are in the order of documents.
            blocks: int64 [batch, sequence], on the language model's ranks: tokens with one number see each other, -1:
                only earlier ones. None: attention is causal.
            feature_rows: {encoder module: row of its features for each placeholder, int64}, where several answers of a
                sample have the same items; None: features are in the order of placeholders.

        Returns:
            (losses or logits, loss mask) at the language model's last stage, ({module: features or activations}, loss
            mask) elsewhere; (activations, loss mask) at other chunks of interleaved stages.

        Raises:
            UserError: no `blocks`, and the model has tokens that see later ones.
        """
        received = getattr(self, "input_tensors", None) or {}
        features = self._encode(modality_inputs or {}, received)
        if self.role.is_first_stage(LANGUAGE):
            received |= receive_features(self.interleaved_bridges)
        if not self.role.has_language_module:
            return features, loss_mask
        # All encoders run before the first exchange, so that every rank makes the exchanges in the same order, also in
        # backward.
        for name, rows in features.items():
            received[name] = self.shared_bridges[name](rows) if name in self.shared_bridges else rows
        for name, rows in received.items():
            if name == LANGUAGE:
                continue
            if not self.shapes.features_need_gradient(name):
                received[name] = rows.detach()
            elif self._cp_group is not None:
                received[name] = sum_gradients(rows, self._cp_group)
            if feature_rows is not None:
                received[name] = received[name].index_select(0, feature_rows[name])
        if self.role.is_first_stage(LANGUAGE) and unwrap_model(self.language_model).config.deepstack:
            received = self._without_deepstack(received, input_ids)
        language = unwrap_model(self.language_model)
        config = language.config
        if blocks is not None:
            attention_mask = language.mask_of(blocks, documents)
        elif config.bidirectional:
            has_items = any(len(rows) for name, rows in received.items() if name != LANGUAGE)
            if has_items or config.bidirectional == "prefix":
                raise UserError(
                    "the forward step must pass `blocks` to the model, in which some tokens see later ones. Take them "
                    "from the microbatch"
                )
        output, loss_mask = self._forward_language_module(
            input_ids, position_ids, attention_mask, loss_mask, labels, received, {"documents": documents}
        )
        if config.virtual_pipeline_model_parallel_size and isinstance(output, dict):
            (output,) = output.values()
        return output, loss_mask

    def _build_packed_seq_params(self, packing_kwargs: dict | None) -> PackedSeqParams | None:
        """Megatron-Core 0.19.2 supports no other format here than `thd` (mimo/model/base.py:585)."""
        if not packing_kwargs or packing_kwargs["documents"] is None:
            return None
        return documents_of(packing_kwargs, 1 if self._cp_group is None else self._cp_group.size())

    def get_text_embeddings(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, special_token_ids: dict[str, int]
    ) -> torch.Tensor:
        """Return embeddings [sequence, batch, hidden] of all tokens. Features will replace those of placeholders. A
        placeholder without a row in the table gets the first row. Megatron-Core's method (mimo/model/base.py:346-397)
        selects the tokens of the text, and the host waits for their number."""
        embedding = unwrap_model(self.language_model).embedding
        for token in special_token_ids.values():
            if token >= embedding.word_embeddings.num_embeddings:
                input_ids = input_ids.masked_fill(input_ids == token, 0)
        return embedding(input_ids=input_ids, position_ids=position_ids)

    def align_embeddings_by_token_positions(
        self,
        modality_embeddings: dict[str, torch.Tensor],
        input_ids: torch.Tensor,
        special_token_ids: dict[str, int],
    ) -> torch.Tensor:
        """Return the text's embeddings [sequence, batch, hidden] with the features of every module at their
        placeholders. Megatron-Core's method (mimo/model/base.py:144-210) counts placeholders on the host, and selects
        gradients by a mask in backward. Both wait for the device. Here the device counts and compares."""
        features = dict(modality_embeddings)
        text_SBH = features.pop("text")
        sequence, batch, hidden = text_SBH.shape
        joined = text_SBH.reshape(-1, hidden)
        for name, rows in features.items():
            mask = (input_ids == special_token_ids[name]).reshape(-1)
            text = f"number of {name} features ({len(rows)}) does not match the number of placeholder tokens"
            torch._assert_async(mask.sum() == len(rows), text)
            place = torch.nonzero_static(mask, size=len(rows)).squeeze(1)
            places = place % sequence * batch + place // sequence
            is_added = name in unwrap_model(self.language_model).config.added
            joined = joined.index_add(0, places, rows) if is_added else joined.index_copy(0, places, rows)
        return joined.view(sequence, batch, hidden)

    def _without_deepstack(
        self, features: dict[str, torch.Tensor], input_ids: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return the features for the language model's input, and set those for its layers on it for this pass."""
        language = unwrap_model(self.language_model)
        hidden, layers = language.config.hidden_size, language.config.deepstack
        assert input_ids is not None, "the first stage has the text"
        nothing_SBH = features[next(iter(features))].new_zeros(*input_ids.T.shape, hidden)
        levels = []
        for layer in range(layers):
            first, last = hidden * (1 + layer), hidden * (2 + layer)
            rows = {name: rows[:, first:last] for name, rows in features.items() if rows.size(1) >= last}
            places = self.align_embeddings_by_token_positions(
                {"text": nothing_SBH, **rows}, input_ids, self.special_token_ids
            )
            levels.append(self._shard_language_inputs(places, None, None)[0])
        language.deepstack_LSBH = torch.stack(levels)
        return {name: rows[:, :hidden] for name, rows in features.items()}

    def _empty_encoder_output(self, encoder_name: str) -> torch.Tensor:
        """Return the features of a microbatch without media, which are not sent: [0, width]."""
        output = super()._empty_encoder_output(encoder_name)
        spec: EncoderSpec = unwrap_model(self.modality_submodules[encoder_name]).encoders[encoder_name].spec
        return output.new_empty(0, output.size(1) * (1 + len(spec.deepstack)), requires_grad=True)

    def _encode(self, inputs: dict[str, Any], received: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return outputs of the encoder stages of this rank; [0, hidden size] without media. If no gradient is needed,
        nothing is kept for a backward pass: frozen weights require none, and the input from the previous stage is
        detached."""
        outputs, shapes = {}, self.shapes
        for name, submodule in self.modality_submodules.items():
            stage, hidden_states = unwrap_model(submodule).pg_collection.pp.rank(), received.get(name)
            if stage and hidden_states is not None and not shapes.stage_needs_gradient(name, stage - 1):
                hidden_states = hidden_states.detach()
            output = submodule(encoder_inputs=inputs.get(name), hidden_states=hidden_states)
            if output is None or output.dim() == 1:  # no media; see `sharding._Root`
                empty = self._empty_encoder_output(name)
                output = empty if output is None else empty + output.sum()
            last = self.role.is_last_stage(name)
            needed = shapes.features_need_gradient(name) if last else shapes.stage_needs_gradient(name, stage)
            outputs[name] = output if needed else output.detach()
        return outputs

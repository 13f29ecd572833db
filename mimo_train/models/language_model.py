"""The language model: Megatron-Core's GPT with the parts of model families outside of its layers.

Shape suffixes: B batch, S sequence, H hidden, N positions with logits, V vocabulary part of this tensor-parallel rank
(whole if gathered), L layers that get their own features (DeepStack).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from mimo_train.config.errors import UserError
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.cpu.kernels import cross_entropy, supports_cross_entropy
from mimo_train.models.attention_mask import mask_of_blocks
from mimo_train.models.documents import Documents
from mimo_train.models.output.divergence import Lesson
from mimo_train.models.output.layer import OutputLayer, OutputRequest, process_output
from mimo_train.models.output.vocabulary import Logits, Vocabulary
from mimo_train.models.rotary import AxisRotaryEmbedding, inverse_frequencies
from mimo_train.parallel.context import own_part

_PADDING_MASK = 5
"""Its place in what `GPTModel._preprocess` returns."""


@runtime_checkable
class LanguageModel(Protocol):
    """The language model as the loop uses it: Megatron-Core's (`SeededGPTModel`), or a class of `transformers`
    (`models.transformers_lm`). Its first stage also has `embedding`, with a table `word_embeddings`."""

    config: TransformerConfig
    pg_collection: ProcessGroupCollection
    max_sequence_length: int
    request: OutputRequest | None
    """What the output layer computes in the next pass only, see `choose_logits`."""
    padding_BS: torch.Tensor | None
    """True for padding in the next pass, which losses of routers do not count; see `leave_out`."""
    trained_logits: int
    """Number of positions that got logits so far in trained passes, counted on tensor-parallel rank 0."""

    def mask_of(self, blocks_BS: torch.Tensor, documents: Sequence[int] | None) -> torch.Tensor:
        """Return the `attention_mask` of tokens that see each other, see `mask_of_blocks`."""
        ...


class SeededGPTModel(GPTModel):
    """`GPTModel` whose weights outside of the layers are seeded by `config.init_seed`, like those inside. `config.llm`
    is its `LlmSpec`. Padded rows of the vocabulary have no part in the softmax, in which Megatron-Core 0.19.2 counts
    them (language_module.py:155). Without labels their logits are the lowest number of their type."""

    def __init__(self, config: TransformerConfig, *, tokens: int = 0, **kwargs: Any):
        """`tokens`: vocabulary rows that are not padding; 0: all."""
        torch.manual_seed(config.init_seed)
        super().__init__(config, **kwargs)
        self.deepstack_LSBH: torch.Tensor | None = None
        """Features that the first layers add to their outputs; for the next pass only."""
        self.request: OutputRequest | None = None
        self.padding_BS: torch.Tensor | None = None
        self.trained_logits = 0
        llm: LlmSpec = config.llm
        self._tokens = tokens or self.vocab_size
        if self.position_embedding_type == "rope":
            self.rotary_pos_emb.inv_freq = inverse_frequencies(llm)
        elif self.position_embedding_type == "mrope":
            self.add_module("rotary_pos_emb", AxisRotaryEmbedding(llm, self.pg_collection.cp))
        elif self.pre_process:
            # Megatron-Core 0.19.2 makes them fp32 whatever the model's type (language_model_embedding.py:67).
            self.embedding.position_embeddings.to(config.params_dtype)
        if self.pre_process and llm.scale_embeddings:
            self.embedding.word_embeddings.register_forward_hook(_scale_embeddings)
        if self.pre_process and llm.embedding_multiplier != 1:
            multiplier = llm.embedding_multiplier
            self.embedding.word_embeddings.register_forward_hook(lambda _module, _inputs, output: output * multiplier)
        if self.post_process:
            logits = Logits(llm.logit_softcap, llm.logit_divisor)
            OutputLayer.adapt(self.output_layer, Vocabulary(self.pg_collection.tp, self._tokens, logits))

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the model, as in Megatron-Core.

        Args:
            packed_seq_params: `Documents` of a packed row. `position_ids` restart in each of them.

        Raises:
            UserError: with context parallelism, more tokens than this rank's part of a sequence; with `data.pack`, rows
                without their documents.
        """
        added, self.deepstack_LSBH = self.deepstack_LSBH, None
        request, self.request = self.request, None
        padding, self.padding_BS = self.padding_BS, None
        if padding is not None and self.config.num_moe_experts:
            kwargs["padding_mask"] = self._own_tokens(padding)
        if self.config.packed or self.config.context_parallel_size > 1:
            self._require_own_part(input_ids, packed_seq_params)
        kwargs["packed_seq_params"] = packed_seq_params
        # Other heads have other outputs.
        if request is not None and self.post_process and isinstance(self.output_layer, ColumnParallelLinear):
            kwargs["output_processor"] = partial(process_output, request)
        if added is not None:
            # An argument of the layers: they run again in the backward pass, after other microbatches.
            kwargs["extra_block_kwargs"] = {"context": added}
        return super().forward(input_ids, *args, **kwargs)

    def mask_of(self, blocks_BS: torch.Tensor, documents: Sequence[int] | None) -> torch.Tensor:
        """Return the attention mask of tokens that see each other, see `mask_of_blocks`."""
        return mask_of_blocks(blocks_BS, documents, self.config)

    def _own_tokens(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the tokens that are in this rank's layers."""
        part_BC = own_part({"tokens": tokens_BS}, self.pg_collection.cp)["tokens"]
        tp = self.pg_collection.tp
        return part_BC.chunk(tp.size(), dim=1)[tp.rank()] if self.config.sequence_parallel else part_BC

    def _require_own_part(self, input_ids: torch.Tensor | None, packed: PackedSeqParams | None) -> None:
        """Reject mistakes of a forward step that would be trained unnoticed."""
        if self.config.packed and self.training and torch.is_grad_enabled() and packed is None:
            raise UserError(
                "data.pack: the rows of a microbatch are several documents, and the forward step does not say where "
                "they end: give the model packed_seq_params=documents_of(batch, cp), of mimo_train.models.documents"
            )
        cp, length = self.config.context_parallel_size, self.max_sequence_length
        tokens = packed.tokens if isinstance(packed, Documents) else length
        if cp > 1 and input_ids is not None and input_ids.size(1) > tokens // cp:
            row = f"data.sequence_length {length}" if packed is None else f"a packed row of {tokens}"
            raise UserError(
                f"the forward step gives {input_ids.size(1)} tokens of a sequence to each of modules.{LANGUAGE}.layout."
                f"cp {cp} ranks, and {row} is {tokens // cp} for each: cut the microbatch by "
                "mimo_train.parallel.context.own_part"
            )

    def _preprocess(
        self,
        *arguments: Any,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple:
        """Preprocess as in Megatron-Core, with rotary angles that restart in each document of a packed row. In fp32
        losses of tokens would otherwise move by 1e-3, although only distances count. `padding_mask` is this rank's:
        Megatron-Core 0.19.2 cuts it on the first stage only (gpt_model.py:352)."""
        preprocessed = super()._preprocess(
            *arguments, position_ids=position_ids, packed_seq_params=packed_seq_params, **options
        )
        preprocessed = (*preprocessed[:_PADDING_MASK], padding_mask, *preprocessed[_PADDING_MASK + 1 :])
        if getattr(options.get("inference_context"), "is_padded", False) and self.position_embedding_type == "rope":
            assert position_ids is not None, "positions of the rows of a batch with several lengths"
            decoder_input, table, *others = preprocessed
            return decoder_input, table[position_ids.T].squeeze(2), *others
        if not isinstance(packed_seq_params, Documents) or self.position_embedding_type != "rope":
            return preprocessed
        assert position_ids is not None, "positions of the documents"
        if position_ids.size(-1) == packed_seq_params.tokens:
            position_ids = own_part({"positions": position_ids}, self.pg_collection.cp)["positions"]
        # `packed_seq`: all positions, not this context-parallel rank's.
        table = self.rotary_pos_emb(self.max_sequence_length, packed_seq=True)
        decoder_input, _, *others = preprocessed
        return decoder_input, table[position_ids[0]], *others

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the loss of every token, [B, S] in nats, from logits [S, B, V], which this changes; with a value head,
        its values."""
        if not isinstance(self.output_layer, ColumnParallelLinear):
            return logits[..., 0].T.contiguous()
        padding_V = self._padding(logits)
        if padding_V is not None:
            # Outside of autograd, without a copy: the loss has no gradient where the softmax is 0.
            with torch.no_grad():
                logits[..., padding_V] = torch.finfo(logits.dtype).min
        if self.config.cpu_kernels and supports_cross_entropy(logits, self.tp_group):
            losses_SB = cross_entropy(logits.flatten(0, 1), labels.T.reshape(-1)).view(logits.shape[:2])
            return losses_SB.T.contiguous()
        return super().compute_language_model_loss(labels, logits)

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        *arguments: Any,
        labels: torch.Tensor | None = None,
        output_processor: partial | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if self.post_process:
            request = OutputRequest()
            if isinstance(output_processor, partial) and output_processor.func is process_output:
                (request,) = output_processor.args
            parts = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
            positions = request.count(hidden_states.size(0) * hidden_states.size(1) * parts)
            if self.training and torch.is_grad_enabled() and self.pg_collection.tp.rank() == 0:
                self.trained_logits += positions  # all of them with another head than ours
            head = self.output_layer
            if output_processor is None and labels is not None and isinstance(head, OutputLayer):
                if request.needs_no_logits(positions, head.output_size_per_partition, self.config.max_logits):
                    output_processor = partial(process_output, request)
        output = super()._postprocess(
            hidden_states, *arguments, labels=labels, output_processor=output_processor, **options
        )
        if labels is None and self.post_process and (padding_V := self._padding(output)) is not None:
            output[..., padding_V] = torch.finfo(output.dtype).min
        return output

    def _padding(self, logits: torch.Tensor) -> slice | None:
        """Return the padded columns of logits [..., V]; None if they have none, or another head made them."""
        if not isinstance(self.output_layer, ColumnParallelLinear):
            return None
        columns = logits.size(-1)
        begin = 0 if columns == self.vocab_size else self.pg_collection.tp.rank() * columns
        first = max(self._tokens - begin, 0)
        return slice(first, columns) if first < columns else None


class TrainedLogits:
    """Counts the positions that got logits on this rank, for any forward step. Without `choose_logits` all positions
    do."""

    def __init__(self, model: list[MegatronModule]):
        self._chunks = [part for chunk in model for part in chunk.modules() if isinstance(part, LanguageModel)]
        self._before = 0

    def local_count(self) -> list[int]:
        """Return the count since the last call, for the step's message."""
        now = sum([chunk.trained_logits for chunk in self._chunks])
        before, self._before = self._before, now
        return [now - before]


def leave_out(model: MegatronModule, padding_BS: torch.Tensor) -> None:
    """Leave tokens out of the losses of routers in a language model's next pass.

    Args:
        padding_BS: True for padding, of whole rows.
    """
    language = unwrap_model(model)
    if isinstance(language, LanguageModel):
        language.padding_BS = padding_BS


def choose_logits(
    model: MegatronModule, learned_N: torch.Tensor | None, lesson: Lesson | None = None, predicts: bool = False
) -> None:
    """Choose the positions that get logits in a language model's next pass.

    Other losses are 0. Without labels the model returns [1, N, V] instead of [B, S, V].

    Args:
        model: its last stage; no effect unless it is a `LanguageModel`.
        learned_N: at least one offset in [B * S] of this rank's part of the text, ascending, without duplicates; None:
            all positions.
        lesson: a teacher's part: with labels the model then returns both losses of a token, [2, B, S].
        predicts: with labels the model returns losses and the most likely tokens, [2, B, S]. Only without gradients.
    """
    language = unwrap_model(model)
    if isinstance(language, LanguageModel):
        language.request = OutputRequest(learned_N, lesson, predicts)


def _scale_embeddings(_module: torch.nn.Module, _arguments: tuple, embeddings: torch.Tensor) -> torch.Tensor:
    """Multiply by sqrt(hidden size), rounded to the precision of the weights first, as families were trained."""
    # Filled on the device: copying a number would wait for all queued work.
    return embeddings * torch.full((), embeddings.size(-1) ** 0.5, dtype=embeddings.dtype, device=embeddings.device)

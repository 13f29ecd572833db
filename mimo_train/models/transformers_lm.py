"""A causal language model of `transformers`, as it is, in the place of ours. Data parallel only.

Shape suffixes: B batch, S sequence, H hidden, N positions with logits, V vocabulary.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from transformers.initialization import no_init_weights

from data.text_format import listed
from encoders.transformers_media.directory import deepstack_targets, keep_float32, per_layer_inputs
from mimo_train.config.errors import UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.transformers_llm import TransformersSizes, alone, class_of, transformers_config
from mimo_train.cpu.kernels import cross_entropy, supports_cross_entropy
from mimo_train.layout.adapters import AdaptedLinear
from mimo_train.models.lora.adapters import start_magnitudes
from mimo_train.models.lora.linear import Adaptable
from mimo_train.models.output.layer import OutputRequest
from mimo_train.models.output.vocabulary import Vocabulary
from mimo_train.models.parameters import seed_for
from mimo_train.models.probe import Probe, only_at, replaced_head
from mimo_train.models.sharding import copy_whole

LISTED = 3
"""Maximum number of names in a message."""
CACHES = ("past_key_values", "cache_params", "state")
"""Names of caches in the inputs and outputs of classes."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of an input that is 1 for tokens of images."""


@dataclass
class ClassCache:
    """The cache of a class of transformers for the tokens of one sequence."""

    states: dict[str, Any] = field(default_factory=dict)
    """By the argument of its forward pass."""
    sequence_len_offset: int = 0
    """Tokens so far."""


class TransformersLanguageModel(MegatronModule):
    """A class of `transformers` with the interface of `language_model.LanguageModel`.

    Attributes:
        model: the model of `transformers`. It has all parameters, so names in checkpoints are those of its class with
            the prefix `model.`.
        remark: what to tell the user of a new model; empty if nothing, and on all ranks but one.
    """

    remark = ""
    share_embeddings_and_output_weights = False  # tied weights are one parameter with one name
    pre_process = post_process = True

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        max_sequence_length: int = 0,
    ):
        """Build the model with weights drawn from `config.init_seed`, equal on every rank; not drawn without
        `config.perform_initialization`. `config.llm` is a `TransformersSizes`."""
        super().__init__(config=config)
        self.pg_collection, self.max_sequence_length = pg_collection, max_sequence_length
        self.tp_group = pg_collection.tp
        self.model_type = ModelType.encoder_or_decoder
        self.request: OutputRequest | None = None
        self.padding_BS: torch.Tensor | None = None
        self.embedded_SBH: torch.Tensor | None = None
        self.deepstack_LSBH: torch.Tensor | None = None
        self.trained_logits = 0
        sizes: TransformersSizes = config.llm
        hf_config = transformers_config(sizes.model_config)
        with torch.random.fork_rng(devices=[]), drawn(config.perform_initialization):
            torch.manual_seed(config.init_seed)
            self.model = alone(class_of(hf_config)._from_config(hf_config, dtype=config.params_dtype))
            self._resize(self.model)
            self.model.tie_weights()
        keep_float32(self.model, config.params_dtype)
        for name, linear in list(self.named_modules()):
            if name in config.adapters:
                adapt(linear, config.adapters[name], config, self.tp_group)
        if config.recompute_granularity == "full":
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.embedding = _Embedding(self.model.get_input_embeddings())
        self._probe = Probe(self.model, config.llm.vocab_size, config.params_dtype, max_sequence_length)
        self._vocabulary = Vocabulary(self.tp_group, config.llm.vocab_size)
        self._inputs = inspect.signature(self.model.forward).parameters

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: ClassCache | None = None,
        **_others: Any,
    ) -> torch.Tensor:
        """Run the model.

        Args:
            position_ids: [B, S]; they restart in each document of a packed row, B 1.
            attention_mask: what `mask_of` returns; None: causal attention.
            decoder_input: embeddings [S, B, H] with the features of media, instead of `input_ids`; the last call of
                `embedding` had their tokens.
            packed_seq_params: not None for a packed row.
            inference_context: cache of the tokens before, which `position_ids` may include.

        Returns:
            Losses [B, S] in nats, or [2, B, S] (see `choose_logits`); without `labels` logits [B, S, V], or [1, N, V]
            of chosen positions; with a cache those of the last position, [B, V].

        Raises:
            UserError: the class is not causal, or mixes the documents of a packed row.
        """
        request, self.request = self.request or OutputRequest(), None
        padding, self.padding_BS = self.padding_BS, None
        embedded, self.embedded_SBH = self.embedded_SBH, None
        decoder_input = embedded if decoder_input is None else decoder_input
        packed, (batch, length) = packed_seq_params is not None, position_ids.shape[-2:]
        probed = length if inference_context is None else 1
        if self.embedding.gather is not None:
            probed = self.max_sequence_length  # ranks that share the weights must run alike
        self._probe.require_independence(packed, probed)
        has_plain_head = self._probe.has_plain_head  # also found by all ranks at once
        inputs: dict[str, Any] = {"input_ids": input_ids}
        if decoder_input is not None:
            inputs = {"inputs_embeds": decoder_input.transpose(0, 1).contiguous()}
            inputs |= per_layer_inputs(self.model, self.embedding.input_ids)
        if self.config.bidirectional and not (inference_context and inference_context.states):
            types_BS = position_ids.new_zeros(batch, length) if attention_mask is None else attention_mask
            inputs[next(name for name in TYPES if name in self._inputs)] = types_BS
        if inference_context is not None:
            with self._added():
                return self._next_logits(inputs, position_ids, inference_context)
        learned, shape = request.learned_N, (batch, length)
        positions = request.count(batch * length)
        if self.training and torch.is_grad_enabled():
            self.trained_logits += positions
        losses = None if labels is None else request.losses(labels)
        head: AbstractContextManager[None] = nullcontext()
        needs_no_logits = request.needs_no_logits(positions, self.config.llm.vocab_size, self.config.max_logits)
        collected: list[torch.Tensor] = []
        if losses is not None and needs_no_logits and has_plain_head:
            head = replaced_head(self.model, partial(losses, vocabulary=self._vocabulary), collected)
        with only_at(self.model, learned, batch * length), head, self._unbalanced(padding), self._added():
            output = self.model(**inputs, **self._options(position_ids), use_cache=False)
        if collected:
            (losses_LN,) = collected
        else:
            logits_NV = output.logits.flatten(0, 1)
            if learned is not None and len(logits_NV) != len(learned):
                logits_NV = logits_NV.index_select(0, learned)  # a class that does not call its output layer
            if losses is None or labels is None:
                return logits_NV[None] if learned is not None else logits_NV.view(batch, length, -1)
            if needs_no_logits:  # of this form of losses, which a head of another kind takes from its logits
                losses_LN = losses(logits_NV, None, vocabulary=self._vocabulary)
            else:
                losses_LN = self._cross_entropy(request.labels(labels), logits_NV).unsqueeze(0)
        balance = getattr(output, "aux_loss", None)
        if isinstance(balance, torch.Tensor) and len(losses_LN) == 1:
            # It counts for each token with a loss, and is no part of the reported one.
            losses_LN = losses_LN + self._balance_weight() * (balance - balance.detach())
        return request.placed(losses_LN, shape)

    def _cross_entropy(self, labels_N: torch.Tensor, logits_NV: torch.Tensor) -> torch.Tensor:
        if self.config.cpu_kernels and supports_cross_entropy(logits_NV, self.tp_group):
            return cross_entropy(logits_NV, labels_N)
        return F.cross_entropy(logits_NV.float(), labels_N, reduction="none")

    def mask_of(self, blocks_BS: torch.Tensor, documents: Sequence[int] | None) -> torch.Tensor:
        """Return 1 for tokens of images, else 0, [B, S]: the class masks them itself."""
        return (blocks_BS >= 0).long()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing: the model has one pipeline stage."""

    def freeze_unused(self) -> None:
        """Freeze the parameters on which no logit depends. torch's AdamW leaves out parameters without a gradient; ours
        would decay them."""
        unused = self._probe.unused()
        for name in unused:
            self.model.get_parameter(name).requires_grad_(False)
        if unused and self.pg_collection.dp.rank() == 0:
            self.remark = f"modules.{LANGUAGE}: no logit depends on {listed(unused, LISTED)}: frozen"

    def load_weights(self, folder: str, key: str) -> None:
        """Load the weights of a directory; rows of the embedding that it lacks are drawn, equal on every rank.

        Args:
            key: config key of the directory, for errors.

        Raises:
            UserError: transformers cannot load it, or its tensors are not those of the model.
        """
        sizes: TransformersSizes = self.config.llm
        try:
            loaded, info = type(self.model).from_pretrained(
                folder,
                config=transformers_config(sizes.model_config),
                dtype=self.config.params_dtype,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{key}: transformers cannot load {folder}: {str(error).splitlines()[0]}. Copy the directory again"
            ) from error
        wrong = [f"{name}: {stored} in the file, {wanted} here" for name, stored, wanted in info["mismatched_keys"]]
        wrong += [f"{name} is missing" for name in sorted(info["missing_keys"])]
        wrong += [f"{name} is no tensor of it" for name in sorted(info["unexpected_keys"])]
        if wrong:
            more = f" and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
            raise UserError(
                f"{key}: the tensors of {folder} are not those of {type(self.model).__name__}: "
                f"{'; '.join(wrong[:LISTED])}{more}"
            )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.init_seed)
            self._resize(alone(loaded))
        values = loaded.state_dict()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if name in values:  # adapters are not
                copy_whole(tensor, values[name])
        start_magnitudes(self)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe parameters and saved buffers to checkpoints: whole on every rank, tied ones once."""
        state, seen = {}, set[int]()
        for name, tensor in self.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                state[name] = tensor
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets, **groups)

    def new_cache(self) -> ClassCache:
        """Return an empty cache for `inference_context`."""
        return ClassCache()

    def _next_logits(self, inputs: dict[str, Any], position_ids: torch.Tensor, cache: ClassCache) -> torch.Tensor:
        tokens = next(value.size(1) for value in inputs.values() if value is not None)
        options = self._options(position_ids[..., -tokens:])
        output = self.model(**inputs, **options, use_cache=True, **cache.states)
        cache.states = {name: output[name] for name in CACHES if output.get(name) is not None}
        if not cache.states:
            raise UserError(f"generate: {type(self.model).__name__} keeps no cache. Export the model instead")
        return output.logits[:, -1]

    def _balance_weight(self) -> float:
        owners = (self.model, self.model.config.get_text_config(decoder=True))
        for owner, name in product(owners, ("router_aux_loss_coef", "aux_loss_coef")):
            if isinstance(getattr(owner, name, None), float | int):
                return float(getattr(owner, name))
        raise UserError(
            f"modules.{LANGUAGE}.llm.model_config: output_router_logits is true, but {type(self.model).__name__} has "
            "no router_aux_loss_coef, the weight of this loss. Set output_router_logits to false in config.json"
        )

    def _resize(self, model: Any) -> None:
        sizes: TransformersSizes = self.config.llm
        if sizes.vocab_size != sizes.stored_vocab_size:
            owner = model if model.get_output_embeddings() is not None else model.get_decoder()
            owner.resize_token_embeddings(sizes.vocab_size, mean_resizing=False)

    def _options(self, position_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        # transformers reads the documents of a packed row from positions that restart (masking_utils.py).
        return {"position_ids": position_ids} if self._probe.takes_positions else {}

    @contextmanager
    def _unbalanced(self, padding_BS: torch.Tensor | None) -> Iterator[None]:
        """Leave padding out of the load-balancing loss of a class."""
        module, name = sys.modules[type(self.model).__module__], "load_balancing_loss_func"
        loss = getattr(module, name, None)
        if padding_BS is None or loss is None:
            yield
            return
        # An attention mask of the forward pass would join the documents of packed rows.
        setattr(module, name, lambda *arguments: loss(*arguments[:3], (~padding_BS).long()))
        try:
            yield
        finally:
            setattr(module, name, loss)

    @contextmanager
    def _added(self) -> Iterator[None]:
        """Give the decoder the features for its layers, zeros for tokens without any."""
        added_LSBH, self.deepstack_LSBH = self.deepstack_LSBH, None
        if added_LSBH is None:
            yield
            return
        added_LBSH = added_LSBH.transpose(1, 2)

        def with_features(_module: torch.nn.Module, arguments: tuple, options: dict[str, Any]) -> tuple:
            all_tokens = added_LBSH.new_ones(added_LBSH.shape[1:3], dtype=torch.bool)
            features = list(added_LBSH.flatten(1, 2))
            if targets := deepstack_targets(self.model.config):
                by_layer = dict(zip(targets, features, strict=True))
                return arguments, options | {"vision_mask": all_tokens[..., None], "deepstack_features": by_layer}
            return arguments, options | {"visual_pos_masks": all_tokens, "deepstack_visual_embeds": features}

        hook = self.model.get_decoder().register_forward_pre_hook(with_features, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


class _Embedding:
    """The input embedding as `MimoModel` calls it. No module, so that its weight has one name."""

    def __init__(self, table: torch.nn.Embedding):
        self.word_embeddings, self.input_ids = table, torch.empty(0)
        self.gather: Callable[[], object] | None = None

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [S, B, H] of `input_ids` [B, S], and keep these for the next pass."""
        self.input_ids = input_ids
        if self.gather is not None:
            self.gather()
        return self.word_embeddings(input_ids).transpose(0, 1)


class LoraLinear(Adaptable, torch.nn.Linear):
    """torch's linear layer with adapters."""

    column, sequence_parallel, skip_bias_add = True, False, False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map [..., input size] to [..., O]."""
        bias = self.bias if self._adds_bias else None
        output = F.linear(input, self.weight, None if self._adds_bias else self.bias)
        return self._adapted(output, bias, self._hidden(input, cut=False))[0]


def adapt(
    linear: torch.nn.Module, adapted: AdaptedLinear, config: TransformerConfig, tp_group: dist.ProcessGroup
) -> None:
    """Give a linear layer of a class its adapters."""
    assert type(linear) is torch.nn.Linear, adapted.linear.name
    linear.__class__ = LoraLinear
    assert isinstance(linear, LoraLinear)
    linear.config, linear.input_size, linear.tp_group = config, linear.in_features, tp_group
    linear.add_adapters(adapted, config.lora, seed_for(config.init_seed, adapted.linear.name))


@contextmanager
def drawn(is_drawn: bool) -> Iterator[None]:
    """Leave the memory of new weights as it is, unless `is_drawn`."""
    if is_drawn:
        yield
        return
    with no_init_weights():
        yield

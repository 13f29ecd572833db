"""A teacher on this rank: a frozen model that ends in the hidden states before its output layer.

The student's last stage has the teacher's output layer, cut over its own tensor-parallel ranks. So a teacher sends one
row of its width for a token instead of a row of the vocabulary, and no rank has all logits of a step.

Shape suffixes: B batch, C positions of this context-parallel rank, S sequence, H hidden size, N learned tokens, V
vocabulary.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model

from data.order.step import Microbatch, StepBatch
from data.samples.protocol import Samples
from mimo_train.config.parts import LANGUAGE
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.evaluation.predictions import PredictStep
from mimo_train.layout.run import Run
from mimo_train.models.output.divergence import TeacherHead
from mimo_train.models.output.vocabulary import Logits
from mimo_train.models.parameters import modules_of
from mimo_train.models.transformer_config import DTYPES
from mimo_train.parallel.collectives import agreed
from mimo_train.parallel.context import gather_sequence
from mimo_train.parallel.device import to_device
from mimo_train.training.step.pipeline import Parts, Pipeline, build_parts
from mimo_train.training.teacher.exchange import Meeting, Rows, learned_tokens, texts_of
from mimo_train.training.teacher.source import TeacherSource, open_teacher, require_one_vocabulary


class Teacher:
    """A built and loaded teacher.

    Attributes:
        run: the teacher's run.
        samples: its config with the order of the student's samples.
        parts: its tokenizer and pipeline.
        student: the student's tokenizer and pipeline, after `meet`.
        head: on the student's last stage, this rank's part of the teacher's output layer; else None.
    """

    def __init__(self, opened: TeacherSource, kind: str, device: torch.device):
        """Build and load the teacher. Collective. Build the student afterwards: both set seeds and global groups."""
        self.run, cfg = opened.run, opened.run.cfg
        self.samples = replace(cfg, run=replace(cfg.run, seed=opened.order_seed))
        self.parts: Parts = build_parts(self.run, kind, device, undrawn=opened.source.undrawn)
        self.head: TeacherHead | None = None
        self._predict = PredictStep(self.parts.pipeline, self._hidden)
        opened.source.load(self.parts.pipeline, self.parts.tokenizer)
        for chunk in self.parts.pipeline.model:
            chunk.eval()

    def meet(self, run: Run, student: Parts) -> None:
        """Give the student's last stage the output layer, which the teacher no longer needs. Collective."""
        self.student, self._layouts = student, (self.run.layout, run.layout)
        self._rows = Rows(self.run.layout.language, run.layout.language, run.cfg.run.timeout_minutes)
        self._empty = torch.zeros(1, self.run.cfg.llm.hidden_size, dtype=self.dtype, device=student.pipeline.device)
        require_one_vocabulary(self.parts.tokenizer, student.tokenizer)
        llm, layout, pipeline = self.run.cfg.llm, self.run.layout.language, self.parts.pipeline
        rows = embedding_rows(llm, self.parts.tokenizer.vocab_size) // layout.tp
        shard_VH = torch.empty(rows, llm.hidden_size, dtype=self.dtype, device=pipeline.device)
        language = self._last_chunk()
        columns = embedding_rows(run.cfg.llm, student.tokenizer.vocab_size) // run.layout.language.tp
        first, last = self._tokens(columns, run, student)
        weight_VH = shard_VH.new_empty(max(last - first, 0), llm.hidden_size)
        for number, rank in enumerate(layout.stage_ranks(layout.pp - 1)[: layout.tp]):
            if rank == dist.get_rank():
                tied = language.share_embeddings_and_output_weights
                weight = language.shared_embedding_or_output_weight() if tied else language.output_layer.weight
                shard_VH.copy_(weight.detach())
            dist.broadcast(shard_VH, src=rank)
            begin, end = max(first, number * rows), min(last, (number + 1) * rows)
            if begin < end:
                weight_VH[begin - first : end - first] = shard_VH[begin - number * rows : end - number * rows]
        if language is not None:
            language.output_layer = _HiddenStates(language)
            language.share_embeddings_and_output_weights = False
        if student.pipeline.is_last_stage:
            distill, tp_group = run.cfg.distill, student.pipeline.groups.collections[LANGUAGE].tp
            logits = Logits(llm.logit_softcap, llm.logit_divisor)
            self.head = TeacherHead(weight_VH, logits, tp_group, distill.temperature, distill.top_k)

    @property
    def is_apart(self) -> bool:
        """True if no rank has modules of both models, so that the teacher can work while the student does."""
        ranks = [{rank for module in layout.modules.values() for rank in module.ranks} for layout in self._layouts]
        return not ranks[0] & ranks[1]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the hidden states."""
        return DTYPES[self.run.cfg.train.precision]

    def teach(
        self,
        step: StepBatch,
        taught: StepBatch,
        bad: torch.Tensor,
        dataset: Samples,
        hidden: dict[int, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """Run the teacher on a step, and return the hidden states of the student's learned tokens on this rank, and the
        first row of each sample by its place. Collective over all ranks.

        Args:
            step: the student's.
            taught: the teacher's, of the same samples.
            bad: above 0 for bad samples, by place.
            dataset: the student's, for errors.
            hidden: `hidden_states` of the step, if they are known.

        Raises:
            UserError: the learned tokens of a sample differ; on every rank.
        """
        student, teacher = self.student.pipeline, self.parts.pipeline
        theirs = learned_tokens(step) if _counts(student) else {}
        ours = learned_tokens(taught) if _counts(teacher) else {}
        meeting = Meeting(dataset, self.student.tokenizer, self.parts.tokenizer)
        counts = meeting.counts(step, theirs, ours, bad)
        hidden = self.hidden_states(taught) if hidden is None else hidden
        return self._rows.exchange(hidden, counts, (taught.plan, step.plan), self._empty)

    def hidden_states(self, step: StepBatch) -> dict[int, torch.Tensor]:
        """Return the hidden states of the learned tokens of each sample, by its place in the step: [tokens, H] on ranks
        of the last stage, empty on others. Collective over the teacher's ranks."""
        pipeline = self.parts.pipeline
        pipeline.shapes.follow(step)
        with torch.no_grad():
            options = {"forward_only": True, "collect_non_loss_data": True}
            collected = pipeline.run(self._predict, self._batches(step), **options)
        by_place: dict[int, torch.Tensor] = {}
        for microbatch, rows_NH in zip(step.microbatches, collected, strict=pipeline.is_last_stage):
            counts = [int(mask.sum()) for _, mask in texts_of(microbatch, step.plan)]
            places = (microbatch["sample_numbers"] - step.first_sample).tolist()
            by_place |= dict(zip(places, rows_NH.split(counts), strict=True))
        return by_place

    def _batches(self, step: StepBatch) -> Iterator[Microbatch]:
        for microbatch in step.microbatches:
            batch = dict(microbatch)
            if "loss_mask" in batch:
                batch["offsets"] = (microbatch["loss_mask"] > 0).flatten().nonzero().squeeze(1)  # on the host
            yield Microbatch(to_device(batch, self.parts.pipeline.device))

    def _hidden(self, batch: dict[str, Any], language: Any, output_BCH: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the hidden states [N, H] of the learned tokens of a microbatch, on every context-parallel rank."""
        hidden_SBH = gather_sequence(output_BCH.transpose(0, 1).contiguous(), language.cp)
        return hidden_SBH.transpose(0, 1).flatten(0, 1).index_select(0, batch["offsets"])

    def _last_chunk(self) -> Any:
        """Return the language model's chunk with the output layer; None on other ranks."""
        pipeline = self.parts.pipeline
        return unwrap_model(modules_of(pipeline.model)[LANGUAGE][-1]) if pipeline.is_last_stage else None

    def _tokens(self, columns: int, run: Run, student: Parts) -> tuple[int, int]:
        """Return the tokens [first, last) of this rank's part of the student's output layer that both models have; none
        on ranks before its last stage. `columns`: tokens of a part."""
        if not student.pipeline.is_last_stage:
            return 0, 0
        tp = student.pipeline.groups.collections[LANGUAGE].tp
        both = ((run.cfg.llm, student), (self.run.cfg.llm, self.parts))
        tokens = min(llm.vocab_size or parts.tokenizer.vocab_size for llm, parts in both)
        return tp.rank() * columns, min((tp.rank() + 1) * columns, tokens)


def built_teacher(run: Run, kind: str, device: torch.device) -> Teacher | None:
    """Build and load the teacher of `train.task=distill`; None for other tasks. Collective."""
    if not run.cfg.traits.has_teacher:
        return None
    with agreed():
        opened = open_teacher(run)
    return Teacher(opened, kind, device)


def _counts(pipeline: Pipeline) -> bool:
    """True on one rank of each replica of a language model's last stage."""
    language = pipeline.groups.collections.get(LANGUAGE)
    return language is not None and pipeline.is_last_stage and language.tp.rank() == language.cp.rank() == 0


class _HiddenStates(torch.nn.Module):
    """Returns its input instead of logits, gathered if sequence parallelism has split it."""

    def __init__(self, language: MegatronModule):
        super().__init__()
        self._gathers, self._tp_group = language.config.sequence_parallel, language.pg_collection.tp

    def forward(self, hidden_SBH: torch.Tensor, **_options: Any) -> tuple[torch.Tensor, None]:
        if self._gathers:
            hidden_SBH = gather_from_sequence_parallel_region(
                hidden_SBH, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return hidden_SBH, None

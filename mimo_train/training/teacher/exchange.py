"""Messages from the teacher to the student: which tokens of a step both learn, and the teacher's hidden states there.

A sample is on one replica of each model. Its learned tokens must be the same; the student's may end earlier, where its
text is cut. Rows of hidden states are sent from the teacher's last stage to the student's, in one batch for a step.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from data.order.step import Microbatch, StepBatch
from data.order.step_plan import StepPlan
from data.samples.protocol import Samples
from data.text.tokens import Tokenizer
from mimo_train.config.errors import UserError
from mimo_train.layout.ranks import ModuleLayout
from mimo_train.parallel import device
from mimo_train.parallel.bridge.shapes import replica_ranks, routes
from mimo_train.parallel.groups import BRIDGE, RankGroups

Learned = dict[int, np.ndarray]
"""Place of a sample in the step -> its learned tokens, int64."""


def learned_tokens(step: StepBatch) -> Learned:
    """Return the learned tokens of the samples that this rank reads for its language model."""
    tokens: Learned = {}
    for microbatch in step.microbatches:
        for number, (labels, mask) in zip(
            microbatch["sample_numbers"].tolist(), texts_of(microbatch, step.plan), strict=True
        ):
            tokens[number - step.first_sample] = labels[mask]
    return tokens


def texts_of(microbatch: Microbatch, plan: StepPlan) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (labels, True where one is learned) of each sample of a microbatch on the host."""
    labels, masks = microbatch["labels"].numpy(), microbatch["loss_mask"].numpy() > 0
    if not plan.packed:
        return list(zip(labels, masks, strict=True))
    numbers = np.asarray(microbatch["sample_numbers"])
    ends = np.cumsum(plan.lengths_in_row(numbers, masks.shape[1]))[: len(numbers)]
    return list(zip(*(np.split(values[0], ends)[: len(numbers)] for values in (labels, masks)), strict=True))


@dataclass(frozen=True)
class Meeting:
    """The dataset and the tokenizers with which errors name a sample and its tokens."""

    dataset: Samples
    """The student's."""
    student: Tokenizer
    teacher: Tokenizer

    def counts(self, step: StepBatch, student: Learned, teacher: Learned, bad: torch.Tensor) -> np.ndarray:
        """Return how many learned tokens of each sample of a step have a teacher: those of the student, 0 for bad
        samples. Collective over all ranks.

        Args:
            student: on one rank of each replica of the student's language model; empty on others.
            teacher: the same of the teacher.
            bad: [size], above 0 for bad samples.

        Raises:
            UserError: the tokens of a sample differ; on every rank.
        """
        size = step.size
        lengths = np.zeros((2, size), dtype=np.int64)
        for row, learned in zip(lengths, (student, teacher), strict=True):
            for place, tokens in learned.items():
                row[place] = len(tokens)
        of_student, of_teacher = _sum(lengths, bad.device) * (bad[:size] == 0).long().cpu().numpy()
        hashes = np.zeros((2, size), dtype=np.int64)
        for row, learned in zip(hashes, (student, teacher), strict=True):
            for place, tokens in learned.items():
                row[place] = _hash(tokens[: of_student[place]])
        first, second = _sum(hashes, bad.device)
        wrong = np.flatnonzero((of_student > 0) & ((first != second) | (of_student > of_teacher)))
        if len(wrong):
            self._report(step.first_sample, int(wrong[0]), student, teacher)
        return of_student

    def _report(self, first_sample: int, place: int, student: Learned, teacher: Learned) -> None:
        sides: list[list[np.ndarray | None]] = [[None, None] for _ in range(dist.get_world_size())]
        dist.all_gather_object(sides, [student.get(place), teacher.get(place)])
        theirs, taught = (next(side[index] for side in sides if side[index] is not None) for index in (0, 1))
        assert theirs is not None and taught is not None, "one rank of each replica has the tokens"
        shard, key = self.dataset.locate(first_sample + place)
        sample = f"sample {key!r} of {shard}"
        same = min(len(theirs), len(taught))
        differing = np.flatnonzero(theirs[:same] != taught[:same])
        if not len(differing):
            raise UserError(
                f"distill.sequence_length: {sample} has {len(theirs)} learned tokens for the student, and only "
                f"{len(taught)} for the teacher, whose text is longer. Raise it"
            )
        at = int(differing[0])
        names = (
            f"{tokens[at]} ({tokenizer.shown([int(tokens[at])])!r})"
            for tokens, tokenizer in ((theirs, self.student), (taught, self.teacher))
        )
        raise UserError(
            f"distill.teacher: learned token {at + 1} of {sample} is {next(names)} for the student, and {next(names)} "
            "for the teacher. Give both the same chat template, or choose another teacher"
        )


class Rows:
    """Sends rows of a step from the teacher's last stage to the student's last stage."""

    def __init__(self, teacher: ModuleLayout, student: ModuleLayout, timeout_minutes: float):
        """Make the group of these ranks. Collective over them."""
        self._senders = replica_ranks(teacher, teacher.pp - 1)
        self._receivers = replica_ranks(student, student.pp - 1)
        self._routes, self._rank = routes(self._senders, self._receivers), dist.get_rank()
        ranks = sorted({rank for replica in (*self._senders, *self._receivers) for rank in replica})
        self._group: dist.ProcessGroup | None = None  # over gloo the world's, as between modules
        if device.backend_of_groups() == "nccl" and self._rank in ranks:
            groups, name = RankGroups(timedelta(minutes=timeout_minutes)), "teacher->student"
            self._group = groups.of(ranks, name, BRIDGE, name)

    def exchange(
        self,
        rows: dict[int, torch.Tensor],
        counts: np.ndarray,
        plans: tuple[StepPlan, StepPlan],
        empty: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """Return this rank's rows of the student's samples, and the first row of each sample by its place.

        Args:
            rows: place of a sample -> [at least `counts` rows, width], on ranks of the teacher's last stage.
            counts: rows of each sample that are sent.
            plans: of the teacher's and of the student's step.
            empty: [1, width], a row for samples without any.
        """
        taught, learned = (_places_of_replicas(plan) for plan in plans)
        received, starts, operations, filled = [], dict[int, int](), [], 0
        for sender, receiver in self._routes:
            if self._rank not in (sender, receiver):
                continue
            both = taught[_replica_of(sender, self._senders)] & learned[_replica_of(receiver, self._receivers)]
            places = [place for place in sorted(both) if counts[place]]
            if not places:
                continue
            if self._rank == sender:
                part = torch.cat([rows[place][: counts[place]] for place in places])
            else:
                part = empty.new_empty(int(counts[places].sum()), empty.size(1))
            if self._rank == receiver:
                received.append(part)
                for place in places:
                    starts[place], filled = filled, filled + int(counts[place])
            if sender != receiver:
                operation, peer = (dist.isend, receiver) if self._rank == sender else (dist.irecv, sender)
                operations.append(dist.P2POp(operation, part, peer, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return torch.cat(received) if received else empty, starts


def _replica_of(rank: int, replicas: Sequence[Sequence[int]]) -> int:
    return next(number for number, ranks in enumerate(replicas) if rank in ranks)


def _places_of_replicas(plan: StepPlan) -> list[set[int]]:
    replicas: list[set[int]] = [set() for _ in plan.shares[0]]
    for of_ranks in plan.shares:
        for places, share in zip(replicas, of_ranks, strict=True):
            places.update(share.places.tolist())
    return replicas


def _sum(numbers: np.ndarray, where: torch.device) -> np.ndarray:
    """Return the sum over all ranks, of numbers that one rank has."""
    total = device.to_device(torch.from_numpy(numbers), where)
    dist.all_reduce(total)
    summed: np.ndarray = total.cpu().numpy()
    return summed


def _hash(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=7).digest())

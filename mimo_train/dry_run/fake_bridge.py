"""Shapes for Megatron-Core's own bridges (`placement.bridge=megatron`), which ask the sender before every message: a
dry run has no sender, and the plan of the step knows what it would say. The questions are asked and counted as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import bridge_communicator
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator, CommRole

from mimo_train.config.parts import LANGUAGE
from mimo_train.parallel.bridge.communicator import TextShapes
from mimo_train.parallel.bridge.shapes import StepShapes, features_width, giving_replicas, taking_replicas
from mimo_train.plan.layout import RunLayout
from mimo_train.plan.run import Run
from mimo_train.step import schedule

Shape = tuple[int, ...]


class Answers:
    """What the other side of one bridge says of shapes, to this rank."""

    def __init__(self, bridge: BridgeCommunicator, layout: RunLayout, shapes: StepShapes, width: int):
        self._bridge, self._shapes, self._width = bridge, shapes, width
        self._giver, self._taker = layout.modules[bridge.src_module_name], layout.modules[bridge.dest_module_name]
        self._step, self._next = -1, 0
        self._sent: deque[tuple[list[Shape], Shape]] = deque()
        self.parts: list[Shape] = []
        """Of the next message, by peer."""
        self.whole: Shape = ()
        """Of all of them together."""

    def note(self, features: Any) -> None:
        """Of features that are sent, whose gradients come back in the same order."""
        self._restart_if_new_step()
        peers = self._bridge.comm_map[self._bridge.current_rank]
        split = [features]
        if peers.role == CommRole.SENDER:
            split = self._bridge._split_tensor_at_batch_dim(features, len(peers.send_to_ranks))
        self._sent.append(([tuple(each.shape) for each in split], tuple(features.shape)))

    def gradients(self) -> None:
        """They are received next."""
        self.parts, self.whole = self._sent.popleft()

    def features(self) -> None:
        """They are received next."""
        self._restart_if_new_step()
        microbatch, self._next = self._next, self._next + 1
        counts = self._shapes.counts[self._giver.name][microbatch]
        givers, own = giving_replicas(self._giver), self._replica()
        first, last = self._shapes.taken(self._giver.name, self._taker, microbatch)[own]
        rows: dict[int, int] = {}
        for replica, (begin, end) in zip(givers, self._shapes.spans(self._giver, microbatch), strict=True):
            both = counts[max(first, begin) : min(last, end)]
            rows |= dict.fromkeys(replica, sum(both))
        peers = self._bridge.comm_map[self._bridge.current_rank].recv_from_ranks
        self.parts = [(rows[peer], self._width) for peer in peers]
        self.whole = (sum(counts[first:last]), self._width)

    def _replica(self) -> int:
        rank = self._bridge.current_rank
        return next(at for at, ranks in enumerate(taking_replicas(self._taker)) if rank in ranks)

    def _restart_if_new_step(self) -> None:
        if self._step != self._shapes.step:
            self._step, self._next = self._shapes.step, 0
            self._sent.clear()


class _Broadcasts:
    """torch.distributed, as the module of bridges sees it: a shape that another rank broadcasts is `whole`."""

    whole: Shape = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def broadcast(self, tensor: Any, src: int, group: Any) -> Any:
        done = dist.broadcast(tensor, src=src, group=group)
        if src != dist.get_rank() and not tensor.dtype.is_floating_point:
            shape = list(self.whole)
            tensor.tolist = lambda: shape
        return done


def install(run: Run) -> None:
    """Answer for the ranks that are not there, for the rest of this process."""
    broadcasts = _Broadcasts()
    bridge_communicator.dist = broadcasts
    known: list[StepShapes] = []

    class Sizes(schedule.MegatronSizes):
        def __init__(self, layout: RunLayout, shapes: StepShapes):
            super().__init__(layout, shapes)
            known.append(shapes)

    class Communicator(schedule.MegatronCommunicator):
        def __init__(self, layout: RunLayout, *arguments: Any):
            super().__init__(layout, *arguments)
            (shapes,) = known
            for bridge in self.bridge_comms:
                width = features_width(run, bridge.src_module_name, run.cfg.llm.hidden_size)
                _answer(bridge, Answers(bridge, layout, shapes, width), broadcasts)
            stages = self.rank_module_map.get(LANGUAGE)
            if stages is not None:
                pgs = stages.p2p_communicator.pp_group
                _answer_stages(stages.p2p_communicator, _texts(run, layout, shapes, dist.get_rank(pgs)))

    schedule.MegatronSizes = Sizes  # type: ignore[misc]
    schedule.MegatronCommunicator = Communicator  # type: ignore[misc, assignment]


def _texts(run: Run, layout: RunLayout, shapes: StepShapes, stage: int) -> TextShapes:
    language, rank = layout.language, dist.get_rank()
    ranks = language.stage_ranks(stage)
    replica = (rank - ranks[0]) // (language.tp * language.cp)
    return TextShapes(language, replica, stage, run.cfg.llm.hidden_size, shapes, language.pp)


def _answer(bridge: Any, answers: Answers, broadcasts: _Broadcasts) -> None:
    """Let a bridge hear `answers`."""
    ask = bridge._communicate_shapes

    def communicate(
        tensor_to_send_next: Any = None,
        recv_next: bool = False,
        recv_prev: bool = False,
        tensor_to_send_prev: Any = None,
    ) -> tuple[list[Shape], list[Shape]]:
        ask(tensor_to_send_next, recv_next, recv_prev, tensor_to_send_prev)
        return (answers.parts if recv_prev else []), (answers.parts if recv_next else [])

    def prepared(method: Callable, *steps: Callable) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            for step in steps:
                step(arguments[0]) if step == answers.note else step()
            broadcasts.whole = answers.whole
            return method(*arguments, **options)

        return call

    bridge._communicate_shapes = communicate
    before: dict[str, tuple[Callable, ...]] = {
        "send_forward": (answers.note,),
        "recv_backward": (answers.gradients,),
        "send_forward_recv_backward": (answers.note, answers.gradients),
        "recv_forward": (answers.features,),
        "send_backward_recv_forward": (answers.features,),
    }
    for name, steps in before.items():
        setattr(bridge, name, prepared(getattr(bridge, name), *steps))


def _answer_stages(communicator: Any, texts: TextShapes) -> None:
    """Let the stages of the language model hear how long texts are."""
    ask = communicator._communicate_shapes

    def communicate(send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool) -> tuple[Any, Any]:
        ask(send_next, send_prev, recv_prev, recv_next)
        return (texts.next(True) if recv_prev else None), (texts.next(False) if recv_next else None)

    communicator._communicate_shapes = communicate

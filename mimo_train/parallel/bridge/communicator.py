"""The communicators of the pipeline schedule: between stages of one module, and between modules."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.parts import LANGUAGE
from mimo_train.flight.file_format import BACKWARD, FORWARD
from mimo_train.flight.recorder import RECORDER
from mimo_train.layout.ranks import ModuleLayout, warm_up
from mimo_train.layout.run import Run
from mimo_train.parallel import device
from mimo_train.parallel.bridge.exchange import DisjointBridge, Watch, not_timed
from mimo_train.parallel.bridge.shapes import StepShapes, Turns
from mimo_train.parallel.groups import RunGroups

Received = tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Any] | None]
"""The tensors from the previous and the following stage, and the handles of pending messages."""


class TimedP2PCommunicator(P2PCommunicator):
    """Megatron-Core's communicator between the stages of one module, timed as `pipeline_wait`. `rows` are the shapes
    that stages of the language model exchange. It is None if every microbatch has whole sequences, or if stages
    exchange shapes first."""

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: TransformerConfig,
        watch: Watch,
        module: str = LANGUAGE,
        rows: "TextShapes | None" = None,
    ):
        super().__init__(pp_group, config)
        self._watch, self._place, self._rows = watch, f"stages of {module}", rows
        self._step, self._counts = -1, {FORWARD: 0, BACKWARD: 0}

    def _communicate(self, *arguments: Any, **options: Any) -> Received:
        # Every send and receive starts here. It also completes here, unless communication overlaps computation.
        self._record(options)
        if self._rows is not None and self._rows.are_planned and (options["recv_prev"] or options["recv_next"]):
            assert not (options["recv_prev"] and options["recv_next"]), "each direction is received apart"
            options["tensor_shape"] = self._rows.next(forward=options["recv_prev"])
        with self._watch("pipeline_wait"):
            previous, following, handles = super()._communicate(*arguments, **options)
        if handles:
            handles = {name: _TimedHandle(handle, self._watch) for name, handle in handles.items()}
        return previous, following, handles

    def _record(self, options: dict[str, Any]) -> None:
        """Note in the flight recorder the place, direction and microbatch of this exchange."""
        if RECORDER.step != self._step:
            self._step, self._counts = RECORDER.step, {FORWARD: 0, BACKWARD: 0}
        forward = options.get("recv_prev") or options.get("tensor_send_next") is not None
        direction = FORWARD if forward else BACKWARD
        RECORDER.at(self._place, direction, self._counts[direction])
        self._counts[direction] += 1


class _TimedHandle:
    """A pending message whose wait is timed as `pipeline_wait`."""

    def __init__(self, handle: dist.Work, watch: Watch):
        self._handle, self._watch = handle, watch

    def wait(self) -> None:
        """Wait until the message has arrived, or until its buffer may be overwritten."""
        with self._watch("pipeline_wait"):
            self._handle.wait()


class TextShapes:
    """The shapes [S / cp (/ tp with sequence parallel), B, H] of the messages that a language-model stage receives.
    They follow the order of the schedule (`get_schedule_table`), in which chunks of a stage take turns. The first stage
    receives no activation for its first chunk. The last stage receives no gradient for its last chunk."""

    def __init__(
        self, module: ModuleLayout, replica: int, stage: int, hidden_size: int, shapes: StepShapes, group: int
    ):
        """
        Args:
            replica: data-parallel rank of this stage.
            group: microbatches that one chunk takes before the next chunk does; unused if stages have one chunk.
        """
        self._module, self._replica, self._hidden, self._shapes = module, replica, hidden_size, shapes
        self._stage, self._group = stage, group
        self._step = -1
        self._orders: dict[bool, Iterator[int]] = {}

    @property
    def are_planned(self) -> bool:
        """True if the data gives the length of each microbatch. Other iterators yield whole sequences."""
        return bool(self._shapes.texts)

    def next(self, forward: bool) -> tuple[int, int, int]:
        """Return the shape of the next activation (forward) or of the next gradient (backward)."""
        if self._step != self._shapes.step:
            self._step = self._shapes.step
            self._orders = {direction: self._order(direction) for direction in (True, False)}
        length, rows = self._shapes.texts[next(self._orders[forward])][self._replica]
        module = self._module
        return length // module.cp // (module.tp if module.sp else 1), rows, self._hidden

    def _order(self, forward: bool) -> Iterator[int]:
        chunks, microbatches = self._module.vpp, len(self._shapes.texts)
        table = get_schedule_table(microbatches, chunks, self._group)
        # Messages from the last stage round to the first skip the chunk at the end of the pipeline.
        around = self._stage == (0 if forward else self._module.pp - 1)
        return iter([microbatch for microbatch, chunk in table if not around or chunk < chunks - 1])


class ModuleStages(TimedP2PCommunicator):
    """The communicator between the stages of one of several modules, without a shape exchange before every message.

    Megatron-Core 0.19.2 exchanges shapes in multi-module schedules (`variable_seq_lengths`,
    p2p_communication.py:322). Here shapes are known in advance. The language model's stages exchange
    [S / cp (/ tp with sequence parallel), B, H]. An encoder's stages exchange [rows, H], where rows are the tokens of
    this rank's samples inside the encoder. Empty tensors are not sent, nor are gradients to stages that need none.
    """

    def __init__(
        self,
        module: ModuleLayout,
        pp_group: dist.ProcessGroup,
        config: TransformerConfig,
        hidden_size: int,
        shapes: StepShapes,
        watch: Watch,
    ):
        config = copy.copy(config)
        config.variable_seq_lengths = False
        super().__init__(pp_group, config, watch, module.name)
        self._module, self._shapes, self._hidden = module, shapes, hidden_size
        self._replica = (dist.get_rank() - module.first_rank) // (module.tp * module.cp) % module.dp
        self._texts = TextShapes(module, self._replica, pp_group.rank(), hidden_size, shapes, 1)
        self._turns = Turns(shapes)

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Sequence[int],
        **options: Any,
    ) -> Received:
        assert not (recv_prev and recv_next), "1F1B without interleaving receives from one side at a time"
        if self._module.name != LANGUAGE:
            stage = self.pp_group.rank()
            recv_next = recv_next and self._shapes.stage_needs_gradient(self._module.name, stage)
            if stage and not self._shapes.stage_needs_gradient(self._module.name, stage - 1):
                tensor_send_prev = None
        if recv_prev or recv_next:
            tensor_shape = self._next_shape(recv_prev)
        empty = None
        if (recv_prev or recv_next) and not tensor_shape[0]:
            empty = torch.empty(
                tensor_shape, dtype=self.config.pipeline_dtype, device=device.current(), requires_grad=True
            )
        previous, following, handles = super()._communicate(
            tensor_send_next=tensor_send_next if tensor_send_next is not None and len(tensor_send_next) else None,
            tensor_send_prev=tensor_send_prev if tensor_send_prev is not None and len(tensor_send_prev) else None,
            recv_prev=recv_prev and empty is None,
            recv_next=recv_next and empty is None,
            tensor_shape=tensor_shape,
            **options,
        )
        if empty is not None:
            previous, following = (empty, None) if recv_prev else (None, empty)
        return previous, following, handles

    def _next_shape(self, forward: bool) -> tuple[int, ...]:
        """Return the shape of the next activation (forward) or of the next gradient (backward)."""
        if self._module.name == LANGUAGE:
            return self._texts.next(forward)
        microbatch = self._turns.next(FORWARD if forward else BACKWARD)
        routes = self._shapes.routes(self._module, microbatch)
        rows = int(routes.items.loads[routes.sources == self._replica].sum())
        # Two dimensions are sent as three, the last of size 1 (multimodule_communicator.py, _prepare_tensor_for_comm).
        return rows, self._hidden, 1


class ModuleCommunicator(MultiModulePipelineCommunicator):
    """Megatron-Core's communicator for the modules in the pipeline, with `DisjointBridge` and `ModuleStages`."""

    def __init__(
        self,
        run: Run,
        groups: RunGroups,
        config: TransformerConfig,
        hidden_sizes: dict[str, int],
        shapes: StepShapes,
        bridges: Sequence[DisjointBridge],
        watch: Watch = not_timed,
    ):
        """`bridges`: those of all disjoint edges; `watch` times stages as `pipeline_wait`."""
        self._run, self._shapes, self._watch, self._hidden_sizes = run, shapes, watch, hidden_sizes
        self._bridges = bridges
        topology: dict[str, list[str]] = {name: [] for name in run.layout.piped_modules}
        for edge in run.layout.disjoint_edges:
            topology[edge.source].append(edge.destination)
        dimensions = {edge.source: 2 for edge in run.layout.disjoint_edges}
        super().__init__({name: groups.grids[name] for name in topology}, topology, config, None, dimensions)

    @property
    def current_stage(self) -> int:
        """This rank's stage, counted from the end of the pipeline. It determines the number of warm-up microbatches.
        Megatron-Core 0.19.2 counts from 0 (multimodule_communicator.py:246-277): modules with fewer stages would run
        ahead of their destination, and both would deadlock."""
        name, info = next(iter(self.rank_module_map.items()))
        return self.total_stages - 1 - warm_up(self._run.layout, name, info.pp_rank)

    def send_forward_recv_backward(
        self, output_dict: dict[str, torch.Tensor], tensor_shape: Any = None, is_last_stage: bool = False
    ) -> dict[str, torch.Tensor]:
        """As Megatron-Core's method. In front of interleaved stages all encoders of a rank send features before the
        rank waits for the first gradient, which depends on them."""
        infos = self.rank_module_map.values()
        if self._run.layout.language.vpp == 1 or not all(info.bridge_comms_as_src_module for info in infos):
            return super().send_forward_recv_backward(output_dict, tensor_shape, is_last_stage)
        self.send_forward(output_dict, is_last_stage)
        return self.recv_backward(tensor_shape, is_last_stage)

    def _build_bridge_comms(self) -> None:
        self.bridge_comms = [*self._bridges]

    def _build_rank_module_info_map(self) -> None:
        super()._build_rank_module_info_map()
        for name, info in self.rank_module_map.items():
            info.p2p_communicator = ModuleStages(
                self._run.layout.modules[name],
                info.p2p_communicator.pp_group,
                self.config,
                self._hidden_sizes[name],
                self._shapes,
                self._watch,
            )

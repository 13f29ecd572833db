"""A module sharded over its data-parallel ranks by torch's `fully_shard` (FSDP2): `modules.NAME.layout.fsdp`.

Neither wrapper of Megatron-Core 0.19.2 fits classes of `transformers`. `TorchFullyShardedDataParallel` calls
`fully_shard` for Megatron's layers alone and on CUDA, takes means of gradients, and cannot scale them. Megatron-FSDP
needs CUDA streams, and brings its own optimizer and checkpoints. Here torch's function is called directly:
`ShardedModule` has the interface of Megatron-Core's wrappers, and gives optimizer and checkpoints plain tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, TorchFullyShardedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mimo_train.config.errors import UserError
from mimo_train.models.parameters import Cut, mark
from mimo_train.parallel import device


class RowShard(Cut):
    """The rows of a parameter on one of its ranks, as torch cuts them: equal parts, of which the last may be smaller or
    empty. `sections` has the size of the first dimension."""

    @classmethod
    def of_parameter(cls, parameter: DTensor) -> "RowShard":
        """Return the rows of a sharded parameter on this rank."""
        mesh = parameter.device_mesh
        return cls(0, (len(parameter),), mesh.get_local_rank(), mesh.size())

    def ranges(self, rows: int) -> list[tuple[int, int]]:
        """Return [(first, last + 1)] of this rank's rows. A stack of matrices, which has more rows than its first
        dimension, is cut between matrices."""
        (length,) = self.sections
        ends = [min(rank * -(-length // self.ranks), length) for rank in (self.rank, self.rank + 1)]
        return [(ends[0] * rows // length, ends[1] * rows // length)]


class ShardedModule(TorchFullyShardedDataParallel):
    """A module whose parameters, gradients and optimizer states are sharded over data-parallel ranks.

    Trained parameters are stored in fp32: they are the optimizer's master copies, and cast where they are gathered.
    Gradients are sums over ranks in fp32. Parameters without a gradient on a rank have zeros, since all ranks must
    reduce alike.

    Attributes:
        group: the ranks.
        shards: this rank's part of each parameter.
    """

    def __init__(
        self,
        config: TransformerConfig,
        module: MegatronModule,
        group: dist.ProcessGroup,
        key: str,
    ):
        """Shard a module in place, unit by unit: entries of the outermost lists of layers if it is a language model. An
        encoder is one unit, because its layers may run more often on one rank than on another.

        Args:
            module: on the CPU; memory that is not touched yet stays so.
            group: data-parallel ranks of the module.
            key: config key of the module, for errors.

        Raises:
            UserError: `fully_shard` does not support a parameter.
        """
        _BaseDataParallel.__init__(self, config=config, module=module)
        self.group = group
        self._is_language, self._key = hasattr(module, "embedding"), f"{key}.layout.fsdp"
        units = _layers(module) if self._is_language else []
        trained = sum(value.numel() for value in module.parameters() if value.requires_grad)
        # Gradients smaller than a layer, such as those of adapters, are reduced once a step.
        reduces_once = trained < max((_size(unit) for unit in units), default=0)
        self.ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=reduces_once)
        self._mesh, self._dtype = DeviceMesh.from_group(group, device.current().type), config.params_dtype
        for unit in units:
            self._shard(unit, reshard=True)
        root: Any = _Root(module)
        # A language model keeps the tables of the vocabulary from forward to backward.
        self._shard(root, reshard=not self._is_language)
        self._root = (root,)  # no child, so that parameters keep their names
        sharded = [part for part in root.modules() if isinstance(part, FSDPModule)]
        groups = (part._get_fsdp_state()._fsdp_param_group for part in sharded)
        self._groups = [parameters for parameters in groups if parameters is not None]
        for parameters in self._groups:
            _reduce_all(parameters)
        self.shards = {
            parameter: torch.nn.Parameter(shard_of(parameter)[0], parameter.requires_grad)
            for parameter in module.parameters()
        }
        if self._is_language:
            root.module.embedding.gather = root.unshard

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the module. Embeddings are set as an attribute: torch would reduce the gradients of the
        embedding, which was called before, as soon as those of a tensor among the arguments are there."""
        if options.get("decoder_input") is not None:
            self.module.embedded_SBH = options.pop("decoder_input")
            options["decoder_input"] = None
        (root,) = self._root
        output = root(*inputs, **options)
        if not torch.is_grad_enabled():
            root.reshard()  # torch waits for a backward pass
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up whole gradients inside the block; the backward pass after it reduces them."""
        (root,) = self._root
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def zero_grad_buffer(self) -> None:
        """Start a step: remove gradients, and follow parameters that were frozen or released since."""
        for parameter, shard in self.shards.items():
            parameter.grad = shard.grad = None
            for tensor in (parameter, shard):
                mark(tensor, main_grad=None)
        for group in self._groups:
            group._init_mp_dtypes()
            for each in group.fsdp_params:
                if hasattr(each, "_unsharded_param"):
                    each._unsharded_param.requires_grad_(each.sharded_param.requires_grad)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Set `main_grad` of parameters and shards, after the last backward pass of a step."""
        for parameter, shard in self.shards.items():
            if parameter.grad is not None:
                for tensor in (parameter, shard):
                    mark(tensor, main_grad=shard_of(parameter.grad)[0])

    def scale_gradients(self, scaling_factor: torch.Tensor) -> None:
        """Multiply all gradients by a number, [1]."""
        gradients = [getattr(shard, "main_grad", None) for shard in self.shards.values()]
        if gradients := [gradient for gradient in gradients if gradient is not None]:
            torch._foreach_mul_(gradients, scaling_factor.squeeze())

    def _shard(self, unit: torch.nn.Module, *, reshard: bool) -> None:
        """Shard a module, and before it those inside whose parameters a class keeps in float32."""
        kept = [
            part
            for part in (unit.modules() if self._is_language and self._dtype != torch.float32 else ())
            if part is not unit
            and any(
                type(value) is torch.nn.Parameter and value.dtype == torch.float32
                for value in part.parameters(recurse=False)
            )
        ]
        for part in (*kept, unit):
            values = [value for value in part.parameters() if not isinstance(value, DTensor)]
            dtypes = {value.dtype for value in values}
            if len(dtypes) > 1:
                raise UserError(
                    f"{self._key}: {type(part).__name__} has parameters of several types "
                    f"({', '.join(sorted(map(str, dtypes)))}), which torch cannot shard together. Set it to false"
                )
            if any(value.dim() == 0 for value in values):
                text = f"{type(part).__name__} has parameters without dimensions, which torch cannot shard"
                raise UserError(f"{self._key}: {text}. Set it to false")
            for value in values:
                if value.requires_grad:
                    value.data = value.data.float()
            dtype = dtypes.pop() if dtypes else self._dtype
            policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
            fully_shard(part, mesh=self._mesh, reshard_after_forward=reshard or None, mp_policy=policy)
            assert isinstance(part, FSDPModule)
            part.set_gradient_divide_factor(1.0)  # sums
            part.set_force_sum_reduction_for_comms(True)


class _Root(torch.nn.Module):
    """Calls a module. torch changes the class of what it shards, which Python refuses for Megatron-Core's encoders.

    An encoder without media on this rank has the output [0] instead of None. Its backward pass takes part in the
    messages of the other ranks.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        output = self.module(*inputs, **options)
        if output is None:
            return torch.empty(0, device=device.current(), requires_grad=torch.is_grad_enabled())
        return output


def shard_of(parameter: torch.Tensor) -> tuple[torch.Tensor, RowShard | None]:
    """Return this rank's part of a parameter, and its rows; the whole and None if it is not sharded."""
    if not isinstance(parameter, DTensor):
        return parameter, None
    with torch.no_grad():
        return parameter.to_local(), RowShard.of_parameter(parameter)


def copy_whole(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter, sharded or not, to a whole value."""
    local, rows = shard_of(parameter)
    if rows is not None:
        ((first, last),) = rows.ranges(len(value))
        value = value[first:last]
    with torch.no_grad():
        local.copy_(value)


def _layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the entries of the outermost lists of modules whose parameters no other module has."""
    users: dict[int, int] = {}
    for part in module.modules():
        for value in part.parameters(recurse=False):
            users[id(value)] = users.get(id(value), 0) + 1
    layers: list[torch.nn.Module] = []
    waiting = [module]
    while waiting:
        part = waiting.pop()
        if isinstance(part, torch.nn.ModuleList):
            layers += part
        else:
            waiting += part.children()
    return [
        layer
        for layer in dict.fromkeys(layers)
        if _size(layer) and all(users[id(value)] == 1 for value in layer.parameters())
    ]


def _size(module: torch.nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())


def _reduce_all(group: Any) -> None:
    """Let a unit of torch (2.11.0, `FSDPParamGroup`) reduce zeros for parameters without a gradient. It leaves these
    out, and ranks that differ in them, by experts or images, would wait for each other."""
    reduce = group.post_backward

    def post_backward(*unused: Any) -> None:
        for each in group.fsdp_params if group.reduce_grads else ():
            is_trained = each.sharded_param.requires_grad and hasattr(each, "_unsharded_param")
            if is_trained and each.unsharded_accumulated_grad is None and each._unsharded_param.grad is None:
                each._unsharded_param.grad = torch.zeros_like(each._unsharded_param)
        reduce(*unused)

    group.post_backward = post_backward

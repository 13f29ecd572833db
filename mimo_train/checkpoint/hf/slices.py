"""Single tensors of a checkpoint, or parts of them: a layer of what is stored as one tensor of all layers.

`megatron.core.dist_checkpointing.load` gives a rank all that a checkpoint holds of a tensor, or what it holds by
itself as one of several ranks; a part alone, on one process, it refuses. So these are read with torch's own reader.
"""

from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


class _OneTensor(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, into: torch.Tensor):
        super().__init__()
        self._into = into

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self._into
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view


class SliceReader:
    """Reads a checkpoint of Megatron-Core's `torch_dist` format on one process."""

    def __init__(self, folder: Path):
        self._reader = FileSystemReader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = metadata.state_dict_metadata

    def read(self, asked: ShardedTensor) -> torch.Tensor:
        """The part that `asked` describes, in the dtype in which it is stored."""
        stored = self._stored[asked.key]
        assert isinstance(stored, TensorStorageMetadata), asked.key
        shape = (1,) * asked.prepend_axis_num + tuple(asked.local_shape)
        into = torch.empty(shape, dtype=stored.properties.dtype)
        part = ChunkStorageMetadata(torch.Size(asked.global_offset), torch.Size(shape))
        items = create_read_items_for_chunk_list(asked.key, stored, [part])
        self._reader.read_data(LoadPlan(items), _OneTensor(into)).wait()
        return into.view(asked.local_shape)

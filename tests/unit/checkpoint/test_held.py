"""What a checkpoint cannot hold is refused by its name, not left out."""

import io
import pickle

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from mimo_train.checkpoint.local_shards import shards_of_module
from mimo_train.config.errors import UserError


class Layer(torch.nn.Module):
    """A weight, and what Transformer Engine would have beside it."""

    def __init__(self, extra):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.extra = extra

    def sharded_state_dict(self, metadata):
        return {
            "weight": ShardedTensor.from_rank_offsets("weight", self.weight, replica_id=(0, 0, 0)),
            "_extra_state": ShardedObject("fc1._extra_state", self.extra, (1,), (0,)),
        }


PICKLE = pickle.dumps({"scale": 1.0})


@pytest.mark.parametrize(
    "extra", [torch.frombuffer(bytearray(PICKLE), dtype=torch.uint8), io.BytesIO(PICKLE), {"a": 1}]
)
def test_a_pickle_of_a_layer_is_refused(extra):
    with pytest.raises(UserError, match=r"modules\.language: fc1\._extra_state has a state of its own .*pickle"):
        list(shards_of_module("language", Layer(extra)))


@pytest.mark.parametrize("extra", [None, torch.empty(0, dtype=torch.uint8), io.BytesIO()])
def test_an_empty_one_is_left_out(extra):
    assert [one.name for one in shards_of_module("language", Layer(extra))] == ["weight"]

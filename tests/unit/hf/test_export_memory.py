"""An export holds one tensor group at a time: live bytes are counted."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.families.weights import language_map
from mimo_train.hf.documents import Written
from mimo_train.hf.export import groups_of, planned_tensors, tensors_of
from mimo_train.hf.tensors import write_tensors

SPEC = LlmSpec(num_layers=6, hidden_size=32, num_attention_heads=4, ffn_hidden_size=96, vocab_size=150, qkv_bias=True)


class LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that are made inside it.

    Attributes:
        peak: most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._storages = {at: own for at, own in self._storages.items() if not own[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return out


class Drawn:
    """Parameters that are made when they are asked for, as those of a checkpoint are read."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self._shapes = shapes

    def load(self, name: str) -> torch.Tensor:
        return torch.ones(self._shapes[name])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_one_group_is_in_memory_at_a_time(kind, tmp_path):
    """With the parameter that is being taken apart; not what was written before."""
    weights = language_map(SPEC, padded_vocab := 256, "qwen2")
    rows = {rule.ours: sum(part.count for part in rule.rows) for rule in weights.rules}
    width = {"linear_fc2.weight": SPEC.ffn_hidden_size}
    shapes = {
        name: (count,) if "norm" in name or name.endswith("bias")
        else (count, next((wide for end, wide in width.items() if name.endswith(end)), SPEC.hidden_size))
        for name, count in rows.items()
    }  # fmt: skip
    assert rows["embedding.word_embeddings.weight"] == padded_vocab
    like = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    part = Written("language", weights)
    planned = planned_tensors(part, like, kind)
    groups = [sum(like[rule.ours].nbytes for rule in group.rules) for group in groups_of(weights)]
    with LiveBytes() as live:
        write_tensors(tmp_path, planned, tensors_of(part, Drawn(shapes), kind), largest_file=40_000)
    assert max(groups) < live.peak <= 2 * max(groups), "the parameter, and the tensors that it becomes"
    assert sum(groups) > 3 * live.peak, "the whole is larger by far, or this proves nothing"

"""Parts of models without processes: kinds of layers, rotary axes, placeholders, norms of large tensors."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema_modules import LoraConfig
from mimo_train.cpu.kernels import BLOCK
from mimo_train.models.blocks.mlp.module import mlp_submodules
from mimo_train.models.layers import layer_spec
from mimo_train.models.lora.linear import LoraColumnParallelLinear
from mimo_train.models.mimo import PlacedMimoModel
from mimo_train.models.parameter_norms import squares_of
from mimo_train.models.rotary import AxisRotaryEmbedding, axes_of_frequencies
from mimo_train.optim.module_optimizer import ModuleOptimizer


def test_layers_with_adapters_or_windows_are_of_torch_where_transformer_engine_is():
    """Its linear layers take no adapters. It is not installed here: to ask for its layers would fail."""
    of_torch = {"lora": LoraConfig(), "recompute": "none"}
    for options in (of_torch | {"lora": LoraConfig(rank=2)}, of_torch | {"full_attention": [0]}):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, persist_layer_norm=False)
        for name, value in options.items():
            setattr(config, name, value)
        parts = layer_spec(config, AttnMaskType.no_mask, te=True).submodules
        linear = parts.self_attention.submodules.linear_qkv
        assert issubclass(linear, LoraColumnParallelLinear if options["lora"].rank else ColumnParallelLinear)
    assert mlp_submodules(te=True, adapted=True).linear_fc1 is LoraColumnParallelLinear


@pytest.mark.parametrize(
    ("section", "interleaved", "axes"),
    [
        ([1, 3, 2], False, [0, 1, 1, 1, 2, 2]),
        ([4, 2, 2], True, [0, 1, 2, 0, 1, 2, 0, 0]),
    ],
)
def test_an_axis_of_positions_turns_its_frequencies(section, interleaved, axes):
    assert axes_of_frequencies(section, interleaved) == axes


def test_rotary_embeddings_turn_by_their_own_sections():
    spec = LlmSpec(hidden_size=8, num_attention_heads=1, mrope_section=[2, 1, 1])
    angles = AxisRotaryEmbedding(spec, SimpleNamespace(size=lambda: 1))
    positions = torch.zeros(3, 1, 2, dtype=torch.long)
    assert angles(positions, [2, 1, 1]).shape == (2, 1, 1, 8)
    with pytest.raises(AssertionError, match=r"\[1, 2, 1\]"):
        angles(positions, [1, 2, 1])


def test_neighbours_turn_by_the_axes_of_glm4v():
    from transformers.models.glm4v.modeling_glm4v import Glm4vTextConfig, Glm4vTextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    theirs = Glm4vTextRotaryEmbedding(Glm4vTextConfig(hidden_size=32, num_attention_heads=2, rope_parameters=rope))
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "partial_rotary_factor": 0.5, "rope_base": 100.0}
    spec = LlmSpec(**sizes, rope_interleaved=True, mrope_section=[2, 1, 1])
    positions = torch.tensor([[[0, 7]], [[1, 5]], [[3, 2]]])
    angles = AxisRotaryEmbedding(spec, SimpleNamespace(size=lambda: 1))(positions, [2, 1, 1])
    expected = theirs(torch.zeros(1), positions)[0]
    assert torch.equal(angles.cos()[:, :, 0].transpose(0, 1), expected)


def test_placeholders_without_a_row_in_the_table_are_never_looked_up():
    looked_up = []

    def embedding(input_ids, position_ids):
        looked_up.append(input_ids)

    embedding.word_embeddings = SimpleNamespace(num_embeddings=8)
    model = SimpleNamespace(language_model=SimpleNamespace(embedding=embedding))
    ids = torch.tensor([[3, 8, 8, 7, 9, 5]])
    PlacedMimoModel.get_text_embeddings(model, ids, ids, {"images": 8, "audio": 9, "details": 5})
    assert looked_up[0].tolist() == [[3, 0, 0, 7, 0, 5]] and ids.tolist() == [[3, 8, 8, 7, 9, 5]]


@pytest.fixture(scope="module")
def large():
    """A tensor whose norm `torch.linalg.vector_norm` has wrong in the fourth digit, and the sum of its squares."""
    tensor = torch.randn(10_000_001, generator=torch.Generator().manual_seed(0))
    return tensor, float(tensor.double().square().sum())


def test_squares_of_large_tensors_have_the_digits_of_fp32(large):
    tensor, squares = large
    turned = tensor[:-1].reshape(1000, -1).T
    halves = tensor[: 9 * BLOCK].bfloat16()
    found = squares_of([tensor, torch.zeros(0), turned, halves, tensor[:5]])
    expected = [each.double().square().sum() for each in (tensor, torch.zeros(0), turned, halves, tensor[:5])]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([float(each) for each in expected], rel=1e-5)
    assert float(found[0]) == pytest.approx(squares, rel=1e-6)
    assert squares_of([tensor[:9].clone().fill_(float("inf"))]).isinf().all() and len(squares_of([])) == 0


def test_gradients_are_clipped_by_the_right_norm(large, monkeypatch):
    tensor, squares = large
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda message: None)
    optimizer = object.__new__(ModuleOptimizer)
    optimizer.module_infos, optimizer._device = {"language": None}, torch.device("cpu")
    optimizer._clip_grads = {"language": None}
    optimizer.config = SimpleNamespace(log_num_zeros_in_grad=False, use_distributed_optimizer=True)
    optimizer._collect_gradients = lambda: torch.zeros(1)
    optimizer.inner = lambda info: [SimpleNamespace(get_grads_for_grad_norm=lambda: [tensor])]
    assert optimizer.reduce_norms()[0].squares["language"] == pytest.approx(squares, rel=2e-6)

"""The value head, the hook that puts it in, and freezing of routers, without processes."""

import torch

from mimo_train.models.heads import (
    LinearForLastLayer,
    _ensure_model_list,
    _freeze_parameter_if_present,
    create_value_head_hook,
    freeze_moe_router,
    make_value_model,
)


class Language(torch.nn.Module):
    """What a hook reads of a GPT model."""

    def __init__(self, pre_process: bool, post_process: bool, width: int = 8, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = True
        self.config = type("Config", (), {"init_seed": 3, "init_method_std": 0.02})()
        self.pg_collection = type("Groups", (), {"tp": None})()
        self.decoder = torch.nn.Module()
        if pre_process:
            self.embedding = torch.nn.Module()
            self.embedding.word_embeddings = torch.nn.Embedding(16, width, dtype=dtype)
            self.embedding.word_embeddings.weight.shared_embedding = True
        if post_process:
            self.decoder.final_layernorm = torch.nn.LayerNorm(width, dtype=dtype)
            self.output_layer = torch.nn.Linear(width, 16, dtype=dtype)


def test_a_head_is_called_like_an_output_layer():
    head = LinearForLastLayer(8, 3, sequence_parallel=False).to(torch.bfloat16)
    hidden = torch.randn(5, 2, 8, dtype=torch.bfloat16)
    output, bias = head(hidden, weight=torch.randn(16, 8), runtime_gather_output=True)
    assert output.shape == (5, 2, 3) and output.dtype == torch.float32 and bias is None
    assert torch.equal(output, (hidden @ head.weight.T).float())
    assert head.bias is None and LinearForLastLayer(8, 1, True).weight.sequence_parallel


def test_the_hook_replaces_the_output_layer_of_the_last_stage_only():
    first, middle, last = Language(True, False), Language(False, False), Language(False, True)
    given = [first, middle, last]
    chunks = create_value_head_hook(8, sequence_parallel=False, output_size=2)(given)
    assert chunks is given and chunks == [first, middle, last]
    assert not hasattr(first, "output_layer") and not hasattr(middle, "output_layer")
    assert isinstance(last.output_layer, LinearForLastLayer) and last.output_layer.weight.shape == (2, 8)
    assert not any(chunk.share_embeddings_and_output_weights for chunk in chunks)
    assert first.embedding.word_embeddings.weight.shared_embedding is False


def test_the_new_head_has_the_models_dtype_and_weights_of_its_seed_alone():
    heads = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        (model,) = make_value_model(8, sequence_parallel=False)(Language(True, True, dtype=torch.bfloat16))
        heads.append(model.output_layer.weight)
    assert heads[0].dtype == torch.bfloat16 and heads[0].shape == (1, 8)
    assert torch.equal(heads[0], heads[1]) and 0 < float(heads[0].float().std()) < 0.1


def test_a_model_becomes_a_list_of_chunks():
    chunk = torch.nn.Linear(1, 1)
    assert _ensure_model_list(chunk) == [chunk]
    several = [chunk, chunk]
    assert _ensure_model_list(several) is several and freeze_moe_router(several) is several
    assert _ensure_model_list((chunk,)) == [chunk]


def test_only_parameters_that_are_there_are_frozen():
    layer = torch.nn.Linear(2, 2)
    layer.name, layer.nothing = "text", None
    for name in ("weight", "absent", "name", "nothing"):
        _freeze_parameter_if_present(layer, name)
    _freeze_parameter_if_present(None, "weight")
    assert not layer.weight.requires_grad and layer.bias.requires_grad


def test_routers_and_gates_of_shared_experts_are_frozen_and_nothing_else():
    def block(gate: bool) -> torch.nn.Module:
        module = torch.nn.Module()
        module.router, module.shared_experts = torch.nn.Linear(2, 4), torch.nn.Linear(2, 2)
        module.shared_experts.gate_weight = torch.nn.Parameter(torch.ones(1, 2)) if gate else None
        return module

    chunks = freeze_moe_router([torch.nn.ModuleList([block(True)]), torch.nn.ModuleList([block(False)])])
    frozen = {name for chunk in chunks for name, parameter in chunk.named_parameters() if not parameter.requires_grad}
    assert frozen == {"0.router.weight", "0.router.bias", "0.shared_experts.gate_weight"}
    assert len(freeze_moe_router(chunks[0])) == 1

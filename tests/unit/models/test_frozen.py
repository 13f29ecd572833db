"""What of frozen weights is refused before a run starts, and how frozen weights are counted."""

from types import SimpleNamespace

import pytest
import torch

from mimo_train.config.errors import UserError
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.estimate.flops import StepFlops
from mimo_train.estimate.parameters import module_parameters
from mimo_train.layout.run import config_faults, resolve
from mimo_train.models.freeze import freeze, release_steps
from tests.unit.configs import changed, load

FROZEN = {"modules.images.freeze": ["encoder"]}


def faults(values: dict) -> dict[str, str]:
    return {fault.key: fault.message for fault in config_faults(changed(values))}


def test_a_run_with_adapters_has_no_fault():
    assert not faults({"modules.language.lora.rank": 4, "modules.images.lora.rank": 2})


def test_a_module_with_adapters_trains_these_alone():
    cfg = load("vlm_digits")
    cfg.language.lora.rank = cfg.modules["images"].lora.rank = 2
    language, images = (module_parameters(cfg, name, vocab=128) for name in ("language", "images"))
    assert language["llm"].trainable == 0 < language["llm"].total
    assert images["encoder"].trainable == 0 and images["projector"].trainable == images["projector"].total
    assert language["adapters"].total == language["adapters"].trainable > 0


def test_weights_beside_adapters_need_no_gradient_but_pass_it_on():
    plain, adapted = load("gpt_tiny"), load("gpt_tiny")
    adapted.language.lora.rank = 2
    step = {"texts": {512: 2}, "counts": {}, "loads": {}, "pairs": {}, "step": 1}
    flops = [StepFlops(cfg, 512)(**step)["language"].model for cfg in (plain, adapted)]
    assert 0.6 < flops[1] / flops[0] < 0.8  # two of three products, and attention


@pytest.mark.parametrize("key", ["feature_cache.dir", "prefetch_microbatches"])
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"modules.images.freeze": []}, "set modules.images.freeze=[encoder]"),
        ({"modules.images.freeze": [], "modules.images.freeze_until": {"encoder": 9}}, "while the encoder is trained"),
        ({"modules.images.encoder.dropout": 0.1}, "dropout changes features"),
    ],
)
def test_features_that_change_are_neither_cached_nor_prefetched(key, values, words):
    on = {"feature_cache.dir": "somewhere", "prefetch_microbatches": 2}[key]
    assert not faults(FROZEN | {f"modules.images.{key}": on})
    assert words in faults(FROZEN | values | {f"modules.images.{key}": on})[f"modules.images.{key}"]


def test_impossible_values_of_cache_and_prefetch_are_refused():
    bounds = "modules.images.feature_cache.max_gigabytes"
    assert "above 0" in faults(FROZEN | {bounds: 0.0})[bounds]
    ahead = "modules.images.prefetch_microbatches"
    assert "at least 0" in faults(FROZEN | {ahead: -1})[ahead]
    assert (
        "only encoders"
        in faults({"modules.language.prefetch_microbatches": 1})["modules.language.prefetch_microbatches"]
    )


def test_a_module_config_has_neither_adapters_nor_cache_by_itself():
    module = ModuleConfig()
    assert module.lora.rank == 0 and module.feature_cache.dir == "" and module.prefetch_microbatches == 0


class EngineLinear(torch.nn.Linear):
    """What Megatron-Core's classes of Transformer Engine say of themselves."""

    def __init__(self, parallel_mode: str, te_return_bias: bool):
        super().__init__(2, 2)
        self.parallel_mode, self.te_return_bias = parallel_mode, te_return_bias


def engine_layer(parallel_mode: str = "column", te_return_bias: bool = False) -> list[torch.nn.Module]:
    return [torch.nn.ModuleDict({"linear_qkv": EngineLinear(parallel_mode, te_return_bias)})]


ONE_STAGE = SimpleNamespace(size=lambda: 1)


@pytest.mark.parametrize("until", [None, 3])
def test_a_bias_that_transformer_engine_gives_no_gradient_is_refused(until):
    """Its backward pass makes the gradient of a bias with that of the weight, and none where the weight is frozen."""

    def frozen(chunks, *patterns: str) -> None:
        if until is None:
            freeze(chunks, list(patterns), "modules.language.freeze", ONE_STAGE)
        else:
            release_steps(chunks, dict.fromkeys(patterns, until), "modules.language.freeze_until", ONE_STAGE)

    key = "modules.language.freeze" + ("" if until is None else "_until")
    with pytest.raises(UserError, match=rf"^{key}: linear_qkv.weight is frozen for longer than linear_qkv.bias, .*"):
        frozen(engine_layer(), "*weight")
    frozen(engine_layer(), "*weight", "*bias")
    frozen(engine_layer(), "*bias")
    frozen(engine_layer("row"), "*weight")
    frozen(engine_layer(te_return_bias=True), "*weight")


def test_it_is_refused_on_the_stages_that_have_no_such_layer_too(monkeypatch):
    """They would go on, and wait for the one that has ended."""
    theirs = [("linear_qkv.weight", "linear_qkv.bias")]

    def all_gather_object(everyone, own, group):
        everyone[:] = [own, theirs if isinstance(own, list) else set()]

    monkeypatch.setattr("mimo_train.models.freeze.dist.all_gather_object", all_gather_object)
    two = SimpleNamespace(size=lambda: 2)
    for stop in (freeze, lambda chunks, patterns, *of: release_steps(chunks, dict.fromkeys(patterns, 3), *of)):
        with pytest.raises(UserError, match=r"linear_qkv.weight is frozen for longer than linear_qkv.bias"):
            stop([torch.nn.ModuleDict()], ["*weight"], "key", two)


def test_images_of_several_microbatches_are_dealt_together_where_one_pass_takes_them():
    ahead = ("modules.images.freeze=[encoder]", "modules.images.prefetch_microbatches=4")
    for layout, together in (("two_processes", 4), ("one_process", 1)):
        images = resolve(load("vlm_digits", f"layout={layout}", *ahead)).layout.modules["images"]
        assert images.pass_microbatches == together, layout

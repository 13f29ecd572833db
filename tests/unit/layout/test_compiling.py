"""Which layers `train.compile` refuses, by key and reason."""

import pytest

from mimo_train.layout.run import config_faults
from tests.unit.configs import load

LANGUAGE, IMAGES = "modules.language.", "modules.images."
REFUSED = {
    "tensor parallel": ((f"{LANGUAGE}layout.tp=2",), "train.compile: is layers", "modules.language.layout.tp is 2"),
    "adapters": ((f"{LANGUAGE}lora.rank=4",), "train.compile: is layers", "lora.rank is 4"),
    "fp8": (("train.precision=bf16", f"{IMAGES}fp8=tensorwise"), "train.compile: is layers", "images has fp8"),
    "selective": ((f"{IMAGES}recompute=selective",), "train.compile: is layers", "images has recompute selective"),
    "weights that are waited for": (("optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true"),
                                    "train.compile: is layers", "optim.overlap_param_gather"),
    "experts": (("llm@modules.language.llm=gpt_tiny_moe",), "train.compile: is layers", "llm.num_experts is"),
    "dropout": ((f"{LANGUAGE}llm.dropout=0.1",), "train.compile: is layers", "language.llm.dropout is 0.1"),
    "dropout of an encoder": ((f"{IMAGES}encoder.dropout=0.1",), "train.compile: is layers", "has dropout"),
    "by its own key": (("train.compile=none", f"{LANGUAGE}compile=layers", f"{LANGUAGE}layout.tp=2"),
                       "modules.language.compile: is layers", "layout.tp is 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_are_not_plain_are_refused(name):
    overrides, key, why = REFUSED[name]
    found = [str(fault) for fault in config_faults(load("vlm_digits", "train.compile=layers", *overrides))]
    assert any(fault.startswith(key) and why in fault for fault in found), found


def test_plain_layers_are_not():
    assert not config_faults(load("vlm_digits", "train.compile=layers", "train.recompute=full", "data.pack=true"))
    left_out = ("train.compile=layers", f"{LANGUAGE}layout.tp=2", f"{LANGUAGE}compile=none")
    assert not config_faults(load("vlm_digits", *left_out))

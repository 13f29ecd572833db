"""A new run has the same initial weights at every layout, to the last bit."""

from collections.abc import Iterator

import pytest
import torch

from mimo_train.layout.run import resolve
from tests.dist.models.test_packed import LATENT_SIZES
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

UNTIED = ("modules.language.llm.tie_embeddings=false", "modules.language.llm.activation=swiglu")
EXPERTS = ("llm@modules.language.llm=gpt_tiny_moe", "modules.language.llm.tie_embeddings=false")
SHARED_EXPERT = ("modules.language.llm.shared_expert_ffn_hidden_size=48",)
LATENT = tuple(f"modules.language.llm.{name}" for name in LATENT_SIZES)
DELTA = tuple(
    f"modules.language.llm.linear_{key}"
    for key in ("attention_layers=[0]", "num_key_heads=2", "num_value_heads=4", "key_head_dim=8", "value_head_dim=12")
)
IMAGES = ("modules.images.projector.resampler.latents=5", "train.precision=bf16")
LAYOUTS = {
    "gated, tp2 pp2": ("gpt_tiny", 4, UNTIED, ("modules.language.layout.tp=2", "modules.language.layout.pp=2")),
    "experts, etp2": ("gpt_tiny", 2, EXPERTS + SHARED_EXPERT,
                      ("modules.language.layout.tp=2", "modules.language.layout.sp=true",
                       "modules.language.layout.etp=2")),
    "latents, tp2": ("gpt_tiny", 2, LATENT, ("modules.language.layout.tp=2", "modules.language.layout.sp=true")),
    "experts, ep2": ("gpt_tiny", 2, EXPERTS, ("layout=language_ep2",)),
    "gated delta net, tp2": ("gpt_tiny", 2, DELTA, ("modules.language.layout.tp=2",)),
    "images": ("vlm_digits", 4, IMAGES, ("placement.mode=disjoint", "modules.images.layout.tp=2",
                                             "modules.language.layout.tp=2")),
}  # fmt: skip


def initial_weights(cfg) -> list[tuple]:
    """What this rank has: (module, name, flat values of a box, its span) of each box."""
    from mimo_train.checkpoint.local_shards import shards_of_model
    from mimo_train.training.step.pipeline import build_parts, start_processes

    parts = build_parts(resolve(cfg), *start_processes(cfg))
    return list(_boxes(shards_of_model(parts.pipeline.model)))


def _boxes(held: list) -> Iterator[tuple]:
    for one in held:
        flat = one.tensor.detach().reshape(-1)
        for at, span in one.boxes:
            yield one.module, one.name, flat[at : at + span.numel].float().numpy(), span


def whole(ranks: list[list[tuple]]) -> dict[tuple[str, str], torch.Tensor]:
    """The whole weights, of which every rank that has an element has the same."""
    weights: dict[tuple[str, str], torch.Tensor] = {}
    for module, name, values, span in (box for boxes in ranks for box in boxes):
        weight = weights.setdefault((module, name), torch.full(span.shape, torch.nan))
        place = tuple(slice(first, first + size) for first, size in zip(span.offset, span.size, strict=True))
        values = torch.from_numpy(values).view(span.size)
        unset = weight[place].isnan()
        assert torch.equal(torch.where(unset, values, weight[place]), values), (module, name)
        weight[place] = values
    return weights


@pytest.mark.parametrize(("model", "ranks", "options", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_has_the_bits_of_one_process(model, ranks, options, layout, digits, tmp_path):
    one_process = "layout=one_process" if model == "vlm_digits" else "layout=language_one"
    one, several = (
        whole(run_ranks(initial_weights, number, config(model, tmp_path, digits, one_process, *options, *overrides)))
        for number, overrides in ((1, ()), (ranks, layout))
    )
    assert several.keys() == one.keys() and len(one) > 10
    for key, weight in one.items():
        assert weight.isfinite().all() and torch.equal(several[key], weight), key

"""Layers that are compiled: the numbers of those that are not, in few graphs."""

import shutil

import pytest

from mimo_train.config.errors import UserError
from mimo_train.models import dense_layer
from tests.dist.ranks import run_ranks
from tests.dist.runs import config, largest_difference
from tests.dist.steps import Steps, whole

ONE, NATIVE = "layout=one_process", "encoder@modules.images.encoder=vit_tiny_native"
RUNS = {
    "packed rows, recomputed, frozen encoder": (
        *(ONE, NATIVE, "data.pack=true", "train.recompute=full"),
        "modules.images.freeze=[encoder]",
    ),
    "stages": ("layout=language_pp2", "optim.overlap_grad_reduce=true"),
}


def _curves(cfg, backend: str) -> tuple[list[tuple], int]:
    """(curve of four steps, number of compiled graphs)."""
    import torch._inductor.config
    from torch._dynamo.backends.registry import lookup_backend

    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return lookup_backend(backend)(graph, inputs)

    dense_layer.BACKEND = counting
    if backend == "inductor":
        torch._inductor.config.compile_threads = 1  # others are processes that import torch
        torch._inductor.config.cpp.vec_isa_ok = False  # vectors take most of its time to generate
    return Steps(cfg).train(4), len(graphs)


def _of_tensor_parallel(cfg) -> str:
    from mimo_train.layout import run

    run.compile_faults = lambda cfg: ()  # which would say so before
    try:
        Steps(cfg)
    except UserError as error:
        return str(error)
    return "no error"


def test_layers_that_are_not_torch_s_own_are_refused_where_they_are_built(prose, tmp_path):
    """Which Transformer Engine's are, where it is installed: the config does not say that."""
    cfg = config("gpt_tiny", tmp_path / "run", prose, "layout=language_tp2")
    cfg.train.compile = "layers"
    for said in run_ranks(_of_tensor_parallel, 2, cfg):
        assert said.startswith("modules.language.compile: is layers, and its layers are not torch's in plain calls")


def _messages(cfg) -> list[str]:
    """What a run says on the console."""
    from mimo_train.logging.console import Console
    from mimo_train.training.pretrain import pretrain

    dense_layer.BACKEND, said = "eager", []
    Console.message = lambda console, text: said.append(text)
    pretrain(cfg)
    return said


def test_the_wait_for_the_compiler_is_announced(prose, tmp_path):
    cfg = config("gpt_tiny", tmp_path / "run", prose, "train.iters=1")
    remark = "train.compile: the layers of modules.language are compiled in the first step"
    for choice, times in (("none", 0), ("layers", 1), ("layers", 0)):  # the last start has no step to make
        cfg.train.compile = choice
        cfg.run.dir = str(tmp_path / choice)
        (said,) = run_ranks(_messages, 1, cfg)
        assert sum(text.startswith(remark) for text in said) == times


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_of_layers_that_are_not_compiled(name, digits, prose, tmp_path):
    layout, *others = RUNS[name]
    demo, ranks = ("vlm_digits", 1) if layout == ONE else ("gpt_tiny", 2)
    shards = digits if demo == "vlm_digits" else prose
    cfg = config(demo, tmp_path / "run", shards, layout, *others)
    plain = [curve for curve, graphs in run_ranks(_curves, ranks, cfg, "none") if not graphs]
    cfg.train.compile = "layers"
    found = run_ranks(_curves, ranks, cfg, "aot_eager")
    assert len(plain) == ranks
    assert max(largest_difference(whole(plain), whole([curve for curve, _ in found]))) < 1e-5
    for _, graphs in found:
        # For each module in front of attention and behind it, recomputed or not, of one row, several, or as many as
        # there are tokens in one: for all layers, and not more with each length.
        assert 2 <= graphs <= (16 if demo == "vlm_digits" else 8)


def test_the_compiler_of_a_run_gives_these_numbers_too(prose, tmp_path):
    cfg = config("gpt_tiny", tmp_path / "run", prose)
    ((plain, _),) = run_ranks(_curves, 1, cfg, "none")
    cfg.train.compile = "layers"
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    ((found, graphs),) = run_ranks(_curves, 1, cfg, "inductor")
    assert max(largest_difference(whole([plain]), whole([found]))) < 1e-5
    assert 2 <= graphs <= 8

"""What is frozen costs nothing but its forward pass, and freezing never changes numbers."""

import functools
from collections.abc import Callable

import pytest

from mimo_train.layout.run import resolve
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, largest_difference
from tests.dist.steps import Steps, whole


def vlm(digits, run_dir, *overrides: str):
    return config("vlm_digits", run_dir, digits, "train.iters=20", "optim.warmup_iters=0", *overrides)


def _curve(cfg, steps: int = 3) -> list[tuple]:
    return Steps(cfg).train(steps)


def curve(cfg, steps: int = 3) -> list[tuple]:
    return whole(run_ranks(_curve, resolve(cfg).layout.world_size, cfg, steps))


@pytest.fixture(scope="module")
def on_one_process(digits, tmp_path_factory) -> Callable[..., list[tuple]]:
    """Gives the curve of so many steps with some keys on one process, which are trained once."""

    @functools.cache
    def train(steps: int, *keys: str) -> list[tuple]:
        return curve(vlm(digits, tmp_path_factory.mktemp("one"), "layout=one_process", *keys), steps)

    return train


@pytest.mark.parametrize(
    "frozen",
    [
        ("modules.language.freeze=['embedding.*']", "modules.images.freeze=[encoder, projector]"),
        ("modules.images.freeze=['encoders.images.patch_embedding.*']",),
        ("modules.images.freeze=[encoder, projector]", "modules.language.freeze_until={'embedding.*': 2}"),
    ],
    ids=["embedding", "patch embedding", "embedding until step 2"],
)
def test_recomputed_layers_behind_frozen_weights_learn(frozen, digits, tmp_path):
    """Torch's checkpoint gives weights no gradient where the input of their layer needs none."""
    kept = curve(vlm(digits, tmp_path / "kept", "layout=one_process", *frozen))
    everywhere = ("train.recompute=full",)
    of_each = ("modules.images.recompute=full", "modules.language.recompute=full")
    for part, recompute in enumerate((everywhere, of_each)):
        run_dir = tmp_path / f"again{part}"
        recomputed = curve(vlm(digits, run_dir, "layout=one_process", *recompute, *frozen))
        assert max(largest_difference(kept, recomputed)) < TOLERANCE
    assert kept[-1][1] < kept[0][1]


BIASES = ("modules.language.llm.bias=true", "modules.language.freeze=['*linear_qkv.weight']")
UNTIL = (BIASES[0], "modules.language.freeze_until={'*linear_qkv.weight': 2}")
LINEAR = ("projector@modules.images.projector=linear", "modules.images.freeze=['input_projections.*weight']")


def _learned(cfg, steps: int) -> tuple[list[tuple], set[str]]:
    """The curve of some steps, and the names of trained biases that they have changed."""
    run = Steps(cfg)
    before, points = run.parameters(), run.train(steps)
    return points, {name for name, now in run.parameters().items() if "bias" in name and (now != before[name]).any()}


@pytest.mark.parametrize(
    ("given", "recompute"),
    [(BIASES, "none"), (UNTIL, "selective"), (LINEAR, "selective")],
    ids=["layers", "layers until step 2", "projector"],
)
def test_biases_beside_frozen_weights_learn_at_every_layout(given, recompute, digits, tmp_path):
    """Megatron-Core's layer with a frozen weight gives its bias no gradient; one rank that computes a layer in plain
    calls of torch does."""
    cut = ("layout=one_process", *(f"modules.{name}.layout.tp=2" for name in ("images", "language")))
    cfgs = [
        vlm(digits, tmp_path / "one", "layout=one_process", *given),
        vlm(digits, tmp_path / "cut", *cut, f"train.recompute={recompute}", *given),
    ]
    one, other = (run_ranks(_learned, ranks, cfg, 3) for ranks, cfg in enumerate(cfgs, 1))
    part = "input_projections" if given is LINEAR else "linear_qkv.bias"
    for _, learned in (*one, *other):
        assert any(part in name for name in learned), learned
    curves = [whole([points for points, _ in ranks]) for ranks in (one, other)]
    assert max(largest_difference(*curves)) < TOLERANCE


STAGE_ONE = [f"encoders.images.{part}.*" for part in ("patch_embedding", "layers.layers.0", "layers.layers.1")]


FIRST_STAGE = [*STAGE_ONE, "*position_embedding"]


@pytest.mark.parametrize(
    ("frozen", "recompute"),
    [(STAGE_ONE[:1], "selective"), (STAGE_ONE[:1], "full"), (FIRST_STAGE, "none"), (FIRST_STAGE, "full")],
    ids=["patches-selective", "patches-full", "first stage-none", "first stage-full"],
)
def test_recomputed_encoder_stages_learn_behind_frozen_weights(frozen, recompute, on_one_process, digits, tmp_path):
    """Two layers, then one: the second stage's input needs a gradient or none."""
    freeze = (f"modules.images.freeze=[{','.join(repr(name) for name in frozen)}]",)
    common = ("modules.images.encoder.num_layers=3", *freeze)
    stages = ("layout=two_processes", "modules.images.layout.pp=2", f"modules.images.recompute={recompute}")
    staged = curve(vlm(digits, tmp_path, *common, *stages))
    assert max(largest_difference(on_one_process(3, *common), staged)) < TOLERANCE


def _costs(cfg, steps: int) -> dict:
    """What freezing saves, on this rank: numbers in gradient buffers and optimizer states by module, whether features
    of a step had a graph, and messages of every step by way."""
    import torch.distributed as dist

    from mimo_train.models.mimo import PlacedMimoModel
    from mimo_train.models.parameters import modules_of
    from mimo_train.parallel.bridge import exchange

    messages, graphs = [], []
    original, encode = exchange.Bridge._exchange, PlacedMimoModel._encode

    def counted(self, given, taken=None, parts=()):
        messages[-1]["sent"] += sum(part.peer != dist.get_rank() for _, part in given)
        messages[-1]["received"] += sum(part.peer != dist.get_rank() for part in parts)
        return original(self, given, taken, parts)

    def looked_at(self, inputs, received):
        outputs = encode(self, inputs, received)
        graphs[-1].update(bool(output.grad_fn) or output.requires_grad for output in outputs.values())
        return outputs

    exchange.Bridge._exchange, PlacedMimoModel._encode = counted, looked_at
    run = Steps(cfg)
    for _ in range(steps):
        messages.append({"sent": 0, "received": 0})
        graphs.append(set())
        run.train(1)
    return {
        "buffers": {
            name: sum(buffer.grad_data.numel() for chunk in chunks for buffer in chunk.buffers)
            for name, chunks in modules_of(run.model).items()
        },
        "states": {
            name: 0
            if info.optimizer is None
            else sum(len(group["params"]) for each in info.optimizer.chained_optimizers for group in each.param_groups)
            for name, info in run.optimizer.module_infos.items()
        },
        "graphs": [sorted(seen) for seen in graphs],
        "messages": messages,
    }


MICROBATCHES = ("train.global_batch_size=16", "train.micro_batch_size=4")
"""Four microbatches, each with images on every rank."""
WHOLLY = "modules.images.freeze=[encoder, projector]"


@pytest.mark.parametrize("layout", ["two_processes", "images_dp2_language_dp1"])
def test_a_wholly_frozen_encoder_module_has_no_buffers_no_graph_and_no_gradient_messages(layout, digits, tmp_path):
    cfg = vlm(digits, tmp_path, f"layout={layout}", *MICROBATCHES, WHOLLY)
    *encoders, language = run_ranks(_costs, resolve(cfg).layout.world_size, cfg, 2)
    for rank in encoders:
        assert rank["buffers"] == {"images": 0} and rank["states"]["images"] == 0
        assert rank["graphs"] == [[False], [False]]
        assert [step["received"] for step in rank["messages"]] == [0, 0]
        assert all(step["sent"] for step in rank["messages"])
    assert [step["sent"] for step in language["messages"]] == [0, 0]
    assert [step["received"] for step in language["messages"]] == [
        sum(rank["messages"][step]["sent"] for rank in encoders) for step in range(2)
    ]


@pytest.mark.parametrize(
    ("frozen", "returned"),
    [
        ("modules.images.freeze=[encoder]", [0, 0]),
        ("modules.images.freeze=['encoders.*layers.layers.0.*', 'encoders.*embedding*']", [0, 0]),
        ("modules.images.freeze_until={encoder: 1}", [0, 4]),
    ],
    ids=["encoder", "first stage", "until step 1"],
)
def test_no_gradient_goes_to_a_stage_of_an_encoder_that_needs_none(frozen, returned, digits, tmp_path):
    stages = "modules.images.layout.pp=2", "modules.images.encoder.num_layers=2", *MICROBATCHES, frozen
    cfg = vlm(digits, tmp_path / "staged", "layout=two_processes", *stages)
    ranks = run_ranks(_curve_and_returned, 3, cfg)
    assert ranks[1][1] == returned
    one = curve(vlm(digits, tmp_path / "one", "layout=one_process", *stages[1:]), 2)
    assert max(largest_difference(one, whole([numbers for numbers, _ in ranks]))) < TOLERANCE


def _curve_and_returned(cfg) -> tuple[list[tuple], list[int]]:
    """Curve, and by step the gradients that this rank sent to the stage before."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    returned, communicate = [], P2PCommunicator._communicate

    def counted(self, *, tensor_send_prev, **options):
        returned[-1] += tensor_send_prev is not None
        return communicate(self, tensor_send_prev=tensor_send_prev, **options)

    P2PCommunicator._communicate = counted
    run, numbers = Steps(cfg), []
    for _ in range(2):
        returned.append(0)
        numbers += run.train(1)
    return numbers, returned


def test_gradients_travel_from_the_step_on_that_needs_them(digits, tmp_path):
    until = "modules.images.freeze_until={encoder: 2, projector: 1}"
    cfg = vlm(digits, tmp_path, "layout=two_processes", *MICROBATCHES, until)
    images, language = run_ranks(_costs, 2, cfg, 3)
    assert images["graphs"] == [[False], [True], [True]]
    assert images["messages"][0]["received"] == 0 < images["messages"][1]["received"]
    assert [step["received"] for step in images["messages"]] == [step["sent"] for step in language["messages"]]


def test_a_frozen_encoder_keeps_only_what_its_projector_needs(digits, tmp_path):
    cfg = vlm(digits, tmp_path, "layout=one_process", "modules.images.freeze=[encoder]")
    (saved,) = run_ranks(_saved_by_encoder, 1, cfg)
    assert saved["frozen"] == 0 < saved["trained"]


def _saved_by_encoder(cfg) -> dict[str, int]:
    """Tensors that a forward pass of the encoder, without its projector, keeps for a backward pass."""
    import torch

    from mimo_train.models.parameters import modules_of

    run = Steps(cfg)
    run.session.data.advance()
    pixels = next(run.session.data)["modality_inputs"]["images"]["images"]["pixels"]
    (module,) = modules_of(run.model)["images"]
    encoder, kept = module.module.encoders["images"], {}
    for state in ("frozen", "trained"):
        encoder.requires_grad_(state == "trained")
        tensors = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, of=tensors: of.append(tensor) or tensor, lambda x: x
        ):
            assert encoder(pixels=pixels).requires_grad == (state == "trained")
        kept[state] = len(tensors)
    return kept


def test_only_the_projector_trains_behind_a_frozen_language_model(digits, tmp_path):
    frozen = ("modules.images.freeze=[encoder]", "modules.language.freeze=[llm]")
    one = curve(vlm(digits, tmp_path / "one", "layout=one_process", *frozen))
    cfg = vlm(digits, tmp_path / "two", "layout=images_dp1_language_tp2", *frozen)
    assert max(largest_difference(one, curve(cfg))) < TOLERANCE
    assert one[-1][1] < one[0][1]
    images, *language = run_ranks(_costs, 3, cfg, 1)
    assert images["buffers"]["images"] > 0
    assert [(rank["buffers"]["language"], rank["states"]["language"]) for rank in language] == [(0, 0)] * 2


@pytest.mark.parametrize(
    "layout",
    [
        ("layout=two_processes",),
        ("layout=images_tp2_language_pp2", "data.pack=true"),
        ("layout=one_process", "modules.images.layout.dp=2", "modules.language.layout.tp=2"),
    ],
    ids=["two processes", "tp2 and pp2", "shared ranks"],
)
@pytest.mark.parametrize(
    "frozen",
    [(WHOLLY,), ("modules.images.freeze_until={encoder: 2, projector: 2}",)],
    ids=["wholly", "until step 2"],
)
def test_numbers_without_the_way_back_are_those_of_one_process(layout, frozen, on_one_process, digits, tmp_path):
    more = curve(vlm(digits, tmp_path, *layout, *frozen), 4)
    assert max(largest_difference(on_one_process(4, *frozen), more)) < TOLERANCE

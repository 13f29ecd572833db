"""Projectors compute what transformers' connectors compute, at tp 1 and 2, and train alike at every layout; what is
adapted from Megatron-Core, and whether it still has to be."""

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from encoders.projectors.spec import ProjectorSpec, ResamplerSpec
from encoders.projectors.weights import connector
from encoders.weight_map import WeightMap, same, with_biases
from tests.dist.ranks import run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks

BOUND = 1e-5
WIDTH, LANGUAGE_WIDTH, ROWS, COLUMNS = 12, 16, 4, 6
"""Of features, of the language model; patches of an image."""
TEXT = {
    "model_type": "llama", "hidden_size": LANGUAGE_WIDTH, "intermediate_size": 20, "hidden_act": "silu",
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def _idefics3() -> tuple:
    from transformers.models.idefics3 import configuration_idefics3, modeling_idefics3

    made = configuration_idefics3.Idefics3Config(vision_config={"hidden_size": WIDTH}, text_config=TEXT)
    made.scale_factor = 2
    connector = modeling_idefics3.Idefics3Connector(made)
    return connector, lambda rows: connector(rows[:, : ROWS * ROWS])  # squares only


def _internvl() -> tuple:
    from transformers.models.internvl import configuration_internvl, modeling_internvl

    made = configuration_internvl.InternVLConfig(vision_config={"hidden_size": WIDTH}, text_config=TEXT)
    projector = modeling_internvl.InternVLMultiModalProjector(made)
    shuffle = modeling_internvl.InternVLModel.pixel_shuffle

    def run(rows: torch.Tensor) -> torch.Tensor:
        shuffled = shuffle(None, rows.unflatten(1, (ROWS, COLUMNS)), 0.5)
        return projector(shuffled.flatten(1, 2))

    return projector, run


def _qwen3() -> tuple:
    """The merger of DeepStack, whose norm is behind the joining."""
    from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl

    made = configuration_qwen3_vl.Qwen3VLVisionConfig(hidden_size=WIDTH, out_hidden_size=LANGUAGE_WIDTH)
    merger = modeling_qwen3_vl.Qwen3VLVisionPatchMerger(made, use_postshuffle_norm=True)

    def run(rows: torch.Tensor) -> torch.Tensor:
        squares = rows.unflatten(1, (ROWS // 2, 2, COLUMNS // 2, 2)).transpose(2, 3)
        return merger(squares.reshape(-1, WIDTH)).unflatten(0, (len(rows), -1))

    return merger, run


def _idefics2() -> tuple:
    from transformers.models.idefics2 import configuration_idefics2, modeling_idefics2

    perceiver = {
        "hidden_size": LANGUAGE_WIDTH, "resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4,
        "resampler_head_dim": 6, "num_key_value_heads": 2, "hidden_act": "silu",
    }  # fmt: skip
    made = configuration_idefics2.Idefics2Config(
        vision_config={"hidden_size": WIDTH}, text_config=TEXT, perceiver_config=perceiver
    )
    made.perceiver_config._attn_implementation = "eager"
    connector = modeling_idefics2.Idefics2Connector(made)
    return connector, lambda rows: connector(rows, torch.ones(rows.shape[:2], dtype=torch.int64))


def _mlp(*names: str, hidden: int, norm: str = "") -> WeightMap:
    first, second = names
    layers = [("encoder.linear_fc1", first, hidden), ("encoder.linear_fc2", second, LANGUAGE_WIDTH)]
    rules = [same(f"{ours}.weight", f"{theirs}.weight", rows) for ours, theirs, rows in layers]
    return WeightMap((*with_biases(rules), *with_biases([same("norm.weight", f"{norm}.weight", 4 * WIDTH)])))


def _known(spec: ProjectorSpec, name: str) -> WeightMap:
    """Of a connector whose names an export writes."""
    found = connector(spec, WIDTH * spec.merge**2, LANGUAGE_WIDTH)
    assert found is not None and found[0] == name
    return found[1].under("")


IDEFICS3 = ProjectorSpec(kind="linear", merge=2, bias=False)
INTERNVL = ProjectorSpec(merge=2, norm="LayerNorm")
IDEFICS2 = ProjectorSpec(
    ffn_hidden_size=20,
    activation="swiglu",
    bias=False,
    resampler=ResamplerSpec(latents=5, num_layers=2, num_attention_heads=4, num_query_groups=2, head_size=6),
)
CONNECTORS = {
    "idefics3": (_idefics3, IDEFICS3, _known(IDEFICS3, "Idefics3")),
    "internvl": (_internvl, INTERNVL, _known(INTERNVL, "InternVL")),
    "qwen3-vl": (
        _qwen3,
        ProjectorSpec(merge=2, norm="LayerNorm", norm_epsilon=1e-6, ffn_hidden_size=4 * WIDTH),
        _mlp("linear_fc1", "linear_fc2", hidden=4 * WIDTH, norm="norm"),
    ),
    "idefics2": (_idefics2, IDEFICS2, _known(IDEFICS2, "Idefics2")),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, float]]:
    """Errors of each of two ranks, by connector, tp and what is compared."""
    return run_ranks(compare_all, 2, tmp_path_factory.mktemp("connectors"))


def test_features_and_gradients_are_those_of_transformers(found):
    for name in CONNECTORS:
        for size in (1, 2):
            errors = {key: error for key, error in found[0].items() if key.startswith(f"{name} tp{size}")}
            assert len(errors) > 1 and max(errors.values()) < BOUND, errors
    assert max(found[1].values()) < BOUND


def compare_all(folder: Path) -> dict[str, float]:
    import torch.distributed as dist
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mimo_train.layout.ranks import ModuleLayout, RunLayout
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups

    torch.set_num_threads(1)
    devices.install("cpu")
    devices.init_process_group("cpu", 60.0)
    layouts = {
        f"tp{tp}": ModuleLayout(name="images", tp=tp, pp=1, dp=1, cp=1, ep=1, sp=False, first_rank=0) for tp in (1, 2)
    }
    groups = build_groups(RunLayout(layouts, (), (0, 1))).collections
    model_parallel_cuda_manual_seed(1, tp_rank=groups["tp2"].tp.rank(), ep_rank=0, etp_rank=0)
    errors: dict[str, float] = {}
    for name, (make, spec, weights) in CONNECTORS.items():
        torch.manual_seed(5)
        connector, run = make()
        place = folder / name
        if dist.get_rank() == 0:
            place.mkdir()
        expected = _reference(connector, run, place)
        dist.barrier()
        for label, layout in layouts.items():
            if label in groups:
                own = _errors(spec, weights, layout, groups[label], place, *expected)
                errors |= {f"{name} {label} {what}": error for what, error in own.items()}
    return errors


def _reference(connector, run, place: Path) -> tuple[torch.Tensor, torch.Tensor]:
    import torch.distributed as dist

    with torch.no_grad():
        for name, value in connector.named_parameters():
            norm = value.ndim == 1 and name.endswith("weight")
            value.normal_(1.0 if norm else 0.0, 0.3 if value.ndim == 1 else value[0].numel() ** -0.5)
    rows = torch.randn(3, ROWS * COLUMNS, WIDTH)
    output = run(rows)
    (output * _weights_of(output)).sum().backward()
    if dist.get_rank() == 0:
        parameters = {name: value.detach() for name, value in connector.named_parameters()}
        save_file(parameters, place / "model.safetensors")
        (place / "gradients").mkdir()
        save_file(
            {name: value.grad.contiguous() for name, value in connector.named_parameters()},
            place / "gradients" / "model.safetensors",
        )
    return rows, output.detach()


def _weights_of(output: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 2, output.numel()).view_as(output).sin()


def _errors(spec, weights, layout, pgs, place, rows, expected) -> dict[str, float]:
    from encoders.native.vit.patch_spec import VisionSpec
    from encoders.native.vit.patches import merge_patches
    from mimo_train.config.llm_spec import LlmSpec
    from mimo_train.config.schema import ConfigContainer
    from mimo_train.config.schema_modules import ModuleConfig
    from mimo_train.estimate.parameters import projector_parameters
    from mimo_train.hf.fill import Reader
    from mimo_train.hf.tensors import TensorFolder
    from mimo_train.models.encoder_module import Projector
    from mimo_train.models.layers import projector_submodules
    from mimo_train.models.norms import norm_class
    from mimo_train.models.parameters import Cut
    from mimo_train.models.transformer_config import projector_config, resampler_config

    llm = LlmSpec(hidden_size=LANGUAGE_WIDTH, num_attention_heads=2)
    images = ModuleConfig(encoder=VisionSpec(hidden_size=WIDTH), projector=spec)
    cfg = ConfigContainer(modules={"images": images, "language": ModuleConfig(llm=llm)})
    width = WIDTH * spec.merge**2
    projector = Projector(
        projector_config(cfg, layout),
        spec,
        resampler_config(cfg, layout),
        norm_class(False),
        input_size=width,
        pg_collection=pgs,
        submodules=projector_submodules(spec.kind, False),
        projector_type={"mlp": "mlp", "linear": "affine"}[spec.kind],
    )
    counted = projector_parameters(spec, width, LANGUAGE_WIDTH, tp=layout.tp)
    assert counted == sum(one.numel() for one in projector.parameters())
    named = dict(projector.named_parameters())
    cuts = {
        name: Cut.of(one, pgs.tp.rank(), pgs.tp.size()) if getattr(one, "tensor_model_parallel", False) else Cut()
        for name, one in named.items()
    }
    Reader(TensorFolder(place, "folder"), weights, "folder").fill({name: one.data for name, one in named.items()}, cuts)
    columns = ROWS if spec.kind == "linear" else COLUMNS
    features = merge_patches(rows[:, : ROWS * columns], ROWS, columns, spec.merge)
    output = projector(features.flatten(0, 1), [features.size(1)] * len(features)).view_as(expected)
    errors = {"output": float((output - expected).abs().max() / expected.abs().max())}
    (output * _weights_of(output)).sum().backward()
    gradients = {name: torch.full_like(one, 7.0) for name, one in named.items()}
    Reader(TensorFolder(place / "gradients", "folder"), weights, "folder").fill(gradients, cuts)
    largest = max(float(one.abs().max()) for one in gradients.values())
    for name, one in named.items():
        errors[name] = float((one.grad - gradients[name]).abs().max()) / largest
    return errors


def test_rows_of_media_of_several_sizes_stay_in_order():
    assert run_ranks(_mixed, 1)[0] < 1e-6


def _mixed() -> float:
    """Largest difference between media of several sizes together and each by itself."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from encoders.native.vit.patch_spec import VisionSpec
    from encoders.projectors.resampler import PerceiverResampler
    from mimo_train.config.llm_spec import LlmSpec
    from mimo_train.config.schema import ConfigContainer
    from mimo_train.config.schema_modules import ModuleConfig
    from mimo_train.layout.ranks import ModuleLayout, RunLayout
    from mimo_train.models.norms import norm_class
    from mimo_train.models.transformer_config import resampler_config
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups

    devices.install("cpu")
    devices.init_process_group("cpu", 60.0)
    layout = ModuleLayout(name="images", tp=1, pp=1, dp=1, cp=1, ep=1, sp=False, first_rank=0)
    groups = build_groups(RunLayout({"images": layout}, (), (0,))).collections["images"]
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    spec = CONNECTORS["idefics2"][1]
    modules = {
        "images": ModuleConfig(encoder=VisionSpec(), projector=spec),
        "language": ModuleConfig(llm=LlmSpec(hidden_size=LANGUAGE_WIDTH, num_attention_heads=2)),
    }
    resampler = PerceiverResampler(
        resampler_config(ConfigContainer(modules=modules), layout), 5, norm_class(False), groups.tp
    )
    counts = [3, 7, 3, 1, 7]
    rows = torch.randn(sum(counts), LANGUAGE_WIDTH)
    alone = torch.cat([resampler(part, [len(part)]) for part in rows.split(counts)])
    assert alone.shape == (25, LANGUAGE_WIDTH)
    return float((resampler(rows, counts) - alone).abs().max())


PLACE = "modules.images.projector"
LATENTS = (
    f"{PLACE}.resampler.latents=3",
    f"{PLACE}.resampler.num_layers=1",
    f"{PLACE}.resampler.num_attention_heads=4",
)
GATED = (f"{PLACE}.activation=swiglu", f"{PLACE}.norm=RMSNorm", f"{PLACE}.bias=false")
TWO_LAYERS = "modules.images.encoder.num_layers=2"
OWN_SIZES = "encoder@modules.images.encoder=vit_tiny_native"


@pytest.mark.parametrize(
    ("keys", "layout"),
    [
        ((*LATENTS, OWN_SIZES), ("layout=images_tp2_language_pp2",)),
        ((*GATED, TWO_LAYERS), ("layout=images_pp2_language_one",)),
    ],
    ids=["resampler", "gated, with a norm"],
)
def test_a_layout_changes_no_number(keys, layout, digits, tmp_path):
    def train(name: str, *overrides: str) -> list[tuple]:
        own = ("train.iters=4", *keys, *overrides)
        return curve(train_on_ranks(config("vlm_digits", tmp_path / name, digits, *own)))

    one, other = train("one", "layout=one_process"), train("other", *layout)
    assert max(largest_difference(one, other)) < TOLERANCE
    assert one[-1][1] < one[0][1]


def _projector_leaves_its_bias_in_parts() -> bool:
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector

    return "skip_bias_add=True" in inspect.getsource(MultimodalProjector.__init__)


def test_linear_projectors_still_need_a_layer_of_ours():
    assert run_ranks(_projector_leaves_its_bias_in_parts, 1) == [True], "see mimo_train.models.layers._gathered_linear"

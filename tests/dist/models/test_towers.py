"""Encoders with the weights of transformers' models give their hidden states, loss and gradients, at every layout."""

import pytest

from tests.dist.ranks import run_ranks
from tests.towers import TOWERS, publish

BOUND = 1e-5
"""Largest difference, of the largest value that is expected."""
LAYOUTS = {"one": (1, 1, 0), "tp2": (2, 1, 0), "pp2": (1, 2, 2), "tp2 pp2": (2, 2, 0)}
"""tp, pp and the first rank."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four ranks found, by tower."""
    root = tmp_path_factory.mktemp("towers")
    published = {name: publish(tower, root / name) for name, tower in TOWERS.items()}
    return run_ranks(compare_all, 4, published)


@pytest.mark.parametrize("name", TOWERS)
def test_features_are_those_of_transformers(name, found):
    readings, names = list(TOWERS[name].readings), {one for rank in found for one in rank[name]}
    wanted = {f"{reading}: {layout}" for reading in readings for layout in LAYOUTS}
    wanted |= {f"{readings[0]}: {layout} {what}" for layout in LAYOUTS for what in ("loss", "norm")}
    assert wanted - {"layer -3: pp2", "layer -3: tp2 pp2"} <= names
    worst = {one: error for rank in found for one, error in rank[name].items() if not error < BOUND}
    assert not worst


def compare_all(published: dict) -> dict[str, dict[str, float]]:
    """Errors on this rank, of features by reading and layout, and of loss, gradient norm and gradients."""
    import torch
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mimo_train.layout.ranks import ModuleLayout, RunLayout
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups

    torch.set_num_threads(1)
    devices.install("cpu")
    devices.init_process_group("cpu", 60.0)
    layouts = {
        name: ModuleLayout(name="images", tp=tp, pp=pp, dp=1, cp=1, ep=1, sp=False, first_rank=first)
        for name, (tp, pp, first) in LAYOUTS.items()
    }
    pgs = build_groups(RunLayout(layouts, (), (0, 1, 2, 3))).collections
    model_parallel_cuda_manual_seed(1, tp_rank=pgs["tp2 pp2"].tp.rank(), ep_rank=0, etp_rank=0)
    return {name: compare(tower, layouts, pgs) for name, tower in published.items()}


def compare(tower, layouts, groups) -> dict[str, float]:
    from dataclasses import replace

    from encoders.registry import FAMILIES

    family = next(one for one in FAMILIES.values() if tower.config["model_type"] in one.readers)
    values = family.read(tower.config, tower.preprocessor)
    errors: dict[str, float] = {}
    for number, (reading, keys) in enumerate(tower.readings.items()):
        spec = family.spec(**values | keys)
        assert not spec.faults() + spec.joint_faults(tower.merge)
        for name, layout in layouts.items():
            if name not in groups or spec.built_layers < layout.pp:
                continue
            variants = [layout]
            if name == "tp2" and spec.token_unit(tower.merge) % 2 == 0:
                variants.append(replace(layout, sp=True))
            for variant in variants:
                label = name + (" sp" if variant.sp else "")
                found = compare_one(tower, spec, variant, groups[name], reading, gradients=number == 0)
                errors |= {f"{reading}: {label}{what}": error for what, error in found.items()}
    return errors


def compare_one(tower, spec, layout, pgs, reading: str, *, gradients: bool) -> dict[str, float]:
    """Errors of one encoder, on the ranks that know them."""
    import torch
    import torch.distributed as dist
    from megatron.core.transformer.enums import AttnMaskType

    from encoders.registry import FAMILIES
    from mimo_train.config.llm_spec import LlmSpec
    from mimo_train.config.schema import ConfigContainer
    from mimo_train.config.schema_modules import ModuleConfig
    from mimo_train.estimate.parameters import encoder_parameters
    from mimo_train.models.layers import layer_spec
    from mimo_train.models.norms import norm_class
    from mimo_train.models.parameters import global_names
    from mimo_train.models.transformer_config import encoder_config
    from tests.towers import loss_of

    cfg = ConfigContainer(modules={"images": ModuleConfig(encoder=spec), "language": ModuleConfig(llm=LlmSpec())})
    config = encoder_config(cfg, layout)
    encoder = FAMILIES[spec.family].load()(
        config, spec, layer_spec(config, AttnMaskType.no_mask, False), norm_class(False), tower.merge, pgs
    )
    stage, stages = pgs.pp.rank(), pgs.pp.size()
    counted = encoder_parameters(spec, tp=layout.tp, stage=stage, stages=stages)
    assert counted == sum(one.numel() for one in encoder.parameters())
    read(encoder, spec, pgs, tower.folder, {name: one.data for name, one in global_names(encoder).items()})

    if layout.size == 1:
        require_round_trip(encoder, spec, tower.folder)

    media = [one for group in tower.media for one in group]
    sizes = [(len(one), spec.sample_rate) if one.ndim == 1 else tuple(one.shape[-2:]) for one in media]
    for size in set(sizes):
        assert spec.input_size(*size, merge=tower.merge) == size
    received = None
    if stage:
        rows = sum(spec.inner_tokens(*size, merge=tower.merge) for size in sizes)
        received = torch.empty(rows, spec.hidden_size)
        dist.recv(received, group=pgs.pp, group_src=0)
        received.requires_grad_()
    output = encoder(media if not stage else None, sizes, received)
    errors = {}
    if stage < stages - 1:
        dist.send(output.detach(), group=pgs.pp, group_dst=1)
        gradient = torch.empty_like(output)
        if gradients:
            dist.recv(gradient, group=pgs.pp, group_src=1)
            output.backward(gradient)
    else:
        expected = tower.features[reading]
        assert len(output) == sum(spec.num_tokens(*size, merge=tower.merge) for size in sizes)
        errors[""] = difference(output, expected.view_as(output))
        if gradients:
            loss = loss_of(output)
            errors[" loss"] = abs(loss.item() / tower.loss - 1)
            loss.backward()
            if stage:
                dist.send(received.grad, group=pgs.pp, group_dst=0)
    if gradients:
        named = global_names(encoder)
        expected = {name: torch.full_like(one, 7.0) for name, one in named.items()}
        read(encoder, spec, pgs, tower.gradients, expected)
        largest = max(float(one.abs().max()) for one in expected.values())
        for name, one in named.items():
            if getattr(one, "sequence_parallel", False):
                dist.all_reduce(one.grad, group=pgs.tp)
            errors[f" {name}"] = float((one.grad - expected[name]).abs().max()) / largest
        both = [one.grad for one in named.values()], expected.values()
        norm, wanted = (sum(float(part.double().square().sum()) for part in parts) ** 0.5 for parts in both)
        errors[" norm"] = abs(norm / wanted - 1)
    return errors


def require_round_trip(encoder, spec, folder) -> None:
    """Tensors that are made of the parameters are those of the directory, bit for bit."""
    import torch

    from encoders.registry import FAMILIES
    from mimo_train.hf.documents import Written
    from mimo_train.hf.export import planned_tensors, tensors_of
    from mimo_train.hf.tensors import TensorFolder

    class Parameters(dict):
        load = dict.__getitem__

    parameters = Parameters({name: one.data for name, one in encoder.named_parameters()})
    weights, there = FAMILIES[spec.family].weight_map(spec), TensorFolder(folder, "folder")
    part = Written("images", weights)
    planned = planned_tensors(part, parameters, torch.float32)
    for plan, value in zip(planned, tensors_of(part, parameters, torch.float32), strict=True):
        assert torch.equal(value, there.whole(plan.name)), plan.name


def difference(one, other) -> float:
    return float((one - other).abs().max() / other.abs().max())


def read(encoder, spec, pgs, folder, into) -> None:
    """Values of a directory, for the parameters of an encoder on this rank: weights, or their gradients, of which those
    of computed positions are no sinusoids."""
    from dataclasses import replace

    from encoders.registry import FAMILIES
    from mimo_train.hf.fill import Reader
    from mimo_train.hf.matching import require_all_used
    from mimo_train.hf.tensors import TensorFolder
    from mimo_train.models.parameters import Cut, global_names

    tensors = TensorFolder(folder, "folder")
    reader = Reader(tensors, replace(FAMILIES[spec.family].weight_map(spec), sinusoids=()), "folder")
    require_all_used([reader], "folder")
    cuts = {
        name: Cut.of(one, pgs.tp.rank(), pgs.tp.size()) if getattr(one, "tensor_model_parallel", False) else Cut()
        for name, one in global_names(encoder).items()
    }
    reader.fill(into, cuts)


@pytest.mark.parametrize("name", [one for one in TOWERS if one != "qwen2.5-vl" and "whisper" not in one])
def test_the_names_of_the_directories_are_those_that_transformers_reads(name, tmp_path):
    """So that a map for these directories is one for published ones; of the other two the encoder is a part."""
    publish(TOWERS[name], tmp_path / "tower")
    kind = type(TOWERS[name].model())
    _, found = kind.from_pretrained(tmp_path / "tower", output_loading_info=True)
    assert not any(found[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))

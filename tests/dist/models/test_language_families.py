"""Every family of language models computes what transformers computes, at any layout, from weights that are read as a
run reads them, and comes back bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoders.weight_map import WeightMap
from mimo_train.estimate.parameters import padded_vocab_size
from mimo_train.families.config_json import language_spec
from mimo_train.families.weights import language_map
from tests.dist.models.families import DOCUMENTS, FAMILIES, SAMPLES, SEQUENCE, SIZES, make, tokens
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

PADDED = padded_vocab_size(SIZES["vocab_size"])
TOLERANCE = 1e-5
"""Of the largest expected value."""
LAYOUTS = {
    "one process": ({}, "none"),
    "tp2, sequence parallel": ({"tp": 2}, "none"),
    "pp2, computed again": ({"pp": 2}, "full"),
    "cp2": ({"cp": 2}, "none"),
}
"""Sizes, and `train.recompute`."""
WITHOUT_CP: list[str] = []
"""Models with a block that context parallelism cannot cut."""
PROMPT = 5
"""Tokens of a prompt, which the cache continues."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    folder = tmp_path_factory.mktemp("families")
    (made,) = run_ranks(make, 1, folder, list(FAMILIES))
    return folder, made


@pytest.fixture(scope="module", params=LAYOUTS)
def computed(request, reference, tmp_path_factory) -> tuple[str, dict[str, list[dict]]]:
    """Name of a layout, and what its ranks have of each model."""
    names = [name for name in FAMILIES if request.param != "cp2" or name not in WITHOUT_CP]
    of_layout, recompute = LAYOUTS[request.param]
    sizes = {"tp": 1, "pp": 1, "cp": 1} | of_layout
    layout = [f"modules.language.layout.{axis}={size}" for axis, size in sizes.items()]
    layout.append(f"train.recompute={recompute}")
    cfg = config("gpt_tiny", tmp_path_factory.mktemp("run"), Path("nowhere"), "layout=language_one", *layout, *RUN)
    ranks = run_ranks(compute, sizes["tp"] * sizes["pp"] * sizes["cp"], cfg, reference[0], names)
    return request.param, {name: [rank[name] for rank in ranks] for name in names}


RUN = (
    f"data.sequence_length={SEQUENCE}",
    f"train.global_batch_size={SAMPLES}",
    "train.micro_batch_size=2",
    # Gradients of experts stay whole on their ranks.
    "optim.distributed_optimizer=false",
)


def test_logits_losses_and_gradients_are_those_of_transformers(reference, computed):
    layout, models = computed
    for name, ranks in models.items():
        expected = reference[1][name]
        (loss,) = {rank["loss"] for rank in ranks if rank["loss"] is not None} if layout != "cp2" else [_cp_loss(ranks)]
        assert loss == pytest.approx(expected["loss"], rel=TOLERANCE), (layout, name)
        if layout != "cp2":
            last = {rank["tp"]: rank["logits"] for rank in ranks if rank["logits"] is not None}
            logits = np.concatenate([last[at] for at in sorted(last)], axis=-1)
            assert _difference(logits[..., : SIZES["vocab_size"]], expected["logits"]) < TOLERANCE, (layout, name)
            states = {number: state for rank in ranks for number, state in rank["states"].items()}
            assert len(states) == SIZES["num_hidden_layers"], "of every layer"
            assert all(_difference(states[at], expected["states"][at]) < TOLERANCE for at in states), (layout, name)
            assert (logits[..., SIZES["vocab_size"] :] < -1e30).all(), "padding is never predicted"
        whole = _whole(ranks, "gradient")
        norm = np.sqrt(sum(np.square(value, dtype=np.float64).sum() for value in whole.values()))
        assert norm == pytest.approx(expected["norm"], rel=TOLERANCE), (layout, name)
        spec, weights = _map(reference[0] / name)
        padding = whole["embedding.word_embeddings.weight"][spec.vocab_size :]
        assert not padding.any(), "padding has no gradient"
        theirs = _exported(weights, whole)
        largest = max(np.abs(value).max() for value in expected["gradients"].values())
        for tensor, gradient in expected["gradients"].items():
            if tensor in theirs:  # experts are fused in the memory of transformers
                assert np.abs(theirs[tensor] - gradient).max() < TOLERANCE * largest, (layout, name, tensor)


def test_documents_in_a_row_do_not_see_each_other(reference, computed):
    layout, models = computed
    for name, ranks in models.items():
        expected = reference[1][name]["documents"]
        for places, logits in _joined([rank for rank in ranks if rank["row"] is not None]):
            assert _difference(logits[:, : SIZES["vocab_size"]], expected[places]) < TOLERANCE, (layout, name)


def test_the_cache_gives_the_logits_of_a_whole_pass(reference, computed):
    layout, models = computed
    for name, ranks in models.items() if layout == "one process" else ():
        expected = reference[1][name]["logits"][0, PROMPT - 1 :]
        assert _difference(ranks[0]["continued"][:, : SIZES["vocab_size"]], expected) < TOLERANCE, name


def test_parameters_are_counted(computed):
    layout, models = computed
    for name, ranks in models.items():
        for rank in ranks:
            assert rank["count"] == rank["counted"], (layout, name)


def _joined(ranks: list[dict]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(places in the row, their logits) of each context-parallel rank, from the parts of tensor-parallel ranks."""
    for places in {rank["row"][0].tobytes(): rank["row"][0] for rank in ranks}.values():
        parts = {rank["tp"]: rank["row"][1] for rank in ranks if np.array_equal(rank["row"][0], places)}
        yield places, np.concatenate([parts[at] for at in sorted(parts)], axis=-1)


def _map(folder: Path) -> tuple[Any, WeightMap]:
    found = json.loads((folder / "config.json").read_text())
    spec = language_spec(found)
    return spec, language_map(spec, PADDED, found["model_type"])


def _cp_loss(ranks: list[dict]) -> float:
    return sum(rank["loss"] * rank["tokens"] for rank in ranks) / sum(rank["tokens"] for rank in ranks)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _whole(ranks: list[dict], what: str) -> dict[str, np.ndarray]:
    """Parameters or their gradients, put together from the parts of tensor-parallel ranks."""
    parts: dict[str, dict[int, tuple]] = {}
    for rank in ranks:
        for name, entry in rank["parameters"].items():
            parts.setdefault(name, {})[rank["tp"]] = entry
    whole = {}
    for name, of_ranks in parts.items():
        entries = [of_ranks[at] for at in sorted(of_ranks)]
        dim, sections = entries[0]["dim"], entries[0]["sections"]
        if dim is None:
            whole[name] = entries[0][what]
            continue
        ends = np.cumsum(sections)[:-1] * entries[0][what].shape[dim] // sum(sections)
        parts_of = [np.split(entry[what], ends, dim) for entry in entries]
        whole[name] = np.concatenate([rank[at] for at in range(len(sections)) for rank in parts_of], dim)
    return whole


def _exported(weights: WeightMap, whole: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    counts, theirs = weights.row_counts(), {}
    for rule in weights.rules:
        value, at = whole[rule.ours], 0
        for rows in rule.rows:
            part = value[at : at + rows.count]
            at += rows.count
            if rows.name:
                into = theirs.setdefault(rows.name, np.empty((counts[rows.name], *value.shape[1:]), value.dtype))
                into[rows.first : rows.first + rows.count * rows.step : rows.step] = part
    theirs = {name: value.reshape(weights.stacks().get(name, value.shape)) for name, value in theirs.items()}
    turned = {name for name, stack in weights.stacks().items() if weights.transposed and len(stack) == 3}
    return {name: value.swapaxes(1, 2) if name in turned else value for name, value in theirs.items()}


def compute(cfg, folder: Path, names: list[str], device_type: str = "cpu") -> dict[str, dict]:
    """On a rank: logits, loss, parameters and gradients of each model."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mimo_train.layout.run import resolve
    from mimo_train.parallel import device as devices
    from mimo_train.parallel.groups import build_groups

    device = devices.install(device_type)
    devices.init_process_group(device_type, 1.0)
    groups = build_groups(resolve(cfg).layout)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True, tp_rank=0, ep_rank=0, etp_rank=0)
    return {name: _compute(cfg, groups, folder / name, device) for name in names}


def _compute(cfg, groups, folder: Path, device) -> dict:
    import torch

    from mimo_train.estimate.parameters import module_parameters
    from mimo_train.hf.load import _cut, load_pretrained
    from mimo_train.layout.run import resolve
    from mimo_train.models.build import build_model
    from mimo_train.models.parameters import global_names, router_biases
    from mimo_train.parallel.context import own_part
    from mimo_train.parallel.device import to_device
    from mimo_train.training.step.forward_step import record_losses
    from mimo_train.training.step.losses import StepLosses, divide_gradients
    from mimo_train.training.step.pipeline import Pipeline
    from mimo_train.training.tasks.sft import masked_token_loss
    from mimo_train.training.train_step import reduce_metrics

    spec, _ = _map(folder)
    if spec.num_experts:
        spec.router_balancing = "none"
    cfg.modules["language"].llm, layout = spec, cfg.language.layout
    layout.sp = layout.tp > 1
    run, language = resolve(cfg), groups.collections["language"]
    model = build_model(cfg, run.layout, groups, vocab_size=200, special_token_ids={}, device=device, te=False)
    pipeline = Pipeline(run, groups, model, device)
    (chunk,) = model
    parameters, biases = global_names(chunk), router_biases(chunk)
    cfg.language.pretrained = str(folder)
    assert load_pretrained(cfg, model, groups, PADDED)
    cuts = {name: _cut(value, groups, "language") for name, value in parameters.items()}
    ids = torch.from_numpy(tokens())
    batches = [
        to_device(
            {"input_ids": part[:, :-1], "labels": part[:, 1:], "loss_mask": torch.ones(len(part), SEQUENCE)}
            | {"position_ids": torch.arange(SEQUENCE).expand(len(part), -1)},
            device,
        )
        for part in ids.split(2)
    ]

    def inputs(iterator: Iterator[dict], *names: str) -> dict[str, Any]:
        batch = own_part(next(iterator), language.cp)
        return {name: batch[name] for name in ("input_ids", "position_ids", *names)}

    def predict(iterator, model):
        return model(**inputs(iterator), attention_mask=None), lambda output, non_loss_data: output

    def learn(iterator, model):
        batch = inputs(iterator, "labels", "loss_mask")
        mask = batch.pop("loss_mask")
        return model(**batch, attention_mask=None), lambda output: masked_token_loss(mask, output)

    states = _States(chunk, language.tp if layout.sp else None)
    logits = pipeline.run(predict, iter(batches), forward_only=True, collect_non_loss_data=True)
    states.close()
    chunk.zero_grad_buffer()
    losses = StepLosses({}, pipeline.groups)
    reports = pipeline.run(record_losses(learn, losses), iter(batches))
    divide_gradients(pipeline.chunks, reduce_metrics({"tokens": (1, losses.local_tokens())}, device)["tokens"])
    total, count = sum(report["lm loss"] for report in reports) if reports else (None, None)
    expected = module_parameters(
        cfg, "language", PADDED, tp=layout.tp, stage=language.pp.rank(), stages=language.pp.size()
    )
    parameters_and_gradients = {
        name: {"weight": value.numpy(force=True).copy(), "gradient": value.main_grad.numpy(force=True).copy()}
        | {"dim": cuts[name].dim if cuts[name].ranks > 1 else None, "sections": cuts[name].sections}
        for name, value in parameters.items()
    }
    parameters_and_gradients |= {
        name: {
            "weight": value.numpy(force=True).copy(),
            "gradient": np.zeros(len(value)),
            "dim": None,
            "sections": (1,),
        }
        for name, value in biases.items()
    }
    return {
        "row": _row(chunk, language.cp) if language.pp.size() == 1 else None,
        "continued": _continued(pipeline) if layout.tp * layout.cp * layout.pp == 1 else None,
        "tp": language.tp.rank(),
        "logits": torch.cat(logits).numpy(force=True) if logits else None,
        "states": states.found,
        "loss": None if total is None else (total / count).item(),
        "tokens": None if count is None else count.item(),
        "count": sum(parameter.numel() for parameter in chunk.parameters()),
        "counted": sum(part.total for part in expected.values()),
        "parameters": parameters_and_gradients,
    }


def _row(chunk, cp_group) -> tuple[np.ndarray, np.ndarray]:
    """Places of this rank in a row of several documents, and their logits."""
    import torch

    from mimo_train.models.documents import Documents
    from mimo_train.parallel.context import own_part
    from mimo_train.parallel.device import to_device

    ids = torch.from_numpy(tokens())
    row = {
        "input_ids": torch.cat([ids[row, :length] for row, length in enumerate(DOCUMENTS)])[None],
        "position_ids": torch.cat([torch.arange(length) for length in DOCUMENTS])[None],
    }
    documents = Documents(np.cumsum(DOCUMENTS).tolist(), cp_group.size())
    places = own_part({"places": torch.arange(documents.tokens)[None]}, cp_group)["places"]
    with torch.no_grad():
        row = to_device(own_part(row, cp_group), next(chunk.parameters()).device)
        logits = chunk(**row, attention_mask=None, packed_seq_params=documents)
    return places[0].numpy(), logits[0].numpy(force=True)


def _continued(pipeline) -> np.ndarray:
    """Logits behind a prompt and each token after it, with the cache."""
    import torch

    from mimo_train.evaluation.generation.decoder import Decoder
    from mimo_train.evaluation.generation.prompts import Prompt

    ids, decoder = tokens()[0, :SEQUENCE].tolist(), Decoder(pipeline)
    logits = [decoder.begin([Prompt(ids[:PROMPT], {}, {})], SEQUENCE)]
    return torch.cat([*logits, *(decoder.step([token]) for token in ids[PROMPT:])]).numpy(force=True)


class _States:
    """The hidden states [samples, sequence, hidden] behind each layer of this rank, the last of all behind the norm, by
    their place among those of transformers, while it is open."""

    def __init__(self, chunk, group):
        """
        Args:
            group: over which the sequence is divided; None: it is whole.
        """
        from megatron.core.utils import unwrap_model

        self.found: dict[int, np.ndarray] = {}
        self._group, decoder = group, unwrap_model(chunk).decoder
        norm = decoder.final_layernorm
        places = [(layer, layer.layer_number) for layer in decoder.layers]
        if norm is not None:
            places[-1] = norm, places[-1][1]
        self._hooks = [one.register_forward_hook(self._note(number)) for one, number in places]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, number: int) -> Any:
        def note(_module, _inputs, output) -> None:
            import torch

            state = (output[0] if isinstance(output, tuple) else output).detach()
            if self._group is not None:
                parts = [torch.empty_like(state) for _ in range(self._group.size())]
                torch.distributed.all_gather(parts, state.contiguous(), group=self._group)
                state = torch.cat(parts)
            before = [self.found[number]] if number in self.found else []
            self.found[number] = np.concatenate([*before, state.transpose(0, 1).numpy(force=True)])

        return note

"""Context parallelism of the language model: attention over parts, evaluation, and checkpoints at another cp. Its
training curves are in the table of layout parity."""

import pytest

from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TOLERANCE, config, curve, largest_difference, train_on_ranks
from tests.dist.steps import Steps

CP2 = "modules.language.layout.cp=2"
SEQUENCE, BATCH, HEADS, KEY_HEADS, WIDTH = 16, 2, 4, 2, 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_parts_is_attention_over_the_whole(ranks):
    """Of two samples, and of one row of three documents."""
    assert max(max(found) for found in run_ranks(attend_on_this_rank, ranks)) < 1e-5


def attend_on_this_rank() -> list[float]:
    """Largest difference of this rank's output and gradients from those of the uncut attention."""
    from mimo_train.parallel import device as devices

    devices.install("cpu")
    devices.init_process_group("cpu", 1.0)
    return [difference_of_parts(None, BATCH), difference_of_parts((3, 9, SEQUENCE), 1)]


def difference_of_parts(ends, batch: int) -> float:
    import torch
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from mimo_train.models.attention import SdpaAttention
    from mimo_train.models.documents import documents_of
    from mimo_train.parallel.context import gather_sequence, own_part

    groups = ProcessGroupCollection(cp=dist.group.WORLD)

    def attention(cp: int) -> SdpaAttention:
        sizes = {"num_layers": 1, "hidden_size": HEADS * WIDTH, "num_attention_heads": HEADS}
        transformer = TransformerConfig(**sizes, context_parallel_size=cp, attention_dropout=0.0)
        return SdpaAttention(transformer, 1, AttnMaskType.causal, "self", pg_collection=groups)

    torch.manual_seed(1)
    shapes = [(SEQUENCE, batch, heads, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    whole = [torch.randn(shape, requires_grad=True) for shape in shapes]
    weight = torch.randn(SEQUENCE, batch, HEADS * WIDTH)
    packed = {"documents": ends} if ends else {}
    expected = attention(1)(*whole, packed_seq_params=documents_of(packed, 1))
    (expected * weight).sum().backward()

    def part_of(tensor_S):
        return own_part({"x": tensor_S.transpose(0, 1)}, groups.cp)["x"].transpose(0, 1).contiguous()

    parts = [part_of(tensor.detach()).requires_grad_() for tensor in whole]
    ranks = dist.get_world_size()
    output = attention(ranks)(*parts, packed_seq_params=documents_of(packed, ranks))
    (output * part_of(weight)).sum().backward()
    pairs = [(part.grad, part_of(tensor.grad)) for part, tensor in zip(parts, whole, strict=True)]
    pairs += [(output, part_of(expected)), (gather_sequence(output.detach(), groups.cp), expected)]
    return max(float((one - other).abs().max()) for one, other in pairs)


EXPERTS = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.expert_ffn_hidden_size=48",
    "modules.language.llm.router_z_loss=0.1",
    "modules.language.layout.ep=2",
)
BALANCINGS = ("seq_aux_loss", "aux_loss", "global_aux_loss")
KINDS = {
    "learned positions, computed again": ("modules.language.llm.position=learned", "train.recompute=full"),
    "grouped keys, attention computed again": ("modules.language.llm.num_query_groups=2", "train.recompute=selective"),
    **{f"experts, {kind}": (*EXPERTS, f"modules.language.llm.router_balancing={kind}") for kind in BALANCINGS},
}
"""Models whose layers need more than their own positions."""


@pytest.mark.parametrize("overrides", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_model_gives_the_numbers_of_one_process(overrides, prose, tmp_path):
    def train(layout: str, *others: str) -> list[dict]:
        steps = ("train.iters=4", "train.micro_batch_size=4", f"layout={layout}")
        return train_on_ranks(config("gpt_tiny", tmp_path / layout, prose, *steps, *others))

    one = train("language_one", *(override for override in overrides if "layout.ep" not in override))
    cut = train("language_cp2", *overrides)
    assert max(largest_difference(curve(one), curve(cut))) < TOLERANCE
    for whole, parts in zip(one, cut, strict=True):
        for name in ("load_balancing_loss", "z_loss"):
            value = whole.get(name, 0)
            assert parts.get(name, 0) == pytest.approx(value, rel=TOLERANCE)
            assert bool(value) == (EXPERTS[0] in overrides)


def forget_to_cut(cfg) -> None:
    """A step whose microbatches are not cut."""
    Steps(cfg, lambda data_iterator, model: (model(**dict(next(data_iterator), attention_mask=None)), None)).train()


def test_a_forward_step_that_does_not_cut_is_told(prose, tmp_path):
    cfg = config("gpt_tiny", tmp_path, prose, "layout=language_cp2")
    with pytest.raises(RankFailure, match="cut the microbatch by mimo_train.parallel.context.own_part"):
        run_ranks(forget_to_cut, 2, cfg)


def test_evaluation_scores_whole_sequences(digits, tmp_path):
    def evaluation(name: str, *overrides: str) -> dict:
        places = (f"data.validation_shards={digits}/held_out", "train.iters=2", "train.report_samples=4")
        lines = train_on_ranks(config("vlm_digits", tmp_path / name, digits, *places, *overrides))
        return next(line for line in lines if "eval/loss" in line)

    one = evaluation("one", "layout=one_process")
    cut = evaluation("cut", "layout=two_processes", CP2)
    assert cut["eval/samples"] == one["eval/samples"] and cut["eval/exact_match"] == one["eval/exact_match"]
    assert cut["eval/loss"] == pytest.approx(one["eval/loss"], rel=TOLERANCE)
    samples = [(tmp_path / name / "samples.json").read_text() for name in ("one", "cut")]
    assert samples[0] == samples[1]

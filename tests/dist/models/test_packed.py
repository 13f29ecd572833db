"""Packed rows in whole models: the loss of every token and every gradient are those of each document alone."""

import numpy as np
import pytest

from mimo_train.config.compose import load
from tests.dist.ranks import RankFailure, run_ranks
from tests.dist.runs import TINY
from tests.dist.steps import Steps

LONGEST, VOCABULARY = 24, 250
LLM = "modules.language.llm."
LATENT_SIZES = ("kv_lora_rank=18", "q_lora_rank=14", "qk_nope_head_dim=10", "qk_rope_head_dim=6", "v_head_dim=12")
MODELS = {
    "rotary": (f"{LLM}num_query_groups=2",),
    "learned positions, computed again": (f"{LLM}position=learned", "train.recompute=full"),
    "windows with frequencies of their own": (
        f"{LLM}window=6",
        f"{LLM}full_attention_layers=[1]",
        f"{LLM}local_rope_base=500",
        f"{LLM}attention_softcap=2",
        "train.recompute=selective",
    ),
    "gated delta net, output gates": (
        f"{LLM}linear_attention_layers=[1]",
        f"{LLM}linear_num_key_heads=2",
        f"{LLM}linear_num_value_heads=4",
        f"{LLM}linear_key_head_dim=8",
        f"{LLM}linear_value_head_dim=12",
        f"{LLM}attention_output_gate=true",
    ),
    "experts": (
        "llm@modules.language.llm=gpt_tiny_moe",
        f"{LLM}expert_ffn_hidden_size=48",
        f"{LLM}router_balancing=none",
        f"{LLM}router_score_function=sigmoid",
        f"{LLM}router_bias=true",
        f"{LLM}partial_rotary_factor=0.5",
    ),
    "latents, computed again": (*(f"{LLM}{size}" for size in LATENT_SIZES), "train.recompute=selective"),
}


@pytest.fixture
def documents() -> list[np.ndarray]:
    """Tokens of samples of many lengths, one of a single token."""
    draw = np.random.default_rng(0)
    return [draw.integers(0, VOCABULARY, length + 1) for length in (24, 9, 1, 17, 13, 2)]


def config_of(tmp_path, prose, *overrides: str):
    places = (f"run.dir={tmp_path}", f"data.shards={prose}/train", "data.validation_shards=", "data.demo=")
    batch = ("train.global_batch_size=1", "train.micro_batch_size=1", f"data.sequence_length={LONGEST}")
    return load("gpt_tiny", (*TINY, *places, "layout=language_one", *batch, "data.pack=true", *overrides))


@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS.keys())
def test_a_row_gives_the_numbers_of_its_documents(overrides, documents, prose, tmp_path):
    (found,) = run_ranks(both_ways, 1, config_of(tmp_path, prose, *overrides), documents)
    (losses, gradients), (alone, of_alone) = found
    assert losses.shape == (sum(len(tokens) - 1 for tokens in documents),)
    assert np.abs(losses - alone).max() < 5e-6
    assert gradients.keys() == of_alone.keys()
    largest = max(np.abs(gradient).max() for gradient in of_alone.values())
    for name, gradient in gradients.items():
        assert np.abs(gradient - of_alone[name]).max() < 2e-6 * largest, name
    blind = np.abs(gradients["decoder.layers.0.self_attention.linear_proj.weight"]).max()
    assert blind > 1e-4 * largest, "attention does not matter, so that parity would say nothing"


def both_ways(cfg, documents: list[np.ndarray]) -> list[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """(loss of every token, every gradient) of one packed row, and of its documents one by one."""
    from data.collate import collate_packed
    from data.order.step import TextSample

    samples = []
    for tokens in documents:
        length = len(tokens) - 1
        room = (0, LONGEST - length)
        ids, labels = (np.pad(part, room) for part in (tokens[:-1], tokens[1:]))
        samples.append(TextSample(0, ids, labels, (np.arange(LONGEST) < length).astype(np.float32), length))
    steps = Steps(cfg)
    lengths = [sample.length for sample in samples]
    packed = collate_packed(samples, lengths, 72, 0)
    alone = [collate_packed([sample], [sample.length], sample.length, 0) for sample in samples]
    return [losses_and_gradients(steps.model[0], batches) for batches in ([packed], alone)]


def losses_and_gradients(chunk, batches: list[dict]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    from megatron.core.utils import unwrap_model

    from mimo_train.models.documents import documents_of

    chunk.zero_grad_buffer()
    losses = []
    for batch in batches:
        inputs = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
        found = chunk(**inputs, attention_mask=None, packed_seq_params=documents_of(batch, 1))
        counted = batch["loss_mask"] > 0
        (found * batch["loss_mask"]).sum().backward()
        losses.append(found[counted].detach().numpy())
    gradients = {
        name: parameter.main_grad.clone().numpy() for name, parameter in unwrap_model(chunk).named_parameters()
    }
    return np.concatenate(losses), gradients


def forget_documents(cfg) -> None:
    """A forward step that takes the rows for samples."""

    def step(data_iterator, model):
        batch = next(data_iterator)
        names = ("input_ids", "position_ids", "labels")
        return model(**{name: batch[name] for name in names}, attention_mask=None), None

    Steps(cfg, step).train()


def test_a_forward_step_that_forgets_documents_is_told(prose, tmp_path):
    with pytest.raises(RankFailure, match=r"data\.pack: the rows .*documents_of\(batch, cp\)"):
        run_ranks(forget_documents, 1, config_of(tmp_path, prose))

"""With its cache a model gives the logits and the greedy tokens of a whole pass for each token."""

import pytest

from tests.dist.models.test_packed import LATENT_SIZES
from tests.dist.ranks import run_ranks
from tests.dist.runs import config

GROUPED = "modules.language.llm.num_query_groups=2"
EXPERTS = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.router_score_function=sigmoid",
    "modules.language.llm.partial_rotary_factor=0.5",
    "train.recompute=full",
)
TWO_ENCODERS = (
    "encoder@modules.details.encoder=vit_tiny",
    "projector@modules.details.projector=mlp_merge2",
    "modules.details.encoder.patch_size=12",
    "modules.details.encoder.num_layers=1",
)
LLM = "modules.language.llm"
WINDOWS = (f"{LLM}.window=6", f"{LLM}.full_attention_layers=[1]", GROUPED)
CAPPED = (
    *WINDOWS,
    f"{LLM}.local_rope_base=500",
    f"{LLM}.attention_softcap=2",
    f"{LLM}.logit_softcap=10",
    f"{LLM}.scale_embeddings=true",
    f"{LLM}.post_norms=true",
    f"{LLM}.tie_embeddings=false",  # tied to embeddings that are scaled up, a model repeats its last token for ever
)
DELTA = (
    f"{LLM}.linear_attention_layers=[1]",
    f"{LLM}.linear_num_key_heads=2",
    f"{LLM}.linear_num_value_heads=4",
    f"{LLM}.linear_key_head_dim=8",
    f"{LLM}.linear_value_head_dim=12",
    f"{LLM}.attention_output_gate=true",
)
OWN_SIZES = ("encoder@modules.images.encoder=vit_tiny_native",)
CASES = {
    # config, images, data.sequence_length, changes
    "gpt_tiny": ("gpt_tiny", 0, 32, ()),
    "learned positions, grouped queries": ("gpt_tiny", 0, 32, ("modules.language.llm.position=learned", GROUPED)),
    "experts, full recompute": ("gpt_tiny", 0, 32, EXPERTS),
    "latents": ("gpt_tiny", 0, 32, tuple(f"{LLM}.{size}" for size in LATENT_SIZES)),
    "windows": ("gpt_tiny", 0, 32, WINDOWS),
    "windows, two ropes, capped scores and logits": ("gpt_tiny", 0, 32, CAPPED),
    "gated delta net, output gates": ("gpt_tiny", 0, 32, DELTA),
    "an image": ("vlm_digits", 1, 42, (GROUPED, "modules.language.llm.qk_norm=true")),
    "three images, two encoders": ("vlm_digits", 3, 72, TWO_ENCODERS),
    "images at their own sizes": ("vlm_digits", 2, 60, OWN_SIZES),
}


def media_of(prompts, count: int) -> list:
    """Images that differ."""
    import tempfile
    from pathlib import Path

    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.png" for number in range(count)]
        for number, file in enumerate(files):
            colour = (80 * number, 255 - 80 * number, 40)
            Image.linear_gradient("L").resize((30 + 8 * number, 30)).convert("RGB").point(
                lambda value, top=colour[0]: min(value + top, 255)
            ).save(file)
        return [prompts.medium("image", file) for file in files]


def batched(parts, cfg, images: int) -> tuple[float, list, list]:
    """Answers of prompts of several lengths, with and without images, greedy and drawn: (largest difference of logits
    in a batch from those alone, relative to their largest; tokens alone; tokens in batches)."""
    import torch

    from mimo_train.evaluation.generation.answers import Answers
    from mimo_train.evaluation.generation.decoder import Decoder
    from mimo_train.evaluation.generation.options import Sampling
    from mimo_train.evaluation.generation.prompts import Prompts, user_turn

    prompts, decoder = Prompts(cfg, parts.tokenizer), Decoder(parts.pipeline)
    media = media_of(prompts, images)
    asked = [
        prompts.of_conversation([user_turn("A?"[: 1 + number % 2], some)], some)
        for number, some in enumerate([media, [], media[:1], media[1:]])
    ] + [prompts.of_text(text) for text in ("It was", "It was the b", "No")]
    length = max(len(prompt.ids) for prompt in asked)
    equal = [prompt for prompt in asked if len(prompt.ids) == length]
    together, largest = asked if decoder.takes_lengths else equal, 0.0
    tokens = [[65 + step + row for row in range(len(together))] for step in range(3)]
    logits = [decoder.begin(together, length + 4), *(decoder.step(step) for step in tokens)]
    for row, prompt in enumerate(together):
        alone = [decoder.begin([prompt], length + 4), *(decoder.step(step[row : row + 1]) for step in tokens)]
        for ours, theirs in zip(logits, alone, strict=True):
            real = theirs[0, : parts.tokenizer.vocab_size].float()
            difference = (ours[row, : len(real)].float() - real).abs().max() / real.abs().max()
            largest = max(largest, float(difference))
    alone, batches = [], []
    # With learned positions some answers end at the last one, while others of their batch go on.
    most = cfg.data.sequence_length if cfg.llm.position == "learned" else 6
    for sampling in (Sampling(), Sampling(1.0, seed=3)):
        single = Answers(cfg, decoder, parts.tokenizer, sampling, most)
        alone += [single(prompt).tokens for prompt in asked]
        batches += [each.tokens for each in Answers(cfg, decoder, parts.tokenizer, sampling, most, 3).batch(asked)]
    assert torch.is_grad_enabled()
    return largest, alone, batches


def compared(cfg, images: int) -> tuple[float, list[int], list[int], int, tuple[float, list, list]]:
    """Greedy tokens to the end of the sequence: (largest difference of a step's logits, relative to their largest;
    tokens by full passes; tokens by `Answers`; length of the prompt; what `batched` returns)."""
    import torch

    from mimo_train.evaluation.generation.answers import Answers
    from mimo_train.evaluation.generation.decoder import Decoder
    from mimo_train.evaluation.generation.options import Sampling
    from mimo_train.evaluation.generation.prompts import Prompts, user_turn
    from mimo_train.evaluation.generation.source import on_ranks
    from mimo_train.evaluation.predictions import PredictStep
    from mimo_train.layout.run import resolve
    from mimo_train.training.step.pipeline import build_parts, start_processes

    run = resolve(on_ranks(cfg))
    parts = build_parts(run, *start_processes(run.cfg))
    pipeline, tokenizer, limit = parts.pipeline, parts.tokenizer, cfg.data.sequence_length
    assert not any(parameter.requires_grad for parameter in pipeline.model[0].parameters()), "no memory for gradients"
    prompts, decoder, predict = Prompts(run.cfg, tokenizer), Decoder(pipeline), PredictStep(pipeline, lambda *_: None)
    prompt = prompts.of_text("It was the")
    if images:
        media = media_of(prompts, images)
        prompt = prompts.of_conversation([user_turn("Which?", media)], media)

    def full_pass(ids: list[int]) -> torch.Tensor:
        """Logits [V] behind `ids`, which are padded as in training."""
        row = torch.full((1, limit), tokenizer.pad_id)
        row[0, : len(ids)] = torch.tensor(ids)
        batch = {"input_ids": row, "labels": torch.zeros_like(row), "position_ids": torch.arange(limit)[None]}
        if prompt.inputs:
            batch["modality_inputs"] = prompt.inputs
        rows = {name: [count] for name, count in prompt.rows.items()}
        pipeline.shapes.begin(rows)
        with torch.no_grad():
            output, _ = predict(iter([batch]), pipeline.model[0])
        return real(output[0, len(ids) - 1])

    def real(logits: torch.Tensor) -> torch.Tensor:
        """Without the padding of the vocabulary, whose logits are the lowest number there is."""
        return logits[: tokenizer.vocab_size].float()

    ids, tokens, largest = list(prompt.ids), [], 0.0
    logits = real(decoder.begin([prompt], limit)[0])
    while True:
        expected = full_pass(ids)
        largest = max(largest, float((logits - expected).abs().max() / expected.abs().max()))
        tokens.append(int(expected.argmax()))
        ids.append(tokenizer.as_text(tokens[-1]))
        if len(ids) == limit:
            break
        logits = real(decoder.step(ids[-1:])[0])
    answered = Answers(run.cfg, decoder, tokenizer, Sampling(), limit)(prompt)
    return largest, tokens, answered.tokens, len(prompt.ids), batched(parts, run.cfg, images)


def tiny(name: str, tmp_path, *overrides: str):
    # All layers start with larger weights than usual, so that logits depend on what the attention sees.
    spread = "modules.language.llm.init_std=0.3"
    layout = "layout=one_process" if name == "vlm_digits" else "layout=language_one"
    return config(name, tmp_path, tmp_path, layout, spread, *overrides)


def until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens


END_OF_TURN = 258
"""Of the byte tokenizer."""


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits_are_those_of_full_passes(case, tmp_path):
    name, images, length, overrides = CASES[case]
    cfg = tiny(name, tmp_path, f"data.sequence_length={length}", *overrides)
    ((largest, tokens, answered, prompt, (apart, alone, together)),) = run_ranks(compared, 1, cfg, images)
    assert largest < 1e-5 and apart < 1e-5
    assert together == alone and len(set(map(tuple, alone))) > 5
    assert answered == until(tokens, END_OF_TURN) and len(set(tokens)) > 3
    assert len(tokens) == length - prompt > 12, prompt


def test_bf16_agrees_to_its_precision(tmp_path):
    cfg = tiny("vlm_digits", tmp_path, "data.sequence_length=42", "train.precision=bf16")
    ((largest, *_),) = run_ranks(compared, 1, cfg, 1)
    assert largest < 5e-2


def _at_layout(cfg, images: int) -> tuple[float, list, list]:
    from mimo_train.layout.run import resolve
    from mimo_train.training.step.pipeline import build_parts, start_processes

    run = resolve(cfg)
    return batched(build_parts(run, *start_processes(run.cfg)), run.cfg, images)


@pytest.mark.parametrize(("name", "images", "overrides"), [
    ("vlm_digits", 2, (GROUPED, "placement.mode=shared", "modules.images.layout.dp=2", "modules.images.layout.tp=1")),
    ("gpt_tiny", 0, (*WINDOWS, *EXPERTS[:3])),
])  # fmt: skip
def test_tensor_parallel_ranks_give_the_answers_of_one_process(name, images, overrides, tmp_path):
    length = "data.sequence_length=72"
    split = ("modules.language.layout.tp=2", "modules.language.layout.sp=true", "modules.language.layout.dp=1")
    (one,) = run_ranks(
        _at_layout, 1, tiny(name, tmp_path / "1", length, *(each for each in overrides if "layout" not in each)), images
    )
    two = run_ranks(_at_layout, 2, tiny(name, tmp_path / "2", length, *overrides, *split), images)
    for apart, alone, together in two:
        assert apart < 1e-5
        assert together == alone == one[1]


@pytest.mark.parametrize(("layout", "words"), [
    (("layout=two_processes",), "modules.images is on ranks 0 to 0, and the language model on 1 to 1"),
    (("placement.mode=shared", "modules.language.layout.cp=2", "modules.images.layout.dp=2"), "layout.cp: is 2"),
])  # fmt: skip
def test_layouts_that_cannot_decode_are_named(layout, words, tmp_path):
    from mimo_train.config.errors import UserError
    from mimo_train.layout.decoding import require_decodable
    from mimo_train.layout.run import resolve

    with pytest.raises(UserError, match=words):
        require_decodable(resolve(config("vlm_digits", tmp_path, tmp_path, *layout)).layout)

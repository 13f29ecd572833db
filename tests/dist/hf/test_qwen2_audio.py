"""A Qwen2-Audio of transformers: logits and a step at any layout, answers, every tensor."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mimo_train.config.compose import load
from mimo_train.layout.run import resolve
from tests.dist.commands import conversation
from tests.dist.hf.one_step import ours, overrides, require_equal, theirs
from tests.dist.hf.test_pretrained import UNCHANGED, export, tensors
from tests.dist.ranks import run_ranks
from tests.dist.runs import TINY, train_on_ranks
from tests.tars import write_tar
from tests.unit.data.text.chat_templates import QWEN_VL

LENGTHS = (16000, 15700, 7001, 4801, 1000, 641)
"""Samples of clips of at most a second: full, nearly full, odd frames, and the shortest with a token."""
MARK = "<|AUDIO|>"
ASKED = [("What is it?", LENGTHS[2:3]), ("Both?", LENGTHS[3:5])]
"""Questions, and the lengths of their clips."""
MOST = 12
"""Tokens of an answer."""


def clip(length: int) -> np.ndarray:
    """Noise that grows, in steps of 16 bits."""
    wave = np.random.default_rng(length).normal(size=length) * np.linspace(0.01, 0.2, length)
    return (np.round(wave * 32768) / 32768).astype(np.float32)


def wav(length: int) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, clip(length), 16000, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def make(folder: Path) -> list[str]:
    """Save a model and its processor; returns greedy answers to `ASKED`."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(2)
    audio = {
        "num_mel_bins": 20, "d_model": 72, "encoder_layers": 3, "encoder_attention_heads": 6, "encoder_ffn_dim": 100,
        "max_source_positions": 50,
    }  # fmt: skip
    text = {
        "model_type": "qwen2", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 301,
        "intermediate_size": 80, "num_hidden_layers": 3, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "use_sliding_window": False, "initializer_range": 0.15,
    }  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **marks)
    own = [MARK, "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": own})
    tokenizer.chat_template = QWEN_VL
    extractor = transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1, return_attention_mask=True)
    processor = transformers.Qwen2AudioProcessor(extractor, tokenizer, chat_template=QWEN_VL)
    config = transformers.Qwen2AudioConfig(
        audio_config=audio, text_config=text, audio_token_index=tokenizer.convert_tokens_to_ids(MARK)
    )
    model = transformers.Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    positions = _sinusoids(50, 72)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "embed_positions" in name:
                value.copy_(positions)
                continue
            norm = value.ndim == 1 and name.endswith("weight")
            value.normal_(1.0 if norm else 0.0, 0.3 if value.ndim == 1 else value[0].numel() ** -0.5)
    model.save_pretrained(folder, max_shard_size="100KB")
    processor.save_pretrained(folder)
    answers = []
    for question, lengths in ASKED:
        content = [*[{"type": "audio"}] * len(lengths), {"type": "text", "text": question}]
        text_of = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        clips = [clip(length) for length in lengths]
        inputs = processor(text=text_of, audio=clips, sampling_rate=16000, return_tensors="pt")
        (whole,) = model.generate(**inputs, max_new_tokens=MOST, do_sample=False)
        answers.append(processor.decode(whole[inputs["input_ids"].size(1) :], skip_special_tokens=True))
    return answers


def _sinusoids(length: int, width: int) -> torch.Tensor:
    from transformers.models.whisper.modeling_whisper import sinusoids

    return sinusoids(length, width)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("qwen2_audio") / "tiny"
    (answers,) = run_ranks(make, 1, folder)
    return folder, answers


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clips")
    members = []
    for number, length in enumerate(LENGTHS * 4):
        turns = [{"from": "human", "value": "<audio>\nWhat?"}, {"from": "gpt", "value": f"tone {number % 7}"}]
        record = json.dumps({"conversations": turns}).encode()
        members += [(f"{number:03}.wav", wav(length)), (f"{number:03}.json", record)]
    write_tar(folder / "train" / "0.tar", members)
    return folder


def config(folder: Path, shards: Path, run_dir: Path, *overrides: str):
    """A run of the two modules of a directory."""
    file = run_dir.parent / "audio.yaml"
    file.write_text(
        "defaults: [data@data: text, optim@optim: adamw, _self_]\n"
        f"modules: {{audio: {{pretrained: {folder}}}, language: {{pretrained: {folder}}}}}\n"
    )
    tiny = [key for key in TINY if not key.startswith("modules.")]
    places = (f"run.dir={run_dir}", f"data.shards={shards}/train", "data.validation_shards=", "data.demo=")
    batch = (
        "train.global_batch_size=8",
        "train.micro_batch_size=4",
        "data.sequence_length=160",
        "placement.mode=shared",
    )
    return load(str(file), (*tiny, *places, *batch, *overrides))


def test_answers_about_clips_are_those_of_transformers(made, tmp_path):
    """Greedily, of one clip and of two, by the command."""
    folder, answers = made
    for (question, lengths), expected in zip(ASKED, answers, strict=True):
        arguments = ["generate", str(folder), "--prompt", question, "--max-new-tokens", str(MOST)]
        for length in lengths:
            file = tmp_path / f"{length}.wav"
            file.write_bytes(wav(length))
            arguments += ["--audio", str(file)]
        ((code, said, errors),) = run_ranks(conversation, 1, arguments)
        assert (code, said.strip()) == (0, expected.strip()), errors
    assert len(set(answers)) == len(ASKED) and all(len(set(answer)) > 3 for answer in answers)


_MODULES = ("audio", "language")
LAYOUTS = {
    "one process": (),
    "tp2": tuple(f"modules.{name}.layout.tp=2" for name in _MODULES),
    "pp2": ("placement.mode=disjoint", *(f"modules.{name}.layout.pp=2" for name in _MODULES)),
    "tp2 pp2": (
        "placement.mode=disjoint",
        *(f"modules.{name}.layout.{one}=2" for name in _MODULES for one in ("tp", "pp")),
    ),
}


def test_a_step_is_that_of_transformers_at_any_layout(made, shards, tmp_path):
    """Logits, loss and gradient norm."""
    expected: dict = {}
    for name, layout in LAYOUTS.items():
        optim = [key for key in overrides(tmp_path / name, shards) if key.startswith(("optim.", "train."))]
        cfg = config(made[0], shards, tmp_path / name, *optim, "data.shuffle=false", "data.pad=sequence", *layout)
        ranks = run_ranks(ours, resolve(cfg).layout.processes[-1] + 1, cfg, "")
        if not expected:
            (expected,) = run_ranks(_step_of_transformers, 1, made[0], ranks[0]["batch"])
        require_equal(ranks, expected)


def _step_of_transformers(folder: Path, batch: list[dict]) -> dict:
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    names = ("input_ids", "labels", "loss_mask", "sample_numbers")
    whole = {name: np.concatenate([part[name] for part in batch]) for name in names}
    clips = [clip(LENGTHS[number % len(LENGTHS)]) for number in whole["sample_numbers"]]
    extractor = AutoProcessor.from_pretrained(folder).feature_extractor
    own = {"sampling_rate": 16000, "padding": "max_length", "return_attention_mask": True, "return_tensors": "pt"}
    inputs = extractor(clips, **own)
    media = {"input_features": inputs["input_features"], "feature_attention_mask": inputs["attention_mask"]}
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    model.model.audio_tower.embed_positions.requires_grad_(False)  # as it is made; reading it back forgets that
    # Padding is behind all text, where causal attention does not see it.
    media["attention_mask"] = torch.ones(whole["input_ids"].shape, dtype=torch.int64)
    return theirs(model, whole, media)


def test_what_comes_in_goes_out_bit_for_bit(made, shards, tmp_path):
    layout = ("placement.mode=disjoint", "modules.audio.layout.tp=2", "modules.language.layout.pp=2")
    train_on_ranks(config(made[0], shards, tmp_path / "run", *UNCHANGED, *layout))
    export(tmp_path / "run", tmp_path / "out")
    came, went = tensors(made[0]), tensors(tmp_path / "out")
    assert came.keys() == went.keys() and any(name.startswith("audio_tower.") for name in went)
    assert all(torch.equal(value, went[name]) for name, value in came.items())
    (found,) = run_ranks(_loaded, 1, tmp_path / "out")
    assert found == ([], "Qwen2AudioProcessor")


def _loaded(folder: Path) -> tuple[list[str], str]:
    from transformers import AutoProcessor, Qwen2AudioForConditionalGeneration

    _, found = Qwen2AudioForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    missing = [*found["missing_keys"], *found["unexpected_keys"], *found["mismatched_keys"]]
    return missing, type(AutoProcessor.from_pretrained(folder)).__name__


def test_positions_that_are_no_sinusoids_are_refused(made, shards, tmp_path):
    """They are computed here, and not read."""
    folder = tmp_path / "other"
    folder.mkdir()
    there = tensors(made[0])
    (name,) = [name for name in there if "embed_positions" in name]
    save_file(there | {name: there[name].flip(1)}, folder / "model.safetensors")
    for file in made[0].glob("*.json"):
        if "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    (said,) = run_ranks(_refused, 1, config(folder, shards, tmp_path / "run"))
    assert said.startswith("modules.audio.pretrained: ") and name in said, said


def _refused(cfg) -> str:
    from mimo_train.config.errors import UserError
    from tests.dist.runs import train_rank

    try:
        train_rank(cfg)
    except UserError as error:
        return str(error)
    return ""

"""Tiny models of several parts of transformers whose media half is run as it is, their samples, and what plain
transformers with AdamW makes of these."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.dist.models.composites import CLIP, DECAY, EPSILON, NEW_TOKENS, RATE, clip, content, file_of, image
from tests.tars import write_tar
from tests.unit.data.text.chat_templates import QWEN_VL, save_tokenizer
from tests.videos import frames_of

STEPS = 5
SEEDS = {"qwen2_5_omni": 4}
"""By which answers have several tokens."""
TEXT = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8,
    "num_hidden_layers": 2, "vocab_size": 420, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SIDE = 28
VISION = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "patch_size": 7,
    "image_size": SIDE,
}  # fmt: skip
SQUARE = {"height": SIDE, "width": SIDE}
PAD = "<|image_pad|>"
EXTENSIONS = {1: "wav", 2: "png", 5: "mp4"}
"""Extension of a file by the numbers of its part."""
TOKENS = {
    "context_image_token": PAD, "start_image_token": "<|vision_start|>", "end_image_token": "<|vision_end|>",
    "video_token": "<|video_pad|>", "image_token": PAD, "audio_token": "<|AUDIO|>",
    "image_break_token": "<|vision_start|>", "image_end_token": "<|vision_end|>",
    "image_boundary_token": "<|vision_start|>", "boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>",
}  # fmt: skip
SAMPLES: list[tuple[list[Any], str]] = [
    (["what is ", (30, 50), " in front of ", (61, 25), " the other?"], "a small wall, and a long one"),
    (["no image: which digit is green?"], "three"),
    ([(70, 45), "read the digits"], "1 2 3"),
    (["both?", (30, 50), (40, 90)], "yes"),
]
"""Parts of the question, images as (height, width), and the answer."""
CLIPS: list[tuple[list[Any], str]] = [
    ([(9000,), "what is said?"], "one two"),
    (["no sound: which digit is green?"], "three"),
    ([(17001,), " before ", (4000,), " after?"], "yes"),
    (["again", (9000,)], "no"),
]
"""As SAMPLES, audio as (samples,)."""
BOTH: list[tuple[list[Any], str]] = [
    (["what is ", (30, 50), " and what says ", (9000,), " of ", (61, 25), "?"], "a small wall, and a long one"),
    (["no media: which digit is green?"], "three"),
    ([(17001,), "read the digits", (70, 45)], "1 2 3"),
    (["both?", (9000,), (9000,)], "yes"),
]
"""Images and audio. Clips of one sample are as long: some processors compute other values next to a longer one."""
OMNI_KINDS = ("qwen2_5_omni", "qwen3_omni_moe_thinker")
SOUND = " with sound"
"""End of the name of a kind whose videos have sound."""
HEARD: list[tuple[list[Any], str]] = [
    (["what is said in ", (30, 10, 24, 32, 5), " next to ", (30, 50), "?"], "a small wall, and a long one"),
    (["no media: which digit is green?"], "three"),
    ([(17001,), "read the digits", (70, 45)], "1 2 3"),
    (["both?", (13, 4, 60, 30, 1), (7, 2, 24, 32, 1)], "yes"),
]
"""Videos with sound, (frames, frames per second, height, width, seconds of sound), longer and shorter than the video,
and media of the others."""
FRAMES = {"size": {"shortest_edge": 196, "longest_edge": 2000}}
"""Options of the video processor."""


def _section(*of_eight: int) -> list[int]:
    """`mrope_section`, by what it is for heads of 8."""
    return [count * TEXT["head_dim"] // 8 for count in of_eight]


def _internvl(library: Any, tokenizer: Any, text: str = "qwen2") -> tuple[Any, Any]:
    config = library.InternVLConfig(
        vision_config=VISION | {"image_size": [SIDE, SIDE], "patch_size": [7, 7]},
        text_config=TEXT | {"model_type": text}, downsample_ratio=0.5,
    )  # fmt: skip
    images = library.GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=4)
    videos = library.InternVLVideoProcessor(size=SQUARE)
    return config, library.InternVLProcessor(images, tokenizer, videos, image_seq_length=4)


def _mistral3(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    vision = library.PixtralVisionConfig(**VISION | {"image_size": 84, "head_dim": 16})
    text = library.MistralConfig(**TEXT, sliding_window=None)
    config = library.Mistral3Config(vision_config=vision, text_config=text, spatial_merge_size=2)
    images = library.PixtralImageProcessor(size={"longest_edge": 84}, patch_size=14)
    tokens = {"image_token": PAD, "image_break_token": "<|vision_start|>", "image_end_token": "<|vision_end|>"}
    return config, library.PixtralProcessor(images, tokenizer, patch_size=7, spatial_merge_size=2, **tokens)


def _idefics3(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    text = library.LlamaConfig(**TEXT)
    config = library.Idefics3Config(vision_config=VISION, text_config=text, scale_factor=2)
    images = library.Idefics3ImageProcessor(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    return config, library.Idefics3Processor(images, tokenizer, image_seq_len=4)


def _smolvlm(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    config = library.SmolVLMConfig(vision_config=VISION, text_config=library.LlamaConfig(**TEXT), scale_factor=2)
    images = library.SmolVLMImageProcessor(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
    return config, library.SmolVLMProcessor(images, tokenizer, library.SmolVLMVideoProcessor(), image_seq_len=4)


def _audioflamingo3(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    audio = {
        "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48,
        "num_mel_bins": 16, "max_source_positions": 50,
    }  # fmt: skip
    config = library.AudioFlamingo3Config(audio_config=audio, text_config=TEXT | {"model_type": "qwen2"})
    sounds = library.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return config, library.AudioFlamingo3Processor(sounds, tokenizer, audio_token="<|AUDIO|>")


def _gemma3(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    # An image has more tokens than the window, and its line breaks join that of the role in front of it.
    layers = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    text = library.Gemma3TextConfig(**TEXT | {"tie_word_embeddings": True}, **layers, query_pre_attn_scalar=20)
    config = library.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    tokenizer.add_tokens(["\n\n\n"])
    tokenizer.chat_template = _writing("<|vision_start|>")
    return config, library.Gemma3Processor(library.Gemma3ImageProcessor(size=SQUARE), tokenizer, image_seq_length=4)


def _paligemma(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    """A PaliGemma 2, with windows and capped scores. The processor adds 1,152 tokens."""
    text = library.Gemma2Config(**TEXT | {"vocab_size": 1600}, sliding_window=3, query_pre_attn_scalar=20)
    vision = library.SiglipVisionConfig(
        **VISION | {"image_size": 14}, vision_use_head=False, projection_dim=TEXT["hidden_size"]
    )
    config = library.PaliGemmaConfig(
        vision_config=vision, text_config=text, projection_dim=TEXT["hidden_size"], tie_word_embeddings=False
    )
    images = library.SiglipImageProcessor(size={"height": 14, "width": 14})
    images.image_seq_length = 4
    tokenizer.chat_template = _writing(PAD)
    return config, library.PaliGemmaProcessor(images, tokenizer)


def _writing(mark: str) -> str:
    """The chat template with a mark for each image."""
    return QWEN_VL.replace("<|vision_start|><|image_pad|><|vision_end|>", mark)


def _qwen2_vl(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": TEXT["hidden_size"], "num_heads": 2, "mlp_ratio": 2}
    vision["patch_size"] = 7
    text = TEXT | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": _section(2, 1, 1)}
    }
    del text["head_dim"]
    config = library.Qwen2VLConfig(vision_config=vision, text_config=text)
    images = library.Qwen2VLImageProcessor(patch_size=7, min_pixels=196, max_pixels=4000)
    return config, library.Qwen2VLProcessor(images, tokenizer, library.Qwen2VLVideoProcessor(patch_size=7))


def _qwen3_vl(library: Any, tokenizer: Any, **experts: Any) -> tuple[Any, Any]:
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": TEXT["hidden_size"],
        "patch_size": 7,
        "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": _section(2, 1, 1), "mrope_interleaved": True}
    text = TEXT | {"rope_parameters": rope}
    config = library.Qwen3VLConfig(vision_config=vision, text_config=text)
    if experts:
        config = library.Qwen3VLMoeConfig(vision_config=vision, text_config=text | experts)
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = library.Qwen2VLImageProcessor(patch_size=7, min_pixels=196, max_pixels=4000, **halves)
    return config, library.Qwen3VLProcessor(images, tokenizer, library.Qwen3VLVideoProcessor(patch_size=7))


def _qwen3_vl_moe(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    return _qwen3_vl(library, tokenizer, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)


def _qwen3_5(library: Any, tokenizer: Any, **experts: Any) -> tuple[Any, Any]:
    seeing, processor = _qwen3_vl(library, tokenizer)
    vision = {**seeing.vision_config.to_dict(), "model_type": "qwen3_5_moe_vision" if experts else "qwen3_5_vision"}
    del vision["deepstack_visual_indexes"]
    rope = {
        "rope_theta": 5000.0,
        "mrope_section": _section(2, 1, 1),
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.5,
    }
    delta = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    text = TEXT | delta | experts | {"head_dim": 2 * TEXT["head_dim"]}
    text["rope_parameters"] = {"rope_type": "default", **rope, "partial_rotary_factor": 0.5}
    return (library.Qwen3_5MoeConfig if experts else library.Qwen3_5Config)(
        vision_config=vision, text_config=text
    ), processor


def _qwen3_5_moe(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return _qwen3_5(library, tokenizer, **sizes, shared_expert_intermediate_size=24)


def _glm4v(library: Any, tokenizer: Any, **experts: Any) -> tuple[Any, Any]:
    vision = {
        "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": TEXT["hidden_size"],
        "patch_size": 7,
        "image_size": SIDE,
    }  # fmt: skip
    rope = {"rope_theta": 5000.0, "mrope_section": _section(1, 1, 0), "partial_rotary_factor": 0.5}
    text = TEXT | experts | {"rope_parameters": {"rope_type": "default", **rope}}
    config = (library.Glm4vMoeConfig if experts else library.Glm4vConfig)(vision_config=vision, text_config=text)
    images = library.Glm4vImageProcessor(patch_size=7, size={"shortest_edge": 196, "longest_edge": 8000})
    return config, library.Glm4vProcessor(images, tokenizer, library.Glm4vVideoProcessor(patch_size=7))


def _glm4v_moe(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return _glm4v(library, tokenizer, **sizes, routed_scaling_factor=1.5)


def _qwen3_omni(library: Any, tokenizer: Any) -> tuple[Any, Any]:
    start, clip, start_audio = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|AUDIO|>", "<|audio_bos|>"])
    seeing, images = _qwen3_vl_moe(library, tokenizer)
    audio = {
        "num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32,
        "output_dim": 32, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 100,
    }  # fmt: skip
    config = library.AutoConfig.for_model(
        "qwen3_omni_moe_thinker",
        text_config={**seeing.text_config.to_dict(), "model_type": "qwen3_omni_moe_text"},
        vision_config={**seeing.vision_config.to_dict(), "model_type": "qwen3_omni_moe_vision_encoder"},
        audio_config=audio,
        vision_start_token_id=start,
        audio_token_id=clip,
        audio_start_token_id=start_audio,
        position_id_per_seconds=13,
    )
    sounds = library.WhisperFeatureExtractor(feature_size=16)
    return config, library.Qwen3OmniMoeProcessor(
        images.image_processor, library.Qwen2VLVideoProcessor(patch_size=7), sounds, tokenizer
    )


def _qwen2_5_omni(library: Any, tokenizer: Any, seconds: int = 2) -> tuple[Any, Any]:
    start, start_audio = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|audio_bos|>"])
    seeing, images = _qwen2_vl(library, tokenizer)
    vision = VISION | {
        "depth": 2,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 28,
        "fullatt_block_indexes": [1],
    }
    audio = {
        "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32,
        "output_dim": 32, "n_window": 10,
    }  # fmt: skip
    config = library.AutoConfig.for_model(
        "qwen2_5_omni_thinker",
        text_config={**seeing.text_config.to_dict(), "model_type": "qwen2_5_omni_text"},
        vision_config=vision,
        audio_config=audio,
        vision_start_token_id=start,
        audio_start_token_id=start_audio,
    )
    sounds = library.WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)
    videos = library.Qwen2VLVideoProcessor(patch_size=7)
    return config, library.Qwen2_5OmniProcessor(images.image_processor, videos, sounds, tokenizer)


def _with_keys_at_the_top(file: Path) -> None:
    """Rewrite config.json as published ones of Qwen2-VL, which have no part for the language model."""
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config.pop("text_config"), **config}))


def _as_published(folder: Path) -> None:
    """Make the directory of an Omni's thinker that of the whole, which speaks too."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    thinker = config | {"architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"]}
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors: dict[str, Any] = {}
    for file in folder.glob("*.safetensors*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    names = {name: f"thinker.{name.removeprefix('thinker.')}" for name in tensors}
    tensors = {names[name]: value for name, value in tensors.items()} | {"talker.codec_head.weight": np.ones((3, 2))}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "spk_dict.pt").write_bytes(b"voices")


OMNI = {
    "image_token": PAD, "audio_token": "<|AUDIO|>", "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>",
}  # fmt: skip
"""Tokens of the processor of Qwen-Omni."""
ADDED = {"gemma3": 1.0, "paligemma": 0.5}
"""What norms of the language model have besides."""
IMAGES_ALONE = "qwen2_5_omni without a module for audio"
AS_IS = "internvl of cohere"
"""Its language model has no native family."""
MODELS = {
    AS_IS: partial(_internvl, text="cohere"),
    "internvl": _internvl,
    "mistral3": _mistral3,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "audioflamingo3": _audioflamingo3,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v_moe,
    "qwen2_5_omni": _qwen2_5_omni,
    IMAGES_ALONE: _qwen2_5_omni,
    f"qwen2_5_omni{SOUND}": partial(_qwen2_5_omni, seconds=6),
    f"qwen3_omni_moe_thinker{SOUND}": _qwen3_omni,
}


def samples_of(kind: str) -> list[tuple[list[Any], str]]:
    if kind.endswith(SOUND):
        return HEARD
    return CLIPS if kind == "audioflamingo3" else BOTH if kind in OMNI_KINDS else SAMPLES


def make(folder: Path, kind: str) -> dict[str, Any]:
    """Save the model with its processor as `folder`/model and the samples as `folder`/samples.tar; returns `compute`
    of them."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    tokens = TOKENS | (OMNI if "omni" in kind else {})
    save_tokenizer(folder / "tokenizer", QWEN_VL, model_specific_special_tokens=tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    config, processor = MODELS[kind](transformers, tokenizer)
    if kind == "idefics3":  # its token is fixed
        tokenizer.chat_template = _writing("<image>")
    processor.chat_template = tokenizer.chat_template
    for medium in ("image", "audio", "video"):
        token = getattr(tokenizer if kind == "gemma3" else processor, f"{medium}_token", None)
        if token is not None:
            setattr(config, f"{medium}_token_id", tokenizer.convert_tokens_to_ids(token))
    torch.manual_seed(SEEDS.get(kind, 5))
    names = {**transformers.models.auto.modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    model = getattr(transformers, names.get(config.model_type, "AudioFlamingo3ForConditionalGeneration"))._from_config(
        config
    )
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim == 1:
                value.add_(torch.randn_like(value), alpha=0.3)
                # Norms of Gemma multiply by 1 + weight: without more, answers would repeat one token.
                value.add_(ADDED.get(kind, 0.0) if "language_model" in name else 0.0)
            else:
                # Two ways of transformers to compute Gated DeltaNet differ by 1e-3 after steps with larger weights.
                value.normal_(0.0, 0.05 if kind.startswith("qwen3_5") else 0.2)
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    if kind.startswith("qwen2_5_omni"):
        _as_published(folder / "model")
    if kind == "qwen2_vl":
        _with_keys_at_the_top(folder / "model" / "config.json")
    processor.save_pretrained(folder / "model")
    (folder / "model" / "LICENSE").write_text("of the model")
    members: list[tuple[str, bytes]] = []
    for number, (parts, answer) in enumerate(samples_of(kind)):
        messages = [{"role": "user", "content": content(parts)}, {"role": "assistant", "content": answer}]
        members.append((f"{number}.json", json.dumps({"messages": messages}).encode()))
        for at, part in enumerate(part for part in parts if isinstance(part, tuple)):
            members.append((f"{number}.{at}.{EXTENSIONS[len(part)]}", file_of(part)))
    write_tar(folder / "samples.tar", members)
    return compute(model, folder / "model", kind)


def batches(processor: Any, kind: str) -> list[tuple[Any, Any]]:
    """The processor's tensors of every sample, and of its prompt alone."""
    found = []
    for parts, answer in samples_of(kind):
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content(parts)}], add_generation_prompt=True
        )
        if kind.endswith(SOUND):
            found.append(tuple(heard(processor, parts, text) for text in (f"{prompt}{answer}<|im_end|>\n", prompt)))
            continue
        media = [clip(*part) if len(part) == 1 else image(*part) for part in parts if isinstance(part, tuple)]
        found.append(
            tuple(_processed(processor, text, media, kind) for text in (prompt + answer + "<|im_end|>\n", prompt))
        )
    return found


def heard(processor: Any, parts: list[Any], text: str) -> dict[str, Any]:
    """The tensors of a sample whose videos have sound; videos may be files."""
    import torch
    from transformers.video_utils import VideoMetadata

    from data.media.audio import decode_sound
    from data.media.headers import parse_video_header_bytes

    images, videos, metadata, sounds, sources = [], [], [], [], []
    for part in parts:
        if isinstance(part, tuple) and len(part) == 2:
            images.append(image(*part))
        elif isinstance(part, tuple) and len(part) == 1:
            sounds.append(clip(*part))
            sources.append(None)
        elif not isinstance(part, str):
            raw = part if isinstance(part, bytes) else file_of(part)
            header, frames = parse_video_header_bytes(raw), frames_of(raw)
            if header.sound:
                sounds.append(decode_sound(raw, 16000, 16 * header.sound).numpy())
                sources.append(len(videos))
            videos.append(torch.from_numpy(frames))
            metadata.append(
                VideoMetadata(
                    total_num_frames=len(frames), fps=float(header.rate), height=header.height, width=header.width,
                    duration=float(len(frames) / header.rate),
                )
            )  # fmt: skip
    options: dict[str, Any] = {"images": [images]} if images else {}
    if videos:
        fps = {"fps": 2.0, "do_sample_frames": True}
        options |= {"videos": videos, "videos_kwargs": FRAMES | fps | {"video_metadata": metadata}}
    if sounds:
        # Each alone: a processor computes other values next to a longer one.
        options |= {"audio": sounds, "audio_from_video_indices": sources, "load_audio_from_video": bool(videos)}
    batch = dict(processor(text=[text], return_tensors="pt", **options))
    return batch | ({"use_audio_in_video": True} if any(source is not None for source in sources) else {})


def _processed(processor: Any, text: str, media: list[Any], kind: str) -> Any:
    """Audio Flamingo 3 takes one clip for a text: the tokens of each are put in as its processor writes them."""
    if kind == "paligemma":
        return _with_prefix(processor, text, media)
    if kind != "audioflamingo3":
        clips = [item for item in media if isinstance(item, np.ndarray)]
        images = [item for item in media if not isinstance(item, np.ndarray)]
        options = {"audio": clips} if clips else {}
        return processor(text=text, images=[images] if images else None, return_tensors="pt", **options)
    if not media:
        return processor.tokenizer(text, return_tensors="pt")
    options = processor._merge_kwargs(tokenizer_init_kwargs={}, return_tensors="pt")["audio_kwargs"]
    inputs, texts = processor._process_audio(media, **options)
    for item in texts:
        text = text.replace("<|AUDIO|>", item.replace("<|AUDIO|>", "\0"), 1)
    inputs = {name: value for name, value in inputs.items() if name not in processor.unused_input_names}
    return {**processor.tokenizer(text.replace("\0", "<|AUDIO|>"), return_tensors="pt"), **inputs}


def _with_prefix(processor: Any, text: str, media: list[Any]) -> dict[str, Any]:
    """PaliGemma's processor takes no chat template and no text alone. Its prefix has the token type 0."""
    import torch

    inputs = {}
    if media:
        options = processor._merge_kwargs(tokenizer_init_kwargs={}, return_tensors="pt")["images_kwargs"]
        inputs, texts = processor._process_images([media], **options)
        text = text.replace(PAD, texts[0])
    ids = processor.tokenizer(text, return_tensors="pt")
    begin = "<|im_start|>assistant\n"
    prefix = len(processor.tokenizer(text[: text.index(begin) + len(begin)])["input_ids"])
    types = (torch.arange(ids["input_ids"].size(1)) >= prefix).long()[None]
    return {**inputs, "input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], "token_type_ids": types}


def compute(model: Any, folder: Path, kind: str) -> dict[str, Any]:
    """Ids and logits of every sample, losses and gradient norms of STEPS steps of AdamW, parameters after them, and a
    greedy answer to the first question."""
    import torch
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    inputs = batches(processor, kind)
    marker = processor.tokenizer.encode("<|im_start|>assistant\n")
    found: dict[str, Any] = {"ids": [batch["input_ids"][0] for batch, _ in inputs], "curve": []}
    video = getattr(model.config, "video_token_id", -1)
    image_id = getattr(model.config, "image_token_id", -1)
    found["ids"] = [ids.where(ids != video, image_id).tolist() for ids in found["ids"]]
    model.eval()
    asked = inputs[0][1]
    with torch.no_grad():
        found["logits"] = [model(**batch).logits[0].numpy() for batch, _ in inputs]
        answered = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False)
    found["answer"] = answered[0, asked["input_ids"].size(1) :].tolist()
    if kind.endswith(SOUND):
        found["positions"] = [positions_in(model.model, batch) for batch, _ in inputs]
    optimizer = None
    for _ in range(STEPS):
        total, count = torch.zeros(()), 0
        for batch, _ in inputs:
            ids = batch["input_ids"]
            logits = model(**batch).logits[0]
            # Learned: what is behind the last marker, but for the line break behind the end of the turn.
            firsts = range(ids.size(1) - len(marker))
            begin = max(at for at in firsts if ids[0, at : at + len(marker)].tolist() == marker) + len(marker)
            losses = torch.nn.functional.cross_entropy(logits[begin - 1 : -2], ids[0, begin:-1], reduction="sum")
            total, count = total + losses, count + ids.size(1) - 1 - begin
        model.zero_grad()
        (total / count).backward()
        named = [value for value in model.parameters() if value.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(named, CLIP))
        found["curve"].append((float(total.detach() / count), norm))
        groups = [
            {"params": [value for value in named if (value.ndim > 1) == decays], "weight_decay": decay}
            for decays, decay in ((True, DECAY), (False, 0.0))
        ]
        optimizer = optimizer or torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPSILON)
        optimizer.step()
    found["after"] = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return found


def positions_in(model: Any, batch: dict[str, Any]) -> Any:
    """Positions of a text in transformers, [3, S]."""
    names = ("input_ids", "attention_mask", "image_grid_thw", "video_grid_thw", "use_audio_in_video")
    sizes = {name: batch[name] for name in names if name in batch}
    if "feature_attention_mask" in batch:
        sizes["audio_seqlens"] = batch["feature_attention_mask"].sum(-1)
    sizes["second_per_grids"] = batch.get("video_second_per_grid")
    return model.get_rope_index(**sizes)[0][:, 0].numpy()


def exported(checkpoint: Path, folder: Path, kind: str) -> dict[str, Any]:
    """Export a checkpoint; returns what transformers finds in the directory: keys that are missing or left over, logits
    of the samples, parameters."""
    import torch
    from transformers import AutoProcessor

    from encoders.transformers_media.directory import class_of, hf_config
    from mimo_train.cli import main

    assert main(["export", str(checkpoint), "--to", str(folder)]) == 0
    model, said = class_of(hf_config(str(folder))).from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        inputs = batches(AutoProcessor.from_pretrained(folder), kind)
        logits = [model(**batch).logits[0].numpy() for batch, _ in inputs]
    parameters = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return {"keys": [*said["missing_keys"], *said["unexpected_keys"]], "logits": logits, "parameters": parameters}

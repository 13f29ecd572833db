"""A Qwen-VL or a LLaVA of tiles that transformers makes, tiny and of odd sizes, samples for it, and what transformers
makes of them."""

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

from tests.tars import write_tar
from tests.unit.data.text.chat_templates import QWEN_VL, save_tokenizer
from tests.videos import frames_of, make_video

PATCH = 6
TEXT = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 80,
    "num_hidden_layers": 3, "vocab_size": 411, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 60, "out_hidden_size": 48, "patch_size": PATCH,
    "window_size": 4 * PATCH, "fullatt_block_indexes": [1], "spatial_merge_size": 2,
}  # fmt: skip
SECTION = [1, 2, 1]
"""Of 4 frequencies: heads are 8 wide."""
TEXT_3 = TEXT | {"num_hidden_layers": 4, "head_dim": 12}
VISION_3 = {
    "depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 60, "out_hidden_size": 48, "patch_size": PATCH,
    "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2], "spatial_merge_size": 2,
}  # fmt: skip
SECTION_3 = [3, 1, 2]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "mlp_only_layers": [1]}
TILE = 4 * PATCH
LLAVA_TEXT = {**TEXT, "head_dim": 12}
LLAVA_VISION = {
    "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 60, "num_hidden_layers": 3, "image_size": TILE,
    "patch_size": PATCH,
}  # fmt: skip
PINPOINTS = [[TILE, 2 * TILE], [2 * TILE, TILE], [2 * TILE, 2 * TILE]]
PIXELS = {"min_pixels": 4 * PATCH**2, "max_pixels": 80 * PATCH**2}
SAMPLES: list[tuple[list[Any], str]] = [
    (["what is ", (30, 50), " in front of ", (61, 25), " the other?"], "a small wall, and a long one"),
    (["no image: which digit is green?"], "three"),
    ([(70, 45), "read the digits"], "1 2 3"),
    (["both?", (13, 40), (40, 90)], "yes"),
]
"""Parts of the question, images as (height, width), and the answer."""
VIDEO = (13, 4, 40, 60)
"""(frames, frames per second, height, width)."""
CHOSEN = {"do_sample_frames": True, "fps": 2, "size": {"shortest_edge": 4 * PATCH**2, "longest_edge": 200 * PATCH**2}}
"""Options of video processors."""
RATE, EPSILON, DECAY, CLIP = 0.01, 1e-3, 0.1, 0.7
NEW_TOKENS, STEPS = 6, 5
"""Tokens of the greedy answer to the first question; steps of training."""


def samples_of(kind: str) -> list[tuple[list[Any], str]]:
    """Return the samples of a family: SAMPLES, with a video between images if it reads videos."""
    (parts, answer), *others = SAMPLES
    if kind == "llava_next":
        return SAMPLES
    return [([*parts[:2], " next to ", VIDEO, *parts[2:]], answer), *others]


def image(height: int, width: int) -> Any:
    from PIL import Image

    shades = np.random.default_rng(height * width).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3))
    return Image.fromarray(shades.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def clip(samples: int) -> np.ndarray:
    """16-bit sound as floats."""
    return np.random.default_rng(samples).integers(-9000, 9000, samples).astype(np.float32) / 32768


def file_of(size: tuple[int, ...], rate: int = 16000) -> bytes:
    """An image file of (height, width), a sound file of (samples,) at `rate` samples per second, or a video of (frames,
    frames per second, height, width), and seconds of sound."""
    if len(size) > 3:
        frames, per_second, height, width, *sound = size
        options = {"sound": sound[0]} if sound else {}
        return make_video(images=frames, rate=per_second, height=height, width=width, seed=frames, **options)
    buffer = io.BytesIO()
    if len(size) == 2:
        image(*size).save(buffer, "PNG")
        return buffer.getvalue()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes((clip(*size) * 32768).astype(np.int16).tobytes())
    return buffer.getvalue()


def make(folder: Path, kind: str) -> dict[str, Any]:
    """Save the model with its processor as `folder`/model and the samples as `folder`/samples.tar; returns what
    transformers makes of them: `compute`."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = made(kind)
    model.save_pretrained(folder / "model", max_shard_size="60KB")
    if kind == "qwen3_vl_moe":
        _transpose_experts(folder / "model")
    _processor(folder / "model", kind, transformers)
    members: list[tuple[str, bytes]] = []
    for number, (parts, answer) in enumerate(samples_of(kind)):
        messages = [{"role": "user", "content": content(parts)}, {"role": "assistant", "content": answer}]
        members.append((f"{number}.json", json.dumps({"messages": messages}).encode()))
        for at, part in enumerate(part for part in parts if isinstance(part, tuple)):
            members.append((f"{number}.{at}.{'png' if len(part) == 2 else 'mp4'}", file_of(part)))
    write_tar(folder / "samples.tar", members)
    return compute(model, folder / "model", samples_of(kind))


def _transpose_experts(folder: Path) -> None:
    """As hubs have them: version 5 of transformers reads both forms, and saves the other."""
    from safetensors.numpy import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        tensors |= {name: value.swapaxes(1, 2).copy() for name, value in tensors.items() if ".experts." in name}
        save_file(tensors, file, {"format": "pt"})


def made(kind: str) -> Any:
    """The model with weights that matter."""
    import torch
    import transformers

    torch.manual_seed(11)
    model = _model(kind, transformers)
    with torch.no_grad():
        for name, value in model.named_parameters():
            norm = value.ndim == 1 and name.endswith("weight")
            value.normal_(1.0 if norm else 0.0, 0.3 if value.ndim == 1 else 0.2)
    return model


def hub_name(name: str, kind: str) -> str:
    """As hubs have it, of a name in the memory of version 5."""
    if kind.startswith("qwen3_vl"):
        return name
    if kind.startswith("llava"):  # all but the tower's names are saved so already
        return name.replace("vision_tower.", "vision_tower.vision_model.")
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def inputs_of(parts: list[Any], processor: Any, answer: str = "") -> Any:
    """Return what a processor makes of a sample; without the answer, of a prompt for it."""
    import torch
    from transformers.video_utils import VideoMetadata

    asked = processor.apply_chat_template([{"role": "user", "content": content(parts)}], add_generation_prompt=True)
    images = [image(*part) for part in parts if isinstance(part, tuple) and len(part) == 2]
    media: dict[str, Any] = {"images": [images]} if images else {}
    if VIDEO in parts:
        frames, rate, height, width = VIDEO
        metadata = VideoMetadata(frames, fps=rate, width=width, height=height, duration=frames / rate)
        media |= {"videos": [torch.from_numpy(frames_of(file_of(VIDEO)))], "video_metadata": [metadata]}
    return processor(text=asked + (f"{answer}<|im_end|>\n" if answer else ""), **media, return_tensors="pt")


def content(parts: list[Any]) -> list[dict[str, str]]:
    kinds = {1: "audio", 2: "image", 4: "video", 5: "video"}
    return [{"type": kinds[len(part)]} if isinstance(part, tuple) else {"type": "text", "text": part} for part in parts]


def _model(kind: str, transformers: Any) -> Any:
    if kind.startswith("llava"):
        return _llava(kind, transformers)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    if kind == "qwen3_vl_moe":
        rope |= {"mrope_section": SECTION_3, "mrope_interleaved": True}
        text = TEXT_3 | EXPERTS | {"rope_parameters": rope}
        config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=VISION_3)
        return transformers.Qwen3VLMoeForConditionalGeneration._from_config(config, attn_implementation="eager")
    if kind == "qwen3_vl":
        rope |= {"mrope_section": SECTION_3, "mrope_interleaved": True}
        config = transformers.Qwen3VLConfig(text_config=TEXT_3 | {"rope_parameters": rope}, vision_config=VISION_3)
        return transformers.Qwen3VLForConditionalGeneration._from_config(config, attn_implementation="eager")
    rope |= {"mrope_section": SECTION}
    config = transformers.Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=VISION)
    return transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="eager")


def _llava(kind: str, transformers: Any) -> Any:
    own: dict[str, Any] = {"image_grid_pinpoints": PINPOINTS}
    if kind == "llava_next":
        towers, family = transformers.CLIPVisionConfig, "LlavaNext"
        text = transformers.LlamaConfig(**LLAVA_TEXT)
        own["vision_feature_layer"] = -2
    else:
        towers, family = transformers.SiglipVisionConfig, "LlavaOnevision"
        text = transformers.Qwen2Config(**TEXT, tie_word_embeddings=True)
        own["vision_aspect_ratio"] = "anyres_max_1"
    vision = towers(**LLAVA_VISION, **({} if kind == "llava_next" else {"vision_use_head": False}))
    config = getattr(transformers, f"{family}Config")(vision_config=vision, text_config=text, **own)
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    return model._from_config(config, attn_implementation="eager")


def _llava_processor(kind: str, tokenizer: Any, transformers: Any) -> Any:
    side = {"height": TILE, "width": TILE}
    own = {"tokenizer": tokenizer, "image_token": "<|image_pad|>", "chat_template": tokenizer.chat_template}
    if kind == "llava_next":
        drawn_images = transformers.LlavaNextImageProcessor(
            size={"shortest_edge": TILE}, crop_size=side, image_grid_pinpoints=PINPOINTS
        )
        own |= {"patch_size": PATCH, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        return transformers.LlavaNextProcessor(drawn_images, **own)
    drawn_images = transformers.LlavaOnevisionImageProcessor(size=side, image_grid_pinpoints=PINPOINTS)
    own |= {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_1"}
    films = transformers.LlavaOnevisionVideoProcessor(size=side, do_sample_frames=True, num_frames=4)
    own["video_token"] = "<|video_pad|>"
    return transformers.LlavaOnevisionProcessor(drawn_images, video_processor=films, **own)


def _processor(folder: Path, kind: str, transformers: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_tokenizer(folder.parent / "tokenizer", QWEN_VL))
    config = json.loads((folder / "config.json").read_text())
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end")}
    config |= {"image_token_id": ids["image_pad"], "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>")}
    config |= {f"{name}_token_id": ids[name] for name in ("vision_start", "vision_end")}
    if kind.startswith("llava"):
        config["image_token_index"] = ids["image_pad"]
        (folder / "config.json").write_text(json.dumps(config))
        _llava_processor(kind, tokenizer, transformers).save_pretrained(folder)
        return
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {"patch_size": PATCH, **PIXELS}
    drawn_images, videos = (
        transformers.Qwen2VLImageProcessor(**sizes),
        transformers.Qwen2VLVideoProcessor(patch_size=PATCH, **CHOSEN),
    )
    of_family = transformers.Qwen2_5_VLProcessor
    if kind.startswith("qwen3_vl"):
        halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        drawn_images = transformers.Qwen2VLImageProcessor(**sizes, **halves)
        videos = transformers.Qwen3VLVideoProcessor(patch_size=PATCH, **CHOSEN)
        of_family = transformers.Qwen3VLProcessor
    of_family(drawn_images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(folder)


def compute(model: Any, folder: Path, samples: list[tuple[list[Any], str]]) -> dict[str, Any]:
    """Ids, positions and logits of every sample, a greedy answer, then (loss, gradient norm) of steps of AdamW with all
    samples, and parameters after them."""
    import torch
    from transformers import AutoProcessor

    processor, config = AutoProcessor.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    model.config.image_token_id, model.config.video_token_id = config["image_token_id"], config["video_token_id"]
    model.eval()
    found: dict[str, Any] = {"ids": [], "positions": [], "logits": [], "curve": []}
    batches = [inputs_of(parts, processor, answer) for parts, answer in samples]
    names = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
    for batch in batches:
        ids = torch.where(batch["input_ids"] == config["video_token_id"], config["image_token_id"], batch["input_ids"])
        found["ids"].append(ids[0].tolist())
        if hasattr(model.model, "get_rope_index"):
            sizes = {name: batch[name] for name in names if name in batch}
            found["positions"].append(model.model.get_rope_index(batch["input_ids"], **sizes)[0][:, 0].numpy())
    asked = inputs_of(samples[0][0], processor)
    answered = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False)
    found["answer"] = answered[0, asked["input_ids"].size(1) :].tolist()
    named, optimizer = dict(model.named_parameters()), None
    texts = [batch["input_ids"][0] for batch in batches]
    for _ in range(STEPS):
        model.zero_grad()
        outputs = [model(**batch).logits[0] for batch in batches]
        losses = [_losses(logits, ids, processor) for logits, ids in zip(outputs, texts, strict=True)]
        loss = torch.cat(losses).mean()
        loss.backward()
        reached = {name: value for name, value in named.items() if value.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(reached.values(), CLIP)
        if optimizer is None:
            groups = [
                {"params": [value for value in reached.values() if (value.ndim > 1) == decays], "weight_decay": decay}
                for decays, decay in ((True, DECAY), (False, 0.0))
            ]
            optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPSILON)
        optimizer.step()
        found["curve"].append((float(loss.detach()), float(norm)))
        if not found["logits"]:
            found["logits"] = [logits.detach().numpy() for logits in outputs]
    found["after"] = {name: value.detach().numpy() for name, value in named.items()}
    return found


def _losses(logits: Any, ids: Any, processor: Any) -> Any:
    """Return the losses of what is behind the last marker, but for the line break behind the end of the turn."""
    import torch

    marker = processor.tokenizer.encode("<|im_start|>assistant\n")
    begin = max(at for at in range(len(ids)) if ids[at : at + len(marker)].tolist() == marker) + len(marker)
    return torch.nn.functional.cross_entropy(logits[begin - 1 : -2], ids[begin:-1], reduction="none")


def exported(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Export a checkpoint; returns what transformers finds in the directory: keys that are missing or left over, logits
    of the samples, parameters."""
    from transformers import AutoModelForImageTextToText

    from mimo_train.cli import main

    assert main(["export", str(checkpoint), "--to", str(folder)]) == 0
    options = {"attn_implementation": "eager"}
    model, said = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True, **options)
    parameters = {name: value.detach().numpy() for name, value in model.named_parameters()}
    logits = logits_of(model, folder)
    return {"keys": [*said["missing_keys"], *said["unexpected_keys"]], "logits": logits, "parameters": parameters}


def logits_of(model: Any, folder: Path) -> list[np.ndarray]:
    """Of every sample, with the processor in `folder`."""
    import torch
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    samples = samples_of(model.config.model_type)
    with torch.no_grad():
        return [model(**inputs_of(parts, processor, answer)).logits[0].numpy() for parts, answer in samples]

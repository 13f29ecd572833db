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
from tests.videos import make_video

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
RATE, EPSILON, DECAY, CLIP = 0.01, 1e-3, 0.1, 0.7
NEW_TOKENS = 6
"""Of the greedy answer to the first question."""


def image(height: int, width: int) -> Any:
    from PIL import Image

    shades = np.random.default_rng(height * width).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3))
    return Image.fromarray(shades.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def clip(samples: int) -> np.ndarray:
    """16-bit sound as floats."""
    return np.random.default_rng(samples).integers(-9000, 9000, samples).astype(np.float32) / 32768


def file_of(size: tuple[int, ...], rate: int = 16000) -> bytes:
    """An image file of (height, width), a sound file of (samples,) at `rate` samples per second, or a video of (frames,
    frames per second, height, width)."""
    if len(size) == 4:
        frames, per_second, height, width = size
        return make_video(images=frames, rate=per_second, height=height, width=width, seed=frames)
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
    for number, (parts, answer) in enumerate(SAMPLES):
        messages = [{"role": "user", "content": content(parts)}, {"role": "assistant", "content": answer}]
        members.append((f"{number}.json", json.dumps({"messages": messages}).encode()))
        for at, (height, width) in enumerate(part for part in parts if isinstance(part, tuple)):
            members.append((f"{number}.{at}.png", file_of((height, width))))
    write_tar(folder / "samples.tar", members)
    return compute(model, folder / "model")


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

    torch.manual_seed(5)
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


def _images(parts: list[Any]) -> list[list[Any]] | None:
    """Of one sample, as the processors take those of a batch."""
    found = [image(*part) for part in parts if isinstance(part, tuple)]
    return [found] if found else None


def content(parts: list[Any]) -> list[dict[str, str]]:
    kinds = {1: "audio", 2: "image", 4: "video"}
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
    films = transformers.LlavaOnevisionVideoProcessor(size=side)
    return transformers.LlavaOnevisionProcessor(drawn_images, video_processor=films, **own)


def _processor(folder: Path, kind: str, transformers: Any) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_tokenizer(folder.parent / "tokenizer", QWEN_VL))
    config = json.loads((folder / "config.json").read_text())
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "vision_start", "vision_end")}
    config |= {"image_token_id": ids["image_pad"], "video_token_id": 410}
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
        transformers.Qwen2VLVideoProcessor(patch_size=PATCH),
    )
    of_family = transformers.Qwen2_5_VLProcessor
    if kind.startswith("qwen3_vl"):
        halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        drawn_images = transformers.Qwen2VLImageProcessor(**sizes, **halves)
        videos, of_family = transformers.Qwen3VLVideoProcessor(patch_size=PATCH), transformers.Qwen3VLProcessor
    of_family(drawn_images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(folder)


def compute(model: Any, folder: Path) -> dict[str, Any]:
    """Ids, positions and logits of every sample, the loss of all, gradient norm, parameters after a step of AdamW, and
    a greedy answer."""
    import torch
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model.config.image_token_id = json.loads((folder / "config.json").read_text())["image_token_id"]
    model.eval()
    found: dict[str, Any] = {"ids": [], "positions": [], "logits": []}
    total, count, marker = torch.zeros(()), 0, processor.tokenizer.encode("<|im_start|>assistant\n")
    for parts, answer in SAMPLES:
        question = [{"role": "user", "content": content(parts)}]
        drawn_images = _images(parts)
        prompt = processor.apply_chat_template(question, add_generation_prompt=True)
        batch = processor(text=prompt + answer + "<|im_end|>\n", images=drawn_images, return_tensors="pt")
        ids = batch["input_ids"]
        if hasattr(model.model, "get_rope_index"):
            positions, _ = model.model.get_rope_index(ids, batch["mm_token_type_ids"], batch.get("image_grid_thw"))
            found["positions"].append(positions[:, 0].numpy())
        logits = model(**batch).logits[0]
        found["ids"].append(ids[0].tolist())
        found["logits"].append(logits.detach().numpy())
        # Learned: what is behind the last marker, but for the line break behind the end of the turn.
        begin = max(at for at in range(ids.size(1)) if ids[0, at : at + len(marker)].tolist() == marker) + len(marker)
        losses = torch.nn.functional.cross_entropy(logits[begin - 1 : -2], ids[0, begin:-1], reduction="sum")
        total, count = total + losses, count + ids.size(1) - 1 - begin
        if len(found["ids"]) == 1:
            asked = processor(text=prompt, images=drawn_images, return_tensors="pt")
            answered = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False)
            found["answer"] = answered[0, asked["input_ids"].size(1) :].tolist()
    (total / count).backward()
    found["loss"] = float(total.detach() / count)
    named = {name: value for name, value in model.named_parameters() if value.grad is not None}
    found["norm"] = float(torch.nn.utils.clip_grad_norm_(named.values(), CLIP))
    groups = [
        {"params": [value for value in named.values() if (value.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, DECAY), (False, 0.0))
    ]
    torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPSILON).step()
    found["after"] = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return found


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

    processor, logits = AutoProcessor.from_pretrained(folder), []
    for parts, answer in SAMPLES:
        drawn_images = _images(parts)
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content(parts)}], add_generation_prompt=True
        )
        with torch.no_grad():
            batch = processor(text=prompt + answer + "<|im_end|>\n", images=drawn_images, return_tensors="pt")
            logits.append(model(**batch).logits[0].numpy())
    return logits

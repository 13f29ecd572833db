"""Tiny models of types of transformers whose media half is run as it is next to a native language model."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.dist.models.composites import clip, image
from tests.dist.models.media_models import PAD, SIDE, SQUARE, TEXT, TOKENS, VISION
from tests.unit.data.text.chat_templates import QWEN_VL, save_tokenizer

CLIP, SIGLIP = VISION | {"model_type": "clip_vision_model"}, VISION | {"model_type": "siglip_vision_model"}
PIXTRAL = VISION | {"model_type": "pixtral", "image_size": 84, "head_dim": 16}
AUDIO = {
    "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "num_mel_bins": 16,
}  # fmt: skip
GLM = AUDIO | {"num_key_value_heads": 2, "intermediate_size": 128}
FLAMINGO = AUDIO | {"max_source_positions": 50, "model_type": "audioflamingo3_encoder"}
MARK = {"audio_token": "<|AUDIO|>"}
PERCEIVER = {
    "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 16,
    "num_key_value_heads": 1,
}  # fmt: skip
CROP = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
LLAVA = {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
PINPOINTS = {"image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]}
SOUND = {"feature_size": 16, "chunk_length": 1}
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ({"vision_config": CLIP}, CROP, LLAVA),
    "vipllava": ({"vision_config": CLIP, "vision_feature_layers": [-2, -1]}, CROP, LLAVA),
    "llava_next": ({"vision_config": CLIP, **PINPOINTS}, CROP | PINPOINTS, LLAVA),
    "llava_next_video": ({"vision_config": CLIP, **PINPOINTS}, CROP | PINPOINTS, LLAVA),
    "llava_onevision": (
        {"vision_config": SIGLIP | {"vision_use_head": False}, **PINPOINTS},
        {"size": SQUARE, **PINPOINTS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "deepseek_vl": ({"vision_config": SIGLIP}, {"size": SQUARE}, {"num_image_tokens": 16}),
    "idefics2": (
        {"vision_config": VISION, "perceiver_config": PERCEIVER},
        {"size": {"longest_edge": SIDE, "shortest_edge": 14}}, {"image_seq_len": 4},
    ),
    "lighton_ocr": (
        {"vision_config": PIXTRAL}, {"size": {"longest_edge": 84}, "patch_size": 14},
        {"patch_size": 7, "spatial_merge_size": 2},
    ),
    "video_llama_3": (
        {"vision_config": {key: value for key, value in VISION.items() if key != "image_size"}},
        {"patch_size": 7, "merge_size": 1, "min_pixels": 196, "max_pixels": 4000}, {},
    ),
    "glmasr": ({"audio_config": GLM}, SOUND | {"chunk_length": 2}, MARK),
    "musicflamingo": (
        {"audio_config": FLAMINGO}, SOUND, MARK,
    ),
}  # fmt: skip
"""Type -> keys of its config, of its image processor or feature extractor, and of its processor."""
SIZES = {"image": ((30, 50), (61, 25), (30, 50)), "audio": ((9000, 16000), (17001, 16000), (9000, 16000))}


def save(kind: str, folder: Path) -> Any:
    """Save a model with its processor; returns the model."""
    import torch
    import transformers
    from transformers.models.auto import (
        feature_extraction_auto,
        image_processing_auto,
        processing_auto,
        video_processing_auto,
    )

    of_config, of_part, of_processor = TYPES[kind]
    save_tokenizer(folder.parent / "tokenizer", QWEN_VL, model_specific_special_tokens=TOKENS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder.parent / "tokenizer")
    text = {"model_type": transformers.CONFIG_MAPPING[kind]().text_config.model_type, **TEXT}
    config = transformers.CONFIG_MAPPING[kind](**of_config, text_config=text)
    built = getattr(transformers, processing_auto.PROCESSOR_MAPPING_NAMES.get(kind, "MusicFlamingoProcessor"))
    parts: dict[str, Any] = {}
    for name in built.get_attributes():
        if name == "tokenizer":
            parts[name] = tokenizer
        elif name == "image_processor":
            named = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES[kind]
            parts[name] = getattr(transformers, named["torchvision"])(**of_part)
        elif name == "video_processor":
            named = video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES[kind]
            parts[name] = getattr(transformers, named["torchvision"])()
        else:
            named = feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES.get(kind, "WhisperFeatureExtractor")
            parts[name] = getattr(transformers, named)(**of_part)
    processor = built(**parts, **of_processor)
    of = "audio" if "audio_config" in of_config else "image"
    token = getattr(processor, f"{of}_token", PAD)
    setattr(config, f"{of}_token_id", tokenizer.convert_tokens_to_ids(getattr(token, "content", token)))
    names = transformers.models.auto.modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    torch.manual_seed(3)
    model = getattr(transformers, names.get(kind, "MusicFlamingoForConditionalGeneration"))._from_config(config).eval()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def differences(folder: Path) -> dict[str, str]:
    """Type -> what differs between the media half and the whole model; empty if nothing does."""
    found = {}
    for kind in TYPES:
        (folder / kind).mkdir()
        found[kind] = difference(kind, folder / kind / "model")
    return {kind: text for kind, text in found.items() if text}


def difference(kind: str, folder: Path) -> str:
    """What differs of one type: the reasons against it, its tokens, its features of several items, or its names."""
    import torch

    from encoders.registry import family_of
    from encoders.transformers_media.model import MediaHalf, getters
    from mimo_train.config.pretrained.composites.of_transformers import of_transformers, stored_weights

    try:
        model = save(kind, folder)
        composite = of_transformers(folder)
        keys = composite.media_keys("images")
        spec = family_of(keys["family"]).spec(**keys)
        half, processor = MediaHalf(spec).eval(), spec.processor()
        state = model.state_dict()
        half.model.load_state_dict({name: state[name] for name in half.model.state_dict()})
        names = {rule.ours for rule in stored_weights(spec.tensors(), folder, "pretrained").rules}
        if names != dict(half.model.named_parameters()).keys() or not composite.spellings(folder, "pretrained"):
            return "names"
        sizes, items = SIZES[spec.kind], []
        for size in sizes:
            pixels = np.array(image(*size)) if spec.kind == "image" else clip(size[0])
            tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy() if spec.kind == "image" else pixels)
            items.append(processor.read(tensor))
            if spec.kind == "image":
                given = processor._processor(text=processor.mark, images=[[image(*size)]], return_tensors="pt")
                ids = given["input_ids"][0].tolist()
                first = ids.index(processor.ids(*size)[0])
                if ids[first : first + len(processor.ids(*size))] != list(processor.ids(*size)):
                    return "tokens"
        with torch.no_grad():
            ours = half(items)
            each = []
            for item in items:
                inputs = {name: value for name, value in item.items() if name in half.arguments}
                pooled = getters(model, spec.kind)[0](**inputs, return_dict=True).pooler_output
                pooled = pooled if isinstance(pooled, list | tuple) else [pooled]
                each += [part.reshape(-1, part.shape[-1]) for part in pooled]
        theirs = torch.cat(each)
        return "" if ours.shape == theirs.shape and torch.allclose(ours, theirs, atol=1e-6) else "features"
    except Exception as error:
        return repr(error)

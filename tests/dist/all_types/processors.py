"""Processors of any type of transformers with several parts, with a tokenizer of bytes that has the special tokens that
they name."""

import inspect
import re
import sys
from typing import Any

from tests.unit.data.text.chat_templates import QWEN_VL

TOKEN = re.compile(r"""["'](<[^"'\s<>]{1,40}>|\[[A-Z_]{2,20}\]|\|[A-Z]{2,20}\|)["']""")
"""Special tokens in source code."""
USUAL = {"bos": 1, "eos": 2, "pad": 0, "sep": 2, "unk": 3, "decoder_start": 1}
OTHERS = {"cls", "mask", "all_special", "additional_special", "add_bos", "add_eos", "extra_special"}
ALIKE = {
    "glm_ocr": "glm46v", "glmga": "glm46v", "fast_vlm": "llava", "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe", "cosmos3_omni": "qwen3_vl", "glm4v_moe": "glm4v",
    "qwen3_vl_moe": "qwen3_vl", "musicflamingo": "audioflamingo3",
    "nemotron_h_omni": "parakeet_encoder",
}  # fmt: skip
"""Types whose processor is that of another."""
CLASSES = {"kosmos-2": "Kosmos2Processor", "kosmos-2.5": "Kosmos2_5Processor"}


def _square(size: int) -> dict[str, Any]:
    return {"image_processor": {"size": {"height": size, "width": size}}}


_TILES = {"image_processor": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}}
_HALVES = {"image_processor": {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}}  # equal to those of video processors
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "aria": {"processor": {"size_conversion": {490: 128, 980: 128}}},
    "aya_vision": {"processor": {"patch_size": 28}, **_square(364)},
    "dots3_note": {"image_processor": {"temporal_patch_size": 1}, "video_processor": {"temporal_patch_size": 1}},
    "fast_vlm": {
        "processor": {"patch_size": 64},
        "image_processor": {"size": {"shortest_edge": 256}, "crop_size": {"height": 256, "width": 256}},
    },
    "got_ocr2": _square(1024), "qianfan_ocr": _square(448),
    "internvl": {**_square(448), "video_processor": {"size": {"height": 448, "width": 448}}},
    "granite_docling": {"processor": {"image_seq_len": 81}},
    "unlimited_ocr": {"image_processor": {"size": {"height": 256, "width": 256}, "tile_size": 128}},
    "step3p7": {"image_processor": {"patch_size": 504}},  # of tiles
    "granite4_vision": {"processor": {"downsample_rate": "1/2"}, **_TILES},
    "llava_next": _TILES, "llava_next_video": {**_TILES, "video_processor": _TILES["image_processor"]},
    "llava_onevision": {"processor": {"num_image_tokens": 729, "vision_feature_select_strategy": "full"}},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _HALVES),
    "nemo_speechlm": {"feature_extractor": {"feature_size": 128}},
    "perception_lm": {
        "processor": {"patch_size": 16, "pooling_ratio": 2}, "image_processor": {"tile_size": 64, "max_num_tiles": 4},
    },
}  # fmt: skip
"""Arguments of a processor and its parts, by type."""
IDS = {"voxtral": {"[AUDIO]": 24, "[BEGIN_AUDIO]": 25}}
"""Ids of tokens that a processor takes as known, by type."""
LENGTHS = {"gemma3": 16, "paligemma": 196}
"""Tokens of an image that a processor takes from its image processor, by type."""
MARKS = {"hunyuan_vl": "<|image_start|><|image|><|image_end|>"}
"""What a chat template writes for an image, where it is not the processor's token."""
_OMNI = ("qwen2_5_omni", "qwen2_5_omni_thinker", "qwen3_omni_moe", "qwen3_omni_moe_thinker")
MARKS |= dict.fromkeys(_OMNI, "<|vision_bos|><|image|><|vision_eos|>")
MARKS |= dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), "<|vision_start|><|image_pad|><|vision_end|>")


def _source(built: type) -> str:
    modules = {base.__module__ for base in built.__mro__ if base.__module__.startswith("transformers.models")}
    return "".join(inspect.getsource(sys.modules[name]) for name in sorted(modules))


def _tokenizer(source: str, strings: tuple[str, ...], kind: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    base = ["<pad>", "<s>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    for token, at in IDS.get(kind, {}).items():
        base.insert(at, token)
    merges = [("\u010a", "\u010a"), ("1", "1")]  # line breaks, and digits
    base += ["".join(pair) for pair in merges]
    vocabulary = {token: at for at, token in enumerate(base)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = {*re.findall(r"tokenizer\.(\w+)_token(?:_id)?\b", source)}
    names |= {*re.findall(r"tokenizer, [\"'](\w+)_token[\"']", source)}
    tokens = {}
    for name in sorted(names - USUAL.keys() - OTHERS):
        default = re.search(rf"""\b{name}_token(?::\s*\w+)?\s*=\s*["']([^"'\s]+)["']""", source, re.I)
        tokens[f"{name}_token"] = default[1] if default else f"<|{name}|>"
    special = {*strings, *TOKEN.findall(source), *tokens.values(), "<|im_start|>", "<|im_end|>"} - {*base}
    special_tokens = [*IDS.get(kind, ()), *sorted(special)]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    usual = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **usual, model_specific_special_tokens=tokens)


def _part(attribute: str, kind: str) -> type:
    import transformers
    from transformers.models.auto import feature_extraction_auto, image_processing_auto, video_processing_auto

    mapping = {
        "image_processor": image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_processor": video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES,
    }.get(attribute, feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES)
    name = mapping.get(kind) or mapping.get(ALIKE.get(kind, kind))
    if isinstance(name, dict):
        name = name.get("torchvision") or name.get("pil")
    default = "CLIPImageProcessor" if attribute == "image_processor" else "WhisperFeatureExtractor"
    built: type = getattr(transformers, name or default)
    return built


def _options_of_part(part: type, attribute: str, kind: str, config: Any) -> dict[str, Any]:
    """Return arguments of a part of the processor that must agree with the model's config."""
    from transformers import WhisperFeatureExtractor

    options = dict(OPTIONS.get(kind, {}).get(attribute, {}))
    vision = getattr(config, "vision_config", None)
    if attribute in ("image_processor", "video_processor"):
        known = getattr(getattr(part, "valid_kwargs", None), "__annotations__", {})
        names = {"patch_size": "patch_size", "merge_size": "spatial_merge_size", "temporal_patch_size": ""}
        for key, of_model in names.items():
            value = getattr(vision, of_model or key, None)
            if key in known and isinstance(value, int) and isinstance(getattr(part, key, None), int):
                options.setdefault(key, value)
    if issubclass(part, WhisperFeatureExtractor):
        options.setdefault("feature_size", getattr(getattr(config, "audio_config", None), "num_mel_bins", 80) or 80)
    return options


def tiny_processor(kind: str, config: Any, strings: tuple[str, ...] = ()) -> Any:
    """Return the processor of a type for a tiny config, with a chat template; its tokenizer has the tokens `strings`
    too."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = CLASSES.get(kind) or PROCESSOR_MAPPING_NAMES.get(kind) or PROCESSOR_MAPPING_NAMES[ALIKE[kind]]
    built, config = getattr(transformers, name), getattr(config, "thinker_config", config)
    source, parts = _source(built), {}
    for attribute in built.get_attributes():
        if "tokenizer" in attribute:
            parts[attribute] = _tokenizer(source, strings, kind)
        else:
            part = _part(attribute, kind)
            parts[attribute] = part(**_options_of_part(part, attribute, kind, config))
    known = inspect.signature(built.__init__).parameters
    options = dict(OPTIONS.get(kind, {}).get("processor", {}))
    vision = getattr(config, "vision_config", None)
    values = {"spatial_merge_size": getattr(config, "spatial_merge_size", None)}
    values["num_query_tokens"] = getattr(config, "num_query_tokens", None)
    if vision is not None:
        patch = getattr(vision, "patch_size", None)
        values["patch_size"] = patch[0] if isinstance(patch, list | tuple) else patch
        if "vision_feature_select_strategy" in known:
            strategy = getattr(config, "vision_feature_select_strategy", None) or "default"
            values["vision_feature_select_strategy"] = strategy
            values["num_additional_image_tokens"] = int(vision.model_type.startswith("clip"))
    options = {key: value for key, value in (values | options).items() if value is not None and key in known}
    processor = built(**parts, **options)
    named = [value for key, value in vars(processor).items() if key.endswith("_token") and isinstance(value, str)]
    missing = tuple(token for token in named if token not in processor.tokenizer.get_vocab())
    if missing and not strings:
        return tiny_processor(kind, config, missing)
    if kind in LENGTHS:
        processor.image_seq_length = processor.image_processor.image_seq_length = LENGTHS[kind]
    return processor


def mark_of(processor: Any, kind: str, medium: str) -> str:
    """Return what a chat template writes for an image or audio item."""
    if medium == "image" and kind in MARKS:
        return MARKS[kind]
    for owner, name in ((processor, "_placeholder_token"), (processor, "_token"), (processor.tokenizer, "_token")):
        token = getattr(owner, f"{medium}{name}", None)
        if token is not None:
            return str(getattr(token, "content", token))
    raise ValueError(f"the processor of {kind} has no {medium} token")


PREFIXED = """
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {%- for part in message.content if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- endfor -%}
    {{- bos_token -}}
    {%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
    {{- '\\n' -}}
  {%- else -%}{{- message.content + eos_token -}}{%- endif -%}
{%- endfor -%}
"""
"""A chat template that writes what PaliGemma's processor does."""


def set_template(processor: Any, kind: str, media: list[str]) -> None:
    """Give a processor the chat template of Qwen-VL, or that of its own, with its own tokens for media."""
    template = PREFIXED if kind == "paligemma" else QWEN_VL
    for medium in media:
        usual = {"image": "<|vision_start|><|image_pad|><|vision_end|>", "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}
        template = template.replace(usual[medium], mark_of(processor, kind, medium))
    if getattr(processor, "video_token", None) is not None:
        mark = MARKS[kind].replace("image", "video") if "vision" in MARKS.get(kind, "") else processor.video_token
        if kind.startswith("glm"):  # by which its classes tell frames from images
            mark = f"<|begin_of_video|>{mark}<|end_of_video|>"
        template = template.replace("<|vision_start|><|video_pad|><|vision_end|>", mark)
    if kind == "molmo2":  # whose processor puts it in front of every text
        template = "{{ bos_token }}" + template
    processor.chat_template = processor.tokenizer.chat_template = template


def set_tokens(values: dict[str, Any], processor: Any) -> None:
    """Set the ids of tokens in the values of a config and its parts, in place, and the size of the vocabulary."""
    tokenizer = processor.tokenizer
    for key, value in list(values.items()):
        if isinstance(value, dict):
            set_tokens(value, processor)
            continue
        match = re.fullmatch(r"(\w+)_token_(?:id|index)", str(key))
        if match is None or isinstance(value, list | str):
            continue
        stem = match[1]
        if stem in USUAL:
            values[key] = None if value is None else USUAL[stem]
            continue
        if isinstance(getattr(processor, f"{stem}_token_id", None), int):
            values[key] = getattr(processor, f"{stem}_token_id")
            continue
        named = [getattr(owner, f"{stem}_token", None) for owner in (tokenizer, processor)]
        texts = [text for text in (getattr(token, "content", token) for token in named) if isinstance(text, str)]
        forms = (f"<|{stem}|>", f"<{stem}>", f"[{stem.upper()}]")
        texts += [text for text in forms if text in tokenizer.get_vocab()]
        if not texts:
            texts = [forms[0]]
            tokenizer.add_special_tokens({"extra_special_tokens": texts}, replace_extra_special_tokens=False)
        values[key] = tokenizer.convert_tokens_to_ids(texts[0])


def set_vocabulary(values: dict[str, Any], size: int) -> None:
    """Set the size of the vocabulary of a config and its parts, in place."""
    for key, value in values.items():
        if isinstance(value, dict):
            set_vocabulary(value, size)
        elif key in ("vocab_size", "n_vocab", "padded_vocab_size", "vocab_size_per_layer_input") and value:
            values[key] = size


def _of_omni(values: dict[str, Any], ids: Any) -> None:
    for part in (values, values.get("thinker_config", {})):
        part["vision_start_token_id"], part["vision_end_token_id"] = ids(["<|vision_bos|>", "<|vision_eos|>"])


def _of_molmo(values: dict[str, Any], ids: Any) -> None:
    names = ("image_start", "image_end", "low_res_image_start", "frame_start", "frame_end")
    tokens = ("<im_start>", "<im_end>", "<low_res_im_start>", "<frame_start>", "<frame_end>")
    values["image_patch_id"] = ids("<im_patch>")
    values |= {f"{name}_token_id": ids(token) for name, token in zip(names, tokens, strict=True)}


def _of_gemma(values: dict[str, Any], ids: Any) -> None:
    values["image_token_index"] = ids("<|image|>")  # that of its processor is the start of an image


def _of_minicpm(values: dict[str, Any], ids: Any) -> None:
    values["newline_id"] = ids("\u010a")
    for name in ("slice_start", "slice_end", "image_start", "image_end"):
        values[f"{name}_id"] = ids(f"<|{name}|>")


def _of_glm(values: dict[str, Any], ids: Any) -> None:
    values |= {
        f"video_{place}_token_id": ids(f"<|{name}_of_video|>") for place, name in (("start", "begin"), ("end", "end"))
    }


FURTHER = {
    "gemma3": _of_gemma,
    "glm5_next": _of_glm,
    "llama4": lambda values, ids: values.update(image_token_index=ids("<|patch|>")),
    "minicpmv4_7": _of_minicpm,
    "molmo2": _of_molmo,
    "qwen2_5_omni": _of_omni,
    "qwen2_5_omni_thinker": _of_omni,
    "qwen3_omni_moe": _of_omni,
    "qwen3_omni_moe_thinker": _of_omni,
}
"""Further ids of tokens, by type."""

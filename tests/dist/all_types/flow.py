"""A tiny model of any type of transformers through the product: a directory in, a step, a checkpoint, a resume, an
export that transformers loads, with the same logits."""

import inspect
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.dist.all_types import processors
from tests.dist.all_types.configs import tiny_config
from tests.dist.models.composites import clip, content, file_of, image
from tests.tars import write_tar
from tests.videos import frames_of

SAMPLES: list[tuple[list[Any], str]] = [
    (["what is ", (70, 90), " in front of ", (96, 64), " the other?"], "a small wall, and a long one"),
    (["no image: which digit is green?"], "three"),
]
"""Parts of the question, images as (height, width), and the answer."""
CLIPS: list[tuple[list[Any], str]] = [([(9000,), "what is said?"], "one two"), SAMPLES[1]]
"""As SAMPLES, audio as (samples,)."""
BOTH: list[tuple[list[Any], str]] = [
    (["what is ", (70, 90), " and what says ", (9000,), " of ", (9000,), "?"], "a small wall, and a long one"),
    SAMPLES[1],
]
"""Images and audio."""
IMAGES, SECONDS = ((70, 90), (640, 600), (70, 90), (640, 600)), (0.9, 0.4, 0.9, 1.7, 0.4)
"""Sizes of items that are computed together."""
VIDEOS: list[tuple[list[Any], str]] = [
    (["what moves in ", (70, 90), " and ", (21, 8, 64, 96), " and ", (5, 5, 96, 64), "?"], "a small wall"),
    SAMPLES[1],
]
"""As SAMPLES, videos as (frames, frames per second, height, width)."""
ALONE: list[tuple[list[Any], str]] = [
    (["what moves in ", (21, 8, 64, 96), " and ", (5, 5, 96, 64), "?"], "a small wall"),
    SAMPLES[1],
]
"""As VIDEOS, without an image."""
ONE: list[tuple[list[Any], str]] = [(["what moves in ", (21, 8, 64, 96), "?"], "a small wall"), SAMPLES[1]]
FRAMES = {"fps": 1.0, "num_frames": 4}
SAMPLING: dict[str, dict[str, Any]] = {"smolvlm": FRAMES}
SAMPLING |= dict.fromkeys(
    ("gemma4", "gemma4_unified", "internvl", "llava_next_video", "llava_onevision", "molmo2", "video_llava"),
    {"num_frames": 4},
)
"""Options of the video processor, by type; without them it takes many frames."""
TEXTS = [SAMPLES[1], (["read it from left to right"], "1 2 3")]
VOCABULARY = 320
"""Rows of language models alone, for bytes."""
EXTENSIONS = {1: "wav", 2: "png", 4: "mp4"}
"""Extension of a file by the numbers of its part."""
LIMIT = 2e8
"""Most parameters of a tiny model."""
STD = 0.1
"""Standard deviation of matrices: features and layers must matter."""


class Outcome(NamedTuple):
    """Results of a type."""

    tier: str
    logits: float
    """Largest difference of our logits and those of the export in transformers, of the largest."""
    resumed: float
    """Largest relative difference of loss and gradient norm of a step after a resume."""
    keys: list[str]
    """Tensors that are missing in the export, or left over."""
    same_ids: bool
    """True if our tokens are those of the processor."""
    shown_tier: str
    """Tier in docs/models.md."""
    batched: float
    """`batch_gap` of its audio; 0 without audio."""


def samples_of(medium: str, kind: str = "") -> list[tuple[list[Any], str]]:
    if medium == "video" and kind.startswith(("glm", "smolvlm")):  # whose classes take no image next to a video
        return ALONE if kind.startswith("glm") else ONE
    if medium == "video" and kind == "molmo2":  # whose processor takes no second video
        return ONE
    return {"image": SAMPLES, "audio": CLIPS, "both": BOTH, "video": VIDEOS}.get(medium, TEXTS)


def make(kind: str, folder: Path, *, videos: bool = False) -> str:
    """Save a tiny model as `folder`/model and samples as `folder`/samples.tar; return the kind of its media, "both" for
    images and audio, or "". With `videos` the samples have these too."""
    import torch
    import transformers
    from transformers.models.whisper.modeling_whisper import sinusoids

    from encoders.transformers_media.directory import kinds_of
    from mimo_train.config.transformers_llm import causal_classes

    medium, processor = "", None
    if kind in _of_parts():
        built = getattr(transformers, _of_parts()[kind])
        config = tiny_config(kind)
        processor = processors.tiny_processor(kind, config)
        media = kinds_of(getattr(config, "thinker_config", config))
        medium = "both" if len(media) > 1 else media[0]
        processors.set_template(processor, kind, media)
        config = tiny_config(kind, lambda values: _fit(values, processor, kind))
        if medium != "audio":
            _set_image_size(config, processor, kind)
    else:
        built = getattr(transformers, causal_classes()[kind])
        config = tiny_config(kind, _fit_text)
    torch.manual_seed(5)
    with torch.device("meta"):
        size = sum(value.numel() for value in built._from_config(config).parameters())
    assert size < LIMIT, f"{size} parameters"
    model = built._from_config(config).float()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.requires_grad and value.ndim > 1:
                value.normal_(0, STD)
            elif "embed_positions" in name:  # as checkpoints have them
                value.copy_(sinusoids(*value.shape))
    model.save_pretrained(folder / "model")
    if kind == "qwen2_5_omni":
        torch.save({}, folder / "model" / "spk_dict.pt")  # of voices
    if processor is not None:
        processor.save_pretrained(folder / "model")
    rate = processor._audio_processor.sampling_rate if medium in ("audio", "both") else 0
    members: list[tuple[str, bytes]] = []
    for number, (parts, answer) in enumerate(samples_of("video" if videos else medium, kind)):
        messages = [{"role": "user", "content": content(parts)}, {"role": "assistant", "content": answer}]
        members.append((f"{number}.json", json.dumps({"messages": messages}).encode()))
        for at, part in enumerate(part for part in parts if isinstance(part, tuple)):
            members.append((f"{number}.{at}.{EXTENSIONS[len(part)]}", file_of(part, rate)))
    write_tar(folder / "samples.tar", members)
    return medium


def _of_parts() -> dict[str, str]:
    from transformers import CONFIG_MAPPING

    from mimo_train.config.transformers_llm import causal_classes
    from scripts.model_tables import types_of_parts

    types = types_of_parts().items()
    return {kind: name for kind, name in types if CONFIG_MAPPING[kind].sub_configs or kind not in causal_classes()}


def _fit(values: dict[str, Any], processor: Any, kind: str) -> None:
    processors.set_tokens(values, processor)
    processors.FURTHER.get(kind, lambda values, ids: None)(values, processor.tokenizer.convert_tokens_to_ids)
    processors.set_vocabulary(values, len(processor.tokenizer) + 8)


def _fit_text(values: dict[str, Any]) -> None:
    processors.set_vocabulary(values, VOCABULARY)
    for key, value in values.items():
        if key.endswith("_token_id") and isinstance(value, int):
            values[key] = min(value, 3)
    if "is_decoder" in values:
        values["is_decoder"] = True


def _set_image_size(config: Any, processor: Any, kind: str) -> None:
    """Give a vision tower the size of the images that its processor makes."""
    mark = processors.mark_of(processor, kind, "image")
    pixels = processor(text=[mark], images=[image(70, 90)], return_tensors="pt").get("pixel_values")
    vision = getattr(config, "vision_config", None)
    is_square = hasattr(pixels, "ndim") and pixels.ndim > 3 and pixels.shape[-1] == pixels.shape[-2]
    if is_square and isinstance(getattr(vision, "image_size", None), int):
        vision.image_size = pixels.shape[-1]


def composed(folder: Path, medium: str, *overrides: str) -> Any:
    """Return the config of a run of two steps."""
    from mimo_train.config.compose import load

    medium = "image" if medium == "video" else medium
    values = {
        "run.dir": folder / "run", "pretrained": folder / "model", "data.shards": folder / "samples.tar",
        "data.demo": "", "data.validation_shards": "", "data.shuffle": "false", "data.sequence_length": 9000,
        "data.workers": 0, "train.iters": 2, "train.global_batch_size": 2, "train.micro_batch_size": 1,
        "train.eval_interval": 0, "optim.lr": 1e-3, "optim.warmup_iters": 0, "checkpoint.save_interval": 0,
        "log.tensorboard": "false", "layout": "one_process",
    }  # fmt: skip
    if not medium:
        del values["layout"]
        values["data.tokenizer"] = "bytes"
    if medium == "audio":
        values["modules.images.encoder.max_seconds"] = 2
    if medium == "both":
        values["modules.audio.encoder.max_seconds"] = 2
    name = {"": "gpt_tiny", "both": "mixed_tiny"}.get(medium, "vlm_digits")
    return load(name, [*(f"{key}={value}" for key, value in values.items()), *overrides])


def _length(cfg: Any, medium: str) -> str:
    """Return an override: the shortest length of samples that holds those here and the largest image."""
    if not medium:
        return "data.sequence_length=64"
    encoders = {name: module.encoder for name, module in cfg.modules.items() if name != "language"}
    merge = cfg.modules["images"].projector.merge
    tokens = 300
    for part in (part for part in samples_of(medium)[0][0] if isinstance(part, tuple)):
        encoder = encoders["audio" if medium == "both" and len(part) == 1 else "images"]
        size = {1: (*part, 16000), 2: part, 4: (*part[2:], *part[:2], 1)}[len(part)]
        tokens += encoder.num_tokens(*size, merge=merge) * 3 // 2  # with separators
    return f"data.sequence_length={max(tokens, *(encoder.most_tokens(merge) + 8 for encoder in encoders.values()))}"


def outcome(kind: str, folder: Path, videos: bool = False) -> Outcome | str:
    """Run a type through everything, in this process, the only rank. Return the reason if it is not supported."""
    import torch
    import transformers

    from mimo_train.layout.run import resolve
    from mimo_train.training.step.batches import StepIterator, open_loader
    from scripts.model_tables import tier_of_parts, tier_of_text
    from tests.dist.commands import command
    from tests.dist.models.test_composites import predicted
    from tests.dist.steps import Steps

    transformers.logging.set_verbosity_error()
    shown = tier_of_parts(kind, _of_parts()[kind]) if kind in _of_parts() else tier_of_text(kind)
    if not shown.name:
        return shown.reason
    medium, overrides = make(kind, folder, videos=videos), []
    is_heard = medium in ("audio", "both") and not videos
    batched = batch_gap(composed(folder, medium), medium) if is_heard else 0.0
    if videos:
        medium = "video"
        if not composed(folder, medium).modules["images"].encoder.reads_videos:
            return "reads no videos"
        overrides = [f"modules.images.encoder.video={json.dumps(SAMPLING.get(kind, {}))}"]
    length = _length(composed(folder, medium, *overrides), medium)
    cfg = composed(folder, medium, length, *overrides)
    run = Steps(cfg)
    run.train()
    checkpoint = run.save()
    iterator = StepIterator(
        open_loader(resolve(cfg), run.pipeline.groups, run.session.data.dataset, consumed=0, steps=1), run.pipeline
    )
    iterator.advance()
    run.pipeline.model[0].eval()
    logits = predicted(run.pipeline, iterator)
    run.pipeline.model[0].train()
    ids = [batch["input_ids"][0] for batch in iterator.current.microbatches]
    expected = run.train()[0]
    run.session.close()
    again = Steps(
        composed(folder, medium, length, *overrides, f"run.dir={folder / 'again'}", f"checkpoint.resume={checkpoint}")
    )
    resumed = again.train()[0]
    again.session.close()
    code, text = command(["export", str(checkpoint), "--to", str(folder / "out")])
    assert code == 0, text
    built = _class(kind)
    if "from_pretrained" in vars(built):  # reads further files
        built.from_pretrained(folder / "out")
    model, info = transformers.PreTrainedModel.from_pretrained.__func__(
        built, folder / "out", dtype=torch.float32, output_loading_info=True
    )
    model = getattr(model, "thinker", model)  # that speaks too
    gaps, alike = [], []
    image, video = (getattr(model.config, f"{name}_token_id", None) for name in ("image", "video"))
    for number, batch in enumerate(_inputs(folder / "out", medium, ids, kind)):
        length = batch["input_ids"].size(1)
        theirs = [image if medium == "video" and token == video else token for token in batch["input_ids"][0].tolist()]
        alike.append(theirs == ids[number][:length].tolist())
        known = {
            *inspect.signature(model.forward).parameters,
            *(["mm_token_type_ids"] if medium in ("image", "both", "video") else []),
        }
        if medium in ("image", "both", "video"):  # some processors give none
            batch.setdefault("mm_token_type_ids", (batch["input_ids"] == model.config.image_token_id).long())
        with torch.no_grad():
            batch = {name: _as_float(value) for name, value in batch.items() if name in known}
            theirs = model.eval()(**batch, use_cache=False).logits[0].float().numpy()
        gaps.append(np.abs(logits[number, :length, : theirs.shape[-1]] - theirs).max() / np.abs(theirs).max())
    differences = [abs(ours / theirs - 1) for ours, theirs in zip(resumed, expected, strict=True)]
    keys = [*info["missing_keys"], *info["unexpected_keys"], *map(str, info["mismatched_keys"])]
    return Outcome(_tier(cfg), float(max(gaps)), max(differences), keys, all(alike), shown.name, batched)


def batch_gap(cfg: Any, medium: str) -> float:
    """Return the largest difference of features of items of several sizes, computed together and alone, of the largest
    feature."""
    import torch

    from encoders.transformers_media.model import MediaHalf

    spec = cfg.modules["audio" if medium == "both" else "images"].encoder
    processor, half, random = spec.processor(), MediaHalf(spec).eval(), torch.Generator().manual_seed(1)
    if spec.kind == "image":
        media = [torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=random) for size in IMAGES]
    else:
        media = [torch.randn(int(time * processor.sample_rate), generator=random) / 10 for time in SECONDS]
    items = [processor.read(item) for item in media]
    with torch.no_grad():
        for parameter in half.parameters():  # some classes begin with zeros
            if parameter.ndim > 1:
                parameter.normal_(0, STD, generator=random)
        alone = torch.cat([half([item]) for item in items])
        return float((half(items) - alone).abs().max() / alone.abs().max())


def _as_float(value: Any) -> Any:
    return value.float() if hasattr(value, "is_floating_point") and value.is_floating_point() else value


def _class(kind: str) -> Any:
    import transformers

    from mimo_train.config.transformers_llm import causal_classes

    if kind in _of_parts():
        return getattr(transformers, _of_parts()[kind])
    return getattr(transformers, causal_classes()[kind])


def _tier(cfg: Any) -> str:
    from mimo_train.config.transformers_llm import TransformersLlm

    native = [not isinstance(cfg.language.llm, TransformersLlm)]
    native += [
        not module.encoder.family.startswith("media_") for name, module in cfg.modules.items() if name != "language"
    ]
    return "native" if all(native) else "mixed" if native[0] else "as it is"


def _inputs(folder: Path, medium: str, ids: list[Any], kind: str) -> list[dict[str, Any]]:
    """Return what transformers gets of the samples."""
    from transformers import AutoProcessor

    if not medium:
        return [{"input_ids": row[None]} for row in ids]
    processor, batches = AutoProcessor.from_pretrained(folder), []
    for parts, answer in samples_of(medium, kind):
        if "suffix" in inspect.signature(processor.__call__).parameters:  # whose other text is seen both ways
            batches.append(_with_suffix(processor, parts, answer))
            continue
        # Voxtral's needs mistral_common, and SmolVLM's has another template for videos.
        by_tokenizer = hasattr(processor, "_retrieve_input_features") or kind == "smolvlm"
        renderer = processor.tokenizer if by_tokenizer else processor
        prompt = renderer.apply_chat_template(
            [{"role": "user", "content": content(parts)}], add_generation_prompt=True, tokenize=False
        )
        images = [image(*part) for part in parts if len(part) == 2 and isinstance(part, tuple)]
        clips = [clip(*part) for part in parts if len(part) == 1 and isinstance(part, tuple)]
        videos = [part for part in parts if len(part) == 4 and isinstance(part, tuple)]
        media = images + clips + videos
        options = ({"images": [images]} if images else {}) | ({"audio": clips} if clips else {})
        options |= _video_options(folder, kind, videos) if videos else {}
        if clips and processor.tokenizer.init_kwargs.get("max_length", 0) is None:
            options["audio_kwargs"] = {"max_length": 30 * 16000}  # its default, which null of the tokenizer replaces
        text = [prompt + answer + "<|im_end|>\n"]
        if not media:
            batches.append(dict(processor.tokenizer(text=text, return_tensors="pt")))
            continue
        if hasattr(processor, "_retrieve_input_features"):
            batches.append(_of_voxtral(processor, text, media))
            continue
        try:
            batches.append(dict(processor(text=text, return_tensors="pt", **options)))
        except ValueError:  # takes no lists for each text
            options |= {"images": images} if images else {}
            batches.append(dict(processor(text=text, return_tensors="pt", **options)))
    return batches


def _video_options(folder: Path, kind: str, videos: list[tuple[int, ...]]) -> dict[str, Any]:
    """Return what a processor gets of videos: all frames, and how to choose of them."""
    import torch
    from transformers.video_utils import VideoMetadata

    from encoders.transformers_media.directory import hf_config, pad_id
    from encoders.transformers_media.videos import videos_of

    reader = videos_of(str(folder), pad_id(hf_config(str(folder)), "image"), SAMPLING.get(kind, {}))
    metadata = [
        VideoMetadata(total_num_frames=frames, fps=rate, height=height, width=width, duration=frames / rate)
        for frames, rate, height, width in videos
    ]
    every = [torch.from_numpy(frames_of(file_of(part))) for part in videos]
    options = {"do_sample_frames": True, "return_metadata": True, "return_mm_token_type_ids": True}
    options |= {**reader.sampling, **SAMPLING.get(kind, {})}
    if "use_token_compression" in reader.options:
        options["use_token_compression"] = False
    return {"videos": [every], "video_metadata": [metadata], **options}


def _with_suffix(processor: Any, parts: list[Any], answer: str) -> dict[str, Any]:
    """Return what PaliGemma gets of a sample; its processor takes no text alone."""
    images = [image(*part) for part in parts if isinstance(part, tuple)]
    text = processor.image_token * len(images) + "".join(part for part in parts if isinstance(part, str))
    if images:
        return dict(processor(text=[text], images=[images], suffix=[answer], return_tensors="pt"))
    tokenizer = processor.tokenizer
    pair = (f"{tokenizer.bos_token}{text}\n", answer + tokenizer.eos_token)
    return dict(tokenizer(*pair, return_token_type_ids=True, return_tensors="pt"))


def _of_voxtral(processor: Any, text: list[str], media: list[Any]) -> dict[str, Any]:
    """Return what Voxtral gets of a clip of less than 30 seconds: mistral_common, which wants an older numpy than ours,
    writes 375 tokens behind one for the beginning."""
    options = processor._merge_kwargs()["audio_kwargs"]
    ids = processor.tokenizer([text[0].replace("[AUDIO]", "[BEGIN_AUDIO]" + "[AUDIO]" * 375)], return_tensors="pt")
    return {**ids, "input_features": processor._retrieve_input_features(media, **options)}

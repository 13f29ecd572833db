"""The encoder of Whisper in a directory of `transformers`: config, and weights by name."""

import json
from collections.abc import Mapping
from typing import Any

from encoders.errors import EncoderError
from encoders.native.vit.weights import LayerNames, layer_rules, norm_rules
from encoders.native.whisper.spec import QwenAudioSpec, WhisperSpec
from encoders.pretrained import ConfigFile, Published, class_defaults, tower_config
from encoders.weight_map import WeightMap, same, with_biases

_LAYERS = LayerNames(
    at="layers.{}.",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    norms=("self_attn_layer_norm", "final_layer_norm"),
    key_bias=False,
)
_PREPROCESSING = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "dither": 0.0}


def read(config: Mapping[str, Any], preprocessor: Mapping[str, Any], model_type: str = "whisper") -> dict[str, Any]:
    """Read Whisper; see `encoders.registry.Family.read`. `model_type` is that of the class of the encoder."""
    file = ConfigFile("config.json", config, {"apply_spec_augment": False, **class_defaults(model_type)})
    file.require(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, encoder_layerdrop=0.0)
    file.require(apply_spec_augment=False)
    preprocessor = preprocessor.get("feature_extractor") or preprocessor
    mels = file["num_mel_bins"]
    preprocessor_file = ConfigFile("preprocessor_config.json", preprocessor, _PREPROCESSING | {"feature_size": mels})
    # The bands of its filters end at 8000 Hz at any rate; ours end at half of the rate.
    preprocessor_file.require(feature_size=mels, dither=0.0, sampling_rate=16000)
    return {
        "family": "whisper",
        "sample_rate": preprocessor_file["sampling_rate"],
        "max_seconds": 2
        * preprocessor_file["hop_length"]
        * file["max_source_positions"]
        / preprocessor_file["sampling_rate"],
        "pad_clips": True,
        "num_mels": mels,
        "window": preprocessor_file["n_fft"],
        "hop": preprocessor_file["hop_length"],
        "hidden_size": file["d_model"],
        "num_layers": file["encoder_layers"],
        "num_attention_heads": file["encoder_attention_heads"],
        "ffn_hidden_size": file["encoder_ffn_dim"],
        "activation": file.activation("activation_function"),
        "key_bias": False,
    }


def published(spec: WhisperSpec) -> Published:
    """Publish a `WhisperModel` whose decoder has no layers and one token; see `encoders.registry.Family.published`."""
    needed = {
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "sample_rate": 16000,
        "key_bias": False,
        "pad_clips": True,
    }
    wrong = [f"{key}={json.dumps(value)}" for key, value in needed.items() if getattr(spec, key) != value]
    if spec.max_samples % spec.sample_rate or spec.max_samples % spec.frame:
        wrong.append(f"max_seconds to whole seconds and whole frames of {spec.frame} samples")
    if wrong:
        raise EncoderError(f"WhisperModel computes something else: set {', '.join(wrong)}")
    names = {
        "d_model": "hidden_size",
        "encoder_layers": "num_hidden_layers",
        "encoder_attention_heads": "num_attention_heads",
        "encoder_ffn_dim": "intermediate_size",
        "activation_function": "hidden_act",
        "init_std": "initializer_range",
    }
    tower, hidden, frames = tower_config(spec), spec.hidden_size, spec.most_inner_tokens()
    no_decoder = {"decoder_layers": 0, "decoder_attention_heads": 1, "vocab_size": 1, "max_target_positions": 1}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), 0)
    config = {
        "model_type": "whisper",
        "architectures": ["WhisperModel"],
        **{theirs: tower[key] for theirs, key in names.items()},
        "num_mel_bins": spec.num_mels,
        "max_source_positions": frames,
        **no_decoder,
        **tokens,
        "begin_suppress_tokens": None,
    }
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": spec.num_mels,
        "sampling_rate": spec.sample_rate,
        "hop_length": spec.hop,
        "n_fft": spec.window,
        "chunk_length": spec.max_samples // spec.sample_rate,
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
    unread: dict[str, tuple[tuple[int, ...], float | None]] = {
        "model.encoder.embed_positions.weight": ((frames, hidden), None),
        "model.decoder.embed_tokens.weight": ((1, hidden), 0.0),
        "model.decoder.embed_positions.weight": ((1, hidden), 0.0),
        "model.decoder.layer_norm.weight": ((hidden,), 1.0),
        "model.decoder.layer_norm.bias": ((hidden,), 0.0),
    }
    return Published(config, extractor, unread)


def weight_map(spec: WhisperSpec) -> WeightMap:
    """See `encoders.registry.Family.weight_map`."""
    if spec.key_bias:
        raise EncoderError("encoder.key_bias: Whisper's keys have no bias: set it to false")
    hidden = spec.hidden_size
    rules = [
        *with_biases(
            [
                same("conv1.weight", "conv1.weight", hidden, tail=(spec.num_mels, 3)),
                same("conv2.weight", "conv2.weight", hidden, tail=(hidden, 3)),
            ]
        ),
        *layer_rules(spec, _LAYERS),
        *norm_rules("layers.final_layernorm", "layer_norm", hidden),
    ]
    positions = "embed_positions.weight"
    carried = (positions, "model.decoder.*", "decoder.*", "proj_out.weight")
    prefixes = ("model.encoder.", "encoder.", "")
    return WeightMap(tuple(rules), carried=carried, sinusoids=(positions,), prefixes=prefixes)


def read_qwen_audio(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """See `encoders.registry.Family.read`."""
    values = read(config, preprocessor, "qwen2_audio_encoder")
    return values | {"family": "qwen_audio", "pad_clips": False, "padded_seconds": values["max_seconds"]}


def weight_map_qwen_audio(spec: QwenAudioSpec) -> WeightMap:
    """See `encoders.registry.Family.weight_map`."""
    return weight_map(spec).under("")

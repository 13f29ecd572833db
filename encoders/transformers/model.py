"""Models of `transformers` as torch modules that give features. `encoders.plain.model` calls them. Shape suffixes: N
media, T tokens of the model, H width, W samples."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from encoders.errors import EncoderError
from encoders.native.whisper.model import log_mel_spectrogram, mel_filters
from encoders.native.whisper.spec import WhisperSpec
from encoders.transformers.directory import ASIDE, drops, value_of
from encoders.transformers.spec import WHISPER_HOP, FromDirectory, TransformersAudioSpec, TransformersSpec

LISTED = 3
"""Maximum number of names in a message."""


class Tower(torch.nn.Module):
    """The model, its output, its weights. Parameters that do not affect the features are frozen: poolers, masks, layers
    after the chosen state."""

    INPUT: str

    def __init__(self, spec: FromDirectory):
        """Raise EncoderError if transformers cannot build the model, or it takes other inputs."""
        super().__init__()
        self.spec = spec
        self._register_constants()
        self.whole_class, self.hf_config = _class_of(spec)
        self.model = self._encoder_of(self.whole_class._from_config(self.hf_config))
        self._require_input()
        used = {id(parameter) for parameter in self._reached()}
        self.unused = {name for name, parameter in self.model.named_parameters() if id(parameter) not in used}
        for name in self.unused:
            self.model.get_parameter(name).requires_grad_(False)

    @torch.no_grad()
    def load_weights(self) -> None:
        """Load the weights of the directory, if the run starts from them. Raise EncoderError if they cannot be read, or
        tensors are missing or have other shapes."""
        if self.spec.weights != "load":
            return
        if (Path(self.spec.path) / "adapter_config.json").is_file():
            # It names the directory of another model, which transformers would load instead.
            raise EncoderError(
                f"encoder.path: {self.spec.path} holds an adapter of PEFT (adapter_config.json): give the directory of "
                "the model with the adapter merged into it"
            )
        try:
            loaded, info = self.whole_class.from_pretrained(
                self.spec.path,
                config=self.hf_config,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                weights_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, UnpicklingError, SafetensorError) as error:
            raise EncoderError(
                f"encoder.path: transformers cannot load {self.spec.path}: {str(error).splitlines()[0]}; give a "
                "directory with safetensors, or with tensors alone in .bin files, or set encoder.weights=random"
            ) from error
        tensors = self._encoder_of(loaded).state_dict()
        # Names in the whole model: tensors outside of the encoder do not matter.
        names_by_id = {id(tensor): name for name, tensor in self._encoder_of(loaded).state_dict(keep_vars=True).items()}
        names = {name: names_by_id.get(id(tensor), "") for name, tensor in loaded.state_dict(keep_vars=True).items()}
        wrong = [f"{key}: {stored} in the file, {expected} here" for key, stored, expected in info["mismatched_keys"]]
        wrong += [
            f"{key} is missing"
            for key in sorted(info["missing_keys"])
            if names.get(key) and names[key] not in self.unused
        ]
        if wrong:
            more = f" and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
            raise EncoderError(
                f"encoder.path: the weights of {self.spec.path} are not those of its config.json for "
                f"{self.whole_class.__name__}: {'; '.join(wrong[:LISTED])}{more}"
            )
        self.model.load_state_dict(tensors)

    def _run(self, inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the chosen output of the model, [N, T, H]. A feature map [N, H, rows, columns] is read in row
        order."""
        chosen = self.spec.hidden_state
        output = self.model(
            **{self.INPUT: inputs}, output_hidden_states=chosen is not None, return_dict=True, **options
        )
        state = output.last_hidden_state if chosen is None else output.hidden_states[chosen]
        return state.flatten(2).transpose(1, 2) if state.dim() == 4 else state

    def _encoder_of(self, model: PreTrainedModel) -> PreTrainedModel:
        return model

    def _register_constants(self) -> None:
        """Register the buffers that preprocessing needs."""

    def _example(self) -> torch.Tensor:
        raise AssertionError("images and clips say it")

    def _require_input(self) -> None:
        parameters = inspect.signature(self.model.forward).parameters
        needed = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and name != self.INPUT
        ]
        if self.INPUT not in parameters or needed:
            raise EncoderError(
                f"encoder.path: {type(self.model).__name__} of {self.spec.path} "
                + (f"needs {', '.join(needed)} too" if self.INPUT in parameters else f"takes no {self.INPUT}")
                + ": this family gives media of one size and nothing else; write a spec and a module around it "
                "(docs/your-encoder.md)"
            )

    def _reached(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that affect the features, by the graph of one forward pass without dropout."""
        self.model.eval()
        with torch.random.fork_rng(devices=()), torch.enable_grad():
            output = self(self._example())
        self.model.train()
        waiting, seen = [output.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                yield node.variable
            waiting += [following for following, _ in node.next_functions]


class VisionTower(Tower):
    """Images [N, 3, height, width] -> features [N, tokens, H]."""

    INPUT = "pixel_values"
    spec: TransformersSpec

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        options = {}
        image_size = getattr(self.hf_config, "image_size", None)
        if "interpolate_pos_encoding" in inspect.signature(self.model.forward).parameters:
            options["interpolate_pos_encoding"] = image_size not in (self.spec.image_size, [self.spec.image_size] * 2)
        return self._run(pixels, **options)[:, self.spec.dropped_tokens() :]

    def _example(self) -> torch.Tensor:
        return torch.zeros(1, 3, self.spec.image_size, self.spec.image_size)


class AudioTower(Tower):
    """Audio [N, W] -> features [N, tokens, H]."""

    spec: TransformersAudioSpec
    window: torch.Tensor
    mel_filters: torch.Tensor
    wants_float32 = True
    """Spectrograms and means need float32 input, which `encoders.plain.model` would round."""

    def __init__(self, spec: TransformersAudioSpec):
        self.INPUT = "input_features" if spec.is_whisper else "input_values"
        super().__init__(spec)

    def forward(self, waves_NW: torch.Tensor) -> torch.Tensor:
        dtype = next(self.model.parameters()).dtype
        if self.spec.normalize:
            mean, variance = waves_NW.mean(1, keepdim=True), waves_NW.var(1, keepdim=True, unbiased=False)
            waves_NW = (waves_NW - mean) / (variance + 1e-7).sqrt()
        if not self.spec.is_whisper:
            return self._run(waves_NW.to(dtype))
        mels_NBF = log_mel_spectrogram(waves_NW, self.window, self.mel_filters, WHISPER_HOP)
        return self._run(mels_NBF.to(dtype))

    def _register_constants(self) -> None:
        if self.spec.is_whisper:
            mels = int(value_of(self.spec.model_config, "num_mel_bins"))
            sound = WhisperSpec(num_mels=mels, sample_rate=self.spec.sample_rate, hop=WHISPER_HOP)
            self.register_buffer("window", torch.hann_window(sound.window), persistent=False)
            self.register_buffer("mel_filters", mel_filters(sound), persistent=False)

    def _encoder_of(self, model: PreTrainedModel) -> PreTrainedModel:
        return model.get_encoder() if self.spec.is_whisper else model

    def _example(self) -> torch.Tensor:
        longest = self.spec.input_size(1, self.spec.sample_rate)[0]
        return torch.zeros(1, longest if self.spec.is_whisper else self.spec.shortest(2))


def _class_of(spec: FromDirectory) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    # Also ignored in a config from a checkpoint.
    arguments = {key: value for key, value in spec.model_config.items() if key not in ASIDE}
    kind = arguments.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **arguments)
        built = AutoModel._model_mapping[type(config)]
    except Exception as error:  # the config class may raise anything about a value
        raise EncoderError(
            f"encoder.path: transformers has no model of its own for the type {kind!r} of {spec.path or 'model_config'}"
        ) from error
    if spec.dropout == 0:
        for key, value in config.to_dict().items():
            if drops(key) and isinstance(value, int | float):
                setattr(config, key, 0.0)
    return (built[0] if isinstance(built, tuple) else built), config

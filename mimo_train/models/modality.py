"""An encoder and its projector as one module of a `MimoModel`, in one or several pipeline stages."""

from typing import Any

import torch
from megatron.core.models.mimo.submodules.vision import VisionModalitySubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mimo_train.parallel import device


class StagedModality(VisionModalitySubmodules):
    """`VisionModalitySubmodules` whose encoder runs on every one of its pipeline stages.

    Megatron-Core 0.19.2 treats the input of a later stage as the encoder's final output and only projects it
    (mimo/submodules/base.py, `forward`).
    """

    def forward(
        self, encoder_inputs: dict[str, Any] | None = None, hidden_states: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """One stage's pass over the pictures of a microbatch.

        Args:
            encoder_inputs: encoder -> arguments of its `forward`; None if the microbatch has no media.
            hidden_states: output of the previous stage, [rows, encoder's hidden size]; None on the first stage.

        Returns:
            [rows, encoder's hidden size], of no rows without media; on the last stage [rows, language model's hidden
            size], None without media.
        """
        ((name, encoder),) = self.encoders.items()
        if encoder_inputs is None:
            return None if self.is_last_stage else _no_rows(encoder.config)
        if not self.is_first_stage:
            encoder_inputs = {name: encoder_inputs[name] | {"hidden_states": hidden_states}}
        outputs = self.encode(encoder_inputs)
        if not self.is_last_stage:
            return outputs[0]
        (projector,) = self.input_projections
        if getattr(projector, "newline", None) is not None:
            tilings = [encoder.spec.tiling(*size) for size in encoder_inputs[name]["sizes"]]
            return projector(self.combine_embeddings(outputs), tilings=tilings)
        if getattr(projector, "resampler", None) is None:
            return self.project_embeddings(outputs)
        return projector(self.combine_embeddings(outputs), _features_of_each(encoder, encoder_inputs[name]))

    def project_embeddings(self, embeddings: list[torch.Tensor], is_input: bool = True) -> torch.Tensor | None:
        """The projector's output, with the features for layers of the language model, if the encoder has these, behind
        it in each row: they are as wide as it already."""
        (encoder,) = self.encoders.values()
        layers = len(encoder.spec.deepstack) if hasattr(encoder, "spec") else 0
        if not layers:
            return super().project_embeddings(embeddings, is_input)
        (rows,) = embeddings
        width = layers * encoder.spec.deepstack_width
        projected = super().project_embeddings([rows[:, :-width]], is_input)
        assert projected is not None, "every encoder has a projector"
        return torch.cat([projected, rows[:, -width:].to(projected.dtype)], dim=1)


def _features_of_each(encoder: Any, inputs: dict[str, Any]) -> list[int]:
    """Features of every medium, from the arguments of an encoder's `forward`: media on the first stage, else sizes."""
    spec, (media, *_) = encoder.spec, inputs.values()
    sizes = inputs.get("sizes")
    if sizes is None:
        image = spec.kind == "image"
        sizes = [tuple(one.shape[-2:]) if image else (len(one), spec.sample_rate) for one in media]
    return [spec.num_tokens(*size, merge=encoder.merge) for size in sizes]


def _no_rows(config: TransformerConfig) -> torch.Tensor:
    """Output of a stage without media; it is not sent."""
    return torch.empty(0, config.hidden_size, dtype=config.pipeline_dtype, device=device.current(), requires_grad=True)

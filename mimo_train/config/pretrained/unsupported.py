"""Types of `transformers` that cannot be trained, with the reason, a clause. docs/models.md lists them."""


def _by_type(types_by_reason: dict[str, str]) -> dict[str, str]:
    return {kind: reason for reason, types in types_by_reason.items() for kind in types.split()}


MEDIA = _by_type(
    {
        "reads images by cross attention in its language model": "idefics mllama",
        "has an encoder and a decoder of text": "florence2 pix2struct pp_formulanet t5gemma2 udop "
        "vision-encoder-decoder",
        "turns images into tokens of its vocabulary": "chameleon emu3",
        "reads codes of an audio codec": "kyutai_speech_to_text",
        "adds audio to every token": "voxtral_realtime",
        "reads the text in its Q-Former too": "instructblip instructblipvideo",
        "puts image features in front of the text": "blip blip-2 fuyu git",
        "has embeddings of images in its language model": "kosmos-2 kosmos-2.5 phi4_multimodal",
        "generates blocks by diffusion": "diffusion_gemma",
        "has a processor without a token for images": "pp_chart2table",
        "predicts actions": "pi0",
        "gives scores of two answers instead of logits": "shieldgemma2",
        "reads proteins": "evolla",
    }
)
"""Types whose images or audio cannot be read."""

LANGUAGE = _by_type(
    {
        "predicts codes of an audio codec": "musicgen musicgen_melody",
        "lets tokens see later ones": "cpmant xlnet",
        "joins bytes into patches by a model of its own": "blt",
        "drafts tokens for another model": "gemma4_assistant gemma4_unified_assistant",
    }
)
"""Types whose language model cannot be trained."""

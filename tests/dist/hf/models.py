"""Directories as `transformers` saves them, of models that it makes with random weights. Run on a rank: the process of
the tests need not import it."""

from pathlib import Path

TOKENS = 300
SPREAD = {"LlamaForCausalLM": 0.05, "LlamaForSequenceClassification": 0.02, "LlavaForConditionalGeneration": 0.2}
"""Of the weights."""


def make_llama(folder: Path, kind: str = "LlamaForCausalLM", **changes) -> None:
    """A language model of odd sizes in several files, with a tokenizer of bytes."""
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": TOKENS,
        "intermediate_size": 100, "num_hidden_layers": 3, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    _save(kind, LlamaConfig(**sizes | changes), folder)
    tokenizer_of_bytes().save_pretrained(folder)


def make_llava(folder: Path) -> None:
    """A LLaVA of odd sizes in several files, by the names that version 5 gives a new model, with a tokenizer of bytes
    and its processor."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, LlamaConfig

    side = TOWER["image_size"]
    images = CLIPImageProcessor(size={"shortest_edge": side + 5}, crop_size={"height": side, "width": side})
    own = {"vision_feature_layer": -2, "projector_hidden_act": "quick_gelu"}
    _save_llava(CLIPVisionConfig(**TOWER), LlamaConfig(**LANGUAGE), images, 1, folder, **own)


def make_llava_of_siglip(folder: Path) -> None:
    """Another: of its tower the last layer is read, and all patches; the embedding is the output layer too."""
    from transformers import Qwen2Config, SiglipImageProcessor, SiglipVisionConfig

    side = TOWER["image_size"] + 2
    images, tower = SiglipImageProcessor(size={"height": side, "width": side}), TOWER | {"image_size": side}
    own = {"vision_feature_layer": [-1], "vision_feature_select_strategy": "full"}
    text = {name: value for name, value in LANGUAGE.items() if name != "head_dim"} | {"tie_word_embeddings": True}
    _save_llava(SiglipVisionConfig(**tower), Qwen2Config(**text), images, 0, folder, **own)


def make_llava_of_dinov2(folder: Path) -> None:
    """A third: of DINOv2, whose class token is dropped."""
    from transformers import CLIPImageProcessor, Dinov2Config, LlamaConfig

    side = TOWER["image_size"]
    images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    sizes = {name: value for name, value in TOWER.items() if name != "intermediate_size"}
    _save_llava(Dinov2Config(**sizes, mlp_ratio=2), LlamaConfig(**LANGUAGE), images, 1, folder)


def _save_llava(tower, text, images, class_tokens: int, folder: Path, **own) -> None:
    from transformers import LlavaConfig, LlavaProcessor

    tokenizer = tokenizer_of_bytes("<image>")
    parts = {"vision_config": tower, "text_config": text, "image_seq_length": 36}
    config = LlavaConfig(**parts, **own, image_token_index=tokenizer.convert_tokens_to_ids("<image>"))
    _save("LlavaForConditionalGeneration", config, folder)
    kind = {"patch_size": tower.patch_size, "vision_feature_select_strategy": config.vision_feature_select_strategy}
    LlavaProcessor(images, tokenizer, num_additional_image_tokens=class_tokens, **kind).save_pretrained(folder)


TOWER = {
    "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6, "image_size": 42,
    "patch_size": 7,
}  # fmt: skip
LANGUAGE = {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 301,
    "intermediate_size": 100, "num_hidden_layers": 3, "max_position_embeddings": 512,
}  # fmt: skip


def make_gemma3():
    """A Gemma 3 with images of odd sizes, whose language model has what its class has by default."""
    import torch
    import transformers

    text = {**LANGUAGE, "vocab_size": TOKENS, "sliding_window": 7, "query_pre_attn_scalar": 20, "num_hidden_layers": 4}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=TOWER, mm_tokens_per_image=4, image_token_index=290
    )
    torch.manual_seed(1)
    model = transformers.Gemma3ForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokenizer_of_bytes(*special: str):
    """Of `transformers`: bytes, marks of a text, and more special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks, additional_special_tokens=list(special))


def _save(kind: str, config, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(1)
    model = getattr(transformers, kind)(config)
    for name, parameter in model.named_parameters():
        mean = 1.0 if kind != "LlamaForCausalLM" and "norm" in name and name.endswith("weight") else 0.0
        torch.nn.init.normal_(parameter, mean, std=SPREAD[kind])
    model.save_pretrained(folder, max_shard_size="100KB")

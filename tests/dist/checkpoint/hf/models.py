"""Directories as `transformers` saves them, of models that it makes with random weights. Run on a rank: the process of
the tests need not import it."""

from pathlib import Path

TOKENS = 300


def make_llama(folder: Path, **changes) -> None:
    """A language model of odd sizes in several files, with a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    sizes = {
        "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": TOKENS,
        "intermediate_size": 100, "num_hidden_layers": 3, "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    _save("LlamaForCausalLM", LlamaConfig(**sizes | changes), folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)


def _save(kind: str, config, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(1)
    model = getattr(transformers, kind)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(folder, max_shard_size="100KB")

"""The chat template of an export is the one that its run was trained with."""

import json
from pathlib import Path

import pytest

from data.records.records import parse_record
from mimo_train.config.compose import load
from mimo_train.estimate.parameters import embedding_rows
from mimo_train.hf.documents import separate
from mimo_train.inputs.datasets import tokenizer_of
from mimo_train.layout.run import resolve
from tests.unit.data.text.chat_templates import CHATML, save_tokenizer, unmarked

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 400,
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "which digit?"}, {"role": "assistant", "content": "three"}]
FILE = "{% for message in messages %}<|im_start|>{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"


def made(folder: Path, kind: str, template: str) -> Path:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return save_tokenizer(folder, CHATML, chat_template=template)


@pytest.mark.parametrize("case", ["its own", "file", "as it is", "own", "variables", "another folder", "at fault"])
def test_a_directory_leaves_with_the_template_of_the_run(case, tmp_path):
    template = {"variables": "{{ style }}" + unmarked(CHATML), "at fault": "{% if"}.get(case, unmarked(CHATML))
    source = made(tmp_path / "source", "cohere" if case == "as it is" else "llama", template)
    (tmp_path / "chat.jinja").write_text(FILE)
    of_file = [f"data.chat_template={tmp_path}/chat.jinja"]
    keys = {
        "its own": [],
        "own": ["data.chat_template=own"],
        "variables": ["data.template_variables.style=brief"],
        "another folder": [f"data.tokenizer={save_tokenizer(tmp_path / 'other', CHATML, chat_template=FILE)}"],
    }.get(case, of_file)
    cfg = resolve(load("gpt_tiny", [f"modules.language.pretrained={source}", "data.sequence_length=160", *keys])).cfg
    tokenizer = tokenizer_of(cfg)
    (document,) = separate(cfg, tokenizer, embedding_rows(cfg.llm, tokenizer.vocab_size))
    assert document.has_other_texts == (case != "its own")
    (tmp_path / "out").mkdir()
    document.write_files(tmp_path / "out")
    if case == "its own":
        files = ("tokenizer.json", "chat_template.jinja")
        assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in files)
    from transformers import AutoTokenizer

    conversation = parse_record(json.dumps({"messages": MESSAGES}).encode(), "json", "k", {})
    expected = tokenizer.template.encode(conversation, {}).tokens
    found = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(MESSAGES, return_dict=True)
    assert found["input_ids"] == expected

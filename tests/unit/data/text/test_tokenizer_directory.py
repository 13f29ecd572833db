"""Tokenizers of runs as files of transformers: for the same messages a run and a served export see the same tokens."""

import json

import pytest

from data.records.members import read_fields
from data.records.records import parse_fields, parse_record
from data.text.placeholders import Placeholder
from data.text.tokenizer_directory import make_readable_by_version_4, write_tokenizer
from data.text.tokens import build_tokenizer
from tests.media_tokens import item_of
from tests.unit.data.text.chat_templates import CHATML, LLAMA, QWEN_VL, TEXTS, save_tokenizer, unmarked

LLAVA_15 = """{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>
' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}{{ content['text'] + ' '}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""  # noqa: E501
LLAVA_ONEVISION = """{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}{# Render all images first #}{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}{# Render all video then #}{% for content in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}{# Render all text next #}{% if message['role'] != 'assistant' %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ '\n' + content['text'] }}{% endfor %}{% else %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{% generation %}{{ '\n' + content['text'] }}{% endgeneration %}{% endfor %}{% endif %}{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""  # noqa: E501
QWEN2_VL = """{% set image_count = namespace(value=0) %}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{% if add_vision_id %}Image {{ image_count.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501
PUBLISHED = {"llava-1.5": LLAVA_15, "llava-onevision": LLAVA_ONEVISION, "qwen2-vl": QWEN2_VL}
PUBLISHED |= {"text only": unmarked(CHATML), "variables": unmarked(LLAMA)}
WORDS = Placeholder("<image>", "image", start="<|vision_start|>", pad="<|image_pad|>", end="<|vision_end|>")


def save_pretokenized(folder, kind: str):
    """A tokenizer without a template whose tokens reach across our pieces. "qwen" splits as Qwen2.5 and Llama 3 do: a
    colon and the line breaks behind it are one word. "llama" puts a space in front of a text, as SentencePiece does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "llama":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        core.decoder, alphabet = decoders.Metaspace(prepend_scheme="first"), list(map(chr, range(10, 127)))
    else:
        words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])
        core.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([*TEXTS, "user:\n\nwhich?", "assistant:\n\nthree", "user:\nwhich"] * 9, trainer)
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(folder)
    return folder


def records(question: str, answer: str):
    """The same two turns about an image in every form of a record."""
    for human in (f"<image>\n{question}", f"<image>{question}", f"{question}\n<image>"):
        yield {"conversations": [{"from": "human", "value": human}, {"from": "gpt", "value": answer}]}
        yield {"messages": [{"role": "user", "content": human}, {"role": "assistant", "content": answer}]}
    parts = [{"type": "image"}, {"type": "text", "text": question}]
    yield {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]}


def sent(first: list, question: str) -> dict:
    """What a client sends."""
    text = {"type": "text", "text": question}
    return {"role": "user", "content": [*first, text] if first else [text, {"type": "image"}]}


def require_equal(ours, theirs, question="which digit is green?", answer="it is three: 3") -> None:
    """Training on every form of a record gives what a served export renders of the message that a client sends."""
    media = {"image": [[item_of([ours.placeholder_id("<image>")] * 1)]]}
    options = {"return_dict": True, "add_generation_prompt": True}
    for record in records(question, answer):
        conversation = parse_record(json.dumps(record).encode(), "json", "k", {"image": 1})
        first = [{"type": "image"}] if conversation.turns[0].parts[0].kind == "image" else []
        said = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
        whole = theirs.apply_chat_template([sent(first, question), said], return_dict=True)["input_ids"]
        encoded = ours.template.encode(conversation, media)
        assert encoded.tokens == whole, (theirs.decode(encoded.tokens), theirs.decode(whole))
        prompt = theirs.apply_chat_template([sent(first, question)], **options)["input_ids"]
        asked = type(conversation)(conversation.turns[:1])
        assert ours.template.prompt(asked, media) == prompt
    # Two images between texts.
    texts = ("Is ", None, "\nlike ", None, "?")
    kinds = [{"type": "text", "text": text} if text else {"type": "image"} for text in texts]
    talk = [
        {"role": "user", "content": kinds},
        {"role": "assistant", "content": [{"type": "text", "text": "näht 好 \x00."}]},
    ]
    two = parse_record(json.dumps({"messages": talk}).encode(), "json", "k", {"image": 2})
    encoded = ours.template.encode(two, {"image": media["image"] * 2})
    assert encoded.tokens == theirs.apply_chat_template(talk, return_dict=True)["input_ids"]
    # `data.fields`, and `generate --image` with it.
    fields = read_fields({"question": "json[q]", "answer": "json[a]"})
    raw = json.dumps({"q": question, "a": answer}).encode()
    named = parse_fields({"json": raw}, fields, "k", {"image": 1})
    asked = theirs.apply_chat_template([sent([{"type": "image"}], question)], **options)["input_ids"]
    assert ours.template.prompt(type(named)(named.turns[:1]), media) == asked


def exported(ours, source, folder):
    """What transformers reads of an export."""
    from transformers import AutoTokenizer

    folder.mkdir()
    write_tokenizer(ours, str(source), folder, {"image": [ours.placeholder_id("<image>")]})
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("placeholder", ["<image>", WORDS], ids=["pad alone", "start and end"])
@pytest.mark.parametrize("kind", ["bytes", "qwen", "llama", "chosen"])
def test_our_own_format(kind, placeholder, tmp_path):
    """Also where it is chosen instead of the tokenizer's template."""
    source = "bytes" if kind == "bytes" else tmp_path / "source"
    if kind == "chosen":
        save_tokenizer(source, CHATML)
    elif kind != "bytes":
        save_pretokenized(source, kind)
    ours = build_tokenizer(source, [placeholder], chat_template="own")
    theirs = exported(ours, source, tmp_path / "out")
    require_equal(ours, theirs)
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast", "version 4 knows no other"
    assert config["model_input_names"] == ["input_ids", "attention_mask"]
    # Line breaks in front of a text, which a tokenizer joins with that of the role's marker.
    said = [
        ("system", "Be brief."),
        ("user", "\n\nwhich?"),
        ("assistant", "\nthree"),
        ("user", " and"),
        ("assistant", ""),
    ]
    record = {"messages": [{"role": role, "content": text} for role, text in said]}
    encoded = ours.template.encode(parse_record(json.dumps(record).encode(), "json", "k", {}), {})
    found = theirs.apply_chat_template(record["messages"], return_dict=True, return_assistant_tokens_mask=True)
    assert found["input_ids"] == encoded.tokens and list(map(bool, found["assistant_masks"])) == encoded.learned
    # A content that is a text, with our marker in it.
    (record, *_) = records("which?", "3")
    conversation = parse_record(json.dumps(record).encode(), "json", "k", {"image": 1})
    media = {"image": [[item_of([ours.placeholder_id("<image>")] * 1)]]}
    messages = [{"role": "user", "content": "<image>\nwhich?"}, {"role": "assistant", "content": "3"}]
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    encoded = ours.template.encode(conversation, media)
    assert found["input_ids"] == encoded.tokens and list(map(bool, found["assistant_masks"])) == encoded.learned


@pytest.mark.parametrize(
    ("name", "placeholder"), [*((name, "<image>") for name in PUBLISHED), ("text only", WORDS)], ids=str
)
def test_a_template_of_a_directory(name, placeholder, tmp_path):
    """As hubs have them. One that takes texts alone becomes one for parts in the export."""
    template = PUBLISHED[name]
    source = save_tokenizer(tmp_path / "source", QWEN_VL, chat_template=template)
    variables = {"date_string": "yesterday"} if template == unmarked(LLAMA) else {}
    ours = build_tokenizer(source, [placeholder], template_variables=variables)
    require_equal(ours, exported(ours, source, tmp_path / "out"))


def test_two_modules_that_read_the_same_images(tmp_path):
    """The export's template writes a pad of each."""
    source = save_pretokenized(tmp_path / "source", "qwen")
    details = Placeholder("<image:details>", "image", start="[", end="]")
    ours = build_tokenizer(source, ["<image>", details])
    pads = [ours.placeholder_id("<image>"), ours.placeholder_id("<image:details>")]
    conversation = parse_record(json.dumps(next(iter(records("which?", "3")))).encode(), "json", "k", {"image": 1})
    encoded = ours.template.encode(conversation, {"image": [[item_of([pad] * 1) for pad in pads]]})
    assert ours.shown(encoded.tokens) == "<s>user:\n<image>[<image:details>]which?</s>assistant:\n3</s>"
    (tmp_path / "out").mkdir()
    write_tokenizer(ours, str(source), tmp_path / "out", {"image": pads})
    from transformers import AutoTokenizer

    messages = [sent([{"type": "image"}], "which?"), {"role": "assistant", "content": "3"}]
    found = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(messages, return_dict=True)
    assert found["input_ids"] == encoded.tokens


def test_the_byte_tokenizer(tmp_path):
    """Its files have the same ids; a run from them has the same ids for records, and the same learned tokens."""
    ours = build_tokenizer("bytes", ["<image>"])
    theirs = exported(ours, "bytes", tmp_path / "out")
    text = "".join(map(chr, range(0x250))) + "好 \U0001f600"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.decode([*ours.encode("a"), 256, 258, 200], skip_special_tokens=True) == ours.decode([97, 200])
    names = (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id)
    assert names == (ours.pad_id, ours.begin_id, ours.end_of_turn_id)
    again = build_tokenizer(tmp_path / "out", ["<image>"])
    pad = ours.placeholder_id("<image>")
    assert again.placeholder_id("<image>") == theirs.convert_tokens_to_ids("<image>") == pad
    assert again.vocab_size == ours.vocab_size and again.template.stop_ids == ours.template.stop_ids
    conversation = parse_record(json.dumps(next(iter(records("q", "a")))).encode(), "json", "k", {"image": 1})
    first, second = (
        tokenizer.template.encode(conversation, {"image": [[item_of([pad] * 9)]]}) for tokenizer in (ours, again)
    )
    assert (first.tokens, first.learned) == (second.tokens, second.learned)


def test_what_version_5_has_saved_is_spelt_as_version_4_reads_it_too(tmp_path):
    """Version 4 takes `extra_special_tokens` for a mapping, and fails at a list."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    save_tokenizer(tmp_path, CHATML)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["extra_special_tokens"] == ["<image>"] and saved["tokenizer_class"] == "TokenizersBackend"
    make_readable_by_version_4(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "extra_special_tokens" not in settings and settings["additional_special_tokens"] == ["<image>"]
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    # Of this class version 4 makes `token_type_ids` otherwise, which `generate` and Qwen2-Audio reject.
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(again, PreTrainedTokenizerFast) and again.extra_special_tokens == ["<image>"]
    assert again.encode("a<image>b") == tokenizer.encode("a<image>b")

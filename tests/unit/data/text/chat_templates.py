"""Tokenizers with chat templates, made here: as the families have them, each with and without generation blocks."""

import json
from pathlib import Path

from data.records.records import parse_record

CHATML = """
{%- if messages[0].role == 'system' -%}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- else -%}
  {{- '<|im_start|>system\nBe brief.<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}
    {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}[{{- message.content + '<|im_end|>' -}}]{{- '\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""As Qwen2.5 without tools: a default system text; contents are texts."""

LLAMA = """
{{- bos_token -}}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date + '\n\n' -}}
{%- if messages[0].role == 'system' -%}
  {%- set text = messages[0].content | trim -%}{%- set messages = messages[1:] -%}
{%- else -%}{%- set text = '' -%}{%- endif -%}
{{- text + '<|eot_id|>' -}}
{%- for message in messages -%}
  {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' -}}
  {%- if message.role == 'assistant' -%}[{{- message.content | trim + '<|eot_id|>' -}}]
  {%- else -%}{{- message.content | trim + '<|eot_id|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""
"""As Llama 3.x: a date, trimmed texts, no line break behind a turn."""

GEMMA = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
  {%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('Roles must alternate user/assistant') -}}
  {%- endif -%}
  {%- set role = 'model' if message.role == 'assistant' else message.role -%}
  {{- '<start_of_turn>' + role + '\n' -}}
  {%- if message.content is string -%}{%- set text = message.content | trim -%}
  {%- else -%}
    {%- set text = namespace(all='') -%}
    {%- for part in message.content -%}
      {%- set text.all = text.all + ('<start_of_image>' if part.type == 'image' else part.text | trim) -%}
    {%- endfor -%}
    {%- set text = text.all -%}
  {%- endif -%}
  {%- if role == 'model' -%}[{{- text + '<end_of_turn>' -}}]{{- '\n' -}}
  {%- else -%}{{- text + '<end_of_turn>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""
"""As Gemma 3: no system role, the role model, images by a mark that is not their pad."""

TOOLS = """
{%- if messages[0].role == 'system' -%}{%- set system = messages[0].content -%}
{%- else -%}{%- set system = 'You can call tools.' -%}{%- endif -%}
{{- '<|im_start|>system\n' + system -}}
{%- if tools -%}
  {{- '\n<tools>' -}}
  {%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
  {{- '\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\n<tool_response>' + message.content + '</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\n' -}}
    [{%- if message.content -%}{{- message.content -}}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '\n<tool_call>' -}}{{- call.function | tojson -}}{{- '</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>' -}}]{{- '\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""As Qwen2.5 with tools."""

QWEN3 = """
{%- set ns = namespace(last=0) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.role == 'assistant' -%}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' -%}
    {%- if loop.index0 > ns.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
  {%- endif -%}
  {{- message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""
"""As Qwen3: reasoning before the last answer only."""

QWEN_VL = """
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\n' -}}
  {%- if message.content is string -%}{{- message.content -}}
  {%- else -%}
    {%- for part in message.content -%}
      {%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
      {%- elif part.type == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
      {%- elif part.type == 'audio' -%}{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}
      {%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""As Qwen2.5-VL, and clips as Qwen2-Audio has them."""

LLAVA = """
{%- for message in messages -%}
  {%- if message.role != 'system' -%}{{- message.role | upper + ': ' -}}{%- endif -%}
  {%- for part in message.content | selectattr('type', 'equalto', 'image') -%}{{- '<image>\n' -}}{%- endfor -%}
  {%- for part in message.content | selectattr('type', 'equalto', 'text') -%}{{- part.text + ' ' -}}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""
"""As LLaVA-1.5: lists of parts only, images first, nothing that ends a turn."""

SPECIAL = {
    CHATML: ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    LLAMA: ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
    GEMMA: ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>"],
    LLAVA: ["<s>", "</s>", "<image>"],
}
SPECIAL |= dict.fromkeys([TOOLS, QWEN3], SPECIAL[CHATML])
VISION = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"]
VISION.append("<|video_pad|>")
SPECIAL[QWEN_VL] = [*SPECIAL[CHATML], *VISION]

ENDS = {LLAMA: "<|eot_id|>", GEMMA: "<eos>", LLAVA: "</s>"}
BEGINS = {LLAMA: "<|begin_of_text|>", GEMMA: "<bos>", LLAVA: "<s>"}

TEXTS = ["which digit is green in the image", "read the digits from left to right please", "it is three: 3"]


def marked(template: str) -> str:
    """With generation blocks."""
    return (
        template.replace("[{{", "{%- generation -%}{{")
        .replace("[{%", "{%- generation -%}{%")
        .replace("}}]", "}}{%- endgeneration -%}")
    )


def unmarked(template: str) -> str:
    """Without."""
    return template.replace("[{{", "{{").replace("[{%", "{%").replace("}}]", "}}")


def save_tokenizer(folder: Path, template: str, *, blocks: bool = False, plain: bool = False, **options) -> Path:
    """A folder with a byte-level BPE tokenizer that has the template; with `plain` one without it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*SPECIAL[template]]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS * 3, trainer)
    core.add_tokens([AddedToken(word, special=False) for word in ("<think>", "</think>", "<tool_call>")])
    names = {"eos_token": ENDS.get(template, "<|im_end|>")}
    if template in BEGINS:
        names["bos_token"] = BEGINS[template]
    text = marked(template) if blocks else unmarked(template)
    given = {} if plain else {"chat_template": text}
    PreTrainedTokenizerFast(tokenizer_object=core, **names, **given | options).save_pretrained(folder)
    return folder


SCHEMA = {"type": "function", "function": {"name": "count", "description": 'of "things"', "parameters": {}}}
CALL = {"type": "function", "function": {"name": "count", "arguments": {"colour": "grün", "most": 3}}}
TALKS = {
    "one turn": [("user", "which digit is green?"), ("assistant", "three 😀")],
    "several turns": [
        ("user", " read the digits \n"),
        ("assistant", "3, 4\n\nand 5 "),
        ("user", "assistant"),
        ("assistant", "assistant\n"),
        ("user", "é"),
        ("assistant", "3"),
    ],
    "system text": [("system", "Answer in digits."), ("user", "which?"), ("assistant", "3")],
}


def messages(talk) -> list[dict]:
    return [{"role": role, "content": text} for role, text in talk]


def parse(record: list | dict | bytes, extension: str = "json", **media: int):
    record = {"messages": record} if isinstance(record, list) else record
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    return parse_record(raw, extension, "k7", media)


def llava(*turns: tuple[str, str]) -> dict:
    return {"conversations": [{"from": name, "value": text} for name, text in turns]}


def learned(tokenizer, encoded) -> list[str]:
    """Every run of learned tokens as text."""
    runs, before = [], False
    for token, yes in zip(encoded.tokens, encoded.learned, strict=True):
        if yes and not before:
            runs.append([])
        if yes:
            runs[-1].append(token)
        before = yes
    return [tokenizer.shown(run) for run in runs]

"""Images and clips in a chat template: the placeholders that it makes of them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from data.collate import to_sample
from data.errors import DataError, RecordError
from data.samples.shard_dataset import ShardDataset
from data.text.placeholders import Placeholder, axis_positions
from data.text.tokens import build_tokenizer
from tests.media_tokens import item_of
from tests.tars import write_tar
from tests.unit.data.helpers import encode_image, images, text_of
from tests.unit.data.text.chat_templates import (
    CHATML,
    GEMMA,
    LLAVA,
    QWEN_VL,
    learned,
    messages,
    parse,
    save_tokenizer,
    unmarked,
)


def member(*counts: tuple[int, int]):
    return [list(counts)]


def shown_media(tokenizer, record, media, **counts) -> str:
    encoded = tokenizer.template.encode(parse(record, **counts), media)
    sample = to_sample(parse(record, **counts), tokenizer, media, 200, 0, "k")
    assert sample.input_ids[: sample.length].tolist() == encoded.tokens
    pads = [at for at, token in enumerate(encoded.tokens) if tokenizer.as_text(token) != token]
    assert encoded.media_end == pads[-1] + 1 and not any(encoded.learned[at] for at in pads)
    return tokenizer.shown(encoded.tokens)


def test_marks_of_the_template_are_not_doubled_and_counts_are_the_modules(saved):
    tokenizer = build_tokenizer(saved(QWEN_VL), ["<image>", "<audio>"])
    image, audio = (tokenizer.placeholder_id(name) for name in ("<image>", "<audio>"))
    assert tokenizer.shown([image, audio]) == "<|image_pad|><|AUDIO|>"
    parts = [{"type": "image"}, {"type": "text", "text": " and "}, {"type": "image_url"}, {"type": "audio"}]
    record = [{"role": "user", "content": parts}, {"role": "assistant", "content": "three"}]
    media = {"image": [[item_of([image] * 3)], [item_of([image] * 1)]], "audio": [[item_of([audio] * 2)]]}
    expected = (
        "<|vision_start|>" + "<|image_pad|>" * 3 + "<|vision_end|> and <|vision_start|><|image_pad|><|vision_end|>"
        "<|audio_bos|><|AUDIO|><|AUDIO|><|audio_eos|>"
    )
    assert f"user\n{expected}<|im_end|>" in shown_media(tokenizer, record, media, image=2, audio=1)
    marker = [{"role": "user", "content": "<image> and <image><audio>"}, record[1]]
    assert f"user\n{expected}<|im_end|>" in shown_media(tokenizer, marker, media, image=2, audio=1)


def test_what_a_tokenizer_has_in_front_of_every_text(tmp_path):
    """As LLaVA-1.5: the template does not write `<s>`; the processor has it, the tokenizer's own rendering has not."""
    from PIL import Image
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, CLIPImageProcessor, LlavaProcessor

    path = save_tokenizer(tmp_path, LLAVA)
    core = Tokenizer.from_file(str(path / "tokenizer.json"))
    core.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    core.save(str(path / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(path)
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    processor = LlavaProcessor(
        CLIPImageProcessor(**sizes), theirs, patch_size=14, vision_feature_select_strategy="full",
        image_token="<image>", chat_template=unmarked(LLAVA),
    )  # fmt: skip
    text = {"type": "text", "text": "which?"}
    asked = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (28, 28))}, text]}]
    options = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    wanted = processor.apply_chat_template(asked, **options)["input_ids"][0]
    ours = build_tokenizer(path, ["<image>"])
    image = ours.placeholder_id("<image>")
    conversation = parse(
        [{"role": "user", "content": [{"type": "image"}, text]}, *messages([("assistant", "3")])], image=1
    )
    media = {"image": [[item_of([image] * 4)]]}
    prompt = replace(conversation, turns=conversation.turns[:1])
    assert ours.template.prompt(prompt, media) == list(wanted)
    assert ours.shown(wanted[:1]) == "<s>" and wanted.count(image) == 4
    encoded = ours.template.encode(conversation, media)
    assert encoded.tokens[: len(wanted)] == list(wanted) and not any(encoded.learned[: len(wanted)])
    assert encoded.tokens[encoded.media_end - 1] == image != encoded.tokens[encoded.media_end]
    record = [{"role": "user", "content": [text]}]
    alone = build_tokenizer(path)
    prompt = replace(prompt, turns=parse([*record, *messages([("assistant", "3")])]).turns[:1])
    ids = theirs.apply_chat_template(record, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert alone.template.prompt(prompt, {}) == list(ids) and ours.template.prompt(prompt, {})[1:] == list(ids)


def test_two_modules_of_a_kind_follow_each_other(saved):
    details = Placeholder("<image:details>", "image", start="<|vision_start|>")
    tokenizer = build_tokenizer(saved(QWEN_VL), ["<image>", details])
    image, other = (tokenizer.placeholder_id(name) for name in ("<image>", "<image:details>"))
    record = messages([("user", "<image>q"), ("assistant", "a")])
    text = shown_media(tokenizer, record, {"image": [[item_of([image] * 2), item_of([other] * 3)]]}, image=1)
    assert (
        "<|vision_start|><|image_pad|><|image_pad|><|vision_end|><|vision_start|>" + "<image:details>" * 3 + "q" in text
    )
    with pytest.raises(DataError, match="remove the mark"):
        build_tokenizer(saved(QWEN_VL), ["<image>", Placeholder("<b>", "image", mark="<|image_pad|>")])


def test_a_mark_that_is_not_the_pad(saved):
    """As Gemma's processor: its text, tokenized whole, with as many pads as the image takes."""
    tokenizer = build_tokenizer(saved(GEMMA), ["<image>"])
    image = tokenizer.placeholder_id("<image>")
    record = messages([("user", "<image>\nq"), ("assistant", "a")])
    text = (
        "<bos><start_of_turn>user\n\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\nq<end_of_turn>"
    )
    assert shown_media(tokenizer, record, {"image": [[item_of([image] * 4)]]}, image=1).startswith(text)
    encoded = tokenizer.template.encode(parse(record, image=1), {"image": [[item_of([image] * 1)]]})
    whole = text.replace("<image_soft_token>" * 4, "<image_soft_token>") + "\n<start_of_turn>model\na<end_of_turn>\n"
    assert encoded.tokens == tokenizer._tokenizer.encode(whole, add_special_tokens=False, split_special_tokens=False)
    assert learned(tokenizer, encoded) == ["a<end_of_turn>"]


def test_a_template_of_texts_gets_the_placeholder_in_the_text(saved):
    for given, text in (
        ("<image>", "<image><image>"),
        (
            Placeholder("<image>", start="<|vision_start|>", pad="<|image_pad|>", end="!"),
            "<|vision_start|><|image_pad|><|image_pad|>!",
        ),
    ):
        tokenizer = build_tokenizer(saved(CHATML), [given])
        image = tokenizer.placeholder_id("<image>")
        record = messages([("user", "<image>\nq"), ("assistant", "see <image>")])
        media = {"image": [[item_of([image] * 2)], [item_of([image] * 2)]]}
        shown = shown_media(tokenizer, record, media, image=2)
        assert f"user\n{text}q<|im_end|>" in shown and f"see {text}<|im_end|>" in shown
        own = build_tokenizer(saved(CHATML), [given], chat_template="own")
        assert f"user:\n{text}q<|im_end|>" in shown_media(own, record, media, image=2)


def test_a_template_that_separates_images_itself(saved):
    """It writes the line break that a LLaVA record has next to the marker."""
    tokenizer = build_tokenizer(saved(LLAVA), ["<image>"])
    image = tokenizer.placeholder_id("<image>")
    media = {"image": [[item_of([image] * 2)]]}
    for question in ("<image>\nq", "q\n<image>", [{"type": "text", "text": "q"}, {"type": "image"}]):
        record = [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]
        assert shown_media(tokenizer, record, media, image=1) == "USER: <image><image>\nq ASSISTANT: a "
    (note,) = tokenizer.template.notes
    assert "no token that ends an answer" in note


def test_a_template_without_a_place_for_a_image(saved, tmp_path):
    (tmp_path / "chat.jinja").write_text(
        LLAVA.replace("message.content | selectattr('type', 'equalto', 'image')", "[]")
    )
    media = {"image": [[item_of([7] * 2)]]}
    tokenizer = build_tokenizer(saved(LLAVA), ["<image>"], chat_template=str(tmp_path / "chat.jinja"))
    record = messages([("user", "<image>q"), ("assistant", "a")])
    image = tokenizer.placeholder_id("<image>")
    assert "<image><image> q" in shown_media(tokenizer, record, {"image": [[item_of([image] * 2)]]}, image=1)
    (tmp_path / "chat.jinja").write_text(QWEN_VL.replace("<|image_pad|>", "[IMG]"))
    with pytest.raises(DataError, match=r"writes '<\|vision_start\|>\[IMG\]<\|vision_end\|>'.*placeholder\.mark"):
        build_tokenizer(saved(QWEN_VL), ["<image>"], chat_template=str(tmp_path / "chat.jinja"))
    given = Placeholder("<image>", pad="<|image_pad|>", mark="[IMG]")
    tokenizer = build_tokenizer(saved(QWEN_VL), [given], chat_template=str(tmp_path / "chat.jinja"))
    media = {"image": [[item_of([tokenizer.placeholder_id("<image>")] * 2)]]}
    assert "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>q" in shown_media(tokenizer, record, media, image=1)
    (tmp_path / "chat.jinja").write_text(
        QWEN_VL.replace("part.type == 'image'", "part.type == 'image' and message.role == 'user'")
    )
    tokenizer = build_tokenizer(saved(QWEN_VL), ["<image>"], chat_template=str(tmp_path / "chat.jinja"))
    with pytest.raises(RecordError, match=r"'<\|image_pad\|>' 0 times for 1 image part"):
        tokenizer.template.encode(parse(messages([("user", "q"), ("assistant", "<image>")]), image=1), media)


def test_a_sample_with_a_image_from_a_shard(saved, tmp_path):
    record = {"conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "three"}]}
    shard = write_tar(
        tmp_path / "s.tar", [("a.png", encode_image(8, 8, "PNG")), ("a.json", json.dumps(record).encode())]
    )
    tokenizer = build_tokenizer(saved(QWEN_VL), ["<image>"])
    data = ShardDataset(shard, tokenizer=tokenizer, sequence_length=48, media=[images(tokens=5)])
    sample = text_of(data, 0)
    assert (sample.input_ids == tokenizer.placeholder_id("<image>")).sum() == 5 == data.token_counts(0)["images"]
    assert tokenizer.shown(sample.labels[sample.loss_mask > 0]) == "three<|im_end|>"
    with pytest.raises(Exception, match="needed 12, given 8"):
        text_of(ShardDataset(shard, tokenizer=tokenizer, sequence_length=8, media=[images(tokens=5)]), 0)


IMAGE, CLIP = 50, 51


def positions(ids, media) -> list[list[int]]:
    return axis_positions(np.array(ids), media).tolist()


def test_text_has_the_same_on_all_axes():
    assert positions([7, 8, 9], {}) == [[0, 1, 2]] * 3


def test_text_goes_on_behind_the_longer_side_of_a_image():
    ids = [7, *[IMAGE] * 6, 8, 9]
    assert positions(ids, {IMAGE: [(6, (2, 3))]}) == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5],
        [0, 1, 1, 1, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 1, 2, 3, 4, 5],
    ]


def test_images_at_both_ends_and_side_by_side():
    ids = [*[IMAGE] * 2, *[IMAGE] * 3, 7, IMAGE]
    assert positions(ids, {IMAGE: [(2, (2, 1)), (3, (1, 3)), (1, (1, 1))]}) == [
        [0, 0, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 5, 6],
        [0, 0, 2, 3, 4, 5, 6],
    ]


def test_what_forms_no_grid_counts_like_text():
    ids = [CLIP, CLIP, IMAGE, IMAGE, IMAGE, 7]
    media = {IMAGE: [(1, None), (2, (1, 2))], CLIP: [(2, None)]}
    assert positions(ids, media) == [[0, 1, 2, 3, 3, 5], [0, 1, 2, 3, 3, 5], [0, 1, 2, 3, 4, 5]]


def test_sound_counts_from_the_first_position_of_its_video():
    ids = [7, 8, IMAGE, IMAGE, CLIP, IMAGE, IMAGE, 9, 8]  # times 0 and 1 of two columns
    media = {IMAGE: [(4, (1, 2, 2, 1.0, 1, 1))], CLIP: [(1, None)]}
    assert positions(ids, media) == [
        [0, 1, 2, 2, 2, 3, 3, 4, 5],
        [0, 1, 2, 2, 2, 2, 2, 4, 5],
        [0, 1, 2, 3, 2, 2, 3, 4, 5],
    ]
    shared = {IMAGE: [(4, (1, 2, 2, 1.0, 1, 0))], CLIP: [(1, None)]}
    assert positions(ids, shared)[0] == [0, 0, 1, 1, 1, 2, 2, 3, 3]
    # Text counts from the last token alone, which has a smaller position than the third column.
    ids = [7, IMAGE, IMAGE, IMAGE, CLIP, 9]
    assert positions(ids, {IMAGE: [(3, (1, 3, 1, 1.0, 1, 1))], CLIP: [(1, None)]})[2] == [0, 1, 2, 3, 1, 2]

"""The text of images is that of the processor for any number of images of any sizes, wherever it is known from.
Features of images and audio in a batch are those of the item alone."""

import json

import torch

from data.records.conversation import Part, Turn
from data.samples.text_lengths import TextLengths
from tests.dist.all_types.flow import batch_gap, composed, make
from tests.dist.models.composites import content, file_of, image
from tests.dist.ranks import run_ranks
from tests.tars import write_tar

KINDS = {
    "gemma3": "plain text around an image",
    "granite_docling": "plain text behind images of one tile",
    "minicpmv4_7": "numbers of images, positions by the class",
    "step3p7": "plain text that depends on the size",
}
"""Types, and what is special about their text."""
AUDIO = ("fun_asr_nano", "glmasr")
"""Types that pad a clip to the longest of a call, or to windows."""
BY_CLASS = ("minicpmv4_7",)
"""Types whose class computes positions."""
TALL, WIDE, SMALL, MIDDLE = (1100, 300), (340, 1400), (70, 90), (640, 600)
QUESTIONS = [
    ["which colour is ", SMALL, " now?"],
    ["two pages:\n\n", TALL, WIDE, "\nwhich is wider?\n\n"],
    [part for size in (SMALL, MIDDLE, TALL) * 4 for part in (size, "\n" if size == MIDDLE else ", ")],
]
"""Parts of questions: texts, and images as (height, width)."""


def test_texts_and_features_of_images(tmp_path):
    assert run_ranks(_compared, 1, tmp_path) == [[*KINDS]]


def _compared(folder):
    for kind in KINDS:
        _compare(kind, folder / kind)
        assert batch_gap(composed(folder / kind, "image"), "image") < 1e-5
    for kind in AUDIO:
        medium = make(kind, folder / kind)
        assert batch_gap(composed(folder / kind, medium), medium) < 1e-5
    return [*KINDS]


def _compare(kind, folder):
    from transformers import AutoProcessor

    from mimo_train.evaluation.generation.prompts import Medium, Prompts
    from mimo_train.inputs.datasets import shard_dataset, tokenizer_of, training_sources

    folder.mkdir()
    make(kind, folder)
    members, expected, asked, positions = [], [], [], []
    processor = AutoProcessor.from_pretrained(folder / "model")
    for number, parts in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": content(parts)}, {"role": "assistant", "content": "the second"}]
        members.append((f"{number}.json", json.dumps({"messages": messages}).encode()))
        sizes = [part for part in parts if isinstance(part, tuple)]
        members += [(f"{number}.{at:02}.png", file_of(size)) for at, size in enumerate(sizes)]
        for turns, result in ((messages, expected), (messages[:1], asked)):
            text = processor.apply_chat_template(turns, add_generation_prompt=turns != messages)
            batch = processor(text=[text], images=[[image(*size) for size in sizes]], return_tensors="pt")
            result.append(batch["input_ids"][0].tolist())
            if turns == messages and kind in BY_CLASS:
                positions.append(_positions(folder / "model", batch))
    write_tar(folder / "samples.tar", members)
    cfg = composed(folder, "image", "data.sequence_length=40000")
    tokenizer = tokenizer_of(cfg)
    dataset = shard_dataset(cfg, tokenizer, training_sources(cfg))
    texts = [dataset.read_text(number)[0] for number in range(len(QUESTIONS))]
    assert [text.input_ids[: text.length].tolist() for text in texts] == expected
    assert [tokenizer.shown(text.labels[text.loss_mask > 0]) for text in texts] == ["the second<|im_end|>"] * 3
    for text, theirs in zip(texts, positions, strict=kind in BY_CLASS):
        assert text.positions[:, : text.length].tolist() == theirs.tolist()
    lengths = TextLengths(dataset)
    list(lengths.build())
    lengths.serve()
    plan = dataset.plan_step(0, len(QUESTIONS))
    assert plan.lengths.tolist() == [*map(len, expected)]
    pad = tokenizer.placeholder_id("<image>")
    assert plan.tokens["images"].tolist() == [ids.count(pad) for ids in expected]
    prompts = Prompts(cfg, tokenizer)
    for parts, ids in zip(QUESTIONS, asked, strict=True):
        media = [
            Medium("image", part, torch.zeros(3, *part, dtype=torch.uint8)) for part in parts if isinstance(part, tuple)
        ]
        turn = Turn("user", tuple(Part("text", part) if isinstance(part, str) else Part("image") for part in parts))
        prompt = prompts.of_conversation([turn], media)
        assert prompt.ids == ids
        if positions:
            assert prompt.positions.tolist() == positions.pop(0)[:, : len(ids)].tolist()


def _positions(folder, batch):
    """Return positions of a text in transformers, [3, S]."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).base_model
    names = ("input_ids", "mm_token_type_ids", "target_sizes")
    found = model.get_rope_index(**{name: batch[name] for name in names})[0][:, 0]
    assert (found[1] != found[2]).any()
    return found

"""Prompts of turns with media, conversations, and the loop over new tokens, with a model that is made up."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from data.errors import DecodeError
from data.records.conversation import Conversation, Part, Turn, split_markers
from data.records.records import parse_record
from mimo_train.commands.generate import _converse
from mimo_train.config.errors import UserError
from mimo_train.evaluation.generation.answers import Answers, Chat
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.evaluation.generation.prompts import Prompts, user_turn
from mimo_train.inputs.datasets import tokenizer_of
from tests.media_tokens import item_of
from tests.unit.configs import load
from tests.videos import make_video

CFG = load("vlm_digits", "data.sequence_length=120")
TOKENIZER = tokenizer_of(CFG)
IMAGE, END = TOKENIZER.placeholder_id("<image>"), TOKENIZER.end_of_turn_id


class Scripted:
    """A decoder that says what it is told, and notes what it is asked."""

    def __init__(self, *texts: str):
        self.lines = [[*text.encode(), END] for text in texts]
        self.prompts, self.lengths, self.fed = [], [], []

    takes_lengths = True

    def begin(self, prompts, length):
        self.prompts += prompts
        self.lengths.append(length)
        self._line = iter(self.lines.pop(0))
        return self._next()

    def step(self, tokens):
        self.fed += tokens
        return self._next()

    def takes_batch(self, prompts):
        return True

    def agree(self, tokens):
        return tokens

    def _next(self):
        token = next(self._line)
        if token == 3:  # Ctrl-C
            raise KeyboardInterrupt
        return torch.nn.functional.one_hot(torch.tensor([token]), TOKENIZER.vocab_size).float()


def answers_of(decoder, max_new_tokens=64):
    return Answers(CFG, decoder, TOKENIZER, Sampling(), max_new_tokens)


@pytest.fixture(scope="module")
def prompts():
    return Prompts(CFG, TOKENIZER)


@pytest.fixture
def image(tmp_path):
    def make(colour: str) -> Path:
        path = tmp_path / f"{colour}.png"
        Image.new("RGB", (30, 20), colour).save(path)
        return path

    return make


def test_turns_and_media_stay_in_a_conversation(prompts, image):
    decoder, said = Scripted("red", "blue and green", "no"), []
    chat = Chat(prompts, answers_of(decoder), "Be brief.")
    chat.attached = [prompts.medium("image", image("red"))]
    assert chat.say("Colour?", said.append).text == "red"
    chat.attached = [prompts.medium("image", image(colour)) for colour in ("blue", "lime")]
    chat.say("<image>And<image>?", said.append)
    chat.say("Sure?", said.append)
    assert "".join(said) == "redblue and greenno"

    count = decoder.prompts[0].rows["images"]
    place = Part("image")
    turns = [
        Turn("system", (Part("text", "Be brief."),)),
        Turn("user", (place, Part("text", "Colour?"))),
        Turn("assistant", (Part("text", "red"),)),
        Turn("user", (place, Part("text", "And"), place, Part("text", "?"))),
        Turn("assistant", (Part("text", "blue and green"),)),
        Turn("user", (Part("text", "Sure?"),)),
    ]
    for index, (prompt, shown) in enumerate(zip(decoder.prompts, (1, 3, 3), strict=True)):
        media = {"image": [[item_of([IMAGE] * count)]] * shown}
        assert prompt.ids == TOKENIZER.template.prompt(Conversation(tuple(turns[: 2 * index + 2])), media)
        assert prompt.rows == {"images": shown * count}
    (pixels,) = decoder.prompts[2].inputs["images"]["images"].values()
    # Red, blue, lime: the channels of the images in the order of their places.
    assert pixels[:, :, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255], [0, 255, 0]]


def test_a_reset_forgets_turns_media_and_what_is_attached(prompts, image):
    decoder = Scripted("a", "b")
    chat = Chat(prompts, answers_of(decoder))
    chat.attached = [prompts.medium("image", image("red"))]
    chat.say("One?")
    chat.attached = [prompts.medium("image", image("red"))]
    chat.reset()
    chat.say("Two?")
    assert decoder.prompts[1].ids == TOKENIZER.template.prompt(
        Conversation((Turn("user", (Part("text", "Two?"),)),)), {}
    )
    assert decoder.prompts[1].inputs == {"images": None}


def test_a_message_that_fails_is_forgotten(prompts, image):
    decoder = Scripted("a", "b")
    chat = Chat(prompts, answers_of(decoder))
    chat.say("One?")
    chat.attached = [prompts.medium("image", image("red"))]
    with pytest.raises(UserError, match=r"leaves no room .* data.sequence_length 120"):
        chat.say("x" * 200)
    chat.say("Two?")
    assert decoder.prompts[1].rows == {"images": 0} and len(decoder.prompts) == 2


@pytest.mark.parametrize(
    ("text", "media", "said"),
    [
        ("<image> <image>?", 1, "2 <image>, and 1 image"),
        ("<image>?", 0, "1 <image>, and 0 image"),
        ("<image> <audio>?", 1, "1 <audio>, and 0 clip"),
        ("<image> <video>?", 1, "1 <video>, and 0 video"),
    ],
)
def test_marks_without_media_are_named(text, media, said, prompts, image):
    with pytest.raises(UserError, match=said):
        user_turn(text, [prompts.medium("image", image("red"))] * media)


def test_what_a_user_says_is_what_a_record_says(prompts, image):
    """The same turn, in the same pieces."""
    media = [prompts.medium("image", image(colour)) for colour in ("red", "blue")]
    for text, marked in (("Which?", "<image>\n<image>\nWhich?"), ("<image>or<image>?", "<image>or<image>?")):
        assert user_turn(text, media).parts == split_markers(marked)
    # Of a model that was trained on captions, nothing is asked.
    assert user_turn("", media).parts == parse_record(b"a cat", "txt", "k", {"image": 2}).turns[0].parts


def test_files_that_cannot_be_used_are_named(prompts, image, tmp_path):
    damaged, empty = image("red"), tmp_path / "empty.png"
    damaged.write_bytes(damaged.read_bytes()[:-30])
    empty.touch()
    with pytest.raises(UserError, match=r"none\.png: No such file"):
        prompts.medium("image", tmp_path / "none.png")
    with pytest.raises(UserError, match=r"empty\.png \(0 bytes\) has no readable image header"):
        prompts.medium("image", empty)
    with pytest.raises(DecodeError, match=r"cannot decode \d+ bytes"):
        prompts.medium("image", damaged)
    with pytest.raises(UserError, match="no module of this model reads clips"):
        prompts.medium("audio", damaged)


def test_an_answer_ends_with_its_turn_or_is_cut_and_says_why(prompts):
    decoder = Scripted("four", "four", "x" * 100)
    prompt = prompts.of_text("Hello")
    whole = answers_of(decoder)(prompt)
    assert (whole.text, whole.tokens, whole.cut) == ("four", list(b"four"), "")
    assert decoder.lengths == [len(prompt.ids) + 64] and decoder.fed == list(b"four")
    cut = answers_of(decoder, 2)(prompt)
    assert (cut.text, cut.cut) == ("fo", "cut after 2 tokens, --max-new-tokens")
    full = answers_of(decoder, 500)(prompts.of_text("y" * 100))
    assert (len(full.tokens), full.cut) == (19, "cut after 19 tokens, where data.sequence_length 120 ends")
    assert decoder.lengths[-1] == 120


def test_placeholders_that_a_model_writes_ask_for_no_features(prompts):
    decoder = Scripted("")
    decoder.lines = [[IMAGE, ord("a"), END]]
    answer = answers_of(decoder)(prompts.of_text("Hello"))
    assert answer.text == "a" and decoder.fed == [TOKENIZER.pad_id, ord("a")]


def test_a_conversation_goes_on_after_errors_and_an_interrupt(prompts, image, capsys):
    decoder = Scripted("ja", "so\3", "gut")
    lines = [
        "/image nowhere.png",
        f'/image "{image("red")}"',
        "",
        "One?\n",
        "/dance",
        "x" * 200,
        "Two?",
        "/reset",
        "Three?",
        "/exit",
        "Four?",
    ]
    _converse(Chat(prompts, answers_of(decoder)), prompts.medium, iter(lines))
    captured = capsys.readouterr()
    assert captured.out == "ja\nso\ngut\n"
    assert [line.partition(":")[0] for line in captured.err.splitlines()] == ["error"] * 3 + ["notice"] * 2
    assert "nowhere.png" in captured.err and "/dance" in captured.err and "interrupted" in captured.err
    assert [prompt.rows["images"] > 0 for prompt in decoder.prompts] == [True, True, False]


def test_an_interrupt_ends_what_is_no_conversation(prompts):
    with pytest.raises(KeyboardInterrupt):
        answers_of(Scripted("so\3"))(prompts.of_text("Hello"))


def test_a_video_is_its_images_where_it_is_marked(prompts, image, tmp_path):
    pytest.importorskip("av")
    (tmp_path / "film.mp4").write_bytes(make_video())
    film, still = prompts.medium("video", tmp_path / "film.mp4"), prompts.medium("image", image("red"))
    assert len(film.frames) == 3  # a second each
    turn = user_turn("Is <image> in <video>?", [film, still])
    own = prompts.of_conversation([turn], [film, still])
    same = [Part("text", "Is "), Part("image"), Part("text", " in "), *[Part("image")] * 3, Part("text", "?")]
    written = prompts.of_conversation([Turn("user", tuple(same))], [still, *film.frames])
    assert own.ids == written.ids and own.rows["images"] == written.rows["images"] > 0
    assert torch.equal(own.inputs["images"]["images"]["pixels"], written.inputs["images"]["images"]["pixels"])
    assert user_turn("q", [film]).parts == (Part("video"), Part("text", "q"))
    (tmp_path / "film.mp4").write_bytes(make_video()[:-9])
    with pytest.raises(UserError, match="no readable header of a video"):
        prompts.medium("video", tmp_path / "film.mp4")

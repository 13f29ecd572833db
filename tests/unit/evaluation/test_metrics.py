"""Metrics of texts: against the official definitions, and against the libraries that compute them."""

import math
import sys
from types import SimpleNamespace

import pytest

from mimo_train.config.errors import UserError
from mimo_train.evaluation import metrics
from mimo_train.evaluation.metrics import METRICS, require_metrics, score, score_each
from mimo_train.evaluation.normal_forms import choice_of, vqa_answer
from mimo_train.evaluation.turns import References


def of_one(name: str, prediction: str, *references: str) -> float:
    scores = score_each([name], [prediction], [references])[name]
    assert [scores.value] == pytest.approx(scores.each)
    return scores.value


def test_vqa_accuracy_is_the_mean_over_the_subsets_of_nine_annotators():
    """As the evaluation code of VQA: each annotator is left out once, and three of the others are enough."""
    for right, expected in enumerate((0, 0.3, 0.6, 0.9, 1, 1, 1, 1, 1, 1, 1)):
        references = ["yes"] * right + ["no", "maybe"] * 5
        assert of_one("vqa", "Yes.", *references[:10]) == pytest.approx(expected)
    assert of_one("vqa", "two", "2") == 1 and of_one("vqa", "two", "3") == 0


@pytest.mark.parametrize(
    ("text", "form"),
    [
        # What the answer processor of EvalAI returns.
        ("The two dogs", "2 dogs"),
        ("a U.S. flag", "us flag"),
        ("3.5 kg.", "3.5 kg"),
        ("up-to-date", "up to date"),
        ("up - to", "up to"),
        ("1,000", "1000"),
        ("it's red, right?", "it 's red right"),
        ("dont", "don't"),
        ("youd've", "you'd've"),
        ("none", "0"),
        ("an\napple", "apple"),
        ("", ""),
    ],
)
def test_answers_have_the_form_of_the_evaluation_server(text, form):
    assert vqa_answer(text) == form


@pytest.mark.parametrize(
    ("name", "prediction", "references", "expected"),
    [
        ("accuracy", " Three ", ["Three"], 1),
        ("accuracy", "three", ["Three", "3"], 0),
        ("accuracy", "3", ["Three", "3"], 1),
        # 1 - distance / length of the longer text, of the best reference; below one half it is 0.
        ("anls", "Mr  Smith", ["mr smith"], 1),
        ("anls", "kitten", ["sitting", "mitten"], 5 / 6),
        ("anls", "kitten", ["sitting"], 4 / 7),
        ("anls", "abcd", ["abxy"], 0.5),
        ("anls", "abcde", ["abxyz"], 0),
        ("anls", "", ["x"], 0),
        # SQuAD's script.
        ("f1", "the red car", ["a red truck", "blue"], 0.5),
        ("f1", "The car!", ["car"], 1),
        ("f1", "car car red", ["car red red blue"], 4 / 7),
        ("f1", "", [""], 1),
        ("f1", "the", ["car"], 0),
        # ChartQA's and Pix2Struct's.
        ("relaxed", "104.9", ["100"], 1),
        ("relaxed", "105.1", ["100"], 0),
        ("relaxed", "-96", ["-100"], 1),
        ("relaxed", "9.8%", ["10%"], 1),
        ("relaxed", "0", ["0"], 1),
        ("relaxed", "0.01", ["0"], 0),
        ("relaxed", "Blue", ["blue"], 1),
        ("relaxed", "bluish", ["blue", "bluish"], 1),
        ("choice", "(B) red", ["B"], 1),
        ("choice", "The answer is C.", ["B", "c"], 1),
        ("choice", "a red car", ["A"], 0),
        ("choice", "Both", ["B"], 0),
    ],
)
def test_scores_are_those_of_the_definition(name, prediction, references, expected):
    if library := METRICS[name].library:
        pytest.importorskip(library)
    assert of_one(name, prediction, *references) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(b)", "B"),
        ("B. red", "B"),
        ("**C**", "C"),
        ("Answer: D", "D"),
        ("So the answer is (A).", "A"),
        ("Boats.", "boats"),
        ("a boat", "a boat"),
        ("A boat.", "a boat"),
        ("I see a boat", "i see a boat"),
        ("A\nIt floats.", "A"),
        ("The answer is A because it floats", "A"),
    ],
)
def test_choices_are_read_as_people_write_them(text, choice):
    assert choice_of(text) == choice


PAIRS = [
    ("a cat sits on the mat", ["the cat sat on the mat", "a cat is on a mat"]),
    ("two dogs run, fast", ["two dogs are running"]),
    ("", ["nothing is here"]),
    ("a red bus", ["a red bus", "the bus"]),
]
PREDICTIONS, TEXTS = [text for text, _ in PAIRS], [texts for _, texts in PAIRS]


def test_error_rates_are_those_of_jiwer():
    jiwer = pytest.importorskip("jiwer")
    for name, rate in (("wer", jiwer.wer), ("cer", jiwer.cer)):
        scores = score_each([name], PREDICTIONS, TEXTS)[name]
        nearest = [min((rate(text, prediction), text) for text in texts) for prediction, texts in PAIRS]
        assert scores.each == pytest.approx([value for value, _ in nearest])
        assert scores.value == pytest.approx(rate([text for _, text in nearest], PREDICTIONS))
    assert of_one("wer", "word", "") == 1 and score(["wer"], [""], [[""]]) == {"wer": 0}
    spoken = "So, it's [noise] Größe FIVE!"
    assert of_one("wer", spoken, "so it s größe 5") == 1
    assert (
        of_one("wer_normalized", spoken, "so it s größe 5")
        == of_one("wer_normalized", "so it s größe 5", spoken)
        == 0.2
    )
    assert of_one("cer_normalized", spoken, "SO IT S GRÖSSE FIVE") == pytest.approx(2 / 19)
    assert score(["wer_normalized"], ["(uh)", "?"], [["..."], ["yes."]]) == {"wer_normalized": 1}


def test_rouge_is_that_of_its_library_on_the_best_reference():
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    for name in ("rouge1", "rouge2", "rougeL"):
        library = scorer.RougeScorer([name], use_stemmer=True)
        expected = [
            max(library.score(text, prediction)[name].fmeasure for text in texts) for prediction, texts in PAIRS
        ]
        scores = score_each([name], PREDICTIONS, TEXTS)[name]
        assert scores.each == pytest.approx(expected) and scores.value == pytest.approx(sum(expected) / 4)


def test_cider_is_that_of_coco_caption_on_plain_words():
    cider = pytest.importorskip("pycocoevalcap.cider.cider")
    texts = [("A cat, on a mat.", ["a cat on a mat", "the cat"]), ("A dog?", ["a bus"]), ("Red bus", ["a red bus"])]
    plain = [("a cat on a mat", ["a cat on a mat", "the cat"]), ("a dog", ["a bus"]), ("red bus", ["a red bus"])]
    value, each = cider.Cider().compute_score(
        {number: references for number, (_, references) in enumerate(plain)},
        {number: [text] for number, (text, _) in enumerate(plain)},
    )
    scores = score_each(["cider"], *zip(*texts, strict=True))["cider"]
    assert scores.value == pytest.approx(float(value)) and scores.each == pytest.approx([float(item) for item in each])
    assert each[0] > 1 and each[1] < 1


class OneRecord:
    """A sample with a record, of which `data.sequence_length` has cut all answered turns but the first."""

    def __init__(self, record, turns: int):
        self.record, self.turns = record, turns

    def read_record(self, number):
        return self.record

    def read_text(self, number):
        return SimpleNamespace(questions=((0, "?"),) * self.turns), None

    def locate(self, number):
        return "a.tar", "0"


@pytest.mark.parametrize(
    ("record", "turns", "field", "expected"),
    [
        ({"answers": ["7", "seven"]}, 1, "", ["7", "seven"]),
        ({"references": [{"answer": 7}], "answers": ["8"]}, 1, "", ["7"]),
        ({"answers": ["7", "3"]}, 2, "", ["truth"]),  # one for each turn, although one turn is left
        ({"answers": ["7", "3"]}, 2, "answers", ["7"]),
        ({"answers": {"text": ["7", "seven"], "answer_start": [0, 9]}}, 1, "", ["7", "seven"]),
        ({"answers": {"a": 7}, "references": [[7]]}, 1, "", ["truth"]),  # no texts
        ({}, 1, "", ["truth"]),
        (None, 1, "", ["truth"]),
    ],
)
def test_references_are_those_of_the_turn_also_if_later_turns_are_cut(record, turns, field, expected):
    assert References(OneRecord(record, turns), field).of(0, 0, "truth") == expected


def mine(predictions, references):
    return {"right": [float(text in texts) for text, texts in zip(predictions, references, strict=True)], "all": 3}


def test_a_function_of_the_user_scores_too():
    values = score_each([f"{__name__}:mine", "accuracy"], ["x", "y"], [["x"], ["x", "z"]])
    assert values == {"mine/right": (0.5, [1, 0]), "mine/all": (3, []), "accuracy": (0.5, [1, 0])}
    nothing = score(["accuracy", f"{__name__}:mine"], [], [])
    assert nothing.keys() == {"accuracy", "mine"} and all(map(math.isnan, nothing.values()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("anl", "--metric: no metric 'anl'. Did you mean anls?.* There are accuracy, vqa, .*, and module:function"),
        ("json:nothing", "--metric: 'json:nothing' cannot be used: .*nothing"),
        ("no_module_of_mine:f", "--metric: 'no_module_of_mine:f' cannot be used: No module"),
        (f"{__name__}:math", "must return a number"),
    ],
)
def test_what_cannot_be_scored_is_named(name, message, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "math", lambda predictions, references: "much")
    with pytest.raises(UserError, match=message):
        score([name], ["x"], [["x"]])


@pytest.mark.parametrize("names", [["mine:loss"], ["mine:accuracy"], ["mine:f", "theirs:f"]])
def test_a_function_does_not_replace_another_value(names, monkeypatch):
    monkeypatch.setattr(metrics, "_function", lambda name, key: mine)
    with pytest.raises(UserError, match=r"--metric: .* would replace another value named"):
        require_metrics(names)
    require_metrics(["mine:f", "mine:f", "accuracy"])


def test_a_missing_library_is_named_with_the_extra_that_has_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jiwer", None)
    with pytest.raises(
        UserError, match=r"train.metrics: wer requires a package: .*jiwer.*pip install 'mimo-train\[eval\]'"
    ):
        require_metrics(["wer"], "train.metrics")
    assert metrics.METRICS["wer"].library == "jiwer"

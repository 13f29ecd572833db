"""Metrics of texts by name: predictions against one or several references each."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from data.text_format import plural
from encoders.key_rules import nearest
from mimo_train.config.errors import UserError
from mimo_train.evaluation import normal_forms

Texts = Sequence[str]
References = Sequence[Sequence[str]]
"""References of each prediction, at least one."""
KEY = "--metric"
_ALL = "There are {}, and module:function"
_MEASURED = {"loss", "exact_match", "samples", "tokens"}
"""Names of what evaluations measure without generating texts."""


class Scores(NamedTuple):
    """Scores of a metric."""

    value: float
    """Of all predictions; NaN without any."""
    each: list[float]
    """Of every prediction; empty if the metric has none."""


@dataclass(frozen=True)
class Metric:
    """A metric and what it needs."""

    score: Callable[[Texts, References], Scores]
    summary: str
    library: str = ""
    """Module to import, of the extra `eval`."""


def score_each(names: Sequence[str], predictions: Texts, references: References) -> dict[str, Scores]:
    """Score predictions by every metric; see `METRICS`. A name `module:function` is the user's function.

    The function is called as (predictions, references). It returns a number, a list with one for each prediction, or a
    dict of these by name; its name in the result is FUNCTION, or FUNCTION/NAME. Without predictions, values are NaN.

    Raises:
        UserError: see `require_metrics`; or the user's function returns something else.
    """
    require_metrics(names)
    assert len(predictions) == len(references) and all(references), "a reference for each prediction"
    scores: dict[str, Scores] = {}
    for name in names:
        if not predictions:
            scores[name.rpartition(":")[2]] = Scores(math.nan, [])
        elif name in METRICS:
            scores[name] = METRICS[name].score(predictions, references)
        else:
            scores |= _by_user(name, predictions, references)
    return scores


def score(names: Sequence[str], predictions: Texts, references: References) -> dict[str, float]:
    """Return the values of `score_each`."""
    return {name: scores.value for name, scores in score_each(names, predictions, references).items()}


def require_metrics(names: Sequence[str], key: str = KEY) -> None:
    """Require that all metrics can be computed.

    Args:
        key: option or config key that names them.

    Raises:
        UserError: there is no such metric or function, a function has the name of another value, or a library is not
            installed.
    """
    titles = {*METRICS, *_MEASURED}
    for name in dict.fromkeys(names):
        if ":" in name:
            _function(name, key)
            title = name.rpartition(":")[2]
            if title in titles:
                raise UserError(f"{key}: {name} would replace another value named {title}. Rename the function")
            titles.add(title)
        elif name not in METRICS:
            raise UserError(f"{key}: no metric {name!r}. {nearest(name, METRICS)}. {_ALL.format(', '.join(METRICS))}")
        elif library := METRICS[name].library:
            try:
                importlib.import_module(library)
            except ImportError as error:
                raise UserError(f"{key}: {name} requires a package: {error}. pip install 'mimo-train[eval]'") from error


def _function(name: str, key: str) -> Callable[..., Any]:
    from mimo_train.config.user_code import load_code  # slow, and the help names all metrics

    return load_code(key, name)


def _by_user(name: str, predictions: Texts, references: References) -> dict[str, Scores]:
    result = _function(name, KEY)(list(predictions), [list(texts) for texts in references])
    title = name.rpartition(":")[2]
    named: Mapping[str, Any] = result if isinstance(result, Mapping) else {"": result}
    return {f"{title}/{key}".rstrip("/"): _scores(value, len(predictions), name) for key, value in named.items()}


def _scores(value: Any, count: int, name: str) -> Scores:
    try:
        if isinstance(value, Sequence) and not isinstance(value, str):
            each = [float(item) for item in value]
            if len(each) != count:
                raise UserError(
                    f"{KEY}: {name} returned {plural(len(each), 'score')} for {plural(count, 'prediction')}"
                )
            return _mean(each)
        return Scores(float(value), [])
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        text = f"{name} must return a number, one for each prediction, or a dict of these, got {value!r:.80}"
        raise UserError(f"{KEY}: {text}") from error


def _mean(each: list[float]) -> Scores:
    return Scores(math.fsum(each) / len(each) if each else math.nan, each)


def _by_prediction(compare: Callable[[str, Sequence[str]], float]) -> Callable[[Texts, References], Scores]:
    def scored(predictions: Texts, references: References) -> Scores:
        return _mean([compare(text, of_text) for text, of_text in zip(predictions, references, strict=True)])

    return scored


def _accuracy(prediction: str, references: Sequence[str]) -> float:
    return float(prediction.strip() in [reference.strip() for reference in references])


def _rouge(kind: str) -> Callable[[Texts, References], Scores]:
    def scored(predictions: Texts, references: References) -> Scores:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer([kind], use_stemmer=True)
        pairs = zip(predictions, references, strict=True)
        return _mean([scorer.score_multi(list(of_text), text)[kind].fmeasure for text, of_text in pairs])

    return scored


def _errors(process: str, *, normalized: bool = False) -> Callable[[Texts, References], Scores]:
    def scored(predictions: Texts, references: References) -> Scores:
        import jiwer

        if normalized:
            predictions, references = _normalized(predictions), [_normalized(texts) for texts in references]
        compare, edits, total, each = getattr(jiwer, process), 0, 0, []
        for text, of_text in zip(predictions, references, strict=True):
            measures = []
            for reference in of_text:
                if not reference.strip():  # jiwer takes none
                    length = len(text.split()) if process == "process_words" else len(text.strip())
                    measures.append((float(length > 0), length, 0))
                    continue
                result = compare(reference, text)
                wrong = result.substitutions + result.deletions + result.insertions
                measures.append((wrong / (right := wrong - result.insertions + result.hits), wrong, right))
            rate, wrong, length = min(measures)
            edits, total = edits + wrong, total + length
            each.append(rate)
        return Scores(edits / total if total else float(edits > 0), each)

    return scored


def _normalized(texts: Texts) -> Texts:
    """Return texts in lower case without punctuation and parts in brackets, by Whisper's normalizer of any language."""
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer

    normalize = BasicTextNormalizer()
    return [normalize(text).strip() for text in texts]


def _cider(predictions: Texts, references: References) -> Scores:
    """CIDEr-D of coco-caption, whose tokenizer is a Java program: nltk's Penn Treebank tokenizer replaces it."""
    from nltk.tokenize import TreebankWordTokenizer
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS

    def tokens(text: str) -> str:
        return " ".join(word for word in TreebankWordTokenizer().tokenize(text.lower()) if word not in PUNCTUATIONS)

    expected = {number: [tokens(text) for text in texts] for number, texts in enumerate(references)}
    value, each = Cider().compute_score(expected, {number: [tokens(text)] for number, text in enumerate(predictions)})
    return Scores(float(value), [float(score) for score in each])


_NORMAL = "in lower case without punctuation, as Whisper normalizes"
METRICS = {
    "accuracy": Metric(_by_prediction(_accuracy), "share of answers equal to a reference"),
    "vqa": Metric(_by_prediction(normal_forms.vqa_accuracy), "VQA accuracy, for 10 references"),
    "anls": Metric(_by_prediction(normal_forms.anls), "average normalized Levenshtein similarity", "rapidfuzz"),
    "f1": Metric(_by_prediction(normal_forms.token_f1), "F1 of words, as in SQuAD"),
    "choice": Metric(_by_prediction(normal_forms.same_choice), "accuracy of multiple-choice letters"),
    "relaxed": Metric(_by_prediction(normal_forms.relaxed_accuracy), "relaxed accuracy of ChartQA, numbers within 5 %"),
    "rouge1": Metric(_rouge("rouge1"), "ROUGE-1 F1", "rouge_score"),
    "rouge2": Metric(_rouge("rouge2"), "ROUGE-2 F1", "rouge_score"),
    "rougeL": Metric(_rouge("rougeL"), "ROUGE-L F1", "rouge_score"),
    "cider": Metric(_cider, "CIDEr-D, from 0 to 10", "pycocoevalcap"),
    "wer": Metric(_errors("process_words"), "word error rate, of the nearest reference", "jiwer"),
    "cer": Metric(_errors("process_characters"), "character error rate, of the nearest reference", "jiwer"),
    "wer_normalized": Metric(_errors("process_words", normalized=True), f"wer, {_NORMAL}", "jiwer"),
    "cer_normalized": Metric(_errors("process_characters", normalized=True), f"cer, {_NORMAL}", "jiwer"),
}
"""All metrics by name. Text is compared as it is unless the metric's definition normalizes it."""

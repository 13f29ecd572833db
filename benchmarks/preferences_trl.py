"""TRL's steps on preference records in order, in fp32: what `tests/e2e/test_trl.py` compares ours with.

    python benchmarks/preferences_trl.py TASK MODEL RECORDS STEPS PAIRS OUT

RECORDS: JSON lines in TRL's form; PAIRS: records of a step; OUT: a JSON line of metrics for each step. Needs trl 1.16
and datasets, in an environment of its own. ORPO's likelihood is restricted to the answer, and its steps have one pair
in a microbatch, because TRL takes the mean over the tokens of a microbatch.
"""

import inspect
import json
import sys
import textwrap
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


def trainer_of(task: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return (trainer class, config class, arguments) of a task."""
    if task == "reward":
        from trl import RewardConfig, RewardTrainer

        return RewardTrainer, RewardConfig, {"disable_dropout": True}
    if task == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer, KTOConfig, {}
    if task == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer, CPOConfig, {"loss_type": "simpo", "cpo_alpha": 0.0}
    if task == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer, orpo_trainer

        source = textwrap.dedent(inspect.getsource(ORPOTrainer.concatenated_forward))
        line = "labels = torch.where(attention_mask == 1, labels, -100)"
        assert source.count(line) == 1, "of another version of trl"
        exec(source.replace(line, 'labels = concatenated_batch["concatenated_labels"].clone()'), vars(orpo_trainer))
        ORPOTrainer.concatenated_forward = orpo_trainer.concatenated_forward
        return ORPOTrainer, ORPOConfig, {}
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer, DPOConfig, {"loss_type": ["sigmoid" if task == "dpo" else "ipo"]}


def main(task: str, model: str, records: str, steps: int, pairs: int, out: str) -> None:
    """Train, and write the metrics of each step."""
    trainer_class, config_class, arguments = trainer_of(task)
    microbatch = 1 if task == "orpo" else pairs
    arguments |= {} if task == "reward" else {"beta": 0.1}
    model_class = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    config = config_class(
        **arguments,
        output_dir=f"{out}.run",
        max_steps=steps,
        max_length=None,
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=pairs // microbatch,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    with open(records) as file:
        rows = [json.loads(line) for line in file]
    trainer = trainer_class(
        model_class.from_pretrained(model, dtype=torch.float32, attn_implementation="eager"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    with open(out, "w") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in trainer.state.log_history if "loss" in entry)


if __name__ == "__main__":
    task, model, records, steps, pairs, out = sys.argv[1:]
    main(task, model, records, int(steps), int(pairs), out)

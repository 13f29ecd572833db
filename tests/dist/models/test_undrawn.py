"""Weights that a run reads from directories are not drawn before: random numbers are counted."""

import json

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mimo_train.config.compose import load
from mimo_train.config.pretrained.fill_in import parts_there
from tests.dist.ranks import run_ranks
from tests.unit.config.test_pretrained import LLAMA
from tests.unit.config.test_pretrained_llava import TOWER

FOLDERS = {"images": "tower", "language": "llama"}


class Draws(TorchDispatchMode):
    """Counts the random numbers that are drawn inside it, by torch and by `encoders.initial_weights`, whose
    seeds do not count.

    Attributes:
        numbers: so many.
    """

    numbers = 0

    def __enter__(self):
        from encoders import initial_weights

        self._fill = initial_weights.fill
        initial_weights.fill = self._counted
        return super().__enter__()

    def __exit__(self, *error):
        from encoders import initial_weights

        initial_weights.fill = self._fill
        return super().__exit__(*error)

    def _counted(self, block, *place, **begin):
        self.numbers += block.numel()
        self._fill(block, *place, **begin)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and out.device.type != "meta" and out.dim():
            self.numbers += out.numel()
        return out


def _built(cfg) -> tuple[int, int, dict[str, int]]:
    """Numbers that are drawn where everything is, and where what directories have is not; parameters of a run by
    name."""
    from mimo_train.layout.run import resolve
    from mimo_train.training.step.pipeline import build_parts, start_processes

    run = resolve(cfg)
    place, counts = start_processes(cfg), []
    for undrawn in (frozenset(), parts_there(run.cfg)):
        with Draws() as draws:
            parts = build_parts(run, *place, undrawn=undrawn)
        counts.append(draws.numbers)
    return *counts, {name: one.numel() for name, one in parts.pipeline.model[0].named_parameters() if one.dim() > 1}


def test_only_what_no_directory_has_is_drawn(digits, tmp_path):
    """A tower and a language model of directories, a projector and adapters of the run."""
    for name, keys in (("tower", TOWER), ("llama", LLAMA)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(keys))
    places = (f"run.dir={tmp_path}/run", f"data.shards={digits}/train", "data.validation_shards=", "data.demo=")
    folders = (f"modules.{module}.pretrained={tmp_path}/{name}" for module, name in FOLDERS.items())
    own = ("layout=one_process", "data.tokenizer=bytes", "data.sequence_length=200", "modules.language.lora.rank=2")
    cfg = load("vlm_digits", (*places, *folders, *own))
    ((everything, drawn, parameters),) = run_ranks(_built, 1, cfg)
    own = [name for name in parameters if "input_projections" in name or name.endswith("lora_a")]
    assert drawn == sum(parameters[name] for name in own) > 0
    assert len(own) < len(parameters) and everything > 5 * drawn

"""The engine: a model with its optimizer at any layout, driven by another program.

Frameworks of reinforcement learning decide what is learned; the engine computes log-probabilities, makes steps, writes
text and hands out weights. Its batches become the microbatches of training, so every layout, encoder, packing and
precision of a run works here too.

Shape suffixes: B batch, S sequence.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from data.storage.url import Place, place_of
from mimo_train.checkpoint import folders
from mimo_train.checkpoint.resume.same_run import recorded_config
from mimo_train.config.errors import ConfigError, Fault, UserError
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.pretrained.config_of_directory import config_of_directory, is_directory_of_a_model
from mimo_train.config.schema import ConfigContainer
from mimo_train.engine.batch import MASK, PLACES, TENSORS, Batch, BatchSamples
from mimo_train.engine.offload import GRADIENTS, OPTIMIZER, WEIGHTS, Offloaded
from mimo_train.engine.weights import named_weights
from mimo_train.evaluation.generation.answers import Answer, Answers
from mimo_train.evaluation.generation.decoder import Decoder
from mimo_train.evaluation.generation.options import Sampling
from mimo_train.evaluation.generation.prompts import Prompt, Prompts
from mimo_train.evaluation.held_out import evaluating
from mimo_train.evaluation.layouts import with_layout
from mimo_train.flight.file_format import CALLER
from mimo_train.flight.recorder import RECORDER
from mimo_train.inputs.padding import padding_of
from mimo_train.launch.exit_signal import ExitSignal
from mimo_train.launch.processes import require_none_idle, started_run
from mimo_train.launch.rank_monitor import watched, working
from mimo_train.parallel.context import own_part
from mimo_train.training.pretrain import default_forward_step
from mimo_train.training.setup import Session, setup
from mimo_train.training.shutdown import ExitVotes
from mimo_train.training.step.batches import StepIterator, open_loader
from mimo_train.training.step.forward_step import prepare_forward_step_func
from mimo_train.training.step.state import GlobalState
from mimo_train.training.tasks.base import LossOutput, Task
from mimo_train.training.train_step import train_step

LossFunction = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]
"""(log-probabilities [B, S] of the tokens of answers, 0 elsewhere; tensors [B, S] of `Batch.tensors`, with `mask`,
`samples` and `places`, see `engine.batch`) -> (sum of losses, number of units as int, {name: (sum, count)}). Gradients
are divided by the units of the whole batch. With context parallelism each rank has its part of S, and counts it."""
Generate = Callable[[Sequence[Prompt], Sampling, int], list[Answer]]
"""(prompts, sampling, most new tokens) -> answers, the same on every rank."""

GREEDY = Sampling()


class Engine:
    """A model with its optimizer. Methods are collective over all ranks, with equal arguments on every rank.

    Attributes:
        session: what a training loop would run on.
        prompts: makes prompts of turns with images and audio.
        generate_by: answers prompts instead of this model, for example by a server that loads `named_weights`.
    """

    def __init__(self, cfg: ConfigContainer, generate_by: Generate | None = None):
        """Build the model of a config, or resume it from its newest checkpoint in `run.dir`. `data` gives the tokenizer
        and how media are read; its training shards are not opened. Raises what `pretrain` raises."""
        if cfg.train.task != "sft":
            text = f"is {cfg.train.task}, and an engine learns by the loss function of its caller. Set train.task=sft"
            raise ConfigError([Fault("train.task", text)])
        if getattr(cfg.llm, "is_balanced", False):
            text = "has output_router_logits, a loss that an engine does not have. Set it to false in config.json"
            raise ConfigError([Fault(f"modules.{LANGUAGE}.llm.model_config", text)])
        for name in [name for name, module in cfg.modules.items() if module.layout.fsdp]:
            text = "is true, and an engine generates and hands over weights with whole replicas. Set it to false"
            raise ConfigError([Fault(f"modules.{name}.layout.fsdp", text)])
        run = started_run(cfg)
        require_none_idle(run)
        with ExitStack() as stack:
            stack.enter_context(watched(run))
            self.session: Session = setup(
                run,
                ExitVotes(ExitSignal(), 0, 0),
                start_time=time.time(),
                samples_of=lambda tokenizer: BatchSamples(cfg, tokenizer, Batch([], [])),
            )
            RECORDER.to(CALLER)
            self._watch = stack.pop_all()
        self._run, self.pipeline, self.tokenizer = run, self.session.parts.pipeline, self.session.parts.tokenizer
        self.prompts, self.generate_by = Prompts(cfg, self.tokenizer), generate_by
        self._memory = Offloaded(self.session.model, self.session.optimizer)
        self._answered = 0

    @classmethod
    def open(cls, place: str | Place, run_dir: str | Path, *, layout: str = "run", **options: Any) -> Self:
        """Start from the weights of a run, a checkpoint or a directory of `transformers`.

        Args:
            place: its folder.
            run_dir: folder of the new run, which resumes if it has a checkpoint.
            layout: `run` for that of the checkpoint, or see `evaluation.layouts.with_layout`.
            options: of `Engine`.

        Raises:
            UserError: there is no complete checkpoint, or no such layout.
        """
        place = place_of(str(place))
        if isinstance(place, Path) and is_directory_of_a_model(place):
            cfg, weights = config_of_directory(place, 0), ""
        else:
            folder = folders.in_folder(place, "CHECKPOINT")
            cfg, weights = recorded_config(folder, trust_code=False), str(folder)
        cfg = with_layout(cfg.as_sft(), layout)
        cfg = replace(
            cfg,
            run=replace(cfg.run, dir=str(run_dir)),
            checkpoint=replace(cfg.checkpoint, weights=weights, dir=""),
        )
        return cls(cfg, **options)

    @property
    def cfg(self) -> ConfigContainer:
        """The config."""
        return self._run.cfg

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.session.state.train_state.step

    def log_probs(self, batch: Batch) -> list[torch.Tensor]:
        """Return the log-probability of each token of the answers, float32 [tokens] for each sample, on every rank: at
        temperature 1, without dropout."""
        self._memory.require_on_device("log_probs")
        device, log_probs = self.pipeline.device, list[torch.Tensor]()
        for first in range(0, len(batch), self.cfg.train.global_batch_size):
            part = batch.part(first, min(self.cfg.train.global_batch_size, len(batch) - first))
            values = torch.zeros(part.ends[-1], device=device)
            task = _Collect(self.cfg, values)
            with evaluating(self.session.model):
                data = self._data(part, trains=False)
                data.advance()
                # Ranks of the last stage call the task; one of a tensor-parallel group has each value.
                self.pipeline.run(self._forward_step(task), data, forward_only=True)
            language = self.pipeline.groups.collections.get(LANGUAGE)
            if language is None or language.tp.rank():
                values.zero_()
            dist.all_reduce(values)
            log_probs += values.cpu().split([len(answer) for answer in part.answers])
        return log_probs

    def train(self, batch: Batch, loss_function: LossFunction) -> dict[str, float]:
        """Make an optimizer step on a batch, and one of the schedules.

        Args:
            batch: at most `train.global_batch_size` samples, in microbatches as in training.
            loss_function: see `LossFunction`.

        Returns:
            The reported means over the batch, with `grad_norm` and `learning_rate`, on every rank.

        Raises:
            UserError: the batch is too large, or longer than `data.sequence_length`; or what the loss function returns.
        """
        self._memory.require_on_device("train")
        most = self.cfg.train.global_batch_size
        if not 0 < len(batch) <= most:
            raise UserError(
                f"train.global_batch_size: is {most}, the most samples of a step, and the batch has {len(batch)}. "
                "Raise it or split the batch"
            )
        session, progress = self.session, self.session.state.train_state
        with working():
            RECORDER.begin_step(progress.step + 1)
            session.freeze_stages.apply(progress.step)
            data = self._data(batch, trains=True)
            with session.parts.stopwatch("step"):
                data.advance()
                task = _Learn(self.cfg, loss_function)
                result = train_step(replace(session, data=data), self._forward_step(task))
        progress.count(len(batch), int(sum(map(len, batch.answers))), result)
        self._answered = 0
        values: list[Any] = [{name: float(value) for name, value in result.losses.items()}]
        dist.broadcast_object_list(values, src=self._run.layout.logging_rank)
        rates = session.schedulers.learning_rates()
        return values[0] | {"grad_norm": float(result.grad_norm or 0.0), "learning_rate": max(rates.values())}

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = GREEDY,
        max_new_tokens: int = 64,
        *,
        numbers: Sequence[int] | None = None,
        batch_size: int = 64,
    ) -> list[Answer]:
        """Answer prompts, on every rank the same. Each replica of the language model answers a part of them.

        Args:
            numbers: see `Answers.batch`; by default they follow from the step and the prompts since then, so that a
                run that resumes draws the same answers.
            batch_size: most sequences that a replica decodes together.

        Raises:
            UserError: a prompt leaves no room for an answer, or the layout cannot decode (`require_decodable`).
        """
        if self.generate_by is not None:
            return self.generate_by(prompts, sampling, max_new_tokens)
        self._memory.require_on_device("generate")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: must be at least 1, is {max_new_tokens}")
        if numbers is None:
            first = (self.step << 32) + self._answered
            numbers = range(first, first + len(prompts))
            self._answered += len(prompts)
        with evaluating(self.session.model):
            decoder = Decoder(self.pipeline)
            answers = Answers(self.cfg, decoder, self.tokenizer, sampling, max_new_tokens, batch_size)
            replicas = self.pipeline.groups.collections[LANGUAGE].dp
            of_replicas: list[Any] = [None] * replicas.size()
            local = slice(replicas.rank(), None, replicas.size())
            dist.all_gather_object(of_replicas, answers.batch(prompts[local], numbers[local]), group=replicas)
        answered: list[Any] = [None] * len(prompts)
        for rank, of_replica in enumerate(of_replicas):
            answered[rank :: replicas.size()] = of_replica
        return answered

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the held-out sets of `data`, as `eval/NAME`."""
        self._memory.require_on_device("evaluate")
        return {
            name: value
            for held_out in self.session.held_out_sets
            for name, value in held_out.evaluate(self.step).items()
        }

    def log(self, values: Mapping[str, float]) -> None:
        """Write values of this step into metrics.jsonl and the other sinks of `log`."""
        progress = self.session.state.train_state
        self.session.state.metrics.log(progress.step, progress.consumed_train_samples, dict(values))

    def named_weights(self, dtype: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the hub, whole tensor) on every rank, see `engine.weights.named_weights`. Every rank must take
        all of them."""
        self._memory.require_on_device("named_weights")
        return named_weights(self.cfg, self.tokenizer, self.session.model, self.pipeline.device, dtype)

    def offload(self, *, weights: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Free the device's memory of weights and optimizer states, which are kept on the host, and of gradients."""
        self._memory.offload(_kinds(weights, gradients, optimizer))

    def onload(self, *, weights: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move back what `offload` has moved; gradients are zero."""
        self._memory.onload(_kinds(weights, gradients, optimizer))

    def save(self) -> Place:
        """Write a checkpoint of everything into `run.dir`, and return its folder."""
        self._memory.require_on_device("save")
        return self.session.checkpointer.save()

    def load(self, place: str | Place) -> None:
        """Continue from a checkpoint of an engine, which any layout has written. Raises UserError as resuming does."""
        self._memory.require_on_device("load")
        self.session.checkpointer.continue_from(folders.in_folder(place_of(str(place)), "CHECKPOINT"))
        self._answered = 0

    def close(self) -> None:
        """End threads and writers; nothing is saved."""
        try:
            self.session.close()
        finally:
            self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _data(self, batch: Batch, *, trains: bool) -> StepIterator:
        """Return the microbatches of one step of a batch; the last is filled with a sample without a loss."""
        layout = self._run.layout.language
        unit = self._run.batch.microbatch_samples * (layout.pp if layout.vpp > 1 else 1)
        size = -(-len(batch) // unit) * unit
        samples = BatchSamples(self.cfg, self.tokenizer, batch.part(0, size), learned=len(batch))
        loader = open_loader(
            self._run,
            self.pipeline.groups,
            samples,
            consumed=0,
            steps=1,
            size_at=lambda _consumed: size,
            padding=padding_of(self.cfg),
            workers=0,
        )
        learned = self.cfg.train.logits == "learned"
        return StepIterator(loader, self.pipeline, trains=trains, learned_logits=learned)

    def _forward_step(self, task: Task) -> Any:
        state: GlobalState = replace(self.session.state)
        state.task = task
        return prepare_forward_step_func(default_forward_step(self.cfg), state)


def _kinds(weights: bool, gradients: bool, optimizer: bool) -> list[str]:
    chosen = {WEIGHTS: weights, GRADIENTS: gradients, OPTIMIZER: optimizer}
    return [kind for kind, is_chosen in chosen.items() if is_chosen]


class _Learn(Task):
    """A loss function as a task."""

    def __init__(self, cfg: ConfigContainer, function: LossFunction):
        super().__init__(cfg)
        self._function = function

    def loss(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> LossOutput:
        """Return what the function returns for this rank's part of the microbatch."""
        mask = batch["loss_mask"]
        local = own_part(batch[TENSORS], groups.cp)
        result: Any = self._function(-output.float() * mask, local | {MASK: mask})
        if not isinstance(result, tuple) or len(result) != 3:
            kind = type(result).__name__
            raise UserError(f"loss_function: returned {kind}, expected (sum, units, {{name: (sum, count)}})")
        total, units, report = result
        if output.requires_grad and not total.requires_grad:
            raise UserError("loss_function: its sum has no gradient. Compute it from log_probs, not detached")
        units = torch.as_tensor(units, device=total.device)
        return total, units if units.is_floating_point() else units.to(torch.int), report  # floats are an error


class _Collect(Task):
    """Collects log-probabilities by their places."""

    def __init__(self, cfg: ConfigContainer, values: torch.Tensor):
        super().__init__(cfg)
        self._values = values

    def loss(self, batch: Mapping[str, Any], groups: ProcessGroupCollection, output: torch.Tensor) -> LossOutput:
        """Store this rank's part of the microbatch."""
        places = own_part(batch[TENSORS], groups.cp)[PLACES]
        chosen = places >= 0
        self._values[places[chosen]] = -output.float()[chosen]
        return output.sum(), chosen.sum().to(torch.int), {}

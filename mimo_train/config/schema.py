"""One run as dataclasses, with the checks of their keys. `compose` reads YAML, and `mimo_train.layout` checks sizes,
ranks and batches together."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, value_faults
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE, parts_of
from mimo_train.config.schema_checkpoint import CheckpointConfig
from mimo_train.config.schema_data import DataConfig
from mimo_train.config.schema_distill import DISTILL, SFT, DistillConfig
from mimo_train.config.schema_log import LogConfig, ProfilingConfig
from mimo_train.config.schema_modules import ModuleConfig
from mimo_train.config.schema_optim import OF_WHOLE_MATRICES, ModuleOptimConfig, OptimConfig
from mimo_train.config.schema_run import LaunchConfig, PlacementConfig, RunConfig
from mimo_train.config.schema_train import TrainConfig
from mimo_train.config.tasks import TASKS, PreferenceConfig, TaskTraits
from mimo_train.config.transformers_llm import TransformersLlm


@dataclass
class ConfigContainer(Section):
    """One complete run."""

    run: RunConfig = field(default_factory=RunConfig)
    """Where the run lives and what it runs on."""
    pretrained: str = ""
    """Model of several parts, for all modules without their own: a directory as `transformers` saves it, or ORG/NAME of
    the hub. See docs/pretrained.md."""
    modules: dict[str, ModuleConfig] = field(default_factory=dict)
    """Encoders by names of your choice, and `language`."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which ranks the modules get."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the samples are and how they become sequences."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, in which batches, and what happens between steps."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """The losses of tasks that compare answers."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """The teacher of `train.task=distill`."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run is saved and how it starts again."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is written, and where to."""
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    """Recordings of a few steps."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """What the launcher decides when it knows its nodes."""

    @property
    def encoders(self) -> dict[str, ModuleConfig]:
        """The modules other than `language`, in the order of the config."""
        return {name: module for name, module in self.modules.items() if name != LANGUAGE}

    @property
    def language(self) -> ModuleConfig:
        return self.modules[LANGUAGE]

    @property
    def bidirectional(self) -> str:
        """Tokens of the language model that see each other, see `EncoderSpec.bidirectional`."""
        return next((kind for module in self.encoders.values() if (kind := module.encoder.bidirectional)), "")

    @property
    def traits(self) -> TaskTraits:
        """What the task of the run reads and needs."""
        return TASKS.get(self.train.task, TaskTraits())

    @property
    def sample_length(self) -> int:
        """Most tokens of a sample, over all its answers."""
        return self.traits.answers * self.data.sequence_length

    @property
    def llm(self) -> LlmSpec:
        """Sizes of the language model, for a config without faults in its modules."""
        llm = self.language.llm
        assert llm is not None, "modules.language.llm is missing, which `layout.run` reports"
        return llm.sizes if isinstance(llm, TransformersLlm) else llm

    def as_sft(self) -> "ConfigContainer":
        """Return the config with train.task=sft, without the keys of other tasks."""
        train = replace(self.train, task=SFT)
        return replace(self, train=train, preference=PreferenceConfig(), distill=DistillConfig())

    def optim_of(self, name: str) -> OptimConfig:
        """Return the optimizer settings of module `name`: those of `optim`, overridden by `modules.NAME.optim`."""
        overrides, keys = self.modules[name].optim, {each.name for each in fields(OptimConfig)}
        changed = {each.name: getattr(overrides, each.name) for each in fields(overrides) if each.name in keys}
        return replace(self.optim, **{key: value for key, value in changed.items() if value is not None})

    def recompute_of(self, name: str) -> str:
        """Return the recompute setting of module `name`: none, selective, full, or parts joined by +."""
        return self.modules[name].recompute or self.train.recompute

    def offload_of(self, name: str) -> bool:
        """True if activations of the layers of module `name` wait on the host."""
        return (self.modules[name].offload_activations or self.train.offload_activations) == "layers"

    def fp8_of(self, name: str) -> str:
        """Return the fp8 recipe of module `name`: none, tensorwise, blockwise or mxfp8."""
        return self.modules[name].fp8 or self.train.fp8

    def compile_of(self, name: str) -> str:
        """Return the compile setting of module `name`: none or layers."""
        return self.modules[name].compile or self.train.compile

    def faults(self) -> Iterator[Fault]:
        """Yield faults of values, alone and between sections. `mimo_train.layout` checks sizes, layouts and batch."""
        yield from value_faults(self, "")
        yield from self.run.faults(self.checkpoint.resume)
        for name, module in self.modules.items():
            yield from module.faults(name, self.optim)
            if module.optim != ModuleOptimConfig() and {*parts_of(name)} <= {*module.freeze} and not module.lora.rank:
                text = "is set, but every part of the module is frozen. Remove it, or train a part"
                yield Fault(f"modules.{name}.optim", text)
            if module.lora.adapter and self.checkpoint.weights:
                yield Fault(
                    f"modules.{name}.lora.adapter",
                    f"is {module.lora.adapter}, and checkpoint.weights {self.checkpoint.weights}: a run begins with "
                    "the weights of one of them; remove the other",
                )
        yield from self.placement.faults()
        yield from self.launch.faults()
        yield from self._nothing_to_train()
        yield from self._value_head_faults()
        yield from self.data.faults()
        yield from self.train.faults()
        yield from self.train.fusions.faults(self.run.device, self.train.precision)
        yield from self.preference.faults(self.train.task, self.traits)
        yield from self.distill.faults(self.train.task)
        if self.train.task == DISTILL and self.train.logits != "learned":
            yield Fault("train.logits", f"must be learned with train.task=distill, is {self.train.logits}")
        of_modules = [self.optim_of(name) for name in self.modules] or [self.optim]
        yield from self.optim.faults(self.train.precision, of_modules)
        for name, module in self.modules.items():
            if module.layout.fsdp and (optimizer := self.optim_of(name).name) in OF_WHOLE_MATRICES:
                text = f"is true, and {optimizer} needs whole matrices. Set it to false, or optim.name=adamw"
                yield Fault(f"modules.{name}.layout.fsdp", text)
        yield from self.checkpoint.faults()
        watched = (("checkpoint.keep_best", self.checkpoint.keep_best), ("train.stop_early", self.train.stop_early))
        for key, section in watched:
            yield from section.faults(key, self.data.evaluates_at, self.train.eval_interval)
        for name, load in self.checkpoint.load_modules.items():
            yield from load.faults(f"checkpoint.load_modules.{name}", name, list(self.modules))
        llm = self.modules[LANGUAGE].llm if LANGUAGE in self.modules else None
        yield from self.log.faults(llm.num_experts if isinstance(llm, LlmSpec) else 0)

    def _value_head_faults(self) -> Iterator[Fault]:
        if not self.traits.value_head or LANGUAGE not in self.modules:
            return
        if isinstance(self.language.llm, TransformersLlm):
            text = f"is {self.train.task}, but modules.{LANGUAGE} is a class of transformers, which gets no value head"
            yield Fault("train.task", f"{text}. Choose a model type with layers of ours, or another task")
        if "lm_head" in self.language.lora.modules_to_save:
            text = f"names lm_head, which train.task={self.train.task} replaces by its value head. Remove it"
            yield Fault(f"modules.{LANGUAGE}.lora.modules_to_save", text)
        if "llm" in self.language.freeze:
            text = (
                f"freezes the value head of train.task={self.train.task} too. Freeze [embedding.*, decoder.*] instead"
            )
            yield Fault(f"modules.{LANGUAGE}.freeze", text)

    def _nothing_to_train(self) -> Iterator[Fault]:
        """Yield the fault of a run whose first step trains nothing. Parts are only unfrozen during a run, so later
        steps train at least as much."""
        if LANGUAGE not in self.modules:
            return
        first: list[tuple[int, str]] = []
        for name, module in self.modules.items():
            for part in parts_of(name):
                until = max(module.freeze_until.get("*", 0), module.freeze_until.get(part, 0))
                if part in module.freeze:
                    continue
                if until <= 0:
                    return
                first.append((until, name))
        if not first:
            yield Fault(
                f"modules.{LANGUAGE}.freeze",
                "every part of every module is frozen. Train at least one part",
            )
            return
        step, name = min(first)
        yield Fault(
            f"modules.{name}.freeze_until",
            f"nothing is trained in the first {step} steps. Train at least one part from the start",
        )

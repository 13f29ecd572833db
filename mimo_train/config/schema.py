"""One run as dataclasses: a docstring per field, with its unit, and the checks beside the keys that they are about.

Imports no torch; reading YAML is in `compose`. Sizes, ranks and batches are looked at together in `mimo_train.plan`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data.bounds import BOUNDS
from mimo_train.config.fault import Fault
from mimo_train.config.installed import library_faults
from mimo_train.config.keys import key, value_faults
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE, parts_of
from mimo_train.config.schema_load import LoadConfig
from mimo_train.config.schema_log import LogConfig, ProfilingConfig
from mimo_train.config.schema_modules import MOST_RANKS, ModuleConfig
from mimo_train.config.schema_train import OptimConfig, TrainConfig

LEAST_PATIENCE = 0.25
"""`run.timeout_minutes` with in-process restarts, whose barriers wait twice as long, is longer than this."""

YEAR = 365 * 24 * 60
"""In minutes. Libraries count a timeout in units that far larger ones overflow."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Files of which a folder with a Hugging Face tokenizer has some."""


@dataclass
class RunConfig:
    """Where a run lives and what it runs on."""

    dir: str = key("runs/run", filled="the folder that the run writes into")
    """Folder that the run writes into. The same folder again resumes the run."""
    seed: int = key(1234, at_least=0, at_most=2**63 - 1)
    """Seed of initial weights, of the order of samples and of dropout."""
    device: str = key("auto", choices=("auto", "cuda", "cpu"))
    """`auto` (CUDA where each process of a machine gets a device), `cuda` or `cpu`. On CUDA each process takes a GPU of
    its own."""
    timeout_minutes: float = key(10.0, at_least=0.001, below=YEAR)
    """Minutes that a rank waits for its peers in a collective before it gives up, less than a year. With
    `inprocess_restarts` above 0.25."""
    hang_report_seconds: float = key(300.0, at_least=0, below=60 * YEAR, zero_means="never")
    """Seconds without progress, in set-up too, after which a run says which rank is to blame and ends with exit code
    18; 0: never. See docs/reliability.md#hangs."""
    inprocess_restarts: int = key(0, at_least=0, at_most=1_000_000)
    """How often a failed run starts again inside its processes, from its newest checkpoint; 0: never. Needs the extra
    `resiliency`. See docs/reliability.md#in-process-restart."""

    def faults(self, resume: str) -> Iterator[Fault]:
        """Values that cannot be, alone and together with `checkpoint.resume`."""
        yield from value_faults(self, "run")
        yield from library_faults(
            self, "run", {"inprocess_restarts": ("nvidia_resiliency_ext.inprocess", "'mimo-train[resiliency]'")}
        )
        if self.inprocess_restarts > 0 and 0 < self.timeout_minutes <= LEAST_PATIENCE:
            yield Fault(
                "run.timeout_minutes",
                f"must be above {LEAST_PATIENCE} with run.inprocess_restarts {self.inprocess_restarts}, is "
                f"{self.timeout_minutes}: ranks send a sign of life every second, and are missed after 30",
            )
        if self.inprocess_restarts > 0 and resume != "auto":
            yield Fault(
                "checkpoint.resume",
                f"must be auto with run.inprocess_restarts {self.inprocess_restarts}, is {resume!r}: a run that starts "
                "again continues from its newest checkpoint",
            )


@dataclass
class PlacementConfig:
    """Which ranks the modules get."""

    mode: str = key("disjoint", choices=("disjoint", "shared"))
    """`disjoint` (one module after the other) or `shared` (every encoder on the ranks of the language model's first
    stage)."""
    first_rank: dict[str, int] = key(factory=dict, at_most=MOST_RANKS)
    """First rank of each module by name, instead of one after the other: `'placement.first_rank={images: 1, language:
    0}'`. Names every module or none; with mode `disjoint`."""
    allow_idle: bool = False
    """Whether processes may be without a module: those in holes between modules, and those beyond the last one. They
    end at once."""
    ranks_per_node: int = key(0, at_least=0, at_most=MOST_RANKS)
    """Ranks of a node, for `mimo-train check` before there is a launcher; 0: as many as the launcher has started on
    each."""
    tp_across_nodes: bool = False
    """Whether a tensor-parallel group may have ranks on several nodes."""
    bridge: str = key("native", choices=("native", "megatron"))
    """How features reach the language model: `native` (sizes are known from the data index; any layouts and counts) or
    `megatron` (Megatron-Core's own communicators, to compare; they exchange sizes, and need counts of equal parts and
    data-parallel sizes that divide each other). Same numbers."""

    def faults(self) -> Iterator[Fault]:
        """Values that cannot be. Ranks and modules are looked at together in `mimo_train.plan.placement`."""
        yield from value_faults(self, "placement")
        for name, rank in self.first_rank.items():
            if rank < 0:
                yield Fault(f"placement.first_rank.{name}", f"must be at least 0, is {rank}")
        if self.first_rank and self.mode == "shared":
            yield Fault(
                "placement.first_rank", "applies to mode disjoint; shared modules all start at rank 0: remove it"
            )


@dataclass
class BoundsConfig:
    """How large the parts of a sample may be: what is above is a bad sample. See docs/data.md#bounds."""

    pixels: int = key(BOUNDS.pixels, at_least=1)
    """Of one picture, height times width."""
    seconds: float = key(BOUNDS.seconds, above=0)
    """Of one clip."""
    sample_rate: int = key(BOUNDS.sample_rate, at_least=1)
    """Of one clip, in Hz."""
    record_bytes: int = key(BOUNDS.record_bytes, at_least=1)
    """Of the `json` or `txt` member."""
    record_depth: int = key(BOUNDS.record_depth, at_least=1)
    """Lists and objects inside each other in a record."""
    turns: int = key(BOUNDS.turns, at_least=1)
    """Of a conversation."""
    placeholders: int = key(BOUNDS.placeholders, at_least=1)
    """Pictures and clips of a sample, together."""


@dataclass
class DataConfig:
    """Where the samples are and how they become sequences."""

    shards: str = ""
    """Training shards, required: a folder, a glob, a brace range `x-{000000..000127}.tar`, or several with commas."""
    validation_shards: str = ""
    """Held-out shards, same forms; empty: no evaluation."""
    demo: str = key("", choices=("", "digits", "mixed", "text"))
    """`digits`, `mixed` (pictures, sounds and texts) or `text`: make the demo's shards at `shards` and
    `validation_shards` on first use. Empty: never; set it so for shards of your own."""
    sequence_length: int = key(1024, at_least=1, at_most=2**27)
    """Tokens of one sample, placeholders of media included. Longer texts are cut at the end."""
    pad: str = key("microbatch", choices=("microbatch", "sequence"))
    """How long the rows of a microbatch are: `microbatch`: as long as its longest sample, and the samples of a step are
    sorted so that microbatches hold similar lengths, or `sequence`: `sequence_length`. The samples of a step are the
    same. See docs/data.md#padding."""
    pack: bool = False
    """Whether samples of a step stand in rows of several, without padding between them, instead of a row each. No
    number changes: attention stays inside samples, and a step trains the same ones. The microbatches of a step follow
    from their lengths, and `train.micro_batch_size` only gives `pack_length` its default. See docs/data.md#packing."""
    pack_length: int = key(0, at_least=0, at_most=2**27)
    """With `pack`: most tokens of a row, at least `sequence_length`. 0: `train.micro_batch_size` x `sequence_length`,
    what a microbatch holds unpacked."""
    tokenizer: str = key("bytes", filled="bytes or a folder")
    """`bytes` (built in), or a folder with a Hugging Face tokenizer."""
    chat_template: str = key("auto", filled="auto, own or a file")
    """How conversations become tokens: `auto` (the tokenizer's own chat template; our own format if it has none), `own`
    (our own format), or a file with a Jinja template. See docs/data.md#chat-templates."""
    template_variables: dict[str, Any] = field(default_factory=dict)
    """Variables that the tokenizer's chat template may use, such as `{enable_thinking: false}` or `{date_string: 26 Jul
    2024}`."""
    shuffle: bool = True
    """Whether training samples come in a new order each epoch."""
    blind: bool = False
    """Ablation: pictures and clips are replaced by zeros, so that only the text is left to learn from."""
    max_bad_samples: int = key(0, at_least=0)
    """Samples that may be unreadable, in all, before the run stops. Held-out samples are counted apart. See
    docs/data.md#bad-samples."""
    read_retries: int = key(5, at_least=0, at_most=1000)
    """Times that a read is tried again after an I/O error, after pauses of 0.5, 1, 2, ... seconds; then the run ends.
    See docs/data.md#bad-samples."""
    bounds: BoundsConfig = field(default_factory=BoundsConfig)
    """How large the parts of a sample may be. See docs/data.md#bounds."""
    workers: int = key(2, at_least=0, at_most=1024)
    """Threads that read and decode ahead on each rank; 0 reads in the training thread."""
    cache_dir: str = ""
    """Folder for shard indexes, instead of beside the shards; empty: beside them, or in the user's cache where that
    folder cannot be written. See docs/data.md#index."""

    def faults(self) -> Iterator[Fault]:
        """Values that cannot be, and demos that would overwrite other shards."""
        found = [*value_faults(self, "data"), *value_faults(self.bounds, "data.bounds")]
        yield from found
        if found:
            return  # paths that are none
        yield from self._tokenizer_faults()
        if self.demo and not self.shards:
            yield Fault("data.shards", f"data.demo={self.demo} needs a folder to make the shards in, is empty")
        elif self.demo:
            yield from self._demo_faults()

    def _tokenizer_faults(self) -> Iterator[Fault]:
        """A name that is no folder would be asked of a network, by every rank."""
        if self.tokenizer == "bytes":
            return
        folder = Path(self.tokenizer)
        if not folder.is_dir():
            yield Fault(
                "data.tokenizer",
                f"no folder {self.tokenizer}: give bytes, or a folder with a Hugging Face tokenizer; nothing is "
                "downloaded, one of the hub is saved by AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)",
            )
        elif not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            yield Fault(
                "data.tokenizer",
                f"there is no tokenizer in {self.tokenizer}, no tokenizer.json and no vocabulary: give the folder in "
                "which AutoTokenizer.save_pretrained wrote one, or bytes",
            )

    def _demo_faults(self) -> Iterator[Fault]:
        """Making a demo replaces every *.tar of its two folders: never where other shards are."""
        from data.demo.make import DEMOS, MARKER

        if self.demo not in DEMOS:
            return
        folder = Path(self.shards).parent
        places = {"shards": folder / "train", "validation_shards": folder / "held_out"}
        for name, place in places.items():
            given = getattr(self, name)
            if given and Path(given) != place:
                yield Fault(
                    "data.demo",
                    f"the {self.demo} demo would be made in {places['shards']} and {places['validation_shards']}, but "
                    f"data.{name} is {given}: set data.demo= (empty) to train on shards of your own",
                )
                return
            if any(place.glob("*.tar")) and not (folder / MARKER).is_file():
                yield Fault(
                    "data.demo",
                    f"the {self.demo} demo would replace the shards of {place}, which are not a demo's (there is no "
                    f"{folder / MARKER}): set data.demo= (empty) to train on them",
                )
                return


@dataclass
class CheckpointConfig:
    """When a run is saved and how it starts again."""

    save_interval: int = key(0, at_least=0)
    """Steps between checkpoints; 0: at the end only."""
    resume: str = key("auto", filled="auto, never or a folder")
    """`auto` (the newest complete checkpoint of `run.dir`, if any), `never`, a checkpoint's folder, or another run's
    folder."""
    weights: str = ""
    """Folder of a run or checkpoint whose weights a new run starts from: its model, nothing else of it."""
    load_modules: dict[str, LoadConfig] = field(default_factory=dict)
    """Modules whose weights a new run takes from other runs, by name, after those of `weights` or `pretrained`:
    `{language: {path: runs/gpt}}`. See docs/checkpoints.md#modules-from-other-runs."""
    trained_only: bool = False
    """Leave weights that the run never trains out of checkpoints: with adapters a checkpoint holds these, other trained
    weights such as a projector, and the optimizer's state. The rest comes from `weights`, or from `run.seed`, again.
    See docs/frozen.md#small-checkpoints."""
    asynchronous: bool | Literal["auto"] = "auto"
    """Whether training goes on while a checkpoint is written, from a copy in the host's memory: `true`, `false`, or
    `auto`: where each host has twice the memory free that its ranks' copies take. See
    docs/checkpoints.md#while-training-goes-on."""
    max_failed_saves: int = key(3, at_least=0)
    """Saves in a row that may fail (disk full, read-only, folder gone) while training goes on; one more ends the run
    with the error. The last save of a run must not fail."""
    keep: int = key(3, at_least=0)
    """Newest checkpoints that stay on disk; 0 keeps all."""
    keep_every: int = key(0, at_least=0)
    """Checkpoints of every multiple of this many steps stay too, whatever `keep` is; 0: none."""
    non_persistent_interval: int = key(0, at_least=0)
    """Steps between checkpoints of which only the newest stays, besides the others; `resume: auto` takes the newest of
    both kinds. 0: none."""


@dataclass
class ConfigContainer:
    """One complete run."""

    run: RunConfig = field(default_factory=RunConfig)
    """Where the run lives and what it runs on."""
    pretrained: str = ""
    """Directory of a model of several parts, as `transformers` saves it, for all modules that have no `pretrained` of
    their own; empty: none. See docs/pretrained.md."""
    modules: dict[str, ModuleConfig] = field(default_factory=dict)
    """Encoders by names of your choice, and `language`."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which ranks the modules get."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the samples are and how they become sequences."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long, in which batches, and what happens between steps."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer and its schedule."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When the run is saved and how it starts again."""
    log: LogConfig = field(default_factory=LogConfig)
    """What is written, and where to."""
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    """Recordings of a few steps."""

    @property
    def encoders(self) -> dict[str, ModuleConfig]:
        """The modules other than `language`, in the order of the config."""
        return {name: module for name, module in self.modules.items() if name != LANGUAGE}

    @property
    def language(self) -> ModuleConfig:
        """The language module."""
        return self.modules[LANGUAGE]

    @property
    def llm(self) -> LlmSpec:
        """Sizes of the language model, of a config whose modules have no faults."""
        llm = self.language.llm
        assert llm is not None, "modules.language.llm is missing, which `plan.run` reports as a fault"
        return llm

    def recompute_of(self, name: str) -> str:
        """What the module `name` computes again in backward: none, selective or full."""
        return self.modules[name].recompute or self.train.recompute

    def faults(self) -> Iterator[Fault]:
        """What is wrong with values of keys, alone and between sections. Sizes of models, layouts, placement and batch
        are looked at in `mimo_train.plan`."""
        yield from value_faults(self, "")
        yield from self.run.faults(self.checkpoint.resume)
        for name, module in self.modules.items():
            yield from module.faults(name, self.optim, self.placement.bridge)
            if module.lora.adapter and self.checkpoint.weights:
                yield Fault(
                    f"modules.{name}.lora.adapter",
                    f"is {module.lora.adapter}, and checkpoint.weights {self.checkpoint.weights}: a run begins with "
                    "the weights of one of them; remove the other",
                )
        yield from self.placement.faults()
        yield from self._nothing_to_train()
        yield from self.data.faults()
        yield from self.train.faults()
        yield from self.optim.faults(self.train.precision)
        yield from value_faults(self.checkpoint, "checkpoint")
        for name, load in self.checkpoint.load_modules.items():
            yield from load.faults(f"checkpoint.load_modules.{name}", name, list(self.modules))
        llm = self.modules[LANGUAGE].llm if LANGUAGE in self.modules else None
        yield from self.log.faults(llm.num_experts if llm is not None else 0)

    def _nothing_to_train(self) -> Iterator[Fault]:
        """Parts are only released in the course of a run, so that no step has less to train than the first."""
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
                "every part of every module is frozen: nothing to train; free at least one",
            )
            return
        step, name = min(first)
        yield Fault(
            f"modules.{name}.freeze_until",
            f"nothing is trained in the first {step} steps: train at least one part from the start",
        )

"""One run as dataclasses: a docstring per field, with its unit. Imports no torch; reading YAML is in `compose`."""

from dataclasses import dataclass, field
from typing import Any

from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.schema_frozen import FeatureCacheConfig, LoraConfig
from mimo_train.config.schema_log import LogConfig, ProfilingConfig


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a run: the config key to change, and a sentence with the numbers."""

    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message


class ConfigError(ValueError):
    """A run that cannot start, with every fault that was found."""

    def __init__(self, faults: list[Fault]):
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))


@dataclass
class RunConfig:
    """Where a run lives and what it runs on."""

    dir: str = "runs/run"
    """Folder that the run writes into; the same folder again resumes the run."""
    seed: int = 1234
    """Seed of initial weights, of the order of samples and of dropout."""
    device: str = "auto"
    """auto (CUDA where each process of a machine gets a device), cuda or cpu."""
    timeout_minutes: float = 10.0
    """How long a rank waits for its peers in a collective before it gives up, in minutes."""
    inprocess_restarts: int = 0
    """How often a failed run starts again inside its processes (needs nvidia-resiliency-ext); 0: never."""


@dataclass
class LayoutConfig:
    """Parallel sizes of one module. Its ranks are tp * cp * dp * pp."""

    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline parallel size (stages)."""
    dp: int = 1
    """Data parallel size (replicas)."""
    cp: int = 1
    """Context parallel size (parts of one sequence)."""
    ep: int = 1
    """Expert parallel size: ranks that the experts are dealt to, taken from tp * cp * dp."""
    etp: int = 1
    """Expert tensor parallel size: ranks that each expert is cut over."""
    vpp: int = 1
    """Virtual pipeline size: model chunks of each stage, for the interleaved schedule. Needs pp > 1."""
    sp: bool = False
    """Sequence parallel: activations between tensor-parallel regions are split along the sequence. Needs tp > 1."""


@dataclass
class ModuleOptimConfig:
    """What one module does differently from `optim`; a value that is not set is the run's."""

    lr: float | None = None
    """Peak learning rate."""
    min_lr: float | None = None
    """Learning rate at the last step."""
    warmup_iters: int | None = None
    """Steps of linear warm-up from 0."""
    decay: str | None = None
    """cosine, linear or constant."""
    weight_decay: float | None = None
    """Decoupled weight decay, on matrices only."""
    clip_grad: float | None = None
    """Largest gradient norm of this module alone: set, the module is a clip group of its own; 0 does not clip."""
    projector_lr: float | None = None
    """Peak learning rate of the module's projector, if it differs from its encoder's."""


@dataclass
class ModuleConfig:
    """One module: an encoder with its projector, or the language model; what of it is frozen; its layout."""

    encoder: Any = None
    """Spec of an encoder (see `encoders.registry`); unset for the language module."""
    projector: Any = None
    """Spec of the projector behind the encoder; unset for the language module."""
    llm: LlmSpec | None = None
    """Spec of the language model; only in the module named `language`."""
    freeze: list[str] = field(default_factory=list)
    """What is not trained: encoder, projector, llm, or shell patterns of parameter names."""
    freeze_until: dict[str, int] = field(default_factory=dict)
    """What is not trained before a step, for example {encoder: 1000}; same names as in `freeze`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters beside the frozen layers of the encoder or the language model."""
    feature_cache: FeatureCacheConfig = field(default_factory=FeatureCacheConfig)
    """Features of a frozen encoder on disk."""
    prefetch_microbatches: int = 0
    """Microbatches whose features a frozen encoder on ranks of its own computes ahead, while it waits; 0: none."""
    optim: ModuleOptimConfig = field(default_factory=ModuleOptimConfig)
    """Learning rate, schedule, weight decay and clipping of this module, where they differ from `optim`."""
    recompute: str = ""
    """none, selective or full: activations of this module computed again in backward; empty: as `train.recompute`."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Parallel sizes of this module."""
    balance: str = "samples"
    """How an encoder's work is divided over its data-parallel ranks: samples (equal numbers of them) or patches (equal
    numbers of tokens inside the encoder, as nearly as whole samples in order allow)."""


@dataclass
class PlacementConfig:
    """Which ranks the modules get."""

    mode: str = "disjoint"
    """disjoint (one module after the other) or shared (every encoder on the ranks of the language model's first
    stage)."""
    first_rank: dict[str, int] = field(default_factory=dict)
    """First rank of each module by name, instead of one after the other; with mode disjoint."""
    allow_idle: bool = False
    """Whether processes may be without a module: those in holes between modules, and those beyond the last one. They
    end at once."""
    ranks_per_node: int = 0
    """Ranks of a node, for `check` before there is a launcher; 0: as many as the launcher has started on each."""
    tp_across_nodes: bool = False
    """Whether a tensor-parallel group may have ranks on several nodes."""
    bridge: str = "planned"
    """How features reach the language model: planned (sizes known from the data index: any layouts and counts), or
    megatron (Megatron-Core's own communicators, to compare: they exchange sizes and need counts of equal parts)."""


@dataclass
class DataConfig:
    """Where the samples are and how they become sequences."""

    shards: str = ""
    """Training shards: a folder, a glob, a brace range `x-{000000..000127}.tar`, or several with commas."""
    validation_shards: str = ""
    """Held-out shards, same forms; empty means no evaluation."""
    demo: str = ""
    """digits, mixed or text: make the demo shards at `shards` and `validation_shards` on first use; empty: never."""
    sequence_length: int = 1024
    """Tokens of one sample, placeholders of media included; longer texts are cut at the end."""
    tokenizer: str = "bytes"
    """bytes (built in), or a folder with a Hugging Face tokenizer."""
    shuffle: bool = True
    """Whether training samples come in a new order each epoch."""
    blind: bool = False
    """Ablation: pictures and clips are replaced by zeros, so that only the text is left to learn from."""
    max_bad_samples: int = 0
    """Samples that may be unreadable, in all, before the run stops."""
    workers: int = 2
    """Threads that read and decode ahead on each rank; 0 reads in the training thread."""
    cache_dir: str = ""
    """Folder for shard indexes where the shards' own folder cannot be written."""


@dataclass
class TrainConfig:
    """The loop."""

    iters: int = 1000
    """Optimizer steps in all."""
    global_batch_size: int = 32
    """Samples of one optimizer step."""
    micro_batch_size: int = 8
    """Samples of one microbatch on one data-parallel rank of the language module."""
    precision: str = "fp32"
    """fp32, bf16 or fp16 (weights and activations; master weights stay fp32; fp16 scales the loss)."""
    recompute: str = "none"
    """none, selective (core attention) or full (every layer): activations computed again in backward."""
    eval_interval: int = 0
    """Steps between evaluations; 0 means at the end only."""
    eval_samples: int = 0
    """Held-out samples of an evaluation; 0 means all of them."""
    report_samples: int = 24
    """Held-out pictures with question, answer and truth in the report."""
    log_interval: int = 1
    """Steps between lines of the log."""
    rampup_batch_size: list[int] = field(default_factory=list)
    """[first size, increment, samples]: the global batch grows from the first size to `global_batch_size` in equal
    steps over that many samples; empty: no ramp-up."""
    skip_iters: list[int] = field(default_factory=list)
    """Steps (counted from 1) whose samples are passed over without training."""
    loss_weights: dict[str, float] = field(default_factory=dict)
    """Weights of the named losses that the forward step gives; 1 where a name is missing."""
    on_nan: str = "raise"
    """What a loss or gradient that is not finite does: raise (name module, rank, microbatch and samples, and write a
    replay file), skip (the update) or bisect (raise, after finding the microbatch and layer where it begins)."""
    rerun: str = "disabled"
    """Megatron-Core's rerun state machine: disabled, validate_results (repeat a step with a suspect loss, to tell
    transient faults of the hardware from wrong data) or report_determinism_stats."""
    exit_interval: int = 0
    """The run saves and ends at a step that is a multiple of this; 0: never."""
    exit_duration_minutes: float = 0.0
    """The run saves and ends after this many minutes; 0: never."""
    manual_gc_interval: int = 0
    """Steps between garbage collections, on all ranks at once, with Python's own collector off; 0: Python decides."""
    callbacks: list[str] = field(default_factory=list)
    """Classes `package.module:Class` of callbacks (see `mimo_train.step.callbacks`)."""


@dataclass
class OptimConfig:
    """The optimizer and its schedule, the same for every module."""

    name: str = "adamw"
    """adamw."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr: float = 1e-5
    """Learning rate at the last step."""
    warmup_iters: int = 0
    """Steps of linear warm-up from 0."""
    decay: str = "cosine"
    """cosine, linear or constant, from the end of warm-up to `train.iters`."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    clip_grad: float = 1.0
    """Largest gradient norm over all modules that have no clip_grad of their own; 0 does not clip."""
    loss_scale: float = 0.0
    """Fixed loss scale of fp16; 0: dynamic."""
    initial_loss_scale: float = 65536.0
    """First dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Least dynamic loss scale."""
    loss_scale_window: int = 1000
    """Steps without overflow after which the dynamic loss scale doubles."""
    distributed_optimizer: bool = True
    """Whether data-parallel replicas divide master weights and moments among them; false: each keeps them whole."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while backward runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters while the next forward runs. Needs overlap_grad_reduce and distributed_optimizer."""


@dataclass
class CheckpointConfig:
    """When a run is saved and how it starts again."""

    save_interval: int = 0
    """Steps between checkpoints; 0 means at the end only."""
    resume: str = "auto"
    """auto (the newest complete checkpoint of `run.dir`, if any), never, or a checkpoint's folder."""
    weights: str = ""
    """Folder of a run or checkpoint whose weights a new run starts from: its model, nothing else of it."""
    keep: int = 3
    """Newest checkpoints that stay on disk; 0 keeps all."""
    non_persistent_interval: int = 0
    """Steps between checkpoints of which only the newest stays, besides the others; 0: none."""


@dataclass
class ConfigContainer:
    """One complete run."""

    run: RunConfig = field(default_factory=RunConfig)
    modules: dict[str, ModuleConfig] = field(default_factory=dict)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)

    @property
    def encoders(self) -> dict[str, ModuleConfig]:
        """The modules other than `language`, in the order of the config."""
        return {name: module for name, module in self.modules.items() if name != LANGUAGE}

    @property
    def language(self) -> ModuleConfig:
        """The language module."""
        return self.modules[LANGUAGE]

    def recompute_of(self, name: str) -> str:
        """What the module `name` computes again in backward: none, selective or full."""
        return self.modules[name].recompute or self.train.recompute


LANGUAGE = "language"
"""Name of the language module: fixed, as in Megatron-Core (MIMO_LANGUAGE_MODULE_KEY)."""

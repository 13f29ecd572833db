"""The size of everything: on a GPU, and in a rehearsal on a CPU."""

from dataclasses import dataclass

COMMON = ("layout=one_process", "train.iters=1000", "optim.lr=1e-5", "optim.min_lr=0")
LLM = "modules.language.llm"


@dataclass(frozen=True)
class Model:
    """A vision-language model with random weights.

    Attributes:
        changes: of the config `vlm_digits`.
        image: height and width in pixels.
    """

    name: str
    changes: tuple[str, ...]
    image: int


@dataclass(frozen=True)
class Shape:
    """How the rows of a microbatch are filled.

    Attributes:
        candidates: changes of the config by name, the largest first: the first that fits is run.
        varied: texts vary in length; else they fill their rows.
    """

    name: str
    changes: tuple[str, ...]
    candidates: dict[str, tuple[str, ...]]
    characters: int
    varied: bool = False


@dataclass(frozen=True)
class Curve:
    """A run of a demo whose losses are compared with those of fp32 with torch's layers on the CPU.

    Attributes:
        bound: the largest relative difference of losses that passes.
        te: layers of Transformer Engine, not of torch.
    """

    config: str
    layout: str
    precision: str
    bound: float
    te: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """What differs from the run on the CPU."""
        return f"{self.precision}, {'te' if self.te else 'torch'} layers{', compiled' if self.compiled else ''}"


@dataclass(frozen=True)
class Sizes:
    """The sizes of all sections."""

    device: str
    matmul: int
    repeats: int
    samples: int
    """Of the demo that the curves read."""
    curves: tuple[Curve, ...]
    curve_changes: tuple[str, ...]
    tests: tuple[str, ...]
    models: tuple[Model, ...]
    filled: Shape
    packed: Shape
    padded: Shape
    """The texts of `packed`, one in each row."""
    compilers: tuple[str, ...]
    """Backends of torch.compile of the reference, the empty one without; the last one compiles our layers, too."""
    warm_up: int
    timed: int
    rounds: int


def llm(**sizes: object) -> tuple[str, ...]:
    """Changes of the language model."""
    return tuple(f"{LLM}.{key}={str(value).lower()}" for key, value in sizes.items())


def microbatches(*sizes: int) -> dict[str, tuple[str, ...]]:
    """Microbatches of these numbers of samples, two a step; then the smallest with everything recomputed."""
    candidates = {
        f"{size} samples": (f"train.micro_batch_size={size}", f"train.global_batch_size={2 * size}") for size in sizes
    }
    last = list(candidates)[-1]
    return candidates | {f"{last}, everything recomputed": (*candidates[last], "train.recompute=full")}


def packs(length: int, samples: int) -> dict[str, tuple[str, ...]]:
    """Rows of `length` tokens, in steps of `samples` samples."""
    change = ("train.micro_batch_size=1", f"train.global_batch_size={samples}")
    return {
        f"rows of {length} tokens": change,
        f"rows of {length} tokens, everything recomputed": (*change, "train.recompute=full"),
    }


CLIP = "encoder@modules.images.encoder=vit_l14_336"
ONE_B, SEVEN_B = "llm@modules.language.llm=llama_1b", "llm@modules.language.llm=llama2_7b"

DIGITS, PROSE = ("vlm_digits", "layout=one_process"), ("gpt_tiny", "layout=language_one")

GPU = Sizes(
    device="cuda",
    matmul=8192,
    repeats=50,
    samples=480,
    curves=(
        Curve(*DIGITS, "fp32", 1e-3),
        Curve(*DIGITS, "bf16", 5e-2),
        Curve(*DIGITS, "fp32", 1e-3, te=True),
        Curve(*DIGITS, "bf16", 5e-2, te=True),
        Curve(*PROSE, "fp32", 1e-3),
        Curve(*PROSE, "fp32", 1e-3, compiled=True),
    ),
    curve_changes=("train.iters=20", "optim.decay=constant"),
    tests=("tests/gpu",),
    models=(
        Model(
            "CLIP-L/14-336 + Llama-3.2-1B",
            (CLIP, ONE_B, *llm(vocab_size=128256), "train.precision=bf16", "data.workers=8"),
            336,
        ),
        Model(
            "SigLIP2-so400m + Qwen2.5-3B",
            (
                "encoder@modules.images.encoder=siglip_so400m_384",
                ONE_B,
                *llm(num_layers=36, hidden_size=2048, num_attention_heads=16, num_query_groups=2),
                *llm(ffn_hidden_size=11008, vocab_size=151936, rope_base=1000000, qkv_bias=True),
                "train.precision=bf16",
                "data.workers=8",
            ),
            384,
        ),
        Model("CLIP-L/14-336 + Llama-2-7B", (CLIP, SEVEN_B, "train.precision=bf16", "data.workers=8"), 336),
    ),
    filled=Shape(
        "2,048 tokens", ("data.sequence_length=2048", "data.pad=sequence"), microbatches(16, 8, 4, 2, 1), 4096
    ),
    packed=Shape(
        "8,192 tokens, packed",
        ("data.sequence_length=8192", "data.pack=true", "data.pack_length=8192"),
        packs(8192, 16),
        8000,
        varied=True,
    ),
    padded=Shape("8,192 tokens, padded", ("data.sequence_length=8192",), microbatches(4, 2, 1), 8000, varied=True),
    compilers=("", "inductor"),
    warm_up=3,
    timed=6,
    rounds=6,
)

_LLM = llm(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4)
_FILLED = Shape("64 tokens", ("data.sequence_length=64", "data.pad=sequence"), microbatches(2), 128)
_VARIED = {"characters": 100, "varied": True}
TINY = Sizes(
    device="cpu",
    matmul=128,
    repeats=3,
    samples=48,
    curves=(
        Curve(*PROSE, "fp32", 1e-6),
        Curve(*PROSE, "bf16", 5e-2),
        Curve(*PROSE, "fp32", 1e-3, te=True),
        Curve(*PROSE, "fp32", 1e-6, compiled=True),
    ),
    curve_changes=("train.iters=3", "train.global_batch_size=4", "train.micro_batch_size=2", *_LLM),
    tests=("tests/unit/layout/test_key_changes.py",),
    models=(Model("tiny", ("train.precision=bf16", *_LLM, "modules.images.encoder.num_layers=1"), 48),),
    filled=_FILLED,
    packed=Shape(
        "128 tokens, packed",
        ("data.sequence_length=128", "data.pack=true", "data.pack_length=128"),
        packs(128, 4),
        **_VARIED,
    ),
    padded=Shape("128 tokens, padded", ("data.sequence_length=128",), microbatches(2), **_VARIED),
    compilers=("eager",),
    warm_up=1,
    timed=2,
    rounds=1,
)

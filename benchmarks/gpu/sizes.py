"""How large everything is: on a GPU, and in a rehearsal on a CPU (`--tiny`)."""

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
        candidates: changes of the config by what they are, the largest first: the first that fits is run.
        varied: whether texts vary in length; else they fill their rows.
    """

    name: str
    changes: tuple[str, ...]
    candidates: dict[str, tuple[str, ...]]
    characters: int
    varied: bool = False


@dataclass(frozen=True)
class Sizes:
    """Of one whole run of the benchmark."""

    device: str
    matmul: int
    repeats: int
    models: tuple[Model, ...]
    filled: Shape
    packed: Shape
    padded: Shape
    """Texts as those of `packed`, one in each row."""
    saved: tuple[str, ...]
    """What makes the first model small enough to be written to disk in time."""
    compilers: tuple[str, ...]
    """Backends of torch.compile of the reference, the empty one is without; the last one is that of our layers, too."""
    warm_up: int
    timed: int
    rounds: int
    read_steps: int
    workers: int


def llm(**sizes: object) -> tuple[str, ...]:
    """Changes of the language model."""
    return tuple(f"{LLM}.{key}={str(value).lower()}" for key, value in sizes.items())


def microbatches(*sizes: int) -> dict[str, tuple[str, ...]]:
    """Microbatches of so many samples, two a step; then the smallest with everything recomputed."""
    found = {
        f"{size} samples": (f"train.micro_batch_size={size}", f"train.global_batch_size={2 * size}") for size in sizes
    }
    last = list(found)[-1]
    return found | {f"{last}, everything recomputed": (*found[last], "train.recompute=full")}


def packs(length: int, samples: int) -> dict[str, tuple[str, ...]]:
    """Rows of so many tokens, of a step of so many samples."""
    change = ("train.micro_batch_size=1", f"train.global_batch_size={samples}")
    return {
        f"rows of {length} tokens": change,
        f"rows of {length} tokens, everything recomputed": (*change, "train.recompute=full"),
    }


CLIP = "encoder@modules.images.encoder=vit_l14_336"
ONE_B, SEVEN_B = "llm@modules.language.llm=llama_1b", "llm@modules.language.llm=llama2_7b"

GPU = Sizes(
    device="cuda",
    matmul=8192,
    repeats=50,
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
    saved=llm(num_layers=4),
    compilers=("", "inductor"),
    warm_up=3,
    timed=6,
    rounds=6,
    read_steps=6,
    workers=16,
)

_TINY = ("train.precision=bf16", *llm(num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4))
TINY = Sizes(
    device="cpu",
    matmul=128,
    repeats=3,
    models=(Model("tiny", (*_TINY, "modules.images.encoder.num_layers=1"), 48),),
    filled=Shape("64 tokens", ("data.sequence_length=64", "data.pad=sequence"), microbatches(2), 128),
    packed=Shape(
        "128 tokens, packed",
        ("data.sequence_length=128", "data.pack=true", "data.pack_length=128"),
        packs(128, 4),
        100,
        varied=True,
    ),
    padded=Shape("128 tokens, padded", ("data.sequence_length=128",), microbatches(2), 100, varied=True),
    saved=(),
    compilers=("", "eager"),
    warm_up=1,
    timed=2,
    rounds=2,
    read_steps=2,
    workers=1,
)

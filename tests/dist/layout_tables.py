"""The layouts of the parity table: every row must train to the numbers of its model on one process."""

import re
from dataclasses import dataclass

from mimo_train.layout.ranks import AXES
from tests.dist.runs import BOUNDS, BOUNDS_BF16, Bounds


@dataclass(frozen=True)
class Row:
    """One layout of a model."""

    sizes: dict[str, str]
    """Parallel sizes by module, for example {"images": "dp2", "language": "tp2 sp"}."""
    placement: str
    """disjoint, shared, or first ranks: {images: 1, language: 0}."""
    changes: tuple[str, ...] = ()
    """What else differs from the run on one process: nothing that may change a number."""

    def __str__(self) -> str:
        several = len(self.sizes) > 1
        sizes = " + ".join(f"{name} {sizes}" if several else sizes for name, sizes in self.sizes.items())
        place = [self.placement] if several else []
        changes = [change.rpartition(".")[2] for change in self.changes]
        return ", ".join([sizes, *place, *changes])

    def size(self, module: str, axis: str) -> int:
        """One parallel size of a module."""
        found = re.search(rf"\b{axis}(\d+)", self.sizes[module])
        return int(found[1]) if found else 1

    def overrides(self, microbatch: int) -> list[str]:
        """Config overrides; `microbatch`: samples of a microbatch over all data-parallel ranks."""
        explicit = self.placement.startswith("{")
        keys = [
            f"placement.mode={'disjoint' if explicit else self.placement}",
            f"train.micro_batch_size={microbatch // self.size('language', 'dp')}",
            *([f"placement.first_rank={self.placement}"] if explicit else []),
        ]
        for module, sizes in self.sizes.items():
            keys += [f"modules.{module}.layout.{axis}={self.size(module, axis)}" for axis in AXES if axis in sizes]
            keys += [f"modules.{module}.layout.sp=true"] * ("sp" in sizes.split())
        return [*keys, *self.changes]


@dataclass(frozen=True)
class Model:
    """What is trained, on one process and at the layouts of its rows."""

    family: str
    """Models of one family run the same code at a layout: what one covers, the others need not."""
    config: str
    demo: str
    """One of `parity.make_demos`."""
    microbatch: int
    """Samples of a microbatch, the same at every layout."""
    overrides: tuple[str, ...]
    rows: tuple[Row, ...]
    bounds: Bounds = BOUNDS

    @property
    def uneven(self) -> bool:
        """Whether microbatches have other numbers of images, or of tokens of them, on every replica."""
        return self.demo in ("sparse", "sizes", "mixed")


def apart(images: str, language: str, *changes: str) -> Row:
    """An encoder in front of the language model, on ranks of its own."""
    return Row({"images": images, "language": language}, "disjoint", changes)


def same(images: str, language: str, *changes: str) -> Row:
    """An encoder on the ranks of the language model's first stage."""
    return Row({"images": images, "language": language}, "shared", changes)


def alone(language: str, *changes: str) -> Row:
    """A language model alone."""
    return Row({"language": language}, "disjoint", changes)


WHOLE_STATES = "optim.distributed_optimizer=false"
WHOLE_ROWS = "data.pad=sequence"
"""Every row as long as any may be, samples in their order: what rows of similar lengths have to give the numbers of."""
ALL_LOGITS = "train.logits=all"
"""Logits also where no loss is: what those of the learned positions alone have to give the numbers of."""
NO_LOGITS = "train.max_logits_mib=0"
"""Losses in blocks of the vocabulary: what stored logits have to give the numbers of."""
PACKED = ("data.pack=true", "data.pack_length=300")
"""Rows of two or three samples: what rows of one sample have to give the numbers of."""
FUSED = tuple(f"train.fusions.{name}=always" for name in ("activation", "bias_dropout", "gradient_accumulation"))
"""Fused kernels: what single operations have to give the numbers of."""
OVERLAPPED = ("optim.overlap_grad_reduce=true", "optim.overlap_param_gather=true")
"""Reductions and gathering during backward and forward: what those in between have to give the numbers of."""
ONE = "one"
"""A module on one rank."""

VLM = (
    apart(ONE, ONE),
    same("dp2", "dp2", WHOLE_ROWS, ALL_LOGITS),
    Row({"images": ONE, "language": "tp2"}, "{images: 2, language: 0}"),
    Row({"images": "dp2", "language": "pp2"}, "{images: 2, language: 0}"),
    Row({"images": "dp2", "language": "tp2 pp2"}, "{images: 0, language: 0}"),
    Row({"images": ONE, "language": "dp2"}, "{images: 0, language: 2}", ("placement.allow_idle=true",)),
    apart(ONE, "dp2"),
    apart("dp2", ONE),
    apart("dp4", "dp2", *PACKED),
    apart("dp2", "dp4", WHOLE_STATES),
    apart("tp2", "pp2"),
    apart("tp2", "pp2 dp2", WHOLE_STATES),
    apart("tp2 dp2", "tp2 dp2", *FUSED, "train.recompute=attention+mlp"),
    apart(ONE, "tp2"),
    apart(ONE, "tp2 sp"),
    apart("dp2", "tp2 sp pp2", "train.recompute=full", ALL_LOGITS, NO_LOGITS, *PACKED),
    same("dp2", "tp2"),
    same("tp2", "dp2", *PACKED),
    same("tp2", "tp2 sp pp2"),
    same("dp4", "tp2 dp2", WHOLE_STATES),
    same("tp2 dp2", "tp2 dp2 pp2"),
    same("dp2", "dp2 pp2", "modules.images.recompute=full", "modules.language.recompute=selective"),
    apart("dp2", "cp2"),
    apart("tp2", "cp2 dp2 pp2", *PACKED),
    same("dp2", "cp2", WHOLE_STATES),
    same("tp2 dp2", "tp2 sp cp2"),
)

UNEVEN = (
    apart("dp2", ONE),
    apart("dp4", "dp2"),
    apart(ONE, "dp2"),
    apart("dp2", "dp4"),
    apart("dp2", "dp2", "modules.images.balance=images"),
    same("dp2", "tp2", "modules.images.balance=images"),
    same("tp2", "dp2"),
    same("dp4", "dp2 tp2 pp2"),
    same("dp2", "cp2"),
)
"""Fan-in and fan-out, apart and on the same ranks, of samples most of which have no image."""

ENCODER_STAGES = (
    apart("pp2", ONE),
    apart("pp2 dp2", "pp2", WHOLE_STATES),
    apart("pp3", "tp2"),
    apart("tp2 pp2", "dp2", "modules.images.recompute=full"),
    apart("pp2", "cp2", "modules.images.recompute=selective"),
    apart("tp2 sp", ONE),
    apart("tp2 sp pp2", "tp2 sp", "train.recompute=full"),
    same("tp2 sp", "dp2"),
)
"""The encoder in stages, the first of two with more layers, and with sequence parallelism; most samples have no
image."""

ANY_SIZE = (
    apart("pp2", "dp2"),
    apart("pp2 dp2", ONE, *PACKED),
    apart("tp2 sp dp2", ONE, "modules.images.balance=images", "train.recompute=full"),
    same("dp2", "tp2"),
)
"""Images of other sizes in every microbatch."""


def first_ranks(language: str, *changes: str, **encoders: str) -> Row:
    """Several encoders, each written as its first rank and its sizes; the language model's the same way."""
    found = {name: of.partition(" ")[::2] for name, of in {**encoders, "language": language}.items()}
    first = ", ".join(f"{name}: {rank}" for name, (rank, _) in found.items())
    return Row({name: sizes for name, (_, sizes) in found.items()}, f"{{{first}}}", changes)


TWO_VISION = (
    first_ranks("2 one", images="0 one", details="1 one"),
    first_ranks("1 one", images="0 one", details="0 one"),
    first_ranks("1 one", images="0 one", details="1 one"),
    first_ranks("2 one", images="0 dp2", details="0 tp2"),
    first_ranks("2 dp2", images="0 dp2", details="2 tp2"),
    first_ranks("0 pp2", images="0 one", details="0 one"),
)
"""Two encoders of the same images: each apart, on the same ranks, one or both with the language model."""

IMAGES_AND_SOUND = (
    first_ranks("2 one", images="0 one", audio="1 one"),
    first_ranks("3 dp2", *PACKED, images="0 dp2", audio="2 one"),
    first_ranks("1 one", images="0 one", audio="1 one"),
    first_ranks("2 dp2", "modules.images.balance=images", images="0 dp2", audio="2 tp2 sp"),
    first_ranks("3 cp2", audio="0 pp2", images="2 one"),
    first_ranks("2 pp2", images="0 tp2", audio="0 dp2"),
    first_ranks("0 one", WHOLE_ROWS, images="0 one", audio="0 one"),
)
"""Images of any size and clips of any length; every fourth microbatch has neither."""

CHUNKS = (
    same("tp2", "dp2 pp2 vpp2", "modules.images.balance=images"),
    apart("dp2", "pp2 vpp2", WHOLE_STATES),
    apart("pp2", "cp2 pp2 vpp2", *PACKED),
)
"""Encoders in front of interleaved stages, with enough microbatches for turns of forward and backward."""

SEVERAL_CHUNKS = (
    first_ranks("1 pp2 vpp2", images="0 one", audio="0 one"),
    first_ranks("2 pp2 vpp2 dp2", images="2 dp2", audio="0 dp2"),
)
"""Two encoders on the same ranks, in front of interleaved stages; and one of them inside the first chunk."""

UNTIED = (apart("dp2", "pp2"), same("tp2", "dp2 pp2", WHOLE_STATES))

BF16 = (
    apart("tp2", "pp2"),
    apart("dp2", "tp2 sp"),
    apart("dp2", "dp2", WHOLE_STATES),
    same("dp2", "tp2 pp2"),
    same("dp2", "cp2 pp2"),
)

GPT = (
    alone(ONE, WHOLE_ROWS, ALL_LOGITS),
    alone(ONE, *PACKED),
    alone("tp2"),
    alone("tp2 sp", *FUSED),
    alone("pp2", "train.recompute=mlp"),
    alone("pp4", "modules.language.recompute=selective"),
    alone("pp2 vpp2"),
    alone("dp2"),
    alone("tp2 dp2", WHOLE_STATES, *PACKED),
    alone("tp2 pp2 vpp2", *PACKED),
    alone("pp2 dp2", "train.recompute=full", "optim.overlap_grad_reduce=true"),
    alone("pp2 dp2", *FUSED, "train.recompute=attention+norms", *OVERLAPPED, NO_LOGITS),
    alone("cp2"),
    alone("cp4", WHOLE_STATES),
    alone("cp2 tp2 sp", NO_LOGITS, *PACKED),
    alone("cp2 dp2 pp2 vpp2"),
)

GPT_UNEQUAL_STAGES = (alone("pp2", NO_LOGITS),)
"""With a cap of logits, which must not meet losses."""

EXPERTS = (
    alone("dp2"),
    alone("dp2 ep2", WHOLE_STATES),
    alone("dp2 ep2 pp2", *FUSED, "train.recompute=attention+experts"),
    alone("tp2 sp"),
    alone("tp2 sp etp2"),
    alone("tp2 sp ep2"),
    alone("tp2 sp dp2 ep2 etp2"),
    alone("cp2 ep2"),
    alone("cp2 dp2 ep2", WHOLE_STATES),
    alone(ONE, "train.recompute=full"),
)

PACKED_EXPERTS = (alone("dp2 ep2", *PACKED), alone("cp2 ep2", WHOLE_STATES, *PACKED))
"""Without losses of routers, which are means over the positions of a row."""

EXPERT_CHUNKS = (alone("pp2 vpp2"),)

VLM_EXPERTS = (apart(ONE, "dp2 ep2"), apart("dp2", "tp2 sp ep2"), same("dp2", "tp2 sp ep2", WHOLE_STATES))

_SHORT = ("data.sequence_length=144", "train.global_batch_size=8")  # texts have 103 tokens or more
_MICROBATCH = 4
_MIXTURE = (
    "llm@modules.language.llm=gpt_tiny_moe",
    "modules.language.llm.expert_ffn_hidden_size=48",
    "modules.language.llm.shared_expert_ffn_hidden_size=32",
    "modules.language.llm.num_layers=2",
    "modules.language.llm.router_z_loss=0.01",
)
_ANY_SIZE = (
    "encoder@modules.images.encoder=vit_tiny_native",
    "modules.images.encoder.num_layers=3",
    "modules.images.projector.merge=2",
    "data.sequence_length=96",
)
_DETAILS = (
    "encoder@modules.details.encoder=vit_tiny",
    "projector@modules.details.projector=linear",
    "modules.details.encoder.patch_size=24",
    "modules.details.encoder.num_layers=2",
    "modules.details.encoder.hidden_size=48",
    "modules.details.encoder.ffn_hidden_size=96",
)
_SMALL_MIXTURE = (
    "placement.mode=shared",
    "train.global_batch_size=8",
    "data.shuffle=false",
    *(f"modules.{name}.encoder.hidden_size=32" for name in ("images", "audio")),
    *(f"modules.{name}.encoder.ffn_hidden_size=64" for name in ("images", "audio")),
    "modules.images.encoder.num_layers=1",
)
_UNTIED = ("modules.language.llm.tie_embeddings=false",)
_CAPPED = ("modules.language.llm.logit_softcap=3",)
_NO_ROUTER_LOSSES = ("modules.language.llm.router_balancing=none", "modules.language.llm.router_z_loss=0")


def _gpt(rows: tuple[Row, ...], *overrides: str, family: str = "gpt") -> Model:
    return Model(family, "gpt_tiny", "prose", _MICROBATCH, ("layout=language_one", *_SHORT, *overrides), rows)


def _vlm(rows: tuple[Row, ...], *overrides: str, demo: str = "digits", family: str = "vlm", **more) -> Model:
    fixed = ("layout=one_process", "train.global_batch_size=8")
    return Model(family, "vlm_digits", demo, _MICROBATCH, (*fixed, *overrides), rows, **more)


SEVERAL, MIXTURES = "several encoders", "experts"

MODELS = {
    "vlm": _vlm(VLM),
    "vlm, few images": _vlm(UNEVEN, demo="sparse"),
    "vlm, three encoder layers": _vlm(
        ENCODER_STAGES,
        "modules.images.encoder.num_layers=3",
        "modules.images.encoder.class_token=true",
        demo="sparse",
    ),
    "vlm, images of any size": _vlm(ANY_SIZE, *_ANY_SIZE, demo="sizes"),
    "two vision encoders": _vlm(TWO_VISION, *_DETAILS, family=SEVERAL),
    "images and sound": Model(SEVERAL, "mixed_tiny", "mixed", _MICROBATCH, _SMALL_MIXTURE, IMAGES_AND_SOUND),
    "vlm, chunks": _vlm(
        CHUNKS,
        "modules.language.llm.num_layers=4",
        "modules.images.encoder.num_layers=2",
        "train.global_batch_size=24",
        demo="sparse",
    ),
    "images and sound, chunks": Model(
        SEVERAL,
        "mixed_tiny",
        "mixed",
        _MICROBATCH,
        (*_SMALL_MIXTURE, "train.global_batch_size=24", "modules.language.llm.num_layers=4"),
        SEVERAL_CHUNKS,
    ),
    "vlm, untied": _vlm(UNTIED, *_UNTIED),
    "vlm, bf16": _vlm(BF16, "train.precision=bf16", family="bf16", bounds=BOUNDS_BF16),
    "vlm, experts": _vlm(VLM_EXPERTS, *_MIXTURE),
    "gpt": _gpt(GPT, "modules.language.llm.num_layers=4"),
    "gpt, three layers, untied": _gpt(GPT_UNEQUAL_STAGES, "modules.language.llm.num_layers=3", *_CAPPED, *_UNTIED),
    "experts": _gpt(EXPERTS, *_MIXTURE, family=MIXTURES),
    "experts without losses of routers": _gpt(PACKED_EXPERTS, *_MIXTURE, *_NO_ROUTER_LOSSES, family=MIXTURES),
    "experts, four layers": _gpt(EXPERT_CHUNKS, *_MIXTURE, "modules.language.llm.num_layers=4", family=MIXTURES),
}
"""By name."""

CASES = [(model, row) for model, found in MODELS.items() for row in found.rows]
"""The whole table."""

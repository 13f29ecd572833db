"""Keys of `data`: the samples and how they become sequences."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.media.options import BOUNDS, COLOURS, is_colour
from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.paths import demo_faults
from mimo_train.config.schema_mix import (
    HeldOutConfig,
    MixChange,
    SourceConfig,
    fields_faults,
    mix_faults,
    named_set_faults,
    source_names,
    validation_faults,
)

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of files in a folder with a Hugging Face tokenizer."""


@dataclass
class VideoConfig(Section):
    """Images of a video: the middle frames of equal parts of its length. See docs/data.md#videos."""

    frames_per_second: float = key(1.0, above=0, at_most=1000)
    """Frames per second; at least one of a video."""
    max_frames: int = key(32, at_least=1, at_most=2**16)
    """Most frames of a video; longer ones get fewer per second."""


@dataclass
class BoundsConfig(Section):
    """Maximum sizes of the parts of a sample; a larger sample is bad. See docs/data.md#bounds."""

    pixels: int = key(BOUNDS.pixels, at_least=1)
    """Most pixels of an image or video frame, also as resized before cropping."""
    seconds: float = key(BOUNDS.seconds, above=0)
    """Longest audio or video item, in seconds."""


@dataclass
class DataConfig(Section):
    """The samples and how they become sequences."""

    shards: str = ""
    """Training shards: a folder, files, a glob, a brace range, URLs, `hf://datasets/NAME`, or a prefix of `.bin` and
    `.idx` files; several with commas. See docs/data.md#what-you-have."""
    mix: list[SourceConfig] = field(default_factory=list)
    """Weighted sources, instead of `shards`. See docs/data.md#mixtures."""
    mix_schedule: list[MixChange] = field(default_factory=list)
    """Changes of the weights at given steps. See docs/data.md#mixtures."""
    exhausted: str = key("repeat", choices=("repeat", "stop"))
    """When a source has given all samples: `repeat` (in another order) or `stop` the run."""
    validation_shards: str = ""
    """Held-out shards, in the forms of `shards`."""
    validation: dict[str, HeldOutConfig] = field(default_factory=dict)
    """Further held-out sets by name: `{charts: {shards: shards/charts}}`. See docs/data.md#held-out-sets."""
    test_shards: str = ""
    """Shards that are evaluated once, after the last step, as `test/loss`."""
    test: dict[str, HeldOutConfig] = field(default_factory=dict)
    """Further test sets by name: `test/NAME/loss`."""
    validation_fraction: float = key(0.0, at_least=0, below=1)
    """Share of the training samples to hold out. See docs/data.md#held-out-sets."""
    split: str = ""
    """Shares of `.bin` and `.idx` files for training, evaluation and test: `969,30,1`, as in Megatron-LM."""
    demo: str = key("", choices=("", "digits", "digits_pairs", "mixed", "text", "video_digits"))
    """Make demo shards on first use: `digits`, `digits_pairs` (right and wrong answers), `mixed` (images, audio and
    text), `text` or `video_digits` (moving digits). Set it empty for your own shards."""
    sequence_length: int = key(1024, at_least=1, at_most=2**27)
    """Most tokens of a sample, placeholders included. Longer text is cut."""
    pad: str = key("microbatch", choices=("microbatch", "sequence"))
    """Pad rows to the longest of the `microbatch`, or to `sequence_length` (`sequence`). See docs/data.md#padding."""
    pack: bool = False
    """Put several samples of a step into one row, with the same results. See docs/data.md#packing."""
    pack_length: int = key(0, at_least=0, at_most=2**27)
    """Most tokens of a packed row; 0: `train.micro_batch_size` x `sequence_length`."""
    separate_documents: bool = False
    """End attention, positions and loss at each document of `.bin` and `.idx` files. Needs `pack`."""
    tokenizer: str = key("bytes", filled="bytes, a folder or a name on the hub")
    """`bytes`, or the folder or hub name of a Hugging Face tokenizer."""
    chat_template: str = key("auto", filled="auto, own or a file")
    """`auto` (the tokenizer's, else our own format), `own` (our own format), or a Jinja file. See
    docs/data.md#chat-templates."""
    template_variables: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `{enable_thinking: false}`."""
    special_tokens_in_text: str | list[str] = field(default_factory=list)
    """Special tokens allowed in texts, or `grounding` (boxes, points). See docs/data.md#special-tokens-in-text."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Where record and media are: `{question: "json[q]", answer: "json[a]", image: [left.jpg, right.jpg]}`. See
    docs/data.md#fields."""
    null_captions: str = key("bad", choices=("bad", "skip"))
    """A sample with a null caption is `bad`, or has no loss (`skip`)."""
    background: str = key("white", filled="white, black, grey, none or #RRGGBB")
    """Colour behind transparent images: `white`, `black`, `grey`, `#RRGGBB`, or `none` (drop transparency). See
    docs/data.md#transparency."""
    video: VideoConfig = field(default_factory=VideoConfig)
    """How many images a video becomes. See docs/data.md#videos."""
    shuffle: bool = True
    """Shuffle training samples each epoch."""
    shuffle_block: int = key(1, at_least=1, at_most=2**20)
    """Neighbouring samples that stay together when shuffled. See docs/data.md#order."""
    blind: bool = False
    """Ablation: replace images and audio by zeros."""
    max_bad_samples: int | float = key(0, at_least=0)
    """Bad samples that a run accepts: a number, or a fraction below 1. See docs/data.md#bad-samples."""
    read_retries: int = key(5, at_least=0, at_most=1000)
    """Retries of a read after an I/O error; then the run ends. See docs/data.md#bad-samples."""
    bounds: BoundsConfig = field(default_factory=BoundsConfig)
    """How large the parts of a sample may be. See docs/data.md#bounds."""
    workers: int = key(2, at_least=0, at_most=1024)
    """Threads per rank that read and decode ahead; 0: read in the training thread."""
    cache_dir: str = ""
    """Folder for shard indexes. Empty: next to the shards, or the user's cache. See docs/data.md#index."""
    cache_bytes: int = key(0, at_least=0, at_most=2**60)
    """Most bytes of remote members that this machine caches. See docs/data.md#from-anywhere."""

    @property
    def held_out_by(self) -> str:
        """The key that holds out some of the training samples; empty: none."""
        if self.validation_fraction:
            return "data.validation_fraction"
        return "data.split" if self.held_out_share else ""

    @property
    def held_out_share(self) -> float:
        """Share of the training samples that is held out; 0 for an invalid `split`."""
        if not self.split:
            return self.validation_fraction
        try:
            _, (begin, end) = split_parts(self.split)
        except DataError:
            return 0.0
        return end - begin

    @property
    def named_sets(self) -> dict[str, HeldOutConfig]:
        """The held-out and test sets with a name, by config key."""
        sections = {"data.validation": self.validation, "data.test": self.test}
        return {f"{key}.{name}": item for key, sets in sections.items() for name, item in sets.items()}

    @property
    def evaluates_at(self) -> dict[str, int]:
        """Prefix in metrics of each held-out set that is evaluated during training, and the set's interval; 0:
        `train.eval_interval`."""
        unnamed = bool(self.validation_shards) or (bool(self.held_out_by) and not self.mix)
        prefixes = {"eval/": 0} if unnamed else {}
        if self.held_out_by:
            prefixes |= {f"eval/{name}/": 0 for name in source_names(self.mix)}
        return prefixes | {f"eval/{name}/": item.interval for name, item in self.validation.items()}

    def faults(self) -> Iterator[Fault]:
        """Yield invalid values, and demos that would overwrite other shards."""
        inside = {"data.bounds": self.bounds, "data.video": self.video}
        faults = [*value_faults(self, "data")]
        faults += [fault for name, section in inside.items() for fault in value_faults(section, name)]
        yield from faults
        wrong = {fault.key for fault in faults}

        def are_sound(*names: str) -> bool:
            return wrong.isdisjoint(f"data.{name}" for name in names)

        if are_sound("mix", "mix_schedule", "shards"):
            yield from mix_faults(self.mix, self.mix_schedule, self.shards)
        if are_sound("split", "validation_fraction"):
            yield from self._split_faults()
            if are_sound("mix", "validation", "validation_shards"):
                names = source_names(self.mix)
                yield from validation_faults(self.validation, self.validation_shards, self.held_out_by, names)
        for name, named in (("validation", self.validation), ("test", self.test)):
            if are_sound(name):
                yield from named_set_faults(f"data.{name}", named)
        if are_sound("tokenizer"):
            yield from self._tokenizer_faults()
        if (
            are_sound("max_bad_samples")
            and self.max_bad_samples >= 1
            and self.max_bad_samples != int(self.max_bad_samples)
        ):
            yield Fault(
                "data.max_bad_samples",
                f"must be a whole number, or a fraction below 1, is {self.max_bad_samples:g}",
            )
        places = [self.shards, self.validation_shards, self.test_shards]
        sets = (*self.validation.values(), *self.test.values())
        places += [source.shards for source in self.mix] + [each.shards for each in sets]
        if self.cache_bytes > 0 and not any("://" in place for place in places):
            text = f"is {self.cache_bytes}, but no shards are remote. Set it to 0"
            yield Fault("data.cache_bytes", text)
        if self.shuffle_block > 1 and not self.shuffle:
            yield Fault(
                "data.shuffle_block", f"is {self.shuffle_block}, but data.shuffle is false. Set only one of them"
            )
        if are_sound("background") and not is_colour(self.background):
            text = f"must be {', '.join(COLOURS)} or #RRGGBB, is {self.background!r}"
            yield Fault("data.background", text)
        if are_sound("fields"):
            yield from fields_faults(self.fields, "data.fields")
        if not are_sound("demo", "shards", "validation_shards"):
            return
        if self.demo and not self.shards:
            yield Fault("data.shards", f"data.demo={self.demo} needs a folder to make the shards in, is empty")
        elif self.demo:
            yield from demo_faults(self.demo, {"shards": self.shards, "validation_shards": self.validation_shards})

    def _split_faults(self) -> Iterator[Fault]:
        if self.split and self.validation_fraction:
            yield Fault(
                "data.split",
                f"is {self.split}, and data.validation_fraction {self.validation_fraction:g}: set only one",
            )
        if self.split:
            try:
                split_parts(self.split)
            except DataError as error:
                yield Fault("data.split", str(error))
        if self.separate_documents and not self.pack:
            yield Fault(
                "data.separate_documents",
                "requires data.pack=true: only packed rows keep documents apart",
            )

    def _tokenizer_faults(self) -> Iterator[Fault]:
        """Yield the fault of a name that is no folder: every rank would request it from a network."""
        if self.tokenizer == "bytes":
            return
        folder = Path(self.tokenizer)
        if not folder.is_dir():
            yield Fault(
                "data.tokenizer",
                f"no folder {self.tokenizer}: give bytes, a folder with a Hugging Face tokenizer, or the name of a "
                "model on the hub, ORG/NAME",
            )
        elif not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            yield Fault(
                "data.tokenizer",
                f"there is no tokenizer in {self.tokenizer}, no tokenizer.json and no vocabulary: give the folder in "
                "which AutoTokenizer.save_pretrained wrote one, or bytes",
            )


def split_parts(text: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return (first and last share of documents for training, those held out) of a `data.split` such as `969,30,1`.

    The test part is not read. Raises DataError if the text is not a split.
    """
    try:
        shares = [float(number) for number in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < float("inf") for share in shares) or not shares[0]:
        raise DataError(
            f"{text!r} is not a split. Give shares of documents for training, validation and test, such as 969,30,1"
        )
    total = sum(shares)
    # Summed as in Megatron-LM, for exactly the same documents.
    trained = shares[0] / total
    held_out = trained + (shares[1] / total if len(shares) > 1 else 0.0)
    return (0.0, trained), (trained, held_out)

"""Keys of `data`: where the samples are and how they become sequences."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.indexed.split import split_parts
from data.media.options import BOUNDS, colour_of
from mimo_train.config.errors import Fault
from mimo_train.config.keys import Section, key, value_faults
from mimo_train.config.paths import demo_faults
from mimo_train.config.schema_mix import (
    MixChange,
    SourceConfig,
    ValidationConfig,
    fields_faults,
    mix_faults,
    source_names,
    validation_faults,
)

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
"""Files of which a folder with a Hugging Face tokenizer has some."""


@dataclass
class VideoConfig(Section):
    """How many pictures a video becomes: those in the middle of so many equal parts of it. See docs/data.md#videos."""

    frames_per_second: float = key(1.0, above=0, at_most=1000)
    """Pictures of a second; at least one of a video."""
    max_frames: int = key(32, at_least=1, at_most=2**16)
    """Most pictures of a video. Longer ones have fewer a second."""


@dataclass
class BoundsConfig(Section):
    """How large the parts of a sample may be: what is above is a bad sample. See docs/data.md#bounds."""

    pixels: int = key(BOUNDS.pixels, at_least=1)
    """Of one picture, height times width; those of videos too. So too of what a picture is resized to before its middle
    is cut out (`resize: crop`), and of the square around one that is not cut into tiles (`cut_several: false`)."""
    seconds: float = key(BOUNDS.seconds, above=0)
    """Of one clip or video."""
    video_bytes: int = key(BOUNDS.video_bytes, at_least=1, at_most=2**60)
    """Of one video."""
    record_bytes: int = key(BOUNDS.record_bytes, at_least=1)
    """Of the `json` or `txt` member."""
    placeholders: int = key(BOUNDS.placeholders, at_least=1)
    """Pictures and clips of a sample, together; a video is as many pictures as are read of it."""


@dataclass
class DataConfig(Section):
    """Where the samples are and how they become sequences."""

    shards: str = ""
    """Training shards, required unless there is a `mix`: a folder, a glob, a brace range `x-{000000..000127}.tar`, or
    several with commas; paths or URLs (`s3://`, `gs://`, `az://`, `https://`, ...); or a folder of an Energon dataset,
    or the YAML of a metadataset; or for texts the prefix of `.bin` and `.idx` files. See docs/data.md#what-you-have."""
    mix: list[SourceConfig] = field(default_factory=list)
    """Sources of samples and their weights, in place of `shards`. See docs/data.md#mixtures."""
    mix_schedule: list[MixChange] = field(default_factory=list)
    """Other weights of the sources from some steps on."""
    mix_new_weights: bool = False
    """Whether a run that continues may have other weights than its checkpoint: they hold from there on."""
    exhausted: str = key("repeat", choices=("repeat", "stop"))
    """When all samples of a source have been drawn: `repeat` (its next epoch, in a new order), or `stop` (the run ends
    with the last step before a sample is drawn a second time)."""
    validation_shards: str = ""
    """Held-out shards, same forms; empty: no evaluation, unless there are the two keys below."""
    validation: dict[str, ValidationConfig] = field(default_factory=dict)
    """Further held-out sets by name, `{charts: {shards: shards/charts}}`: measured as `eval/NAME/loss` and so on."""
    test_shards: str = ""
    """Shards of a test set, same forms: evaluated once, after the last step, as `test/loss` and so on. Empty: none."""
    validation_fraction: float = key(0.0, at_least=0, below=1)
    """Share of the training samples that is held out instead of trained on; 0: none. See docs/data.md#held-out-sets."""
    split: str = ""
    """Of `.bin` and `.idx` files: which documents are trained on, held out, and left for a test: their shares in the
    order of the file, `969,30,1` as of Megatron-LM's `--split`. Empty: all of `shards` are trained on."""
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
    separate_documents: bool = False
    """Of `.bin` and `.idx` files, with `pack`: whether attention, positions and loss end where a document ends, as with
    Megatron-LM's `--reset-position-ids`, `--reset-attention-mask` and `--eod-mask-loss`, instead of going on into the
    next one of the sample."""
    tokenizer: str = key("bytes", filled="bytes or a folder")
    """`bytes` (built in), or a folder with a Hugging Face tokenizer."""
    chat_template: str = key("auto", filled="auto, own or a file")
    """How conversations become tokens: `auto` (the tokenizer's own chat template; our own format if it has none), `own`
    (our own format), or a file with a Jinja template. See docs/data.md#chat-templates."""
    template_variables: dict[str, Any] = field(default_factory=dict)
    """Variables that the tokenizer's chat template may use, such as `{enable_thinking: false}` or `{date_string: 26 Jul
    2024}`."""
    special_tokens_in_text: str | list[str] = field(default_factory=list)
    """Special tokens of the tokenizer that a record's text may have, such as `["<|box_start|>", "<|box_end|>"]`, or
    `grounding` for those that the vocabulary has of boxes, points and references. All others are read as plain text.
    See docs/data.md#special-tokens-in-text."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Which members of a sample, and which values of its JSON, are its record and its media: `{caption: caption.txt}`,
    `{question: "json[q]", answer: "json[a]", image: [left.jpg, right.jpg]}`. See docs/data.md#fields."""
    null_captions: str = key("bad", choices=("bad", "skip"))
    """What a sample is whose caption is null: `bad`, or without loss and not counted (`skip`, blank answers too)."""
    background: str = key("white", filled="white, black, grey, none or #RRGGBB")
    """What stands behind pictures where they are transparent: `white`, `black`, `grey`, `#RRGGBB`, or `none`
    (transparency is left out). See docs/data.md#transparency."""
    video: VideoConfig = field(default_factory=VideoConfig)
    """How many pictures a video becomes. See docs/data.md#videos."""
    shuffle: bool = True
    """Whether training samples come in a new order each epoch."""
    shuffle_block: int = key(1, at_least=1, at_most=2**20)
    """Neighbouring samples of the shards that stay together in that order, for storage where one large read is faster
    than many small ones; 1: none. Only for shards whose samples are shuffled already. See docs/data.md#order."""
    blind: bool = False
    """Ablation: pictures and clips are replaced by zeros, so that only the text is left to learn from."""
    max_bad_samples: int | float = key(0, at_least=0)
    """Samples that may be unreadable, in all, before the run stops: a number, or below 1 a fraction of all. Held-out
    samples are counted apart. See docs/data.md#bad-samples."""
    read_retries: int = key(5, at_least=0, at_most=1000)
    """Times that a read is tried again after an I/O error, after pauses of 0.5, 1, 2, ... seconds; then the run ends.
    See docs/data.md#bad-samples."""
    bounds: BoundsConfig = field(default_factory=BoundsConfig)
    """How large the parts of a sample may be. See docs/data.md#bounds."""
    workers: int = key(2, at_least=0, at_most=1024)
    """Threads that read and decode ahead on each rank; 0 reads in the training thread."""
    cache_dir: str = ""
    """Folder for shard indexes, instead of beside the shards; empty: beside them, or in the user's cache where that
    folder cannot be written and for shards with a URL. See docs/data.md#index."""
    cache_bytes: int = key(0, at_least=0, at_most=2**60)
    """Most bytes of members of remote shards that are kept on this machine, in `data.cache_dir` or the user's cache;
    0: none. See docs/data.md#from-anywhere."""

    @property
    def held_out_by(self) -> str:
        """The key that holds out some of the training samples; empty: none does."""
        if self.validation_fraction:
            return "data.validation_fraction"
        return "data.split" if self.held_out_share else ""

    @property
    def held_out_share(self) -> float:
        """Share of the training samples that is held out; of a `split` with a fault 0."""
        if not self.split:
            return self.validation_fraction
        try:
            _, (begin, end) = split_parts(self.split)
        except DataError:
            return 0.0
        return end - begin

    def faults(self) -> Iterator[Fault]:
        """Values that cannot be, and demos that would overwrite other shards."""
        inside = {"data.bounds": self.bounds, "data.video": self.video}
        found = [*value_faults(self, "data")]
        found += [fault for name, section in inside.items() for fault in value_faults(section, name)]
        yield from found
        wrong = {fault.key for fault in found}

        def are_sound(*names: str) -> bool:
            return wrong.isdisjoint(f"data.{name}" for name in names)

        if are_sound("mix", "mix_schedule", "shards"):
            yield from mix_faults(self.mix, self.mix_schedule, self.shards)
        if are_sound("split", "validation_fraction"):
            yield from self._split_faults()
            if are_sound("mix", "validation", "validation_shards"):
                names = source_names(self.mix)
                yield from validation_faults(self.validation, self.validation_shards, self.held_out_by, names)
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
        places += [one.shards for one in self.mix] + [one.shards for one in self.validation.values()]
        if self.cache_bytes > 0 and not any("://" in place for place in places):
            text = f"is {self.cache_bytes}, but no shards are remote. Set it to 0"
            yield Fault("data.cache_bytes", text)
        if self.shuffle_block > 1 and not self.shuffle:
            yield Fault(
                "data.shuffle_block", f"is {self.shuffle_block}, but data.shuffle is false. Set only one of them"
            )
        if are_sound("background"):
            try:
                colour_of(self.background)
            except DataError as error:
                yield Fault("data.background", str(error))
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

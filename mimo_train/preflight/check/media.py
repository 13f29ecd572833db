"""The tokens of media in a run."""

from encoders.base import num_tokens
from encoders.errors import EncoderError
from encoders.plain.spec import PlainSpec
from mimo_train.config.schema import ConfigContainer
from mimo_train.preflight.check.report import Report, Table

MINUTE = 720, 1280, 1800, 30, 1
"""Extent of the video in the table."""


def add_media(report: Report, cfg: ConfigContainer) -> None:
    """Add the tokens of one image, one audio item and one video, for each encoder."""
    for medium in dict.fromkeys(module.encoder.medium for module in cfg.encoders.values()):
        rows = []
        for name, module in cfg.encoders.items():
            if module.encoder.medium == medium:
                read_as, patches, tokens = module.encoder.describe_input(module.projector.merge)
                tokens = str(module.projector.latents or tokens)
                rows.append(
                    (name, read_as, patches, f"{module.projector.merge}", f"{tokens} of {cfg.data.sequence_length}")
                )
        inside = "patches" if medium == "image" else "frames"
        header = ("module", "read as", inside, "merge", "tokens of data.sequence_length")
        report.tables.append(Table(f"One {medium}", header, rows))
    videos = [_video_row(cfg, name) for name, module in cfg.encoders.items() if module.encoder.reads_videos]
    videos += [_sound_row(cfg, name) for name, module in cfg.encoders.items() if module.encoder.sound]
    if videos:
        title = "One minute of video, 1280 x 720 at 30 frames per second"
        report.tables.append(Table(title, ("module", "frames", "chosen by", "tokens of data.sequence_length"), videos))
    for name, module in cfg.encoders.items():
        if isinstance(module.encoder, PlainSpec):
            report.warnings += [f"modules.{name}.encoder: {note}" for note in module.encoder.notes()]


def _video_row(cfg: ConfigContainer, name: str) -> tuple[str, ...]:
    encoder, projector = cfg.modules[name].encoder, cfg.modules[name].projector
    defaults = [f"{option}={value}" for option, value in encoder.videos().sampling.items()]
    options = [f"modules.{name}.encoder.video"] if encoder.video else []
    options += [f"default {', '.join(defaults)}"] if defaults else [] if options else ["the model's processor"]
    try:
        frames = len(encoder.video_frames(*MINUTE))
        tokens = f"{num_tokens(encoder, projector, *MINUTE)} of {cfg.data.sequence_length}"
    except EncoderError as error:
        return name, "none", " and ".join(options), str(error)
    return name, f"{frames}", " and ".join(options), tokens


def _sound_row(cfg: ConfigContainer, images: str) -> tuple[str, ...]:
    name, audio = next((name, module) for name, module in cfg.encoders.items() if module.encoder.kind == "audio")
    chosen_by = f"modules.{images}.encoder.sound"
    try:
        tokens = f"{num_tokens(audio.encoder, audio.projector, 60, 1)} of {cfg.data.sequence_length}"
    except EncoderError as error:
        return name, "sound", chosen_by, str(error)
    return name, "sound", chosen_by, tokens

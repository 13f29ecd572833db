"""Checkpoints of other programs and of earlier versions, which are not read. Imports no torch."""

from data.storage.url import Place, Url
from mimo_train.config.errors import UserError

_FORMATS = {
    (".metadata", "*.distcp", "common.pt"): "the format of torch.distributed.checkpoint",
    ("mp_rank_*/*.pt", "iter_*/mp_rank_*/*.pt"): "Megatron-LM's own format",
    ("*.pt", "*.pth", "*.ckpt"): "the format of torch.save",
}
"""Files that only checkpoints of other formats have."""


def require_own_format(folder: Place, before: str = "") -> None:
    """Raises UserError, which begins with `before`, for a checkpoint of another program or of an earlier version:
    nothing is damaged in it, and copying or renaming it is of no use. None has its folders in object storage."""
    if isinstance(folder, Url):
        return
    for names, program in _FORMATS.items():
        found = next((path for name in names for path in sorted(folder.glob(name))), None)
        if found is not None:
            raise UserError(
                f"{before}checkpoint {folder} is of {program} ({found.relative_to(folder)}), which is read by "
                "unpickling, and so not here: go on with the program that wrote it, or export it as a directory of "
                "transformers there and start from that (modules.NAME.pretrained)"
            )

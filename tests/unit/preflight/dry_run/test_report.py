"""The heading of a dry run."""

from mimo_train.preflight.dry_run.command import heading
from tests.unit.configs import load


def test_it_names_what_is_not_tried():
    plain = load("vlm_digits", "train.precision=bf16")
    assert heading(plain, 2, 1500) == "Dry run of 2 of 1,500 ranks, as on CUDA, of which none is touched"
    one = load("vlm_digits", "train.compile=layers", "modules.images.compile=none", "run.device=cpu")
    first, second = heading(one, 2, 2).splitlines()
    assert first.endswith("as on the CPU")
    assert second.startswith("NOT TRIED: the compiler; layers of language, which the run compiles (train.compile)")
    fp8 = load("vlm_digits", "train.precision=bf16", "modules.images.fp8=tensorwise")
    assert heading(fp8, 1, 2).endswith(
        "NOT TRIED: fp8 (train.fp8) and Transformer Engine; layers of images are torch's"
    )

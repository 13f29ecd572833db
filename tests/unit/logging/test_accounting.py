import pytest

from mimo_train.estimate.flops import Flops
from mimo_train.layout.ranks import RunLayout
from mimo_train.layout.run import resolve
from mimo_train.logging.throughput import peak_tflops, utilisation
from tests.unit.configs import changed


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Quadro B2000", None),
    ],
)
def test_peak_by_the_name_of_the_device(name, peak):
    assert peak_tflops(name) == peak


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 989), ("fp32", 67), ("fp8", 1979)])
def test_the_peak_is_that_of_the_precision_in_use(precision, peak):
    assert peak_tflops("NVIDIA H100 80GB HBM3", precision) == peak


def test_a_device_without_fp8_has_no_peak_in_it():
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "fp8") is None


def layout(images: int, language: int) -> RunLayout:
    sizes = {"modules.images.layout.dp": images, "modules.language.layout.dp": language}
    return resolve(changed({**sizes, "train.global_batch_size": 6, "train.micro_batch_size": 1})).layout


FLOPS = {"images": Flops(2e12, 3e12), "language": Flops(12e12, 18e12)}


def test_utilisation_by_hand():
    values = utilisation(FLOPS, seconds=0.5, layout=layout(1, 3), peaks={"images": 16.0, "language": 16.0})
    assert values == pytest.approx(
        {
            "tflops/images": 4.0,  # 2e12 / (0.5 s x 1 device)
            "tflops/language": 8.0,  # 12e12 / (0.5 s x 3 devices)
            "tflops": 7.0,  # 14e12 / (0.5 s x 4 devices)
            "mfu/images": 0.25,
            "mfu/language": 0.5,
            "mfu": 7 / 16,
            "hfu/images": 0.375,
            "hfu/language": 0.75,
            "hfu": 10.5 / 16,
        }
    )


def test_modules_of_several_precisions_are_held_to_peaks_of_their_own():
    values = utilisation(FLOPS, seconds=0.5, layout=layout(1, 3), peaks={"images": 16.0, "language": 32.0})
    assert values["mfu/images"] == 0.25 and values["mfu/language"] == 0.25
    # At their peaks: 2 / 16 + 12 / 32 seconds of one device, of 0.5 s x 4 devices.
    assert values["mfu"] == pytest.approx((2 / 16 + 12 / 32) / 2)
    assert values["hfu"] == pytest.approx((3 / 16 + 18 / 32) / 2)


def test_without_the_peak_of_a_module_the_run_has_no_utilisation():
    values = utilisation(FLOPS, seconds=0.5, layout=layout(1, 3), peaks={"images": 16.0, "language": None})
    assert "mfu/images" in values and not {"mfu/language", "mfu", "hfu"} & set(values)

"""Layouts drawn at random: legal ones train to the numbers of one process, illegal ones are refused before start, by
`mimo-train check`, `mimo-train train` and `pretrain` with the same words.

The same layouts at every run; MIMO_RANDOM_LAYOUTS=200 draws that many others of each kind.
"""

import contextlib
import functools
import io
import math
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from mimo_train.check.faults import config_faults
from mimo_train.layout import plan
from tests.dist.layout_tables import MODELS, Row
from tests.dist.parity import config_of, make_demos
from tests.dist.ranks import run_ranks
from tests.dist.runs import curve, largest_difference, train_on_ranks

EXAMPLES = int(os.environ.get("MIMO_RANDOM_LAYOUTS", "0"))
MOST_RANKS = 6
SHORT = "train.iters=3"


def drawn(default: int) -> settings:
    """A few examples, always the same; not made smaller after a failure, which would train for long."""
    return settings(
        max_examples=EXAMPLES or default,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def legal(draw) -> tuple[str, Row]:
    """A model and a layout that its sizes, its microbatch of 4 samples and `MOST_RANKS` allow."""
    several = draw(st.booleans())
    tp, cp, dp, pp = draw(
        st.tuples(*[st.sampled_from([1, 2])] * 4).filter(lambda sizes: math.prod(sizes) <= MOST_RANKS - several)
    )
    language = [f"tp{tp}", f"cp{cp}", f"dp{dp}", f"pp{pp}", *["sp"] * (tp > 1 and draw(st.booleans()))]
    stage, ranks = tp * cp * dp, tp * cp * dp * pp
    changes = draw(st.sampled_from([(), ("optim.distributed_optimizer=false",), ("train.recompute=full",)]))
    if not several:
        chunks = ["vpp2"] if pp > 1 and draw(st.booleans()) else []
        return "gpt", Row({"language": " ".join(language + chunks)}, "disjoint", changes)
    left = MOST_RANKS - ranks
    placement = draw(st.sampled_from(["shared", "disjoint", "language first"]))
    room = [stage] if placement == "shared" else [size for size in (1, 2, 4) if size <= left]
    size = draw(st.sampled_from(room))
    encoder_tp = draw(st.sampled_from([each for each in (1, 2, 4) if size % each == 0]))
    if placement == "language first":
        placement = f"{{images: {ranks}, language: 0}}"
    replicas = size // encoder_tp
    if placement == "shared" or size == 1 or draw(st.booleans()):
        sizes = {"images": f"tp{encoder_tp} dp{replicas}", "language": " ".join(language)}
        return "vlm, few pictures", Row(sizes, placement, changes)
    stages = draw(st.sampled_from([each for each in (1, 2) if replicas % each == 0]))
    images = [f"tp{encoder_tp}", f"dp{replicas // stages}", f"pp{stages}", *["sp"] * (encoder_tp == 2)]
    sizes = {"images": " ".join(images), "language": " ".join(language)}
    return "vlm, encoder stages, few pictures", Row(sizes, placement, changes)


FAULTS = {
    "modules.language.layout.tp=3": "modules.language.layout.tp",
    "modules.language.layout.dp=0": "modules.language.layout.dp",
    "modules.language.layout.pp=9": "modules.language.layout",
    "modules.language.layout.ep=2": "modules.language.layout.ep",
    "modules.images.layout.dp=3": "modules.images.layout.dp",
    "modules.images.layout.tp=3": "modules.images.layout.tp",
    "modules.images.layout.pp=9": "modules.images.layout.pp",
    "modules.images.layout.ep=2": "modules.images.layout.ep",
    "placement.mode=scattered": "placement.mode",
    "placement.first_rank={images: 9, language: 0}": "placement.first_rank",
    "placement.first_rank={images: 0}": "placement.first_rank",
    "train.global_batch_size=7": "train.global_batch_size",
    "modules.language.recompute=some": "modules.language.recompute",
}
"""What makes any layout illegal, and the key that must be named."""


@st.composite
def illegal(draw) -> tuple[str, Row, str]:
    """A legal layout with one of `FAULTS`, and the key of it."""
    change = draw(st.sampled_from(list(FAULTS)))
    model, row = draw(legal().filter(lambda found: "images" not in change or "images" in found[1].sizes))
    if change.startswith("placement.first_rank"):
        row = replace(row, placement="disjoint")
    return model, replace(row, changes=(*row.changes, change)), FAULTS[change]


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return make_demos(tmp_path_factory.mktemp("demos"))


@pytest.fixture(scope="module")
def train(demos, tmp_path_factory):
    """Trains a model, at the layout of a row or on one process, and gives its curve."""

    def curve_of(model: str, row: Row | None = None) -> list[tuple]:
        return curve(train_on_ranks(config_of(model, demos, tmp_path_factory.mktemp("run"), row, SHORT)))

    return curve_of


@pytest.fixture(scope="module")
def one_process(train):
    """Gives the curve of a model on one process, which is trained once."""
    return functools.cache(train)


@drawn(8)
@given(found=legal())
def test_a_legal_layout_trains_to_the_numbers_of_one_process(found, train, one_process, demos, tmp_path_factory):
    model, row = found
    note(f"{model}: {row}")
    cfg = config_of(model, demos, tmp_path_factory.mktemp("config"), row, SHORT)
    assert config_faults(cfg) == []
    assert plan(cfg).world_size <= MOST_RANKS
    assert max(largest_difference(one_process(model), train(model, row))) < MODELS[model].tolerance


@drawn(20)
@given(found=illegal())
def test_an_illegal_layout_is_refused_everywhere_with_the_same_words(found, demos, tmp_path_factory):
    model, row, key = found
    note(f"{model}: {row}")
    folder = tmp_path_factory.mktemp("refused")
    faults = [str(fault) for fault in config_faults(config_of(model, demos, folder, row, SHORT))]
    assert any(fault.startswith(key) for fault in faults), faults
    ((checked, trained, raised),) = run_ranks(_refused, 1, model, demos, folder, row)
    assert checked == trained == raised == faults
    assert not any(folder.iterdir()), "something was written"


def _refused(model: str, demos: dict, folder, row: Row) -> tuple[list[str], ...]:
    """The faults that `check`, `train` and `pretrain` name."""
    from mimo_train.cli import main
    from mimo_train.compose import to_yaml
    from mimo_train.config import ConfigError
    from mimo_train.training.pretrain import pretrain

    cfg, printed = config_of(model, demos, folder, row, SHORT), []
    path = folder.with_suffix(".yaml")
    path.write_text(to_yaml(cfg))
    for command in ("check", "train"):
        out = io.StringIO()
        with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
            assert main([command, str(path)]) == 1
        lines = [line for line in out.getvalue().splitlines() if line.startswith("error: ")]
        printed.append([line.removeprefix("error: ") for line in lines])
    with pytest.raises(ConfigError) as error:
        pretrain(cfg)
    return *printed, str(error.value).splitlines()

"""What is written for a key of text is its value, however YAML would read it."""

import pytest
import yaml

from mimo_train.config import compose
from mimo_train.config.errors import ConfigError

LIKE_NUMBERS = "20241012_153000 12:30 0012 1e5 1E5 1_000 0x1F 0b11 +5 1.50 1.0e-3 2024 .5 5. 0o17 -0 1e-7 2024-10-12 09"


@pytest.mark.parametrize("text", LIKE_NUMBERS.split())
def test_a_text_that_looks_like_a_number_stays_as_written(tmp_path, text):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.yaml").write_text(f"shards: {text}\n")
    (tmp_path / "run.yaml").write_text(
        f"defaults: [vlm_digits, {{override data@data: mine}}, _self_]\nrun: {{dir: {text}}}\ntrain: {{iters: 3}}\n"
    )
    cfg = compose.load(
        str(tmp_path / "run.yaml"),
        [
            f"data.validation={{more: {{shards: {text}}}}}",
            f"data.mix=[{{shards: {text}, name: {text}}}]",
            f"+data.cache_dir={text}",
            f"data.mix[0].name={text}",
            "data.validation_shards=x-${run.dir}",
            f"modules.images.freeze=[{text}]",
        ],
    )
    assert cfg.run.dir == cfg.data.shards == cfg.data.cache_dir == text
    assert cfg.data.validation["more"].shards == cfg.data.mix[0].shards == cfg.data.mix[0].name == text
    assert (cfg.data.validation_shards, cfg.modules["images"].freeze) == (f"x-{text}", [text])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(compose.to_yaml(cfg))
    assert compose.load(str(resolved)) == compose.from_dict(yaml.safe_load(resolved.read_text())) == cfg


@pytest.mark.parametrize(
    ("override", "value"),
    [("optim.lr=1e-3", 0.001), ("optim.lr=1.0E-3", 0.001), ("train.iters=1_000", 1000), ("train.iters=0012", 12),
     ("run.seed=0x10", 16), ("optim.lr=0.10", 0.1), ("data.template_variables.a=010", 10),
     ("data.template_variables.a=1e1", 10.0)],
)  # fmt: skip
def test_a_number_is_read_in_base_ten_unless_marked(override, value):
    found = compose.load("vlm_digits", [override])
    for name in override.partition("=")[0].split("."):
        found = found[name] if isinstance(found, dict) else getattr(found, name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.iters=12:30", "'12:30'"),
        ("train.iters=1e3", "is 1e3"),
        ("optim.lr=.nan", "finite"),
        ("train.iters=0o17", "0o17"),
    ],
)
def test_what_is_no_number_is_a_fault_that_repeats_it(override, message):
    with pytest.raises(ConfigError, match=message):
        cfg = compose.load("vlm_digits", [override])
        raise ConfigError(cfg.faults())

"""Composition: every shipped file, round trips, and faults that name the key."""

import copy
import dataclasses

import pytest
import yaml

from encoders.key_rules import FixedKeys
from encoders.projectors.spec import ProjectorSpec
from encoders.registry import FAMILIES
from mimo_train.config import compose
from mimo_train.config.compose import load
from mimo_train.config.errors import ConfigError
from mimo_train.config.llm_spec import LlmSpec
from mimo_train.config.parts import LANGUAGE
from mimo_train.config.schema import ConfigContainer
from mimo_train.layout.run import config_faults, layout_faults, resolve, with_config_faults

CONFIGS = compose.shipped_configs()
RUNS = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
MODULES = {run: set(compose.load(run).modules) for run in RUNS}


def group(name: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / name).glob("*.yaml"))


def faults(config: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as raised:
        compose.load(config, overrides)
    assert str(raised.value) == "\n".join(map(str, raised.value.faults))
    return {fault.key: fault.message for fault in raised.value.faults}


@pytest.mark.parametrize("choice", group("layout"))
@pytest.mark.parametrize("run", RUNS)
def test_every_shipped_config_plans_with_every_layout_of_its_modules(run, choice):
    """A layout file with a module that the run lacks is rejected by that module's key. So is one with more chunks than
    layers."""
    modules = yaml.safe_load((CONFIGS / "layout" / f"{choice}.yaml").read_text())["modules"]
    language = modules[LANGUAGE]["layout"]
    experts = ["llm@modules.language.llm=gpt_tiny_moe"] if language["ep"] > 1 else []
    cfg = compose.load(run, [f"layout={choice}", *experts])
    refused = {f"modules.{name}.encoder" for name in set(modules) - MODULES[run]}
    if language["vpp"] > 1 and cfg.llm.num_layers % (language["pp"] * language["vpp"]):
        refused.add(f"modules.{LANGUAGE}.layout.vpp")
    if refused:
        assert refused <= {fault.key for fault in layout_faults(cfg)}
        return
    found = resolve(cfg)
    assert found.layout.world_size >= 1
    assert found.batch.num_microbatches * found.batch.microbatch_samples == cfg.train.global_batch_size
    assert compose.from_dict(yaml.safe_load(compose.to_yaml(cfg))) == cfg


@pytest.mark.parametrize("run", RUNS)
def test_resolved_yaml_is_a_config_itself(run, tmp_path):
    cfg = compose.load(run, ["train.iters=7", "run.dir=somewhere"])
    file = tmp_path / "resolved.yaml"
    file.write_text(compose.to_yaml(cfg))
    again = compose.load(str(file))
    assert again == cfg
    assert (again.train.iters, again.run.dir) == (7, "somewhere")
    assert compose.from_dict(compose.to_dict(cfg)) == cfg


@pytest.mark.parametrize("name", group("encoder"))
def test_encoder_files_make_sound_specs(name):
    cfg = compose.load("vlm_digits", [f"encoder@modules.images.encoder={name}"])
    assert isinstance(cfg.modules["images"].encoder, tuple(family.spec for family in FAMILIES.values()))
    assert cfg.modules["images"].encoder.name == name
    assert cfg.modules["images"].encoder.faults() == []


@pytest.mark.parametrize("name", group("projector"))
def test_projector_files_make_sound_specs(name):
    # A grid of 4 x 4 patches, which projectors can join two by two or all at once.
    patches = "modules.images.encoder.patch_size=12"
    cfg = compose.load("vlm_digits", [patches, f"projector@modules.images.projector={name}"])
    assert isinstance(cfg.modules["images"].projector, ProjectorSpec)
    assert resolve(cfg).layout.world_size == 2


@pytest.mark.parametrize("name", group("llm"))
def test_llm_files_make_sound_specs(name):
    cfg = compose.load("gpt_tiny", [f"llm@modules.language.llm={name}"])
    assert isinstance(cfg.language.llm, LlmSpec)
    assert cfg.language.llm.name == name
    assert resolve(cfg).layout.world_size == 1


@pytest.mark.parametrize("name", group("data"))
def test_data_files_compose(name):
    data = compose.load("gpt_tiny", [f"data={name}"]).data
    assert (data.shards or data.mix) and data.sequence_length > 0


def test_overrides_set_values_and_pick_files():
    cfg = compose.load(
        "vlm_digits", ["train.iters=3", "layout=one_process", "modules.images.layout.tp=1", "data.sequence_length=128"]
    )
    assert (cfg.train.iters, cfg.placement.mode, cfg.data.sequence_length) == (3, "shared", 128)


def test_a_users_file_builds_on_a_shipped_one(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [vlm_digits, _self_]\ntrain: {iters: 5}\n")
    cfg = compose.load(str(file), ["layout=language_pp2"])
    assert cfg.train.iters == 5
    assert cfg.language.layout.pp == 2
    assert cfg.modules["images"].encoder.name == "vit_tiny"


def test_unset_keys_have_the_defaults_of_the_dataclasses(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text("modules: {language: {llm: {num_layers: 2}}}\n")
    cfg = compose.load(str(file))
    assert cfg.language.llm == dataclasses.replace(LlmSpec(), num_layers=2)
    assert cfg.train == ConfigContainer().train
    assert not cfg.encoders
    assert list(compose.load("vlm_digits").encoders) == ["images"]


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("train.iter=5", "train.iter", "Did you mean iters"),
        ("modules.images.encoder.patch=4", "modules.images.encoder.patch", "Did you mean patch_size"),
        ("zzz=1", "zzz", "Choose from run, pretrained, modules, placement"),
        ("modules.images.encoder.family=clap", "modules.images.encoder.family", "unknown encoder family 'clap'"),
        ("layout=two_proceses", "layout", "Did you mean two_processes"),
    ],
)
def test_unknown_names_are_faults_with_the_nearest(override, key, said):
    found = faults("vlm_digits", override)
    assert said in found[key]


def sections(section, path: str = "") -> dict[str, object]:
    """Return every dataclass in a config by its key, including the specs of encoders and projectors."""
    inner = section.values() if isinstance(section, dict) else ()
    if dataclasses.is_dataclass(section):
        inner = [getattr(section, field.name) for field in dataclasses.fields(section)]
    found = {type(section).__name__: section} if dataclasses.is_dataclass(section) else {}
    for value in inner:
        found |= sections(value)
    return found


def test_an_attribute_that_is_no_key_is_an_error_in_every_section():
    cfg = load("vlm_digits")
    cfg.train.iters = 7
    everywhere = sections(cfg)
    for name, family in FAMILIES.items():  # an instance before its fields are set
        assert issubclass(family.spec, FixedKeys), name
        everywhere[family.spec.__name__] = object.__new__(family.spec)
    assert {"TrainConfig", "LayoutConfig", "LlmSpec", "VisionSpec", "WhisperSpec", "ProjectorSpec"} <= everywhere.keys()
    for name, section in everywhere.items():
        with pytest.raises(AttributeError, match=f"{name} has no key 'no_such_key'"):
            section.no_such_key = 1
    with pytest.raises(AttributeError, match=r"TrainConfig has no key 'train_iters'. Did you mean iters"):
        cfg.train.train_iters = 1
    with pytest.raises(AttributeError, match=r"OptimConfig has no key 'learning_rate'. Choose from name, lr, "):
        cfg.optim.learning_rate  # noqa: B018
    assert copy.deepcopy(cfg) == cfg and dataclasses.replace(cfg.train, iters=8).iters == 8 and cfg.train.iters == 7


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["layout=two_proceses", "llm@modules.language.llm=gpt_tny", "train.iter=5"], {"layout", "llm", "train.iter"}),
        (["data.shards=*.tar", "train.iters", "optim.lr=fast"], {"data.shards", "train.iters", "optim.lr"}),
        (["modules.images.encoder.family=clap", "optim.lr=fast"], {"modules.images.encoder.family", "optim.lr"}),
        (["placement.first_rank={images:1}", "run.seed=x"], {"placement.first_rank", "run.seed"}),
    ],
)
def test_faults_of_all_kinds_are_named_at_once(overrides, keys):
    assert set(faults("vlm_digits", *overrides)) == keys


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (
            ["optm.lr=2", "train.itres=3", "train.global_batch_size=30"],
            {"optm", "train.itres", "train.global_batch_size"},
        ),
        (
            ["optim.lr=x", "data.background=redd", "data.max_bad_samples=-1"],
            {"optim.lr", "data.background", "data.max_bad_samples"},
        ),
        (["data.validation=5", "data.validation_fraction=2"], {"data.validation", "data.validation_fraction"}),
        # A default that replaces a wrong value proves nothing.
        (["train.micro_batch_sise=15", "train.global_batch_size=30"], {"train.micro_batch_sise"}),
        (["modules.language.llm.num_layers=two", "modules.language.layout.pp=5"], {"modules.language.llm.num_layers"}),
    ],
)
def test_values_and_arithmetic_are_looked_at_beside_wrong_keys(overrides, keys):
    with pytest.raises(ConfigError) as raised:
        compose.load("vlm_digits", overrides)
    assert {fault.key for fault in with_config_faults(raised.value).faults} == keys


def test_a_batch_is_looked_at_beside_sizes_that_cannot_be():
    cfg = compose.load("vlm_digits", ["modules.images.encoder.patch_size=5", "train.global_batch_size=30"])
    assert {"modules.images.encoder.patch_size", "train.global_batch_size"} <= {
        fault.key for fault in config_faults(cfg)
    }


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("train.iters=many", "train.iters", "'many'"),
        ("modules.images.encoder.hidden_size=wide", "modules.images.encoder.hidden_size", "'wide'"),
        ("data.shards=null", "data.shards", "None"),
        ("train=5", "train", "must be a mapping of keys, is 5"),
        ("modules.images.encoder=vit_tiny", "modules.images.encoder", "must be a mapping of keys, is 'vit_tiny'"),
    ],
)
def test_wrong_types_are_faults_with_key_and_value(override, key, said):
    assert said in faults("vlm_digits", override)[key]


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("placement.first_rank={images:1,language:3}", "placement.first_rank", "after the colon, {images: 1}"),
        (
            "data.fields={image: json[a], caption: x.txt}",
            "data.fields",
            "cannot be read as YAML. Write {key: value, ...} or [value, ...], with quotes around texts such as",
        ),
        (
            "data.shards=*.tar",
            "data.shards",
            "*.tar cannot be read as YAML",
        ),
        (
            "run.dir=runs/m\udcfcde",
            "run.dir",
            r"runs/m\udcfcde cannot be read as YAML",
        ),
        ("train.skip_iters=[1, 2", "train.skip_iters", "[1, 2 cannot be read as YAML. Write {key: value"),
        ("train.loss_weights={foo:2}", "train.loss_weights", "Write a space after the colon, {foo: 2}"),
        (
            "modules.language.lora.alpha=32",
            "modules.language.lora.rank",
            "is missing, but alpha is set",
        ),
        (
            "encoder=vit_small",
            "encoder",
            "requires its place in the config. Write encoder@modules",
        ),
        ("data.shards=???", "data.shards", "is ???, a value that is still missing"),
        ("optim=[]", "optim", "picks one file of the group optim, is []"),
        ("optim=", "optim", "is empty. Name one"),
        ("modules.images.encoder.family=[a]", "modules.images.encoder.family", "the name of a family, is ['a']"),
    ],
)
def test_slips_of_the_pen_are_faults_with_what_was_meant(override, key, said):
    assert said in faults("vlm_digits", override)[key]


@pytest.mark.parametrize(
    "file, override, key",
    [
        ("data:\n  - shards: my/train\n", "", "data"),
        ("modules: {images: {layout: [2, 1]}}\n", "", "modules.images.layout"),
        ("", "modules=[images]", "modules"),
        ("", "checkpoint=[1]", "checkpoint"),
    ],
)
def test_a_list_in_the_place_of_a_mapping_is_named_by_its_key(tmp_path, file, override, key):
    """Merging it with the mapping of the defaults fails before types are compared, without a location."""
    (tmp_path / "my.yaml").write_text(f"defaults: [vlm_digits, _self_]\n{file}")
    with pytest.raises(ConfigError) as error:
        compose.load(str(tmp_path / "my.yaml"), [override] if override else [])
    assert [fault.key for fault in error.value.faults] == [key]
    assert str(error.value).startswith(f"{key}: must be a mapping")


def test_a_value_that_a_file_leaves_open_is_a_fault(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [vlm_digits, _self_]\ndata: {shards: '???'}\nmodules: {images: {freeze: ['???']}}\n")
    assert set(faults(str(file))) == {"data.shards", "modules.images.freeze[0]"}
    assert compose.load(str(file), ["data.shards=mine", "modules.images.freeze=[]"]).data.shards == "mine"


def test_a_module_of_which_there_is_a_layout_alone_is_named_with_those_of_the_run():
    for run, override, said in (
        ("vlm_digits", "modules.image.layout.tp=2", "Did you mean modules.images?"),
        ("gpt_tiny", "layout=one_process", "the modules of this run are language, and a file or an override names"),
    ):
        (fault,) = layout_faults(compose.load(run, [override]))
        assert fault.key.endswith(".encoder") and said in fault.message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("~chekpoint", "does not exist"),
        ("~modules.images.freeze", "'modules.images.freeze' does not exist"),
        ("~train.iters=3", "The value of 'train.iters' is 2100 and not 3"),
    ],
)
def test_a_removal_of_what_is_not_there_is_a_fault_of_the_override(override, said):
    found = faults("vlm_digits", *["~layout"] * ("layout" not in override), override)
    assert [*found] == ["vlm_digits.yaml"]
    assert said in found["vlm_digits.yaml"]


def test_unknown_configs_are_faults_with_the_nearest(tmp_path):
    assert "Did you mean vlm_digits" in faults("vlm_digit")["CONFIG"]
    missing = tmp_path / "none.yaml"
    assert str(missing) in faults(str(missing))["CONFIG"]
    (tmp_path / "mine.yml").write_text("defaults: [vlm_digits, _self_]\n")
    assert "expected a file that ends in .yaml" in faults(str(tmp_path / "mine.yml"))["CONFIG"]


@pytest.mark.parametrize("text", ["train: {iters: 5\n", "train:\n\titers: 5\n", "- a\n- b\n"])
def test_a_file_that_is_no_mapping_in_yaml_is_a_fault_that_names_it(tmp_path, text):
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    assert list(faults(str(file))) == ["broken.yaml"]


def test_an_interpolation_that_leads_nowhere_is_a_fault():
    assert "nowhere" in faults("vlm_digits", "run.dir=${nowhere}")["vlm_digits.yaml"]


def test_a_language_module_of_another_name_is_told_its_name():
    cfg = compose.load("gpt_tiny", ["modules.langauge.llm.num_layers=2"])
    faults = list(layout_faults(cfg))
    assert [fault.key for fault in faults] == ["modules.langauge.llm"]
    assert "named 'language' has an llm: give it this name" in faults[0].message

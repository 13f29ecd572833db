"""Parameters of a rank from a directory: which ranges they consist of, and what does not fit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from encoders.weight_map import Rows, Rule, WeightMap, heads, same, spelt, stacked, with_biases
from mimo_train.config.errors import UserError
from mimo_train.config.pretrained.weight_files import SINGLE
from mimo_train.hf.documents import Written
from mimo_train.hf.export import groups_of, planned_tensors, tensors_of
from mimo_train.hf.fill import Reader
from mimo_train.hf.matching import require_all_used
from mimo_train.hf.tensors import TensorFolder
from mimo_train.models.parameters import Cut

KEY = "modules.language.pretrained"
WIDTH, HEAD, GROUPS, PER_GROUP, FFN, VOCAB, PADDED = 6, 2, 2, 3, 8, 5, 8
THEIRS = {
    "q.weight": (GROUPS * PER_GROUP * HEAD, WIDTH),
    "k.weight": (GROUPS * HEAD, WIDTH),
    "v.weight": (GROUPS * HEAD, WIDTH),
    "q.bias": (GROUPS * PER_GROUP * HEAD,),
    "v.bias": (GROUPS * HEAD,),
    "gate.weight": (FFN, WIDTH),
    "up.weight": (FFN, WIDTH),
    "down.weight": (WIDTH, FFN),
    "mix.weight": (20, WIDTH),
    "embed.weight": (VOCAB, WIDTH),
    "patch.weight": (WIDTH, 3, 2, 2),
    "norm.weight": (WIDTH,),
}
ATTENTION = {"groups": GROUPS, "per_group": PER_GROUP, "size": HEAD}
MAP = WeightMap(
    (
        heads("qkv.weight", "q.weight", "k.weight", "v.weight", **ATTENTION),
        heads("qkv.bias", "q.bias", "", "v.bias", **ATTENTION),
        stacked("fc1.weight", [("gate.weight", FFN), ("up.weight", FFN)]),
        same("fc2.weight", "down.weight", WIDTH),
        same("in_proj.weight", "mix.weight", 20),
        Rule("embedding", (Rows("embed.weight", VOCAB), Rows("", PADDED - VOCAB))),
        same("patch.weight", "patch.weight", WIDTH, (3, 2, 2)),
        same("norm.weight", "norm.weight", WIDTH),
    ),
    carried=("inv_freq",),
    prefixes=("model.", ""),
)
WHOLE = {
    "qkv.weight": (20, WIDTH), "qkv.bias": (20,), "fc1.weight": (16, WIDTH), "fc2.weight": (WIDTH, FFN),
    "in_proj.weight": (20, WIDTH), "embedding": (PADDED, WIDTH), "patch.weight": (WIDTH, 12), "norm.weight": (WIDTH,),
}  # fmt: skip
CUTS = {"qkv.weight": (0, (1,)), "qkv.bias": (0, (1,)), "fc1.weight": (0, (1, 1)), "fc2.weight": (1, (1,))}
CUTS |= {"in_proj.weight": (0, (4, 4, 8, 4)), "embedding": (0, (1,))}
"""(dimension, sections)"""


@pytest.fixture
def values():
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in THEIRS.items()}


def reader(tmp_path, values, prefix="model.", of=MAP) -> Reader:
    save_file({prefix + name: value for name, value in values.items()} | {"inv_freq": torch.ones(2)}, tmp_path / SINGLE)
    folder = TensorFolder(tmp_path, KEY)
    found = Reader(folder, of, KEY)
    require_all_used([found], KEY)
    return found


def filled(found: Reader, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    cuts, parameters = {}, {}
    for name, shape in WHOLE.items():
        dim, sections = CUTS.get(name, (None, (1,)))
        cuts[name] = Cut(dim, sections, rank, ranks) if dim is not None else Cut()
        local = [size // ranks if at == dim else size for at, size in enumerate(shape)]
        parameters[name] = torch.full(local, torch.nan)
    found.fill(parameters, cuts)
    return parameters


def test_new_rows_are_drawn_alike_on_every_rank(tmp_path, values):
    rows = (Rows("embed.weight", VOCAB), Rows("", 2, std=0.1), Rows("", 1))
    found = reader(tmp_path, values, of=replace(MAP, rules=tuple(
        Rule("embedding", rows) if rule.ours == "embedding" else rule for rule in MAP.rules
    )))  # fmt: skip
    whole, parts = filled(found, 0, 1)["embedding"], [filled(found, rank, 4)["embedding"] for rank in range(4)]
    assert torch.equal(torch.cat(parts), whole) and torch.equal(whole[:VOCAB], values["embed.weight"])
    new, padding = whole[VOCAB : VOCAB + 2], whole[VOCAB + 2 :]
    assert 0.03 < new.std() < 0.3 and not torch.equal(new[0], new[1]) and not padding.any()


def test_values_take_the_parameter_s_dtype(tmp_path, values):
    parameter = torch.empty(WIDTH, dtype=torch.bfloat16)
    reader(tmp_path, values).fill({"norm.weight": parameter}, {"norm.weight": Cut()})
    assert torch.equal(parameter, values["norm.weight"].bfloat16())


def without(name):
    return lambda values: values.pop(name)


def reshaped(name, *shape):
    return lambda values: values.update({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("k.weight"), "it lacks model.k.weight"),
        (reshaped("embed.weight", 7, WIDTH), r"model.embed.weight has shape \(7, 6\) there, and 5 rows here"),
        (reshaped("extra.weight", 2), "has model.extra.weight, for which the model has no place"),
        (without("q.weight"), "has no tensor model.q.weight or q.weight; it has"),
    ],
)
def test_a_directory_of_another_model_is_refused(tmp_path, values, change, said):
    change(values)
    with pytest.raises(UserError, match=f"^{KEY}: .*{said}"):
        reader(tmp_path, values)


def test_a_copy_of_a_tied_tensor_must_equal_it(tmp_path, values):
    of = replace(MAP, copies=(("head.weight", "embed.weight"),))
    found = reader(tmp_path, values | {"head.weight": values["embed.weight"].clone()}, of=of)
    found.require_equal_copies()
    assert torch.equal(filled(found, 0, 1)["embedding"][:VOCAB], values["embed.weight"])
    found = reader(
        tmp_path, values | {"head.weight": values["embed.weight"] + torch.eye(VOCAB, WIDTH)[[3] * VOCAB]}, of=of
    )
    with pytest.raises(UserError, match=f"^{KEY}: .*model.head.weight and model.embed.weight with different values"):
        found.require_equal_copies()


def test_other_shapes_are_both_named(tmp_path, values):
    found = reader(tmp_path, values)
    with pytest.raises(
        UserError, match=r"down.weight \(6, 8\) there make 6 x 4, fc2.weight here is \(6, 5\) on each of 2"
    ):
        found.fill({"fc2.weight": torch.empty(6, 5)}, {"fc2.weight": Cut(1, rank=0, ranks=2)})
    with pytest.raises(UserError, match="has no tensor for head.weight: .*parameters that its family does not have"):
        found.fill({"head.weight": torch.empty(6, 5)}, {"head.weight": Cut()})


def test_a_map_names_each_row_once():
    assert MAP.row_counts() == {name: shape[0] for name, shape in THEIRS.items()}
    with pytest.raises(AssertionError, match="rows 2 to 3 of a"):
        WeightMap((Rule("x", (Rows("a", 2), Rows("a", 1, 3))),)).row_counts()
    with pytest.raises(AssertionError):
        WeightMap((same("x", "a", 1), same("x", "b", 1)))


def test_biases_follow_their_weights():
    (weight, bias) = with_biases([same("fc.weight", "up.weight", 3, (2, 2))])
    assert (weight.ours, bias.ours) == ("fc.weight", "fc.bias") and bias.rows == (Rows("up.bias", 3),)


def test_names_are_spelt_as_in_the_directory():
    memory = (("model.", "model.language_model."), ("lm_head.", "lm_head."))
    assert spelt("model.norm.weight", memory) == "model.language_model.norm.weight"
    assert spelt("lm_head.weight", memory) == "lm_head.weight" and spelt("a", "x.") == "x.a"


LANGUAGE_MAP = WeightMap((same("norm", "model.norm.weight", 4), same("top", "model.layers.0.weight", 4)))


@pytest.mark.parametrize(
    ("spelling", "begins"),
    [
        ("language_model.", ("language_model.",)),
        ("", ("model.",)),
        ((("model.", "model.language_model."), ("lm_head.", "lm_head.")), ("model.language_model.",)),
    ],
)
def test_a_part_of_a_directory_has_all_that_is_its_own(tmp_path, spelling, begins):
    """Layers that config.json does not count are not passed over where the rest of the directory is not read."""
    theirs = {name: spelt(name, spelling) for name in LANGUAGE_MAP.row_counts()}
    others = {"vision_tower.patch.weight": torch.ones(2), "visual.patch.weight": torch.ones(2)}

    def read(**more: torch.Tensor) -> None:
        save_file({name: torch.ones(4) for name in theirs.values()} | others | more, tmp_path / SINGLE)
        folder = TensorFolder(tmp_path, KEY)
        found = Reader(folder, LANGUAGE_MAP.under(spelling), KEY)
        assert found.begins == begins
        require_all_used([found], KEY, begins=found.begins)

    read()
    more = spelt("model.layers.1.weight", spelling)
    with pytest.raises(UserError, match=f"has {more}, for which the model has no place"):
        read(**{more: torch.ones(4)})


EXPERTS, MIDDLE, OUT = 3, 4, 6
STACKS = WeightMap(
    tuple(
        Rule(f"{at}.{ours}", (Rows(theirs, rows, at * rows, stack=(EXPERTS, rows, columns)),))
        for at in range(EXPERTS)
        for ours, theirs, rows, columns in (("fc1", "gate_up", 2 * MIDDLE, OUT), ("fc2", "down", OUT, MIDDLE))
    )
)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_matrices_of_a_stack_are_read_in_either_form_and_written_as_they_came(transposed, ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("mimo_train.hf.tensors.CHUNK", 24)  # less than a matrix
    torch.manual_seed(2)
    values = {name: torch.randn(stack) for name, stack in STACKS.stacks().items()}
    stored = {name: value.mT.contiguous() if transposed else value for name, value in values.items()}
    save_file(stored, tmp_path / SINGLE)
    found = Reader(TensorFolder(tmp_path, KEY), STACKS, KEY)
    assert found.transposed == transposed
    for rank in range(ranks):
        up, down = Cut(0, (1, 1), rank, ranks), Cut(1, (1,), rank, ranks)
        for at in range(EXPERTS):
            parts = {
                f"{at}.fc1": torch.empty(2 * MIDDLE // ranks, OUT),
                f"{at}.fc2": torch.empty(OUT, MIDDLE // ranks),
            }
            found.fill(parts, {f"{at}.fc1": up, f"{at}.fc2": down})
            halves = [half.chunk(ranks)[rank] for half in values["gate_up"][at].chunk(2)]
            assert torch.equal(parts[f"{at}.fc1"], torch.cat(halves))
            assert torch.equal(parts[f"{at}.fc2"], values["down"][at].chunk(ranks, 1)[rank])
    part = Written("language", STACKS, transposed=found.transposed)
    assert len(groups_of(STACKS)) == 2
    whole = {
        f"{at}.{ours}": values[theirs][at]
        for at in range(EXPERTS)
        for ours, theirs in (("fc1", "gate_up"), ("fc2", "down"))
    }
    planned = planned_tensors(part, whole, torch.float32)
    written = list(tensors_of(part, SimpleNamespace(load=whole.__getitem__), torch.float32))
    assert {plan.name: plan.shape for plan in planned} == {name: value.shape for name, value in stored.items()}
    assert all(torch.equal(value, stored[plan.name]) for plan, value in zip(planned, written, strict=True))


def test_a_square_matrix_has_the_form_of_the_others_and_other_shapes_are_errors(tmp_path):
    def read(**shapes: tuple[int, ...]) -> Reader:
        save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / SINGLE)
        rows = {"gate_up": (2, 4, 4), "down": (2, 4, 2)}
        rules = [
            Rule(f"{name}.{at}", (Rows(name, stack[1], at * stack[1], stack=stack),))
            for name, stack in rows.items()
            for at in range(2)
        ]
        return Reader(TensorFolder(tmp_path, KEY), WeightMap(tuple(rules)), KEY)

    assert not read(gate_up=(2, 4, 4), down=(2, 4, 2)).transposed
    assert read(gate_up=(2, 4, 4), down=(2, 2, 4)).transposed
    with pytest.raises(UserError, match=r"down has shape \(2, 4, 3\) there, and \(2, 4, 2\) here"):
        read(gate_up=(2, 4, 4), down=(2, 4, 3))


def test_a_stack_of_matrices_is_read_from_several_tensors_and_written_to_them(tmp_path):
    torch.manual_seed(3)
    stored = {f"{at}.{name}": torch.randn(MIDDLE, OUT) for at in range(EXPERTS) for name in ("gate", "up")}
    rows = tuple(Rows(name, MIDDLE, tail=(OUT,)) for name in stored)
    weights = WeightMap((Rule("stack", rows),))
    save_file(stored, tmp_path / SINGLE)
    found, value = Reader(TensorFolder(tmp_path, KEY), weights, KEY), torch.empty(EXPERTS, 2 * MIDDLE, OUT)
    found.fill({"stack": value}, {"stack": Cut()})
    assert torch.equal(value.flatten(0, 1), torch.cat([*stored.values()]))
    part, source = Written("images", weights), SimpleNamespace(load={"stack": value}.__getitem__)
    planned = planned_tensors(part, {"stack": value}, torch.float32)
    written = list(tensors_of(part, source, torch.float32))
    assert {plan.name: plan.shape for plan in planned} == dict.fromkeys(stored, (MIDDLE, OUT))
    assert all(torch.equal(value, stored[plan.name]) for plan, value in zip(planned, written, strict=True))
    with pytest.raises(UserError, match=r"make 24 x 6, stack here is \(48, 3\)"):
        found.fill({"stack": torch.empty(48, 3)}, {"stack": Cut()})

"""`check` of `launch.layouts`: each as the launcher would start it."""

from mimo_train.preflight.check import main

TWO, THREE = "1: one_process", "3: images_dp1_language_dp2 train.micro_batch_size=4"


def checked(capsys, layouts: str) -> tuple[int, list[str], list[str]]:
    """The exit code, rows of the table, and errors."""
    code = main("vlm_digits", [f"launch.layouts={{{layouts}}}"], without_data=True)
    out, err = capsys.readouterr()
    table = out.partition("layouts by nodes\n")[2].partition("\n\n")[0].splitlines()
    return code, [" ".join(row.split()) for row in table[1:]], err.splitlines()


def test_layouts_are_shown_by_their_nodes(capsys):
    code, rows, _ = checked(capsys, f"{THREE}, {TWO}")
    assert code == 0
    assert rows == ["1 1 8 images (one rank), language (one rank)", "3 1 4 images (one rank), language (dp2)"]


def test_every_fault_of_every_layout_has_its_key(capsys):
    wrong = "2: images_dp1_language_dp2, 4: two_processes optim.lr=1, 5: one_process train.micro_batch_size=7"
    code, rows, errors = checked(capsys, f"{TWO}, {wrong}")
    assert code == 1 and len(rows) == 1
    for start, words in (
        ("error: launch.layouts.2: the layout needs 3 processes", "2 nodes"),
        ("error: launch.layouts.4: changes optim.lr", "run"),
        ("error: launch.layouts.5: train.global_batch_size", "7"),
    ):
        assert any(line.startswith(start) and words in line for line in errors), errors


def test_a_fault_of_all_layouts_is_told_once(capsys):
    main("vlm_digits", [f"launch.layouts={{{TWO}, {THREE}}}", "train.log_interval=0"], without_data=True)
    assert capsys.readouterr().err.count("train.log_interval") == 1


def test_without_layouts_there_is_no_table(capsys):
    assert checked(capsys, "")[1] == []


def test_without_data_neither_weights_nor_tokenizer_need_be_here(capfd):
    absent = "modules.language.pretrained=/models/vicuna"
    overrides = [absent, "launch.layouts={1: ''}", "layout=pictures_8"]
    assert main("recipes/llava_1_5_finetune", overrides, without_data=True) == 0
    assert f"notice: {absent.replace('=', ': ')} is not on this machine" in capfd.readouterr().err

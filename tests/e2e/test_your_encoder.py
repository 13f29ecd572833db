"""docs/your-encoder.md, done literally: its files, installed as a package outside of the tree, and its commands."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

from data.demo.make import make_demo
from tests.e2e.test_train import lines_of
from tests.hang import HANG_SECONDS

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "your-encoder.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.S | re.M)


def files() -> dict[str, str]:
    """Files of the page by the path in their first line."""
    found = [block.split("\n", 1) for language in ("python", "toml", "yaml") for block in blocks(language)]
    return {first.removeprefix("# "): rest for first, rest in found if first.startswith("# ")}


def written(folder: Path, name: str) -> Path:
    """A file of the page, in `folder`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(files()[name])
    return path


WORLDS = """
import contextlib, io, json, sys
from mimo_train.cli import main
results = []
for overrides in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["world", "my.yaml", *overrides])
    results.append((code, out.getvalue(), err.getvalue()))
assert "torch" not in sys.modules
print(json.dumps(results))
"""


def test_what_lies_in_the_working_directory_is_found_and_checked_without_torch(tmp_path):
    written(tmp_path, "my_encoder/spec.py")
    written(tmp_path, "my_encoder/model.py")
    config = written(tmp_path, "my.yaml")
    config.write_text(config.read_text().replace("family: squares", "family: my_encoder.spec:Squares"))
    cases = (
        ([], "2\n", ""),
        (["modules.images.layout.tp=2"], "", "modules.images.layout.tp: encoder.family my_encoder.spec:Squares"),
        (["modules.images.encoder.sides=8"], "", "modules.images.encoder.sides: unknown key. Did you mean side"),
    )
    command = [sys.executable, "-P", "-c", WORLDS, json.dumps([overrides for overrides, *_ in cases])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    for (_, printed, complaint), (code, out, err) in zip(cases, json.loads(done.stdout), strict=True):
        assert out == printed and complaint in err, err
        assert (code == 0) == (not complaint) and "Traceback" not in err


def test_the_page_does_what_it_says(tmp_path):
    source, site, work = tmp_path / "source", tmp_path / "site", tmp_path / "work"
    for folder in (source, work):
        folder.mkdir()
    for name in files():
        written(work if name == "my.yaml" else source, name)
    install, commands = blocks("bash")
    assert install == "pip install .\n"
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation", "--no-deps", "--target", site]
    subprocess.run([*pip, "."], cwd=source, check=True, capture_output=True, timeout=HANG_SECONDS)
    shutil.rmtree(source)

    demo = make_demo(tmp_path / "digits", train_samples=200, held_out_samples=16, shards=2)
    with (work / "my.yaml").open("a") as config:  # the demo of the page, but smaller
        config.write(f"data: {{demo: '', shards: {demo}/train, validation_shards: {demo}/held_out}}\n")
    Image.new("RGB", (40, 40), "white").save(work / "digit.png")
    environment = os.environ | {
        "MIMO": str(REPOSITORY),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "OMP_NUM_THREADS": "1",
    }
    for command in commands.splitlines():
        done = subprocess.run(
            ["bash", "-c", command], cwd=work, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if "check" in command:
            assert "no faults" in done.stdout and "3 x 3" in done.stdout
    lines = [line for line in lines_of(work / "runs" / "mine") if "lm loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and lines[-1]["grad_norm"] > 0
    assert lines[-1]["lm loss"] < lines[0]["lm loss"]

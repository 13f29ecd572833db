"""Files of clusters: by the published models of their fields, and what they say of a run."""

import re

import pytest
import yaml

from mimo_train.cli import main
from mimo_train.config.run_files import shipped_configs
from mimo_train.launch.restarts import AGAIN, ANOTHER_MACHINE

FOUR = ["vlm_digits", "layout=images_dp2_language_dp2", "run.dir=/runs/a b"]
TWO_OF_TWO = ["--nodes", "2", "--gpus-per-node", "2"]
VOLUME = ["--set", "claim=runs", "--set", "mount=/runs"]
KUBERNETES = ["kubernetes", *FOUR, *TWO_OF_TWO, *VOLUME, "--set", "image=here/mimo:1"]
TRAINJOB = ["trainjob", *KUBERNETES[1:]]
SKYPILOT = ["skypilot", *FOUR, *TWO_OF_TWO, *VOLUME, "--set", "gpu=H100"]
CLUSTERS = pytest.mark.parametrize("cluster", [KUBERNETES, TRAINJOB, SKYPILOT], ids=["kubernetes", "trainjob", "sky"])


@pytest.fixture
def filled(capsys):
    """What the command writes, read back."""

    def filled(*arguments: str) -> list[dict]:
        assert main(["launch", "cluster", *arguments]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return filled


def require_same(model: type, manifest: dict) -> None:
    """Each key is one of the model, and of its type: what it does not know, it leaves out."""
    assert model.from_dict(manifest).to_dict() == manifest


def commented_options(name: str) -> str:
    """The template with every line that is commented out as an example in place."""
    lines = (shipped_configs() / "cluster" / f"{name}.yaml").read_text().splitlines()
    return "\n".join(re.sub(r"^( +)# (?=- |[\w/]+: )", r"\1", line) for line in lines)


def test_templates_are_what_kubernetes_and_kubeflow_take(filled, tmp_path):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (tmp_path / "mine.yaml").write_text(commented_options("kubernetes"))
    for template in ("kubernetes", str(tmp_path / "mine.yaml")):
        service, job = filled(template, *KUBERNETES[1:])
        require_same(models.IoK8sApiCoreV1Service, service)
        require_same(models.IoK8sApiBatchV1Job, job)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "rdma/ib" in container["resources"]["limits"] and container["securityContext"]
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(AssertionError):
        require_same(models.IoK8sApiBatchV1Job, job)
    (trainjob,) = filled(*TRAINJOB)
    require_same(models.TrainerV1alpha1TrainJob, trainjob)
    assert trainjob["spec"]["trainer"]["numNodes"] == trainjob["spec"]["trainer"]["numProcPerNode"] == 2
    assert trainjob["spec"]["trainer"]["command"] == container["command"]


def test_the_pods_of_a_job_find_each_other_and_start_again(filled):
    service, job = filled(*KUBERNETES, "--set", "name=digits")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert container["command"] == ["mimo-train", "launch", "here", *FOUR]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert (env["NNODES"], env["MASTER_ADDR"]) == ("2", "digits-0.digits")
    assert pod["subdomain"] == service["metadata"]["name"] == "digits"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["ports"][0]["port"] == int(env["MASTER_PORT"])
    assert spec["completions"] == spec["parallelism"] == 2
    assert env["MIMO_STOPPED_CODE"] == str(AGAIN)
    assert int(env["MIMO_GRACE_SECONDS"]) < pod["terminationGracePeriodSeconds"]
    handled = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"][:2]]
    assert handled == [[ANOTHER_MACHINE], [AGAIN]]


def test_the_examples_of_the_help_need_no_files(filled, capsys):
    with pytest.raises(SystemExit):
        main(["launch", "cluster", "--help"])
    examples = capsys.readouterr().out.partition("examples")[2].split("mimo-train launch cluster ")[1:]
    assert len(examples) == 2
    for example in examples:
        assert filled(*example.partition(" >")[0].replace("\\\n", " ").split())


def test_directories_of_the_pods_need_not_be_here(tmp_path, capsys):
    """Also where the config has no other sizes."""
    config = tmp_path / "mine.yaml"
    config.write_text(
        "pretrained: /models/qwen\nmodules:\n  images: {layout: {dp: 2}}\n  language: {layout: {tp: 2}}\n"
        "placement: {mode: shared}\ndata: {shards: /data/train, tokenizer: /models/qwen}\n"
    )
    arguments = ["launch", "cluster", "kubernetes", str(config), "--nodes", "1", *KUBERNETES[6:]]
    assert main(arguments) == 1
    assert "/models/qwen" in capsys.readouterr().err
    assert main([*arguments, "--without-data"]) == 0
    out, err = capsys.readouterr()
    assert "pretrained: /models/qwen is not on this machine" in err and len([*yaml.safe_load_all(out)]) == 2


@CLUSTERS
def test_a_run_dir_that_goes_with_its_machine_is_warned_about(cluster, capsys):
    for run_dir, checkpoints, words in (
        ("/runs/mine", "", ""),
        ("/runs2/mine", "", "begins again at step 0"),
        ("mine", "s3://bucket/mine", "checkpoints are in s3://bucket/mine"),
    ):
        assert main(["launch", "cluster", *cluster, f"run.dir={run_dir}", f"checkpoint.dir={checkpoints}"]) == 0
        err = capsys.readouterr().err
        assert words in err and (f"warning: run.dir is {run_dir}, which is not in" in err) == bool(words)


def test_a_task_of_skypilot(filled):
    (task,) = filled(*SKYPILOT)
    assert task["run"] == "scripts/train_vlm.sh vlm_digits layout=images_dp2_language_dp2 'run.dir=/runs/a b'"
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:2"
    assert task["volumes"] == {"/runs": "runs"}
    assert task["envs"]["MIMO_STOPPED_CODE"] == str(task["resources"]["job_recovery"]["recover_on_exit_codes"][0])
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml_config(task).num_nodes == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*KUBERNETES, "--gpus-per-node", "4"], ["--gpus-per-node is 4", "2 processes on each of 2"]),
        ([*KUBERNETES, "checkpoint.resume=none"], ["checkpoint.resume", "auto", "'none'"]),
        ([*KUBERNETES[:-1], "image=here mimo:1"], ["--set image: expected", "'here mimo:1'"]),
        (KUBERNETES[:-2], ["kubernetes.yaml needs image: add --set image=..."]),
        ([*KUBERNETES, "--set", "imagine=a"], ["--set imagine:", "has no ${imagine}", "image"]),
        ([*KUBERNETES, "--set", "nodes=3"], ["--set nodes: the run decides"]),
        (["slurm", *KUBERNETES[1:]], ["no template 'slurm'", "kubernetes, skypilot, trainjob"]),
    ],
)
def test_what_does_not_fit_is_told(arguments, words, capsys):
    assert main(["launch", "cluster", *arguments]) == 1
    out, err = capsys.readouterr()
    assert not out and all(word in err for word in words), err

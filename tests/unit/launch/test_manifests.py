"""Manifests of clusters: by the published models of their fields, and what they say of a run."""

import pytest
import yaml

from mimo_train.cli import main
from mimo_train.launch.requeue import AGAIN

FOUR = ["vlm_digits", "layout=images_dp2_language_dp2", "run.dir=/runs/a b"]
KUBERNETES = [*FOUR, "--nodes", "2", "--gpus-per-node", "2", "--image", "here/mimo:1", "--volume", "runs:/runs"]


@pytest.fixture
def rendered(capsys):
    """What a command writes, read back."""

    def rendered(*arguments: str) -> list[dict]:
        assert main(["launch", *arguments]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return rendered


def require_same(model: type, manifest: dict) -> None:
    """Each key is one of the model, and of its type: what it does not know, it leaves out."""
    assert model.from_dict(manifest).to_dict() == manifest


def test_a_job_and_its_service_are_what_kubernetes_takes(rendered):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    service, job = rendered("kubernetes", *KUBERNETES, "--folder", "/work")
    require_same(models.IoK8sApiCoreV1Service, service)
    require_same(models.IoK8sApiBatchV1Job, job)


def test_a_trainjob_is_what_kubeflow_takes(rendered):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (job,) = rendered("kubernetes", *KUBERNETES, "--as", "trainjob")
    require_same(models.TrainerV1alpha1TrainJob, job)
    assert job["spec"]["trainer"]["numNodes"] == job["spec"]["trainer"]["numProcPerNode"] == 2


def test_the_validation_sees_a_wrong_key(rendered):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, job = rendered("kubernetes", *KUBERNETES)
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(AssertionError):
        require_same(models.IoK8sApiBatchV1Job, job)


def test_the_pods_of_a_job_find_each_other_and_start_again(rendered):
    service, job = rendered("kubernetes", *KUBERNETES, "--name", "digits", "--restarts", "5")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert container["command"] == ["mimo-train", "launch", "here", *FOUR]
    assert (env["NNODES"], env["MASTER_ADDR"]) == ("2", "digits-0.digits")
    assert pod["subdomain"] == service["metadata"]["name"] == "digits"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert spec["completions"] == spec["parallelism"] == 2 and spec["backoffLimitPerIndex"] == 5
    assert (
        env["MIMO_STOPPED_CODE"] == str(AGAIN) and int(env["MIMO_GRACE_SECONDS"]) < pod["terminationGracePeriodSeconds"]
    )
    ignored = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"][:2]]
    assert ignored == [[16], [AGAIN]]


def test_without_gpus_none_are_asked_for(rendered):
    _, job = rendered("kubernetes", *FOUR, "--nodes", "2", "--gpus-per-node", "0", "--image", "a")
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"] == {}


def test_a_run_dir_that_goes_with_its_pod_is_warned_about(capsys):
    for run_dir, warned in (("/runs/mine", False), ("runs/mine", True), ("/runs2/mine", True)):
        assert main(["launch", "kubernetes", *KUBERNETES, f"run.dir={run_dir}"]) == 0
        assert (f"warning: run.dir is {run_dir}" in capsys.readouterr().err) == warned, run_dir


def test_a_task_of_skypilot(rendered):
    (task,) = rendered("skypilot", *FOUR, "--nodes", "2", "--accelerators", "H100:2")
    assert task["run"] == "scripts/train_vlm.sh vlm_digits layout=images_dp2_language_dp2 'run.dir=/runs/a b'"
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:2"
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml_config(task).num_nodes == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kubernetes", *KUBERNETES, "--gpus-per-node", "4"], ["--gpus-per-node is 4", "2 processes on each of 2"]),
        (["kubernetes", *KUBERNETES, "--nodes", "3"], ["needs 4 processes", "3 nodes"]),
        (["kubernetes", *KUBERNETES, "--name", "My_Run"], ["--name is 'My_Run'", "small letters"]),
        (["kubernetes", *KUBERNETES, "--volume", "runs"], ["--volume is runs: give", "a colon"]),
        (["kubernetes", *KUBERNETES, "--image", "here mimo:1"], ["--image is 'here mimo:1'"]),
        (["kubernetes", *KUBERNETES, "--image", ""], ["--image is ''"]),
        (["kubernetes", *KUBERNETES, "checkpoint.resume=none"], ["checkpoint.resume", "auto", "'none'"]),
        (
            ["skypilot", *FOUR, "checkpoint.resume=none", "--nodes", "2", "--accelerators", "H100:2"],
            ["checkpoint.resume", "auto", "'none'"],
        ),
        (
            ["kubernetes", *FOUR, "run.device=cuda", *KUBERNETES[3:], "--gpus-per-node", "0"],
            ["--gpus-per-node is 0", "run.device is cuda"],
        ),
        (["kubernetes", *KUBERNETES, "--as", "trainjob", "--restarts", "0"], ["--restarts is 0", "trainjob"]),
        (["kubernetes", *KUBERNETES, "--runtime", "mine"], ["--runtime is mine", "a job does not"]),
        (["skypilot", *FOUR, "--nodes", "2", "--accelerators", "H100"], ["--accelerators is 'H100'", "H100:8"]),
        (["skypilot", *FOUR, "--nodes", "1", "--accelerators", "H100:8"], ["4 processes on each of 1"]),
        (["kubernetes", *FOUR, "train.iters=-1", *KUBERNETES[3:]], ["train.iters"]),
    ],
)
def test_what_does_not_fit_is_told(arguments, words, capsys):
    assert main(["launch", *arguments]) == 1
    out, err = capsys.readouterr()
    assert not out and all(word in err for word in words), err

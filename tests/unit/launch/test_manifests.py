"""Manifests of clusters: by the published models of their fields, and what they say of a run."""

import subprocess

import pytest
import yaml

from mimo_train.cli import main
from mimo_train.launch.requeue import AGAIN

FOUR = ["vlm_digits", "layout=images_dp2_language_dp2", "run.dir=/runs/a b"]
KUBERNETES = [
    "kubernetes",
    *FOUR,
    "--nodes",
    "2",
    "--gpus-per-node",
    "2",
    "--image",
    "here/mimo:1",
    "--volume",
    "runs:/runs",
]
SKYPILOT = ["skypilot", *FOUR, "--nodes", "2", "--accelerators", "H100:2", "--volume", "shared:/runs"]


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
    service, job = rendered(*KUBERNETES, "--folder", "/work")
    require_same(models.IoK8sApiCoreV1Service, service)
    require_same(models.IoK8sApiBatchV1Job, job)


def test_a_trainjob_is_what_kubeflow_takes(rendered):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (job,) = rendered(*KUBERNETES, "--as", "trainjob")
    require_same(models.TrainerV1alpha1TrainJob, job)
    assert job["spec"]["trainer"]["numNodes"] == job["spec"]["trainer"]["numProcPerNode"] == 2


def options_of_pods(manifest: dict) -> dict:
    """The pod with its container, in a Job or in the patch of a TrainJob."""
    spec = manifest["spec"]
    if manifest["kind"] == "TrainJob":
        (replicated,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = replicated["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        return pod | container | {"env": spec["trainer"]["env"], "resources": spec["trainer"]["resourcesPerNode"]}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    return pod | container


@pytest.mark.parametrize(("form", "model"), [("job", "IoK8sApiBatchV1Job"), ("trainjob", "TrainerV1alpha1TrainJob")])
def test_what_pods_are_given(rendered, form, model):
    options = "--env A=b=c --secret KEY=wandb:api.key --pull-secret registry --cpus 96 --memory 900Gi --rdma rdma/ib=8"
    *_, manifest = rendered(*KUBERNETES, "--as", form, *options.split(), "--node-selector", "gpu.example/kind=h100")
    pod = options_of_pods(manifest)
    assert {"name": "A", "value": "b=c"} in pod["env"]
    assert {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api.key"}}} in pod["env"]
    limits = {"nvidia.com/gpu": "2", "cpu": "96", "memory": "900Gi", "rdma/ib": "8"}
    assert pod["resources"] == {"limits": limits}
    assert pod["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pod["nodeSelector"] == {"gpu.example/kind": "h100"} and pod["imagePullSecrets"] == [{"name": "registry"}]
    require_same(getattr(pytest.importorskip("kubeflow_trainer_api.models"), model), manifest)


@pytest.mark.parametrize("cluster", ["kubernetes", "skypilot"])
def test_the_example_of_the_help_needs_no_files(rendered, capsys, cluster):
    with pytest.raises(SystemExit):
        main(["launch", cluster, "--help"])
    example = capsys.readouterr().out.partition("example")[2].partition(f"mimo-train launch {cluster} ")[2]
    assert rendered(cluster, *example.partition(" >")[0].replace("\\\n", " ").split())


def test_directories_of_the_pods_need_not_be_here(tmp_path, rendered, capsys):
    """Also where the config has no other sizes."""
    config = tmp_path / "mine.yaml"
    config.write_text(
        "pretrained: /models/qwen\nmodules:\n  images: {layout: {dp: 2}}\n  language: {layout: {tp: 2}}\n"
        "placement: {mode: shared}\ndata: {shards: /data/train, tokenizer: /models/qwen}\n"
    )
    arguments = ["kubernetes", str(config), "--nodes", "1", *KUBERNETES[6:]]
    assert main(["launch", *arguments]) == 1
    assert "add --without-data" in capsys.readouterr().err
    assert main(["launch", *arguments, "--without-data"]) == 0
    out, err = capsys.readouterr()
    assert "pretrained: /models/qwen is not on this machine" in err and len([*yaml.safe_load_all(out)]) == 2


def test_the_validation_sees_a_wrong_key(rendered):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    _, job = rendered(*KUBERNETES)
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(AssertionError):
        require_same(models.IoK8sApiBatchV1Job, job)


def test_the_pods_of_a_job_find_each_other_and_start_again(rendered):
    service, job = rendered(*KUBERNETES, "--name", "digits", "--restarts", "5")
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


CLUSTERS = pytest.mark.parametrize("cluster", [KUBERNETES, SKYPILOT], ids=["kubernetes", "skypilot"])


@CLUSTERS
def test_a_run_dir_that_goes_with_its_machine_is_warned_about(cluster, capsys):
    for run_dir, warned in (("/runs/mine", False), ("runs/mine", True), ("/runs2/mine", True)):
        assert main(["launch", *cluster, f"run.dir={run_dir}"]) == 0
        assert (f"warning: run.dir is {run_dir}, which is on no --volume" in capsys.readouterr().err) == warned, run_dir


@CLUSTERS
def test_checkpoints_in_object_storage_are_not_said_to_be_lost(cluster, capsys):
    assert main(["launch", *cluster, "run.dir=mine", "checkpoint.dir=s3://bucket/mine"]) == 0
    err = capsys.readouterr().err
    assert "logs and metrics are gone" in err and "checkpoints are in s3://bucket/mine" in err and "step 0" not in err


def test_a_relative_run_dir_is_in_the_working_directory(capsys):
    assert main(["launch", *KUBERNETES, "run.dir=mine", "--folder", "/runs"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_task_of_skypilot(rendered):
    (task,) = rendered(*SKYPILOT)
    assert task["run"] == "scripts/train_vlm.sh vlm_digits layout=images_dp2_language_dp2 'run.dir=/runs/a b'"
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:2"
    assert task["volumes"] == {"/runs": "shared"} == rendered(*SKYPILOT[:-1], "shared:/runs/")[0]["volumes"]
    assert "remote" in task["envs"]["MIMO_EXTRAS"], "for checkpoint.dir in object storage"
    assert "volumes" not in rendered(*SKYPILOT[:-2])[0]
    sky = pytest.importorskip("sky")
    assert sky.Task.from_yaml_config(task).num_nodes == 2


def test_what_skypilot_sets_up_has_python_from_uv_where_there_is_none(rendered, tmp_path):
    """On a machine as its clouds have them: an older Python, and uv in ~/.local/bin."""
    (task,) = rendered(*SKYPILOT)
    tools = tmp_path / ".local" / "bin"
    tools.mkdir(parents=True)
    (tools / "uv").write_text('#!/bin/sh\necho "uv $*"; ln -s /bin/true "$HOME/.local/bin/python3.12"\n')
    (tools / "bash").write_text('#!/bin/sh\necho "bash $*, $(command -v python3.12)"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    (tmp_path / "ln").symlink_to("/bin/ln")
    machine = {"HOME": str(tmp_path), "PATH": str(tmp_path)}

    def set_up() -> list[str]:
        done = subprocess.run(["/bin/sh", "-ec", task["setup"]], env=machine, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    last = f"bash -c . scripts/env.sh, {tools}/python3.12"
    assert set_up() == ["uv python install 3.12", last]
    assert set_up() == [last], "it is there"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*KUBERNETES, "--gpus-per-node", "4"], ["--gpus-per-node is 4", "2 processes on each of 2"]),
        ([*KUBERNETES, "--nodes", "3"], ["needs 4 processes", "3 nodes"]),
        ([*KUBERNETES, "--name", "My_Run"], ["--name is 'My_Run'", "small letters"]),
        ([*KUBERNETES, "--volume", "runs"], ["--volume is runs: give", "a colon"]),
        ([*SKYPILOT, "--volume", "other:/"], ["--volume is other:/: give its name"]),
        ([*SKYPILOT, "--volume", "other:/runs"], ["--volume is other:/runs, and shared is mounted at /runs"]),
        ([*KUBERNETES, "--image", "here mimo:1"], ["--image is 'here mimo:1'"]),
        ([*KUBERNETES, "--image", ""], ["--image is ''"]),
        ([*KUBERNETES, "checkpoint.resume=none"], ["checkpoint.resume", "auto", "'none'"]),
        (
            [*SKYPILOT, "checkpoint.resume=none"],
            ["checkpoint.resume", "auto", "'none'"],
        ),
        (
            ["kubernetes", *FOUR, "run.device=cuda", *KUBERNETES[4:], "--gpus-per-node", "0"],
            ["--gpus-per-node is 0", "run.device is cuda"],
        ),
        (
            ["kubernetes", *FOUR, "run.device=cpu", *KUBERNETES[4:]],
            ["--gpus-per-node is 2, and run.device is cpu", "give --gpus-per-node 0, or run.device=auto"],
        ),
        (
            ["skypilot", *FOUR, "run.device=cpu", *SKYPILOT[4:]],
            ["--accelerators is H100:2, and run.device is cpu", "give run.device=auto"],
        ),
        ([*KUBERNETES, "--as", "trainjob", "--restarts", "0"], ["--restarts is 0", "trainjob"]),
        ([*KUBERNETES, "--runtime", "mine"], ["--runtime is mine", "a job does not"]),
        (["skypilot", *FOUR, "--nodes", "2", "--accelerators", "H100"], ["--accelerators is 'H100'", "H100:8"]),
        (["skypilot", *FOUR, "--nodes", "1", "--accelerators", "H100:8"], ["4 processes on each of 1"]),
        (["kubernetes", *FOUR, "train.iters=-1", *KUBERNETES[4:]], ["train.iters"]),
        ([*KUBERNETES, "--env", "A"], ["--env: expected for example", "got 'A'"]),
        ([*KUBERNETES, "--env", "NNODES=3"], ["--env: NNODES is set by the manifest"]),
        ([*KUBERNETES, "--env", "A=1", "--env", "A=2"], ["--env: A is given twice"]),
        ([*KUBERNETES, "--secret", "A=b"], ["--secret: expected for example WANDB_API_KEY=wandb:key"]),
        ([*KUBERNETES, "--memory", "512"], ["--memory must be a number with its unit"]),
        ([*KUBERNETES, "--rdma", "ib=8"], ["--rdma: expected for example rdma/ib=8"]),
        ([*KUBERNETES, "--node-selector", "a b=c"], ["--node-selector: expected"]),
    ],
)
def test_what_does_not_fit_is_told(arguments, words, capsys):
    assert main(["launch", *arguments]) == 1
    out, err = capsys.readouterr()
    assert not out and all(word in err for word in words), err

"""containers/: the image is built and trains, and the manifests are rendered, validated and run (kubernetes_lab.py)."""

import json
import os
import re
import shutil
import subprocess
import sys

import kubernetes_lab as lab
import pytest
from helpers import ROOT, SCRIPTS, difference, train

FOLDER = ROOT / "containers/kubernetes"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.yaml-template"))
EXPORTED = dict(re.findall(r"^export (\w+)=(\S*)", (ROOT / "containers/README.md").read_text(), re.M))
VARIABLES = EXPORTED | {"JOB_NAME": "job", "IMAGE_URI": "ddp:1"}
pytestmark = pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())


def rendered(template, **changes):
    """Return the documents of a template, with the variables that README.md exports."""
    done = lab.render(FOLDER / template, VARIABLES | changes)
    assert done.returncode == 0, done.stderr
    return lab.parse(done.stdout)


def all_documents():
    return [*lab.parse((FOLDER / "etcd.yaml").read_text()), *(part for name in TEMPLATES for part in rendered(name))]


# The real Enroot has no package: a stand-in writes the image and, as Enroot does, refuses to overwrite one, and removes
# the container of podman:// with docker.
ENROOT = """#!/bin/bash
[ "$1$2" = import--output -a ! -e "$3" ] && printf %s "$4" >"$3" || exit 9
[[ $4 != podman://* ]] || docker rm || exit 8
"""


@pytest.mark.parametrize("arguments, then, content", [
    ([], "", f"docker://{lab.OFFICIAL_IMAGE}"), (["podman://ddp:1", "mine.sqsh"], "", "podman://ddp:1"),
    ([], "exit 1", "old"), ([], "kill -TERM $PPID; sleep 1", "old"),
])
def test_an_enroot_image_is_only_replaced_by_a_complete_one(tmp_path, arguments, then, content):
    tools, output = tmp_path / "bin", tmp_path / "work" / (arguments or ["", "pytorch.sqsh"])[1]
    for file, text in {tools / "enroot": ENROOT + then, tools / "podman": "#!/bin/sh\n", output: "old"}.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    done = subprocess.run(["bash", ROOT / "containers/create-enroot-image.sh", *arguments], cwd=output.parent,
                          env={"PATH": f"{tools}:{os.environ['PATH']}"})
    assert (done.returncode == 0) is (not then)
    assert os.listdir(output.parent) == [output.name] and output.read_text() == content


# --- rendering ---
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_unset_variable_is_named_and_nothing_is_written(template):
    used = set(re.findall(r"[$]([A-Z_]+)", (FOLDER / template).read_text())) - {"RDZV_ID", "BACKOFF_LIMIT"}
    assert {"JOB_NAME", "CLAIM_NAME", "ARGS"} <= used <= set(EXPORTED), "README.md explains every variable"
    for name in used - {"ARGS"}:
        done = lab.render(FOLDER / template, {key: value for key, value in VARIABLES.items() if key != name})
        assert done.returncode != 0 and done.stdout == "" and f"export {name}" in done.stderr, done.stderr


# --- validation ---
# Kubeflow's and Kubernetes' own models read the documents and write them, without unknown fields and wrong types.
READ_AND_WRITE = """
import json, sys, types
from kubeflow.training import ApiClient
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
for document in json.load(sys.stdin):
    if document["kind"] == "TrainJob":
        written = TrainerV1alpha1TrainJob.from_dict(document).to_dict()
    else:
        model = {"PyTorchJob": "KubeflowOrgV1PyTorchJob"}.get(document["kind"], "V1" + document["kind"])
        read = ApiClient().deserialize(types.SimpleNamespace(data=json.dumps(document)), model)
        written = ApiClient().sanitize_for_serialization(read)
    print(json.dumps(written))
"""


def test_every_manifest_is_valid(tmp_path):
    def written(documents):
        lines = lab.sh(sys.executable, "-c", READ_AND_WRITE, input=json.dumps(documents), env={"PYTHONPATH": tmp_path})
        return [json.loads(line) for line in lines.splitlines()]

    lab.sh(sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", tmp_path, "kubeflow-training",
           "kubeflow-trainer-api", timeout=200)
    documents = all_documents()
    assert {f'{part["apiVersion"]}/{part["kind"]}' for part in documents} == {"v1/Pod", "v1/Service",
        "apps/v1/Deployment", "kubeflow.org/v1/PyTorchJob", "trainer.kubeflow.org/v1alpha1/TrainJob"}
    assert written(documents) == documents
    wrong = json.loads(json.dumps(documents).replace("fsGroup", "fsgroup"))
    assert [one["kind"] for one, other in zip(wrong, written(wrong)) if one == other] == ["Service"]


def test_pods_are_restricted_and_do_not_share_a_store():
    for name, pod, _ in lab.pods_of(all_documents()):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["fsGroup"] == 1001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert name == "etcd" or {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        env = {variable["name"]: variable["value"] for variable in container.get("env", [])}
        assert env.get("PET_RDZV_BACKEND") != "c10d" or env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        timeout = int(env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
        assert "torchrun" not in str(container) or 30 < timeout < pod["terminationGracePeriodSeconds"]


# --- running, with the image of the Dockerfile ---
@pytest.fixture(scope="module")
def images(tmp_path_factory):
    image, base = lab.build_images(tmp_path_factory.mktemp("images"))
    etcd = ["--volume", f"{shutil.which('etcd')}:/usr/local/bin/etcd:ro", base]
    yield {VARIABLES["IMAGE_URI"]: [image], lab.OFFICIAL_IMAGE: [base], "quay.io/coreos/etcd:v3.5.16": etcd}
    lab.sh("podman", "rmi", "--force", image)


@pytest.fixture
def cluster(images, tmp_path):
    cluster = lab.Cluster(tmp_path, images)
    yield cluster
    cluster.close()


def test_the_image_holds_the_scripts_and_trains_without_root(images):
    (image,) = images[VARIABLES["IMAGE_URI"]]
    command = lab.podman_run("--rm", "--network", "none", image)
    files = lab.sh(*command, "sh", "-c", "test $(id -u) = 1001 && touch ~/writable && find . -type f").split()
    assert sorted(files) == sorted(f"./{script}/train.py" for script in SCRIPTS)
    output = lab.sh(*command, timeout=180)
    assert "world size 2 " in output and float(re.search(r"error of a learned weight: ([\d.]+)", output)[1]) < 0.02


def starts_of(pods):
    """Return (processes, threads, first step, last step) of each start of the training, in order of the steps."""
    text = "\n".join(pod.log.read_text() for pod in pods)
    headers = re.findall(r"(?:world size (\d+) on cpu|GPUs none), threads (\d+) .* steps (\d+) to (\d+)$", text, re.M)
    return sorted((tuple(int(number or 1) for number in header) for header in headers), key=lambda start: start[2])


def wait_briefly(documents):
    """Let the pods of a PyTorchJob wait for others for five seconds, not five minutes."""
    (setting,) = documents[0]["spec"]["elasticPolicy"]["rdzvConf"]
    assert setting == {"key": "last_call_timeout", "value": "300"}
    setting["value"] = "5"
    return documents


def assert_learned(cluster, pods, name, script):
    """All pods have completed the job's last step, with the result of a run without losses."""
    cluster.wait(pods)
    text = "\n".join(pod.log.read_text() for pod in pods)
    assert cluster.checkpoint(name)["step"] == starts_of(pods)[-1][3] > 0
    result = float(re.findall(r"(?:error of a learned weight:|test accuracy) ([\d.]+)", text)[-1])
    assert result < 0.02 if script == "cpu_ddp" else result > 0.8


@pytest.mark.parametrize("template, script, epochs, arguments, victim", [
    ("pytorchjob-simple", "synthetic_ddp", 40, "", 0),  # it hosts the rendezvous
    ("trainjob", "fashionmnist_ddp", 8, "--fake-data", 0),
    ("pod", "mnist_dp", 8, "--fake-data", 0),
])
def test_a_job_completes_after_the_loss_of_a_pod(cluster, template, script, epochs, arguments, victim):
    (cluster.folder / "job").mkdir()
    shutil.copy(ROOT / script / "train.py", cluster.folder / "job")  # the ConfigMap of pytorchjob-simple
    pods = cluster.apply(rendered(f"{template}.yaml-template", SCRIPT=script, EPOCHS=epochs, ARGS=arguments))
    cluster.wait(pods, until=lambda: cluster.checkpoint("job")["step"] > 0)
    lost_at = cluster.checkpoint("job")["step"]
    pods[victim].lose()
    pods[victim].come_back()
    assert_learned(cluster, pods, "job", script)
    first, *others = starts_of(pods)
    assert first[2] == 0 and others and lost_at <= others[-1][2] and 0 not in [start[2] for start in others]
    assert {start[:2] for start in starts_of(pods)} == {(len(pods), 1)}, "as many threads as the limit allows"


def test_pods_come_back_or_are_lost_for_good_and_the_global_batch_stays(cluster, tmp_path):
    documents = rendered("pytorchjob.yaml-template", NUM_NODES=3, EPOCHS=50, ARGS="--batch-size=11 --save-every=2")
    assert documents[0]["spec"]["runPolicy"]["backoffLimit"] == 60
    pods = cluster.apply(wait_briefly(documents))

    def training(times):
        """Return whether all three have started so often, and saved a checkpoint since."""
        starts = starts_of(pods)
        return [start[0] for start in starts].count(3) == times and cluster.checkpoint("job")["step"] > starts[-1][2]

    cluster.wait(pods, until=lambda: training(1))
    pods[1].lose("TERM")
    pods[1].come_back()
    cluster.wait(pods, until=lambda: training(2))
    pods[2].lose()
    assert_learned(cluster, pods[:2], "job", "cpu_ddp")
    assert not any(pod.restarts for pod in pods), "pods continue when another one is lost"
    assert starts_of(pods)[-1][0] == 2 and cluster.checkpoint("job")["global_batch"] == 33
    train("cpu_ddp", "--epochs", 50, "--batch-size", 33, "--checkpoint", tmp_path / "undisturbed")
    assert difference(cluster.claim / "job.pt", tmp_path / "undisturbed") < 1e-5


def test_a_job_that_cannot_work_is_failed_and_explains_itself_until_then(cluster):
    ((name, spec, _),) = lab.pods_of(rendered("pytorchjob.yaml-template", NUM_NODES=1, ARGS="--bogus"))
    pod = lab.Pod(cluster, name, spec, backoff_limit=1)  # `kubectl get pods` shows the first restart
    cluster.wait([pod], until=lambda: "unrecognized arguments: --bogus" in pod.log.read_text())
    with pytest.raises(AssertionError, match="Failed"):
        cluster.wait([pod], timeout=180)


def test_with_etcd_any_pod_may_be_lost_for_good_and_the_next_job_runs(cluster):
    cluster.apply(lab.parse((FOLDER / "etcd.yaml").read_text()))
    pods = cluster.apply(wait_briefly(rendered("pytorchjob-etcd.yaml-template", EPOCHS=100, ARGS="--save-every=2")))
    cluster.wait(pods, until=lambda: cluster.checkpoint("job")["step"] > 0)
    pods[0].lose()
    assert_learned(cluster, pods[1:], "job", "cpu_ddp")
    assert [start[0] for start in starts_of(pods)] == [2, 1] and not pods[1].restarts

    pods = cluster.apply(rendered("pytorchjob-etcd.yaml-template", JOB_NAME="next", EPOCHS=50))
    assert_learned(cluster, pods, "next", "cpu_ddp")
    assert [start[0] for start in starts_of(pods)] == [2]

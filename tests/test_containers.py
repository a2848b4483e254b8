"""containers/: the image is built and trains, and the manifests are rendered, validated and run (kubernetes_lab.py)."""

import json
import os
import re
import shutil
import subprocess
import sys

import kubernetes_lab as lab
import pytest
from helpers import ROOT, SCRIPTS

FOLDER = ROOT / "containers/kubernetes"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.yaml-template"))
EXPORTED = dict(re.findall(r"^export (\w+)=(\S*)", (ROOT / "containers/README.md").read_text(), re.M))
VARIABLES = EXPORTED | {"JOB_NAME": "job", "IMAGE_URI": "ddp:1", "CPU_PER_NODE": "1"}
pytestmark = pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())


def rendered(template, **changes):
    """Return the documents of a template, with the variables that README.md exports."""
    done = lab.render(FOLDER / template, VARIABLES | changes)
    assert done.returncode == 0, done.stderr
    return lab.parse(done.stdout)


def all_documents():
    return [*lab.parse((FOLDER / "etcd.yaml").read_text()), *(part for name in TEMPLATES for part in rendered(name))]


# Enroot cannot be installed here: a stand-in writes the image, and refuses to overwrite one as Enroot does.
@pytest.mark.parametrize("arguments, then, content", [
    ([], "", f"docker://{lab.OFFICIAL_IMAGE}"), (["podman://ddp:1", "mine.sqsh"], "", "podman://ddp:1"),
    ([], "exit 1", "old"), ([], "kill -TERM $PPID; sleep 1", "old"),
])
def test_an_enroot_image_is_only_replaced_by_a_complete_one(tmp_path, arguments, then, content):
    enroot, output = tmp_path / "bin/enroot", tmp_path / "work" / (arguments or ["", "pytorch.sqsh"])[1]
    for file, text in {enroot: f'#!/bin/sh\n[ "$1$2" = import--output -a ! -e "$3" ] || exit 9\n'
                               f'printf %s "$4" >"$3"\n{then}\n', output: "old"}.items():
        file.parent.mkdir()
        file.write_text(text)
    enroot.chmod(0o755)
    done = subprocess.run(["bash", ROOT / "containers/create-enroot-image.sh", *arguments], cwd=output.parent,
                          env={"PATH": f"{enroot.parent}:{os.environ['PATH']}"})
    assert (done.returncode == 0) is (not then)
    assert os.listdir(output.parent) == [output.name] and output.read_text() == content


# --- rendering ---
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_unset_variable_is_named_and_nothing_is_written(template):
    used = set(re.findall(r"[$]([A-Z_]+)", (FOLDER / template).read_text())) - {"RDZV_ID"}
    assert {"JOB_NAME", "CLAIM_NAME", "ARGS"} <= used <= set(EXPORTED), "README.md explains every variable"
    for name in used - {"ARGS"}:
        done = lab.render(FOLDER / template, {key: value for key, value in VARIABLES.items() if key != name})
        assert done.returncode != 0 and done.stdout == "" and f"export {name}" in done.stderr, done.stderr


# --- validation ---
PATCH = "spec.runtimePatches[].trainingRuntimeSpec.template.spec.replicatedJobs[]"
POD = f"{PATCH}.template.spec.template.spec"
FIELDS = {  # the fields of the custom kinds that the manifests use, with their types; all others are wrong
    "PyTorchJob": {
        "apiVersion": "kubeflow.org/v1", "kind": str, "metadata.name": str,
        "spec.nprocPerNode": str, "spec.elasticPolicy.rdzvBackend": str, "spec.elasticPolicy.rdzvHost": str,
        "spec.elasticPolicy.rdzvPort": int, "spec.elasticPolicy.rdzvId": str, "spec.elasticPolicy.minReplicas": int,
        "spec.elasticPolicy.maxReplicas": int, "spec.elasticPolicy.maxRestarts": int,
        "spec.runPolicy.backoffLimit": int, "spec.pytorchReplicaSpecs.Worker.replicas": int,
        "spec.pytorchReplicaSpecs.Worker.restartPolicy": str, "spec.pytorchReplicaSpecs.Worker.template.spec": dict},
    "TrainJob": {  # of a pod, a patch may change the last six fields only
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": str, "metadata.name": str,
        "spec.runtimeRef.name": str, "spec.trainer.image": str, "spec.trainer.numNodes": int,
        "spec.trainer.numProcPerNode": int, "spec.trainer.command": list, "spec.trainer.args": list,
        "spec.trainer.resourcesPerNode": dict, "spec.runtimePatches[].manager": str, f"{PATCH}.name": str,
        f"{POD}.nodeSelector": dict, f"{POD}.securityContext": dict, f"{POD}.volumes": list,
        f"{POD}.containers[].name": str, f"{POD}.containers[].securityContext": dict,
        f"{POD}.containers[].volumeMounts": list},
}


def wrong_fields(value, fields, path=""):
    if path in fields:
        return [] if fields[path] in (type(value), value) else [path]
    if isinstance(value, dict):
        return [wrong for key in value for wrong in wrong_fields(value[key], fields, f"{path}.{key}".strip("."))]
    if isinstance(value, list):
        return [wrong for item in value for wrong in wrong_fields(item, fields, f"{path}[]")]
    return [path]


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Return a function that returns what is wrong with documents, strictly.

    kubernetes-validate is installed into a folder of its own: its dependencies are not the project's. The pods of
    custom kinds are validated as the operators make them.
    """
    folder = tmp_path_factory.mktemp("validate")
    lab.sh(sys.executable, "-m", "pip", "install", "-q", "--target", folder, "kubernetes-validate", timeout=200)

    def validate(documents):
        custom = [document for document in documents if document["kind"] in FIELDS]
        wrong = [field for document in custom for field in wrong_fields(document, FIELDS[document["kind"]])]
        pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
                for name, spec in lab.pods_of(custom if not wrong else [])]
        file = folder / "documents.yaml"
        file.write_text("---\n".join(json.dumps(part) + "\n" for part in documents + pods if part not in custom))
        done = subprocess.run([sys.executable, "-m", "kubernetes_validate", "--strict", file],
                              env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)
        return "\n".join(wrong) + (done.stdout + done.stderr if done.returncode else "")
    return validate


def test_every_manifest_is_valid(problems):
    documents = all_documents()
    assert {part["kind"] for part in documents} == {"PyTorchJob", "TrainJob", "Pod", "Service", "Deployment"}
    assert not problems(documents)


@pytest.mark.parametrize("template, old, new", [
    ("pytorchjob.yaml-template", "maxRestarts", "maxRestart"),
    ("pytorchjob.yaml-template", '"nprocPerNode": "1"', '"nprocPerNode": 1'),
    ("pytorchjob.yaml-template", "mountPath", "path"),
    ("trainjob.yaml-template", '"securityContext"', '"tolerations"'),
    ("pod.yaml-template", "runAsNonRoot", "runAsNonroot"),
])
def test_the_validation_finds_a_wrong_field(problems, template, old, new):
    text = json.dumps(rendered(template))
    assert old in text and problems(json.loads(text.replace(old, new)))


def test_pods_are_restricted():
    for name, pod in lab.pods_of(all_documents()):
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["fsGroup"] == 1001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert name == "etcd" or {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


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
    assert sorted(files) == sorted([f"./{script}/train.py" for script in SCRIPTS] + ["./slurm/requirements.txt"])
    output = lab.sh(*command, timeout=180)
    assert "2 processes" in output and float(re.search(r"error of a learned weight: ([\d.]+)", output)[1]) < 0.02


def starts_of(pods):
    """Return (processes, threads, first step, last step) of each start of the training, in order of the steps."""
    text = "\n".join(pod.log.read_text() for pod in pods)
    headers = re.findall(r"(?:(\d+) processes on cpu|CPU), (\d+) threads.* steps (\d+) to (\d+)$", text, re.M)
    return sorted((tuple(int(number or 1) for number in header) for header in headers), key=lambda start: start[2])


def assert_learned(cluster, pods, name, script):
    """All pods have completed the job's last step, with the result of a run without losses."""
    cluster.wait(pods)
    text = "\n".join(pod.log.read_text() for pod in pods)
    assert cluster.step(name) == starts_of(pods)[-1][3] > 0
    if script == "cpu_ddp":
        assert float(re.findall(r"error of a learned weight: ([\d.]+)", text)[-1]) < 0.02
    else:
        assert float(re.findall(r"test accuracy ([\d.]+)", text)[-1]) > 0.8


@pytest.mark.parametrize("template, script, epochs, arguments, victims", [
    ("pytorchjob", "cpu_ddp", 100, "--save-every=2", [1, 0]),  # pod 0 hosts the rendezvous
    ("pytorchjob-simple", "synthetic_ddp", 40, "", [1]),
    ("trainjob", "fashionmnist_ddp", 8, "--fake-data", [0]),
    ("pod", "mnist_dp", 8, "--fake-data", [0]),
])
def test_a_job_completes_after_the_loss_of_pods(cluster, template, script, epochs, arguments, victims):
    (cluster.folder / "job").mkdir()
    shutil.copy(ROOT / script / "train.py", cluster.folder / "job")  # the ConfigMap of pytorchjob-simple
    pods = cluster.apply(rendered(f"{template}.yaml-template", SCRIPT=script, EPOCHS=epochs, ARGS=arguments))
    lost_at = 0
    for victim in victims:
        cluster.wait(pods, until=lambda: cluster.step("job") > lost_at)
        lost_at = cluster.step("job")
        if victim == 0 and template == "pytorchjob":
            assert pods[0].starts == 1, "pod 0 continues when pod 1 is lost"
        pods[victim].lose()
        pods[victim].come_back()
    assert_learned(cluster, pods, "job", script)
    starts = starts_of(pods)
    assert starts[0][2] == 0 and lost_at <= starts[-1][2] and 0 not in [start[2] for start in starts[1:]]
    assert template == "pod" or starts[0][0] == starts[-1][0] == 2
    assert {start[1] for start in starts} == {1}, "as many threads as the limit allows"


def test_with_etcd_any_pod_may_be_lost_for_good_and_the_next_job_runs(cluster):
    cluster.apply(lab.parse((FOLDER / "etcd.yaml").read_text()))
    pods = cluster.apply(rendered("pytorchjob-etcd.yaml-template", EPOCHS=100, ARGS="--save-every=2"))
    cluster.wait(pods, until=lambda: cluster.step("job") > 0)
    pods[0].lose()
    assert_learned(cluster, pods[1:], "job", "cpu_ddp")
    assert [start[0] for start in starts_of(pods)] == [2, 1] and pods[1].starts == 1

    pods = cluster.apply(rendered("pytorchjob-etcd.yaml-template", JOB_NAME="next", EPOCHS=50))
    assert_learned(cluster, pods, "next", "cpu_ddp")
    assert [start[0] for start in starts_of(pods)] == [2]

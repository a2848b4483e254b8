"""The manifests in containers/kubernetes are rendered, validated strictly and run: see kubernetes_lab.py."""

import difflib
import json
import os
import re
import subprocess
import sys

import kubernetes_lab as lab
import pytest
import torch

FOLDER = lab.ROOT / "containers/kubernetes"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.yaml-template"))
ELASTIC = [name for name in TEMPLATES if name.startswith("pytorchjob")]
VARIABLES = dict(JOB_NAME="my-job", SCRIPT="cpu_ddp", EPOCHS=50, ARGS="", IMAGE_URI="registry/ddp:1", INSTANCE_TYPE="ml.m5.2xlarge",
                 NUM_NODES=2, WORKERS_PER_NODE=1, CPU_PER_NODE=2, MEMORY_PER_NODE="2Gi", GPU_PER_NODE=0, CLAIM_NAME="fsx-claim")


def rendered(template, **changes):
    """The documents of a template."""
    lab.skip_without("envsubst", "yq")
    done = lab.render(FOLDER / template, **{**VARIABLES, **changes})
    assert done.returncode == 0, done.stderr
    return lab.parse(done.stdout)


def all_documents():
    return [document for name in TEMPLATES for document in rendered(name)] + lab.parse((FOLDER / "etcd.yaml").read_text())


# --- rendering ---
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_unset_or_empty_variable_is_named_and_nothing_is_written(template):
    lab.skip_without("envsubst")
    used = set(re.findall(r"[$]([A-Z_]+)", (FOLDER / template).read_text())) - {"RDZV_ID"}
    assert used <= set(VARIABLES) and len(used) >= 8
    for name in used:
        for value in [None] + [""] * (name != "ARGS"):
            done = lab.render(FOLDER / template, **{**VARIABLES, name: value})
            assert done.returncode != 0 and done.stdout == ""
            assert re.findall(r"[A-Z_]{4,}", done.stderr.replace("README", "")) == [name], done.stderr


def test_render_mistakes_are_one_line(tmp_path):
    lab.skip_without("envsubst")
    (tmp_path / "plain.yaml").write_text("kind: Pod\n")
    for arguments in ([], ["a", "b"], [tmp_path / "absent"], [tmp_path / "plain.yaml"]):
        done = subprocess.run(["bash", FOLDER / "render.sh", *arguments], capture_output=True, text=True, timeout=30)
        assert done.returncode != 0 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    for arguments in "--fresh", "--samples=64 --fresh --seed=1":
        done = lab.render(FOLDER / "pod.yaml-template", **{**VARIABLES, "ARGS": arguments})
        assert done.returncode != 0 and done.stdout == "" and "another JOB_NAME" in done.stderr, done.stderr


@pytest.mark.parametrize("template", TEMPLATES)
def test_gpus_are_a_variable(template):
    for name, _, pod in lab.pods_of(rendered(template, GPU_PER_NODE=4, WORKERS_PER_NODE=4)):
        container = lab.container_of(pod)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == container["resources"]["requests"]["nvidia.com/gpu"] == 4
        assert template == "pod.yaml-template" or {"name": "PET_NPROC_PER_NODE", "value": "4"} in container["env"]


def test_the_variants_of_the_pytorchjob_differ_in_little():
    """They are copies, so that each can be read alone."""
    plain = (FOLDER / "pytorchjob.yaml-template").read_text().split("apiVersion", 1)[1].splitlines()
    for name, most in {"pytorchjob-etcd.yaml-template": 10, "pytorchjob-simple.yaml-template": 12}.items():
        lines = (FOLDER / name).read_text().split("apiVersion", 1)[1].splitlines()
        changed = [line for line in difflib.ndiff(plain, lines) if line[0] in "+-"]
        assert 0 < len(changed) <= most, changed


def test_the_readme_sets_every_variable():
    lab.skip_without("envsubst")
    exports = "\n".join(re.findall(r"^export (?!AWS|ACCOUNT|REGISTRY).*", (lab.ROOT / "containers/README.md").read_text(), re.M))
    for template in TEMPLATES:
        command = f'REGISTRY=registry\n{exports}\nexec bash "$0" "$1"'
        done = subprocess.run(["bash", "-c", command, FOLDER / "render.sh", FOLDER / template], env={"PATH": os.environ["PATH"]},
                              capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 and "name: cpu-ddp\n" in done.stdout, done.stderr


# --- validation ---
NUMBER, TEXT, ANY = int, str, object
FIELDS = {  # of the custom kinds, as far as the manifests use them; what is not here is wrong
    "PyTorchJob": ("kubeflow.org/v1", {
        "nprocPerNode": TEXT,
        "elasticPolicy": {"rdzvBackend": ("c10d", "etcd"), "rdzvHost": TEXT, "rdzvPort": NUMBER, "rdzvId": TEXT,
                          "minReplicas": NUMBER, "maxReplicas": NUMBER, "maxRestarts": NUMBER},
        "runPolicy": {"backoffLimit": NUMBER},
        "pytorchReplicaSpecs": {"Worker": {"replicas": NUMBER, "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
                                           "template": {"spec": ANY}}}}),  # a pod's: see pod_templates
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", {
        "runtimeRef": {"name": TEXT},
        "trainer": {"image": TEXT, "numNodes": NUMBER, "numProcPerNode": NUMBER, "command": [TEXT], "args": [TEXT], "resourcesPerNode": ANY},
        "runtimePatches": [{"manager": TEXT, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
            {"name": TEXT, "template": {"spec": {"template": {"spec": {
                # A runtime patch may change these of a pod, and no others; `env` of the container `node` not either.
                "nodeSelector": ANY, "securityContext": ANY, "volumes": ANY,
                "containers": [{"name": TEXT, "securityContext": ANY, "volumeMounts": ANY}]}}}}}]}}}}]}),
}


def wrong_fields(value, fields, path=""):
    if isinstance(fields, dict):
        if not isinstance(value, dict):
            return [f"{path} is no object"]
        return [problem for key in value for problem in (
            wrong_fields(value[key], fields[key], f"{path}.{key}") if key in fields else [f"{path}.{key} is unknown"])]
    if isinstance(fields, list):
        return [problem for item in value for problem in wrong_fields(item, fields[0], f"{path}[]")]
    right = value in fields if isinstance(fields, tuple) else isinstance(value, fields) and not isinstance(value, bool)
    return [] if right else [f"{path} is {value!r}"]


def custom_kind_problems(document):
    version, fields = FIELDS[document["kind"]]
    whole = {"apiVersion": (version,), "kind": TEXT, "metadata": {"name": TEXT}, "spec": fields}
    return wrong_fields(document, whole)


@pytest.fixture(scope="module")
def kubernetes_validate(tmp_path_factory):
    """The command kubernetes-validate from PyPI, in an environment of its own: its imports are none of the project's."""
    folder = tmp_path_factory.mktemp("validate")
    lab.sh(sys.executable, "-m", "venv", folder / "venv")
    done = subprocess.run([folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "kubernetes-validate"],
                          capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip("needs PyPI: pip install kubernetes-validate")

    def problems(document):
        (folder / "document.json").write_text(json.dumps(document))  # JSON is YAML
        done = subprocess.run([folder / "venv/bin/kubernetes-validate", "--strict", folder / "document.json"],
                              capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr if done.returncode else ""
    return problems


def test_every_manifest_is_strictly_valid(kubernetes_validate):
    documents = all_documents()
    assert {document["kind"] for document in documents} == {"PyTorchJob", "TrainJob", "Pod", "Service", "Deployment"}
    for document in documents:
        if document["kind"] in FIELDS:
            assert custom_kind_problems(document) == []
            for pod in lab.pod_templates(document):
                assert kubernetes_validate(pod) == ""
        else:
            assert kubernetes_validate(document) == ""


def test_the_validation_finds_a_wrong_field(kubernetes_validate):
    job, trainjob, (pod,) = rendered(ELASTIC[-1])[0], rendered("trainjob.yaml-template")[0], rendered("pod.yaml-template")
    job["spec"]["elasticPolicy"]["maxRestart"] = 1
    job["spec"]["nprocPerNode"] = 2
    assert len(custom_kind_problems(job)) == 2
    trainjob["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"][
        "template"]["spec"]["containers"][0]["env"] = []
    assert len(custom_kind_problems(trainjob)) == 1
    pod["spec"]["containers"][0]["securityContext"]["runAsNonroot"] = True
    assert "runAsNonroot" in kubernetes_validate(pod)
    (other, *_) = lab.pod_templates(rendered("pytorchjob.yaml-template")[0])
    other["spec"]["containers"][0]["volumeMounts"][0]["path"] = "/x"
    assert "path" in kubernetes_validate(other)


def test_pods_are_what_a_careful_administrator_asks_for():
    for document in all_documents():
        for name, _, pod in lab.pods_of([document]):
            container = lab.container_of(pod)
            assert set(container["resources"]["requests"]) >= {"cpu", "memory"} <= set(container["resources"]["limits"])
            assert pod["spec"]["securityContext"]["runAsNonRoot"] is True and pod["spec"]["securityContext"]["fsGroup"] == 1001
            assert not any("hostPath" in volume for volume in pod["spec"]["volumes"])
            if document["kind"] != "Deployment":
                assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["spec"]["volumes"]
                assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
                # nothing between torchrun and the script: an option there would override what the operator says
                assert re.search(r"exec (torchrun|python) /workspace/\w+/train.py ", container["args"][0])


# --- running ---
@pytest.fixture(scope="module")
def images(tmp_path_factory):
    lab.skip_unless_images_can_be_built()
    lab.skip_without("ip", "envsubst", "yq", "etcd")
    folder = tmp_path_factory.mktemp("images")
    base = lab.base_image(folder)
    image = lab.build_image(folder, base)
    etcd = ["--volume", f"{lab.which('etcd')}:/usr/local/bin/etcd:ro"]
    yield {VARIABLES["IMAGE_URI"]: (image, []), lab.OFFICIAL_IMAGE: (base, []), "quay.io/coreos/etcd:v3.5.16": (base, etcd)}
    lab.sh("buildah", "rmi", "--force", image)


@pytest.fixture
def cluster(images, tmp_path):
    with lab.Cluster(tmp_path, images) as cluster:
        cluster.claim(VARIABLES["CLAIM_NAME"])
        yield cluster


def snapshot(cluster, name):
    """The job's snapshot, or None."""
    try:
        return torch.load(cluster.claims[VARIABLES["CLAIM_NAME"]] / f"{name}.pt", weights_only=True)
    except FileNotFoundError:
        return None


def snapshot_step(cluster, name):
    state = snapshot(cluster, name)
    return state["step"] if state else 0


def run_headers(pods):
    """(hosts, first step) of each time that training began, as the workers' output tells."""
    text = "".join(pod.log.read_text() for pod in pods)
    return [(set(hosts.split(", ")), int(step))
            for hosts, step in re.findall(r"^\w+: \d+ workers? on (.*?) \|.* steps (\d+) to", text, re.M)]


def assert_trained(cluster, pods, name, steps):
    """cpu_ddp has trained to the end, and to the noise floor."""
    state, text = snapshot(cluster, name), "".join(pod.log.read_text() for pod in pods)
    assert state["step"] == steps
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())
    assert float(re.findall(r"train loss (\S+)", text)[-1]) < 0.0125  # the noise's variance is 0.01
    assert float(re.findall(r"within (\S+) of the true", text)[-1]) < 0.02
    assert (cluster.claims[VARIABLES["CLAIM_NAME"]] / f"{name}.pt.status").read_text() == "finished\n"


@pytest.mark.parametrize("template", ELASTIC)
def test_an_elastic_job_survives_the_loss_of_each_pod(cluster, template):
    steps_per_epoch, epochs = 32, 200
    name = "lossy"
    if "etcd" in template:
        cluster.apply(lab.parse((FOLDER / "etcd.yaml").read_text()))
    if "simple" in template:
        cluster.config_map(name, lab.ROOT / "cpu_ddp/train.py")
    pods = cluster.apply(rendered(template, JOB_NAME=name, EPOCHS=epochs, ARGS="--save-every=5"))
    lost_at = []
    for victim in (1, 0):  # worker-0 hosts the c10d store
        cluster.wait(pods, 240, until=lambda: snapshot_step(cluster, name) >= sum(lost_at[-1:]) + 25 * steps_per_epoch)
        lost_at.append(snapshot_step(cluster, name))
        if victim == 0:
            assert [pod.starts for pod in pods] == [1, 2], "worker-0's torchrun takes worker-1 back without starting again"
        pods[victim].lose()
    cluster.wait(pods, 240)
    assert_trained(cluster, pods, name, steps_per_epoch * epochs)
    hosts, steps = zip(*sorted(run_headers(pods), key=lambda header: header[1]))
    assert hosts[0] == {pod.name for pod in pods}
    assert steps[0] == 0 < lost_at[0] <= steps[1], "training began anew"
    assert lost_at[0] < lost_at[1] <= steps[-1]

    if "etcd" in template:  # the same etcd serves the next job
        pods = cluster.apply(rendered(template, JOB_NAME="next", EPOCHS=20))
        cluster.wait(pods, 120)
        assert_trained(cluster, pods, "next", 20 * steps_per_epoch)


def test_a_trainjob_survives_the_loss_of_a_pod(cluster):
    pods = cluster.apply(rendered("trainjob.yaml-template", EPOCHS=150, ARGS="--save-every=5"))
    cluster.wait(pods, 120, until=lambda: snapshot_step(cluster, "my-job") >= 40 * 32)
    lost_at = snapshot_step(cluster, "my-job")
    pods[0].lose()
    cluster.wait(pods, 240)
    assert_trained(cluster, pods, "my-job", 150 * 32)
    (hosts, first), *_, (_, last) = sorted(run_headers(pods), key=lambda header: header[1])
    assert hosts == {"my-job-node-0-0", "my-job-node-0-1"} and first == 0 and last >= lost_at


@pytest.mark.parametrize("script, arguments", {
    "fashionmnist_ddp": "--fake-data=256", "cifar10_ddp": "--fake-data=32 --batch-size=8", "synthetic_ddp": ""}.items())
def test_every_script_runs_as_a_job(cluster, script, arguments):
    template = {"fashionmnist_ddp": "pytorchjob.yaml-template"}.get(script, "trainjob.yaml-template")
    pods = cluster.apply(rendered(template, SCRIPT=script, EPOCHS=1, ARGS=arguments))
    cluster.wait(pods, 240)
    assert len(pods) == 2 and [pod.starts for pod in pods] == [1, 1]
    assert [hosts for hosts, _ in run_headers(pods)] == [{pod.name for pod in pods}]
    assert snapshot_step(cluster, "my-job") > 0


def test_mnist_runs_as_a_pod(cluster):
    (pod,) = cluster.apply(rendered("pod.yaml-template", EPOCHS=1, ARGS="--fake-data=256"))
    cluster.wait([pod], 240)
    assert pod.starts == 1
    state = snapshot(cluster, "my-job")
    assert state["step"] > 0 and all(torch.isfinite(tensor).all() for tensor in state["model"].values())

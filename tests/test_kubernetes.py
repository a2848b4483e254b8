"""containers/kubernetes/: the manifests are rendered, validated and run (see kubernetes_lab.py)."""

import json
import re
import shutil
import sys
from typing import NamedTuple

import kubernetes_lab as lab
import pytest
import torch
from checkpoints import difference, load_checkpoint
from functions import train
from scripts import ROOT

pytestmark = pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())

FOLDER = ROOT / "containers/kubernetes"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.yaml-template"))
READY = sorted(path.name for path in FOLDER.glob("*.yaml"))
REQUIRED = {"IMAGE_URI": lab.OUR_IMAGE, "CLAIM_NAME": "fsx-claim"}


def rendered(template, **variables):
    """Return the documents of a template, with render.sh's defaults for all other variables."""
    done = lab.render(template, **REQUIRED, **variables)
    assert done.returncode == 0, f"render.sh {template} failed:\n{done.stderr}"
    return lab.parse(done.stdout)


def ready(manifest):
    return lab.parse((FOLDER / manifest).read_text())


def all_documents():
    documents = []
    for template in TEMPLATES:
        documents += rendered(template)
    for manifest in READY:
        documents += ready(manifest)
    return documents


def all_pods():
    return lab.pods_of(all_documents())


# --- render.sh ---
@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_required_variable_is_named_and_nothing_is_written(template, name):
    variables = {other: REQUIRED[other] for other in REQUIRED if other != name}
    done = lab.render(template, **variables)
    assert done.returncode != 0, f"render.sh is to fail without {name}:\n{done.stdout}"
    assert f"export {name}" in done.stderr, f"the error is to name {name}:\n{done.stderr}"
    assert done.stdout == "", f"nothing is to be written without {name}:\n{done.stdout}"


@pytest.mark.parametrize("template", TEMPLATES)
def test_render_prints_every_value_that_it_used(template):
    names = set(re.findall(r"[$]([A-Z_]+)", (FOLDER / template).read_text()))
    done = lab.render(template, **REQUIRED)
    printed = set(re.findall(r"^([A-Z_]+)=", done.stderr, re.M))
    assert names, f"{template} has no variables"
    missing = sorted(names - printed)
    assert not missing, f"{template} uses {missing}; render.sh printed only:\n{done.stderr}"


def test_the_readme_explains_every_variable():
    readme = (ROOT / "containers/README.md").read_text()
    explained = set(re.findall(r"^\| `([A-Z_]+)` \|", readme, re.M))
    used = set()
    for template in TEMPLATES:
        used.update(re.findall(r"[$]([A-Z_]+)", (FOLDER / template).read_text()))
    used -= {"RDZV_ID", "BACKOFF_LIMIT"}  # computed by render.sh
    different = sorted(explained ^ used)
    assert not different, f"in a template, or in containers/README.md, but not in both: {different}"


@pytest.mark.parametrize("resources, processes", [
    ({}, 1),
    ({"CPU_PER_NODE": 4}, 4),
    ({"CPU_PER_NODE": 32, "GPU_PER_NODE": 8}, 8),
    ({"CPU_PER_NODE": 4, "WORKERS_PER_NODE": 2}, 2),
])
def test_a_pod_has_a_process_for_each_gpu_or_cpu(resources, processes):
    (job,) = rendered("pytorchjob.yaml-template", **resources)
    count = job["spec"]["nprocPerNode"]
    assert count == str(processes), f"{resources} is to give {processes} processes, not {count}"


@pytest.mark.parametrize("resources, hinted", [
    ({"CPU_PER_NODE": 4, "WORKERS_PER_NODE": 1}, True),
    ({"GPU_PER_NODE": 4, "WORKERS_PER_NODE": 8}, True),
    ({"CPU_PER_NODE": 4}, False),
    ({"CPU_PER_NODE": 32, "GPU_PER_NODE": 8, "WORKERS_PER_NODE": 8}, False),
])
def test_unusual_numbers_of_processes_get_a_hint(resources, hinted):
    done = lab.render("pytorchjob.yaml-template", **REQUIRED, **resources)
    assert done.returncode == 0, f"{resources} is to be accepted:\n{done.stderr}"
    has_hint = "hint: " in done.stderr
    assert has_hint == hinted, f"hint for {resources}: {has_hint}, not {hinted}:\n{done.stderr}"


def test_numbers_that_are_not_whole_are_refused():
    done = lab.render("pytorchjob.yaml-template", **REQUIRED, CPU_PER_NODE="500m")
    assert done.returncode != 0, f"CPU_PER_NODE=500m is to be refused:\n{done.stdout}"
    assert "CPU_PER_NODE=500m" in done.stderr, f"the error is to name it:\n{done.stderr}"


# --- validation ---
# Kubeflow's and Kubernetes' own models read the documents and write them again. Unknown fields are
# lost on the way, and wrong types are errors.
READ_AND_WRITE = """
import json
import sys
import types

from kubeflow.training import ApiClient
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

for document in json.load(sys.stdin):
    kind = document["kind"]
    if kind == "TrainJob":
        written = TrainerV1alpha1TrainJob.from_dict(document).to_dict()
    else:
        model = "KubeflowOrgV1PyTorchJob" if kind == "PyTorchJob" else "V1" + kind
        response = types.SimpleNamespace(data=json.dumps(document))
        read = ApiClient().deserialize(response, model)
        written = ApiClient().sanitize_for_serialization(read)
    print(json.dumps(written))
"""


@pytest.fixture(scope="module")
def read_and_write(tmp_path_factory):
    """Return a function that lets Kubeflow's models read documents and write them again."""
    folder = tmp_path_factory.mktemp("models")
    lab.sh(sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--target", folder,
           "kubeflow-training", "kubeflow-trainer-api", timeout=200)

    def run(documents):
        output = lab.sh(sys.executable, "-c", READ_AND_WRITE, input=json.dumps(documents),
                        env={"PYTHONPATH": folder})
        return [json.loads(line) for line in output.splitlines()]

    return run


def test_every_manifest_is_valid(read_and_write):
    documents = all_documents()
    kinds = {document["kind"] for document in documents}
    assert kinds == {"Pod", "Service", "Deployment", "PyTorchJob", "TrainJob"}, kinds
    for document, written in zip(documents, read_and_write(documents), strict=True):
        expected = json.dumps(document, indent=1, sort_keys=True)
        found = json.dumps(written, indent=1, sort_keys=True)
        assert found == expected, f'the {document["kind"]} has a field that Kubeflow does not know'


def test_the_validation_notices_an_unknown_field(read_and_write):
    text = json.dumps(all_documents()).replace("runAsUser", "runasUser")
    wrong = json.loads(text)
    for document, written in zip(wrong, read_and_write(wrong), strict=True):
        kind = document["kind"]
        if kind != "Service":  # it has no such field
            assert written != document, f"the unknown field runasUser of a {kind} was not noticed"


def test_pods_meet_the_restricted_security_standard():
    for pod in all_pods():
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True, f"{pod.name} may run as root"
        profile = security["seccompProfile"]["type"]
        assert profile == "RuntimeDefault", f"{pod.name} has the seccomp profile {profile}"
        (container,) = pod.spec["containers"]
        allowed = container["securityContext"]
        assert allowed["allowPrivilegeEscalation"] is False, f"{pod.name} may gain privileges"
        dropped = allowed["capabilities"]
        assert dropped == {"drop": ["ALL"]}, f"{pod.name} is to drop all capabilities: {dropped}"


def test_pods_with_gpus_have_shared_memory_for_nccl():
    checked = 0
    for pod in all_pods():
        (container,) = pod.spec["containers"]
        if "nvidia.com/gpu" in container["resources"]["limits"]:
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert "/dev/shm" in paths, f"{pod.name} has 64 MiB of shared memory, too few for NCCL"
            checked += 1
    assert checked, "no manifest asks for GPUs"


def test_torchrun_lets_processes_save_before_kubernetes_kills_the_pod():
    checked = 0
    for pod in all_pods():
        (container,) = pod.spec["containers"]
        for variable in container.get("env", []):
            if variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT":
                wait = int(variable["value"])
                grace = pod.spec["terminationGracePeriodSeconds"]
                assert 30 < wait < grace, f"{pod.name}: torchrun kills after {wait} s of {grace}"
                checked += 1
    assert checked, "no manifest sets TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


# --- running, with the image of the Dockerfile ---
@pytest.fixture
def cluster(tmp_path):
    with lab.Cluster(tmp_path) as cluster:
        yield cluster


class Start(NamedTuple):
    """What the first line of a training says."""

    first_step: int
    last_step: int
    processes: int
    threads: int
    log: str  # of its pod


def starts_of(pods):
    """Return each start of the training, in the order of the steps."""
    header = r"^(?:world size (\d+) )?.*threads (\d+) .* steps (\d+) to (\d+)$"
    starts = []
    for pod in pods:
        log = pod.log.read_text()
        for processes, threads, first, last in re.findall(header, log, re.M):
            start = Start(int(first), int(last), int(processes or 1), int(threads), log)
            starts.append(start)
    return sorted(starts, key=lambda start: start.first_step)


def assert_learned(cluster, pods, script):
    """The training has ended with a good result."""
    if script == "cpu_ddp":
        text = "\n".join(pod.log.read_text() for pod in pods)
        results = re.findall(r"error of a learned weight: ([\d.]+)", text)
        assert results, f"cpu_ddp did not end:\n{cluster.logs()}"
        assert float(results[-1]) < 0.02, f"cpu_ddp did not learn the weights:\n{cluster.logs()}"
    else:
        results = re.findall(r"accuracy ([\d.]+)", starts_of(pods)[-1].log)
        assert results, f"{script} printed no accuracy:\n{cluster.logs()}"
        assert float(results[-1]) > 0.8, f"{script} did not learn:\n{cluster.logs()}"


def assert_complete(cluster, pods, job):
    """The checkpoint is that of the last step."""
    last = starts_of(pods)[-1].last_step
    step = cluster.step(job)
    assert step == last > 0, f"the checkpoint is of step {step}, not {last}:\n{cluster.logs()}"


def test_the_simple_manifest_trains_on_two_pods_and_starts_over_after_a_loss(cluster):
    # What its comment says: kubectl create configmap cpu-ddp --from-file=cpu_ddp/train.py
    (cluster.folder / "cpu-ddp").mkdir()
    shutil.copy(ROOT / "cpu_ddp/train.py", cluster.folder / "cpu-ddp")
    pods = cluster.apply(ready("pytorchjob-simple.yaml"))
    cluster.wait_until(lambda: starts_of(pods), pods)
    pods[1].lose()  # the other pod hosts the rendezvous, whose store has the lost pod's address
    pods[1].come_back()
    cluster.wait_completed(pods)
    starts = starts_of(pods)
    first_steps = [start.first_step for start in starts]
    assert first_steps == [0, 0], f"the training is to start over once:\n{cluster.logs()}"
    worlds = [start.processes for start in starts]
    assert worlds == [2, 2], f"two pods are to train together: {worlds}\n{cluster.logs()}"
    restarts = pods[0].restarts
    assert restarts == 0, f"the other pod has restarted, {restarts} times\n{cluster.logs()}"
    assert_learned(cluster, pods, "cpu_ddp")


@pytest.mark.parametrize("template, script, flags", [
    ("pytorchjob.yaml-template", "synthetic_ddp", "--epochs=40"),
    ("trainjob.yaml-template", "fashionmnist_ddp", "--epochs=8 --fake-data"),
    ("pod.yaml-template", "mnist_dp", "--epochs=8 --fake-data"),
])
def test_a_job_resumes_after_the_loss_of_its_first_pod(cluster, template, script, flags):
    pods = cluster.apply(rendered(template, SCRIPT=script, JOB_NAME="job", ARGS=flags))
    cluster.wait_until(lambda: cluster.step("job") > 0, pods)
    saved = cluster.step("job")
    pods[0].lose()
    pods[0].come_back()
    cluster.wait_completed(pods)
    starts = starts_of(pods)
    resumed_at = [start.first_step for start in starts[1:]]
    assert resumed_at, f"nothing was started again:\n{cluster.logs()}"
    assert min(resumed_at) > 0, f"a start did not resume: {resumed_at}\n{cluster.logs()}"
    assert max(resumed_at) >= saved, f"resumed at {resumed_at}, saved at {saved}\n{cluster.logs()}"
    worlds = {start.processes for start in starts}
    assert worlds == {len(pods)}, f"all pods are to train: {worlds}\n{cluster.logs()}"
    threads = {start.threads for start in starts}
    assert threads == {1}, f"a pod with 1 CPU is to use 1 thread: {threads}\n{cluster.logs()}"
    assert_complete(cluster, pods, "job")
    assert_learned(cluster, pods, script)


def wait_briefly(documents):
    """Let the pods of a PyTorchJob wait for others for five seconds, not five minutes."""
    (setting,) = documents[0]["spec"]["elasticPolicy"]["rdzvConf"]
    assert setting["key"] == "last_call_timeout", setting
    setting["value"] = "5"
    return documents


class Ended(NamedTuple):
    """A job that has ended, and its cluster."""

    cluster: lab.Cluster
    pods: list


@pytest.fixture(scope="module")
def elastic_job(tmp_path_factory):
    """Train on 3 pods. Stop one, which comes back, then lose another one for good."""
    folder = tmp_path_factory.mktemp("elastic")
    flags = "--epochs=50 --batch-size=11 --save-every=2"
    documents = rendered("pytorchjob.yaml-template", NUM_NODES=3, ARGS=flags)
    with lab.Cluster(folder) as cluster:
        pods = cluster.apply(wait_briefly(documents))

        def all_three_have_saved(times):
            starts = starts_of(pods)
            worlds = [start.processes for start in starts]
            return worlds.count(3) == times and cluster.step("cpu-ddp") > starts[-1].first_step

        cluster.wait_until(lambda: all_three_have_saved(1), pods)
        pods[1].lose("TERM")
        pods[1].come_back()
        cluster.wait_until(lambda: all_three_have_saved(2), pods)
        pods[2].lose()
        cluster.wait_completed(pods[:2])
    return Ended(cluster, pods)


def test_an_elastic_job_completes_without_a_pod_that_is_lost_for_good(elastic_job):
    cluster, pods = elastic_job
    last = starts_of(pods)[-1]
    assert last.processes == 2, f"two of three pods are to remain:\n{cluster.logs()}"
    assert_complete(cluster, pods, "cpu-ddp")
    assert_learned(cluster, pods, "cpu_ddp")


def test_the_pods_of_an_elastic_job_do_not_restart_when_another_is_lost(elastic_job):
    cluster, pods = elastic_job
    restarts = [pod.restarts for pod in pods]
    assert restarts == [0, 0, 0], f"pods have restarted: {restarts}\n{cluster.logs()}"


def test_the_global_batch_stays_when_pods_are_lost(elastic_job):
    cluster, _ = elastic_job
    batch = load_checkpoint(cluster.claim / "cpu-ddp.pt")["global_batch"]
    assert batch == 33, f"3 pods began with batches of 3 x 11 = 33, at the end it was {batch}"


def test_losses_of_pods_do_not_change_the_weights(elastic_job, tmp_path):
    cluster, _ = elastic_job
    undisturbed = tmp_path / "undisturbed.pt"
    train("cpu_ddp", "--epochs", 50, "--batch-size", 33, "--checkpoint", undisturbed)
    change = difference(cluster.claim / "cpu-ddp.pt", undisturbed)
    assert change < 1e-5, f"weights differ from those of a run without losses by {change}"


def test_a_job_that_cannot_work_explains_itself_and_fails(cluster):
    documents = rendered("pytorchjob.yaml-template", NUM_NODES=1, ARGS="--bogus")
    documents[0]["spec"]["elasticPolicy"]["maxRestarts"] = 1  # not 10: that takes minutes
    documents[0]["spec"]["runPolicy"]["backoffLimit"] = 2
    (pod,) = cluster.apply(documents)
    with pytest.raises(lab.JobFailed):
        cluster.wait_completed([pod], timeout=180)
    log = pod.log.read_text()
    assert "unrecognized arguments: --bogus" in log, f"the log does not name the mistake:\n{log}"


def write_images(folder):
    """Write images of two classes, red and blue ones, with noise."""
    for part, count in ("train", 32), ("val", 16):
        for channel, name in (0, "red"), (2, "blue"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = torch.randint(0, 100, (40 * 40, 3), dtype=torch.uint8)
                pixels[:, channel] += 100
                image = b"P6 40 40 255\n" + bytes(pixels.flatten().tolist())
                (folder / part / name / f"{number}.ppm").write_bytes(image)


def test_a_folder_of_images_on_the_volume_trains_as_pods(cluster):
    write_images(cluster.claim / "images")
    flags = "--image-folder=/fsx/images --image-size=32 --epochs=1 --batch-size=8 --workers=1"
    pods = cluster.apply(rendered("pytorchjob.yaml-template", SCRIPT="cifar10_ddp", ARGS=flags))
    cluster.wait_completed(pods)
    assert "of 64 images" in cluster.logs(), f"64 images are to be used:\n{cluster.logs()}"
    worlds = [start.processes for start in starts_of(pods)]
    assert worlds == [2], f"two pods are to train together, once: {worlds}\n{cluster.logs()}"
    assert_complete(cluster, pods, "cifar10-ddp")


@pytest.fixture(scope="module")
def etcd_jobs(tmp_path_factory):
    """Train on two pods with etcd. Lose the first one for good. Then run another job."""
    folder = tmp_path_factory.mktemp("etcd")
    template = "pytorchjob-etcd.yaml-template"
    with lab.Cluster(folder) as cluster:
        cluster.apply(ready("etcd.yaml"))
        documents = rendered(template, JOB_NAME="first", ARGS="--epochs=100 --save-every=2")
        first = cluster.apply(wait_briefly(documents))
        cluster.wait_until(lambda: cluster.step("first") > 0, first)
        first[0].lose()
        cluster.wait_completed(first[1:])
        second = cluster.apply(rendered(template, JOB_NAME="second"))
        cluster.wait_completed(second)
    return Ended(cluster, first), Ended(cluster, second)


def test_with_etcd_any_pod_may_be_lost_for_good(etcd_jobs):
    cluster, pods = etcd_jobs[0]
    worlds = [start.processes for start in starts_of(pods)]
    assert worlds == [2, 1], f"2 processes, then 1, are to train, not {worlds}\n{cluster.logs()}"
    assert pods[1].restarts == 0, f"the other pod has restarted:\n{cluster.logs()}"
    assert_complete(cluster, pods, "first")
    assert_learned(cluster, pods, "cpu_ddp")


def test_an_etcd_serves_the_next_job(etcd_jobs):
    cluster, pods = etcd_jobs[1]
    worlds = [start.processes for start in starts_of(pods)]
    assert worlds == [2], f"two pods are to train together, once: {worlds}\n{cluster.logs()}"
    assert_complete(cluster, pods, "second")
    assert_learned(cluster, pods, "cpu_ddp")

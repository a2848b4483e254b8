"""containers/kubernetes/: the manifests are rendered and run (see kubernetes_lab.py)."""

import json
import re
import shutil
import sys
from typing import NamedTuple

import kubernetes_lab as lab
import pytest
from checkpoints import difference
from scripts import ROOT

pytestmark = pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())

FOLDER = ROOT / "containers/kubernetes"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml*"))
REQUIRED = {"IMAGE_URI": lab.OUR_IMAGE, "CLAIM_NAME": "fsx-claim"}


def documents_of(manifest, changes=(), **variables):
    """Return the documents of a manifest, with changes (pairs of texts); a template is rendered."""
    if manifest.endswith("-template"):
        done = lab.render(manifest, **REQUIRED, **variables)
        assert done.returncode == 0, f"render.sh {manifest} failed:\n{done.stderr}"
        text = done.stdout
    else:
        text = (FOLDER / manifest).read_text()
    for old, new in changes:
        assert old in text, f"{manifest} has no {old}"
        text = text.replace(old, new)
    return lab.parse(text)


def pods_of_all_manifests():
    documents = [document for manifest in MANIFESTS for document in documents_of(manifest)]
    return [pod for document in documents for pod in lab.pods_of(document)]


# --- render.sh ---
@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_variable_is_named_and_nothing_is_written(name):
    variables = {other: REQUIRED[other] for other in REQUIRED if other != name}
    done = lab.render("job.yaml-template", **variables)
    assert done.returncode != 0, f"render.sh is to fail without {name}:\n{done.stdout}"
    assert f"export {name}" in done.stderr, f"the error is to name {name}:\n{done.stderr}"
    assert done.stdout == "", f"nothing is to be written without {name}:\n{done.stdout}"


def test_numbers_that_are_not_whole_are_refused():
    done = lab.render("job.yaml-template", **REQUIRED, CPU_PER_NODE="500m")
    assert done.returncode != 0, f"CPU_PER_NODE=500m is to be refused:\n{done.stdout}"


def test_the_readme_explains_every_variable():
    readme = (ROOT / "containers/README.md").read_text()
    explained = set(re.findall(r"^\| `([A-Z_]+)` \|", readme, re.M))
    texts = [(FOLDER / manifest).read_text() for manifest in MANIFESTS]
    used = set(re.findall(r"[$]([A-Z_]+)", "".join(texts)))
    used -= {"RDZV_ID", "BACKOFF_LIMIT", "CHECKPOINT", "THREADS_PER_WORKER"}  # of render.sh
    different = sorted(explained ^ used)
    assert not different, f"in a template, or in containers/README.md, but not in both: {different}"


@pytest.mark.parametrize("variables, processes, threads", [
    ({}, 1, 1),
    ({"CPU_PER_NODE": 4}, 4, 1),
    ({"CPU_PER_NODE": 32, "GPU_PER_NODE": 8}, 8, 4),
    ({"CPU_PER_NODE": 4, "WORKERS_PER_NODE": 2}, 2, 2),
    ({"CPU_PER_NODE": 32, "GPU_PER_NODE": 8, "SCRIPT": "mnist_dp"}, 1, 32),
])
def test_a_pod_has_a_process_per_gpu_or_cpu_which_share_its_cpus(variables, processes, threads):
    text = json.dumps(documents_of("job.yaml-template", **variables))
    assert f"--nproc-per-node={processes} " in text, f"not {processes} processes:\n{text}"
    assert f'"OMP_NUM_THREADS", "value": "0{threads}"' in text, f"not {threads} threads:\n{text}"


@pytest.mark.parametrize("script, saves", [
    ("cifar10_ddp", True), ("mnist_dp", False), ("synthetic_ddp", False)])
@pytest.mark.parametrize("manifest", [name for name in MANIFESTS if name.endswith("-template")])
def test_the_scripts_that_have_checkpoints_save_them(manifest, script, saves):
    text = json.dumps(documents_of(manifest, SCRIPT=script, ARGS="--seed=1"))
    flag = "--checkpoint=/fsx/cifar10-ddp.pt " if saves else ""
    command = f"/workspace/{script}/train.py {flag}--seed=1"
    found = re.sub(" +", " ", text)
    assert command in found, f"{manifest} is to run {command}:\n{found}"


# --- the manifests ---
def test_pods_meet_the_restricted_security_standard():
    for name, pod, *_ in pods_of_all_manifests():
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True, f"{name} may run as root"
        profile = security["seccompProfile"]["type"]
        assert profile == "RuntimeDefault", f"{name} has the seccomp profile {profile}"
        allowed = pod["containers"][0]["securityContext"]
        assert allowed["allowPrivilegeEscalation"] is False, f"{name} may gain privileges"
        dropped = allowed["capabilities"]
        assert dropped == {"drop": ["ALL"]}, f"{name} is to drop all capabilities: {dropped}"


def test_pods_that_train_have_shared_memory_and_time_to_save():
    trainers = [(name, pod) for name, pod, *_ in pods_of_all_manifests() if name != "etcd"]
    assert len(trainers) == 10, f"5 manifests with 2 pods each are to be checked: {trainers}"
    for name, pod in trainers:
        paths = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        assert "/dev/shm" in paths, f"{name} has 64 MiB of shared memory, too few for NCCL"
        variables = {item["name"]: item["value"] for item in pod["containers"][0]["env"]}
        wait = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        grace = pod["terminationGracePeriodSeconds"]
        assert 30 < wait < grace, f"{name}: torchrun kills after {wait} s of {grace}"


@pytest.mark.parametrize("manifest", ["job.yaml", "job.yaml-template"])
def test_the_service_gives_the_pods_of_a_job_their_names(manifest):
    service, job = documents_of(manifest)
    name = job["metadata"]["name"]
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": name}}, service
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"], service


# --- running, with the image of the Dockerfile ---
@pytest.fixture
def cluster(tmp_path):
    with lab.Cluster(tmp_path) as cluster:
        # kubectl create configmap cpu-ddp --from-file=cpu_ddp/train.py
        (cluster.folder / "cpu-ddp").mkdir()
        shutil.copy(ROOT / "cpu_ddp/train.py", cluster.folder / "cpu-ddp")
        yield cluster


class Start(NamedTuple):
    """What the first line of a training says, and the last step that it has saved, or 0."""

    processes: int
    first: int
    saved: int


def starts_of(pods):
    """Return the starts of the training by the log of pod 0, or of the pods that go on."""
    starts = []
    for pod in pods:
        parts = re.split(r"^world size (\d+)\b.* steps (\d+) to \d+$", pod.log.read_text(), flags=re.M)
        for processes, first, log in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            saved = re.findall(r"^saved step (\d+) in ", log, re.M) or [0]
            starts.append(Start(int(processes), int(first), int(saved[-1])))
    return starts


def assert_learned(cluster, pods):
    """cpu_ddp has ended with a good result."""
    text = "".join(pod.log.read_text() for pod in pods)
    errors = re.findall(r"error of a learned weight: ([\d.]+)", text)
    assert errors, f"cpu_ddp did not end:\n{cluster.logs()}"
    assert float(errors[-1]) < 0.02, f"cpu_ddp did not learn the weights:\n{cluster.logs()}"


def wait_for_saved(cluster, pods, count):
    """Wait until the training has started count times and saved since. Return the starts."""
    def saved():
        starts = starts_of(pods)
        return len(starts) >= count and starts[-1].saved > 0
    cluster.wait_until(saved)
    return starts_of(pods)


def test_the_job_completes_as_it_is(cluster):
    pods = cluster.apply(documents_of("job.yaml"))
    cluster.wait_completed(pods)
    worlds = [start.processes for start in starts_of(pods)]
    assert worlds == [4], f"2 pods of 2 processes are to train once: {worlds}\n{cluster.logs()}"
    assert_learned(cluster, pods)


LONG = [("--epochs=200", "--epochs=20000 --save-every=0.01")]


def test_the_job_survives_losses_and_starts_over_only_after_that_of_pod_0(cluster):
    pods = cluster.apply(documents_of("job.yaml", LONG))
    wait_for_saved(cluster, pods, 1)
    pods[1].kill_worker()
    starts = wait_for_saved(cluster, pods, 2)
    assert starts[1].first >= starts[0].saved > 0, f"a lost worker: {starts}\n{cluster.logs()}"
    failures = [pod.failures for pod in pods]
    assert failures == [0, 0], f"a lost worker is to fail no pod: {failures}\n{cluster.logs()}"
    pods[1].lose()
    starts = wait_for_saved(cluster, pods, 3)
    assert starts[2].first >= starts[1].saved, f"lost pod 1: {starts}\n{cluster.logs()}"
    failures = [pod.failures for pod in pods]
    assert failures == [0, 1], f"lost pod 1 is to fail no other: {failures}\n{cluster.logs()}"
    pods[0].lose()
    starts = wait_for_saved(cluster, pods, 4)
    assert starts[3].first == 0, f"without a claim, pod 0 starts over: {starts}\n{cluster.logs()}"
    worlds = {start.processes for start in starts}
    assert worlds == {4}, f"2 pods of 2 processes are to train: {worlds}\n{cluster.logs()}"


def test_the_job_with_a_claim_saves_when_it_is_stopped_and_resumes_without_pod_0(cluster, tmp_path):
    flags = ["--epochs=400", "--save-every=0.01"]
    pods = cluster.apply(documents_of("job.yaml-template", ARGS=" ".join(flags)))
    wait_for_saved(cluster, pods, 1)
    for pod in pods:  # as kubectl drain does
        pod.stop()
    starts = wait_for_saved(cluster, pods, 2)
    assert starts[1].first == starts[0].saved, f"not where it stopped: {starts}\n{cluster.logs()}"
    pods[0].lose()
    starts = wait_for_saved(cluster, pods, 3)
    assert starts[2].first >= starts[1].saved, f"lost pod 0: {starts}\n{cluster.logs()}"
    cluster.wait_completed(pods)
    undisturbed = tmp_path / "undisturbed.pt"
    lab.sh(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
           ROOT / "cpu_ddp/train.py", *flags, "--checkpoint", undisturbed)
    change = difference(cluster.claim / "cpu-ddp.pt", undisturbed)
    assert change == 0, f"weights differ from those of a run without losses by {change}"


def test_a_job_that_cannot_work_explains_itself_and_fails(cluster):
    changes = [("--max-restarts=3", "--max-restarts=0"),  # sooner
               ("backoffLimitPerIndex: 3", "backoffLimitPerIndex: 1")]
    pods = cluster.apply(documents_of("job.yaml-template", changes, ARGS="--bogus"))
    with pytest.raises(lab.JobFailed):
        cluster.wait_completed(pods)
    log = pods[0].log.read_text()
    assert "unrecognized arguments: --bogus" in log, f"the log does not name the mistake:\n{log}"


def test_mnist_dp_trains_as_a_job_of_one_pod(cluster):
    flags = "--fake-data --epochs=1"
    pods = cluster.apply(documents_of("job.yaml-template", SCRIPT="mnist_dp", ARGS=flags))
    cluster.wait_completed(pods)
    assert len(pods) == 1, f"mnist_dp has one process, not {len(pods)} pods"
    assert "accuracy" in pods[0].log.read_text(), f"it is to train:\n{cluster.logs()}"


def test_a_trainjob_resumes_after_the_loss_of_its_first_pod(cluster):
    flags = "--epochs=8 --fake-data"
    pods = cluster.apply(documents_of("trainjob.yaml-template", SCRIPT="fashionmnist_ddp",
                                      ARGS=flags))
    wait_for_saved(cluster, pods, 1)
    pods[0].lose()
    pods[0].start()
    cluster.wait_completed(pods)
    starts = starts_of(pods)
    assert starts[-1].first >= starts[0].saved, f"not resumed: {starts}\n{cluster.logs()}"
    worlds = {start.processes for start in starts}
    assert worlds == {2}, f"all pods are to train: {worlds}\n{cluster.logs()}"


BRIEFLY = [('"300"', '"5"')]  # for how long the pods of a PyTorchJob wait for others


def test_a_pytorchjob_goes_on_without_a_lost_pod(cluster):
    flags = "--epochs=1500 --save-every=0.01"
    pods = cluster.apply(documents_of("pytorchjob.yaml-template", BRIEFLY, ARGS=flags))
    wait_for_saved(cluster, pods[:1], 1)
    pods[1].stop()
    pods[1].start()
    starts = wait_for_saved(cluster, pods[:1], 2)
    while starts[-1].processes == 1:  # it went on alone before the other came back
        starts = wait_for_saved(cluster, pods[:1], len(starts) + 1)
    pods[1].lose()
    cluster.wait_completed(pods[:1])
    last = starts_of(pods[:1])[-1]
    assert last.processes == 1, f"one of two pods is to remain:\n{cluster.logs()}"
    assert last.first > 0, f"it is to resume:\n{cluster.logs()}"
    assert pods[0].restarts == 0, f"the other pod is not to restart:\n{cluster.logs()}"
    assert_learned(cluster, pods[:1])


def test_with_etcd_any_pod_may_be_lost(cluster):
    cluster.apply(documents_of("etcd.yaml"))
    flags = "--epochs=400 --save-every=0.01"
    pods = cluster.apply(documents_of("pytorchjob-etcd.yaml-template", BRIEFLY, ARGS=flags))
    wait_for_saved(cluster, pods, 1)
    pods[0].lose()
    cluster.wait_completed(pods[1:])
    worlds = [start.processes for start in starts_of(pods)]
    assert worlds == [2, 1], f"2 processes, then 1, are to train, not {worlds}\n{cluster.logs()}"
    assert pods[1].restarts == 0, f"the other pod has restarted:\n{cluster.logs()}"
    assert_learned(cluster, pods)

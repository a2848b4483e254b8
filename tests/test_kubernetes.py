"""containers/kubernetes/: the manifests are rendered and run (see kubernetes_lab.py)."""

import json
import re
import sys
from typing import NamedTuple

import kubernetes_lab as lab
import pytest
from checkpoints import difference
from scripts import ROOT

pytestmark = pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())

FOLDER = ROOT / "containers/kubernetes"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.yaml-template"))
MANIFESTS = ["job.yaml", "etcd.yaml", *TEMPLATES]
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


# --- render.sh and the manifests ---
@pytest.mark.parametrize("variables, named", [
    ({"IMAGE_URI": ""}, "export IMAGE_URI"),
    ({"CLAIM_NAME": ""}, "export CLAIM_NAME"),
    ({"CPU_PER_NODE": "500m"}, "CPU_PER_NODE=500m"),
])
def test_a_mistake_is_named_and_nothing_is_written(variables, named):
    done = lab.render("job.yaml-template", **{**REQUIRED, **variables})
    assert done.returncode != 0, f"{variables} is to be an error:\n{done.stdout}"
    assert named in done.stderr, f"the error is to say {named}:\n{done.stderr}"
    assert done.stdout == "", f"nothing is to be written:\n{done.stdout}"


def test_the_readme_explains_every_variable():
    readme = (ROOT / "containers/README.md").read_text()
    explained = set(re.findall(r"^\| `([A-Z_]+)` \|", readme, re.M))
    texts = [(FOLDER / manifest).read_text() for manifest in MANIFESTS]
    used = set(re.findall(r"[$]([A-Z_]+)", "".join(texts)))
    used -= {"RDZV_ID", "BACKOFF_LIMIT", "CHECKPOINT", "THREADS_PER_WORKER"}  # of render.sh
    different = sorted(explained ^ used)
    assert not different, f"in a template, or in containers/README.md, but not in both: {different}"


@pytest.mark.parametrize("variables, processes, threads", [
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
@pytest.mark.parametrize("manifest", TEMPLATES)
def test_a_template_runs_the_script_with_its_checkpoint_and_flags(manifest, script, saves):
    text = json.dumps(documents_of(manifest, SCRIPT=script, ARGS="--seed=1"))
    command = f"/workspace/{script}/train.py --checkpoint=/fsx/cifar10-ddp.pt --seed=1"
    if not saves:
        command = f"/workspace/{script}/train.py --seed=1"
    assert command in text.replace("  ", " "), f"{manifest} is to run {command}:\n{text}"


def test_pods_are_restricted_and_have_shared_memory_and_time_to_save():
    pods = [pod for manifest in MANIFESTS for document in documents_of(manifest)
            for pod in lab.pods_of(document)]
    assert len(pods) == 11, f"5 manifests with 2 pods each and etcd are to be checked: {pods}"
    for name, pod, *_ in pods:
        (container,) = pod["containers"]
        security = {**pod["securityContext"], **container["securityContext"]}
        assert security["runAsNonRoot"] is True, f"{name} may run as root"
        profile = security["seccompProfile"]
        assert profile == {"type": "RuntimeDefault"}, f"{name} has the seccomp profile {profile}"
        assert security["allowPrivilegeEscalation"] is False, f"{name} may gain privileges"
        dropped = security["capabilities"]
        assert dropped == {"drop": ["ALL"]}, f"{name} is to drop all capabilities: {dropped}"
        if name == "etcd":
            continue
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert "/dev/shm" in paths, f"{name} has 64 MiB of shared memory, too few for NCCL"
        variables = {item["name"]: item["value"] for item in container["env"]}
        wait = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        grace = pod["terminationGracePeriodSeconds"]
        assert 30 < wait < grace, f"{name}: torchrun kills after {wait} s of {grace}"


@pytest.mark.parametrize("manifest", ["job.yaml", "job.yaml-template"])
def test_the_service_gives_the_pods_of_a_job_their_names(manifest):
    service, job = documents_of(manifest)
    selector = {"job-name": job["metadata"]["name"]}
    assert service["spec"] == {"clusterIP": "None", "selector": selector}, service
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"], service


# --- running, with the image of the Dockerfile ---
@pytest.fixture
def cluster(tmp_path):
    cluster = lab.Cluster(tmp_path)
    yield cluster
    cluster.close()


class Start(NamedTuple):
    """What the first line of a training says, and its last saved step, or 0."""

    processes: int
    first: int
    saved: int


def starts_of(pods):
    """Return the starts of the training by the log of pod 0, or of the pods that go on."""
    header = r"^world size (\d+)\b.* steps (\d+) to \d+$"
    starts = []
    for pod in pods:
        parts = re.split(header, pod.log.read_text(), flags=re.M)
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


def next_start(cluster, pods, processes=2):
    """Wait until the training starts (again) and saves. Return the last start but one, the last."""
    count = len(starts_of(pods))

    def has_saved():
        starts = starts_of(pods)
        return len(starts) > count and starts[-1].processes == processes and starts[-1].saved > 0
    cluster.wait_until(has_saved)
    return starts_of(pods)[-2:]


def test_the_job_completes(cluster):
    pods = cluster.apply(documents_of("job.yaml", [("--epochs=200", "--epochs=40")]))
    cluster.wait_completed(pods)
    worlds = [start.processes for start in starts_of(pods)]
    assert worlds == [4], f"2 pods of 2 processes are to train once: {worlds}\n{cluster.logs()}"
    assert_learned(cluster, pods)


LONG = [("--epochs=200", "--epochs=20000 --save-every=0.002"),
        ("--nproc-per-node=2", "--nproc-per-node=1")]


def test_the_job_survives_losses_and_starts_over_only_after_that_of_pod_0(cluster):
    pods = cluster.apply(documents_of("job.yaml", LONG))
    next_start(cluster, pods)
    pods[1].kill_worker()
    before, after = next_start(cluster, pods)
    assert after.first >= before.saved > 0, f"lost worker: {before} {after}\n{cluster.logs()}"
    failures = [pod.failures for pod in pods]
    assert failures == [0, 0], f"a lost worker is to fail no pod: {failures}\n{cluster.logs()}"
    pods[1].stop("KILL")
    before, after = next_start(cluster, pods)
    assert after.first >= before.saved, f"lost pod 1: {before} {after}\n{cluster.logs()}"
    failures = [pod.failures for pod in pods]
    assert failures == [0, 1], f"lost pod 1 is to fail no other: {failures}\n{cluster.logs()}"
    pods[0].stop("KILL")
    _, after = next_start(cluster, pods)
    assert after.first == 0, f"without a claim, pod 0 starts over: {after}\n{cluster.logs()}"


def test_the_job_with_a_claim_saves_when_it_is_stopped_and_resumes_without_pod_0(cluster, tmp_path):
    flags = "--epochs=250 --save-every=0.002"
    pods = cluster.apply(documents_of("job.yaml-template", ARGS=flags))
    next_start(cluster, pods)
    for pod in reversed(pods):  # as kubectl drain does. Without pod 0, pod 1 would fail
        pod.stop("TERM")
    before, after = next_start(cluster, pods)
    assert after.first == before.saved, f"not saved: {before} {after}\n{cluster.logs()}"
    pods[0].stop("KILL")
    before, after = next_start(cluster, pods)
    assert after.first >= before.saved, f"lost pod 0: {before} {after}\n{cluster.logs()}"
    cluster.wait_completed(pods)
    undisturbed = tmp_path / "undisturbed.pt"
    lab.sh(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
           ROOT / "cpu_ddp/train.py", "--epochs=250", "--checkpoint", undisturbed, timeout=240)
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


@pytest.mark.parametrize("manifest, script, start", [
    ("job.yaml-template", "mnist_dp", "GPUs none, threads 1 "),
    ("trainjob.yaml-template", "fashionmnist_ddp", "world size 2 on cpu, threads 1 "),
])
def test_other_scripts_and_a_trainjob_train(cluster, manifest, script, start):
    flags = "--fake-data --epochs=1"
    pods = cluster.apply(documents_of(manifest, SCRIPT=script, ARGS=flags))
    cluster.wait_completed(pods)
    log = pods[0].log.read_text()
    assert start in log, f"not the processes and threads of the manifest, {start}:\n{log}"
    assert "test loss" in log, f"{script} is to train and test:\n{cluster.logs()}"


BRIEFLY = [('"300"', '"5"')]  # for how long the pods of a PyTorchJob wait for others


def test_a_pytorchjob_goes_on_without_a_lost_pod(cluster):
    flags = "--epochs=250 --save-every=0.002"
    pods = cluster.apply(documents_of("pytorchjob.yaml-template", BRIEFLY, ARGS=flags))
    next_start(cluster, pods[:1])
    pods[1].stop("TERM")
    pods[1].start()
    next_start(cluster, pods[:1])
    pods[1].stop("KILL")
    cluster.wait_completed(pods[:1])
    last = starts_of(pods[:1])[-1]
    assert last.processes == 1, f"one of two pods is to remain:\n{cluster.logs()}"
    assert last.first > 0, f"it is to resume:\n{cluster.logs()}"
    assert pods[0].restarts == 0, f"the other pod is not to restart:\n{cluster.logs()}"
    assert_learned(cluster, pods[:1])


def test_with_etcd_any_pod_may_be_lost(cluster):
    cluster.apply(documents_of("etcd.yaml"))
    flags = "--epochs=250 --save-every=0.002"
    pods = cluster.apply(documents_of("pytorchjob-etcd.yaml-template", BRIEFLY, ARGS=flags))
    next_start(cluster, pods)
    pods[0].stop("KILL")
    cluster.wait_completed(pods[1:])
    worlds = [start.processes for start in starts_of(pods)]
    assert worlds == [2, 1], f"2 processes, then 1, are to train, not {worlds}\n{cluster.logs()}"
    assert pods[1].restarts == 0, f"the other pod has restarted:\n{cluster.logs()}"
    assert_learned(cluster, pods)

"""containers/kubernetes/: the manifests are rendered, and run side by side (kubernetes_lab.py)."""

import contextlib
import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import kubernetes_lab as lab
import pytest
from scripts import ROOT

pytestmark = pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())

FOLDER = ROOT / "containers/kubernetes"
TEMPLATES = sorted(path.name for path in FOLDER.glob("*.yaml-template"))
MANIFESTS = ["job.yaml", "etcd.yaml", *TEMPLATES]
REQUIRED = {"IMAGE_URI": lab.OUR_IMAGE, "CLAIM_NAME": "fsx-claim"}


def render(template, **variables):
    """Run render.sh and return the finished process."""
    return subprocess.run(["bash", FOLDER / "render.sh", FOLDER / template], capture_output=True,
                          text=True, env={"PATH": os.environ["PATH"], **variables})


def documents_of(manifest, changes=(), **variables):
    """Return the documents of a manifest, with changes (pairs of texts); a template is rendered."""
    if manifest.endswith("-template"):
        done = render(manifest, **REQUIRED, **variables)
        assert done.returncode == 0, f"render.sh {manifest} failed:\n{done.stderr}"
        text = done.stdout
    else:
        text = (FOLDER / manifest).read_text()
    for old, new in changes:
        assert old in text, f"{manifest} has no {old}"
        text = text.replace(old, new)
    return json.loads(lab.sh("yq", "--slurp", ".", input=text))


# --- render.sh and the manifests ---
@pytest.mark.parametrize("variables, named", [
    ({"IMAGE_URI": ""}, "export IMAGE_URI"),
    ({"CPU_PER_NODE": "500m"}, "CPU_PER_NODE=500m"),
])
def test_a_mistake_is_named_and_nothing_is_written(variables, named):
    done = render("job.yaml-template", **{**REQUIRED, **variables})
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
    ({"CPU_PER_NODE": "4"}, 4, 1),
    ({"CPU_PER_NODE": "32", "GPU_PER_NODE": "8"}, 8, 4),
    ({"CPU_PER_NODE": "32", "GPU_PER_NODE": "8", "SCRIPT": "mnist_dp"}, 1, 32),
])
def test_a_pod_has_a_process_per_gpu_or_cpu_which_share_its_cpus(variables, processes, threads):
    text = json.dumps(documents_of("job.yaml-template", **variables))
    assert f"--nproc-per-node={processes} " in text, f"not {processes} processes:\n{text}"
    assert f'"OMP_NUM_THREADS", "value": "0{threads}"' in text, f"not {threads} threads:\n{text}"


@pytest.mark.parametrize("script", ["cifar10_ddp", "mnist_dp", "synthetic_ddp"])
@pytest.mark.parametrize("manifest", TEMPLATES)
def test_a_template_runs_the_script_with_its_checkpoint_and_flags(manifest, script):
    text = json.dumps(documents_of(manifest, SCRIPT=script, ARGS="--seed=1"))
    checkpoint = "--checkpoint=/fsx/cifar10-ddp.pt " if script == "cifar10_ddp" else ""
    command = f"/workspace/{script}/train.py {checkpoint}--seed=1"
    assert command in text.replace("  ", " "), f"{manifest} is to run {command}:\n{text}"


RESTRICTED = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_pods_are_restricted_and_have_shared_memory_and_time_to_save(manifest):
    pods = [pod for document in documents_of(manifest) for pod in lab.pods_of(document)]
    for name, pod, *_ in pods:
        (container,) = pod["containers"]
        security = {**pod["securityContext"], **container["securityContext"]}
        assert security == {**security, **RESTRICTED}, f"{name} is not restricted: {security}"
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
    selected = {"clusterIP": "None", "selector": {"job-name": job["metadata"]["name"]}}
    assert service["spec"] == selected, f"the Service selects not the pods of the Job: {service}"
    name = service["metadata"]["name"]
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert name == subdomain, f"pods are in the subdomain {subdomain}, their Service is {name}"


# --- running, with the image of the Dockerfile ---
class Start(NamedTuple):
    processes: int
    first: int  # step
    saved: int  # step, or 0


def starts_of(pods):
    """Return the starts of the training by the log of pod 0, or of the pods that go on."""
    text = "".join(pod.log.read_text() for pod in pods)
    parts = re.split(r"^world size (\d+)\b.* steps (\d+) to \d+$", text, flags=re.M)
    starts = []
    for processes, first, log in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        saved = re.findall(r"^saved step (\d+) in ", log, re.M) or [0]
        starts.append(Start(int(processes), int(first), int(saved[-1])))
    return starts


def next_start(cluster, pods, processes=2):
    """Wait until the training starts (again) and saves. Return the last start but one, the last."""
    count = len(starts_of(pods))

    def has_saved():
        starts = starts_of(pods)
        return len(starts) > count and starts[-1].processes == processes and starts[-1].saved > 0
    cluster.wait_until(f"{processes} processes train and save", has_saved)
    return starts_of(pods)[-2:]


DISTURBED = "--epochs=40 --save-every=0"  # saves in each step, which takes time
BRIEFLY = [('"300"', '"5"')]  # for how long the pods of a PyTorchJob wait for others


def job_without_a_claim(cluster):
    """It resumes after the loss of pod 1, and starts over after that of pod 0."""
    pods = cluster.apply(documents_of("job.yaml", [
        ("--epochs=200", "--epochs=20000 --save-every=0.002")]))
    next_start(cluster, pods, 4)
    pods[1].stop("KILL")
    before, after = next_start(cluster, pods, 4)
    assert after.first >= before.saved, f"lost pod 1: {before} {after}\n{cluster.logs()}"
    failures = [pod.failures for pod in pods]
    assert failures == [0, 1], f"lost pod 1 is to fail no other: {failures}\n{cluster.logs()}"
    pods[0].stop("KILL")
    _, after = next_start(cluster, pods, 4)
    assert after.first == 0, f"without a claim, pod 0 starts over: {after}\n{cluster.logs()}"


def job_with_a_claim(cluster):
    """It saves when all pods are stopped, resumes in new ones, and survives a lost process."""
    pods = cluster.apply(documents_of("job.yaml-template", ARGS=DISTURBED))
    next_start(cluster, pods)
    for pod in reversed(pods):  # as kubectl drain does. Without pod 0, pod 1 would fail
        pod.stop("TERM")
    before, after = next_start(cluster, pods)
    assert after.first == before.saved, f"not saved: {before} {after}\n{cluster.logs()}"
    pods[1].kill_worker()
    before, after = next_start(cluster, pods)
    assert after.first >= before.saved, f"lost process: {before} {after}\n{cluster.logs()}"
    failures = [pod.failures for pod in pods]
    assert failures == [1, 1], f"a lost process is to fail no pod: {failures}\n{cluster.logs()}"
    cluster.wait_completed(pods)


def pytorchjob_goes_on_without_a_lost_pod(cluster):
    pods = cluster.apply(documents_of("pytorchjob.yaml-template", BRIEFLY, ARGS=DISTURBED))
    next_start(cluster, pods[:1])
    pods[1].stop("TERM")
    pods[1].start()
    next_start(cluster, pods[:1])
    pods[1].stop("KILL")
    assert_goes_on(cluster, pods[0])


def with_etcd_any_pod_may_be_lost(cluster):
    cluster.apply(documents_of("etcd.yaml"))
    pods = cluster.apply(documents_of("pytorchjob-etcd.yaml-template", BRIEFLY, ARGS=DISTURBED))
    next_start(cluster, pods)
    pods[0].stop("KILL")
    assert_goes_on(cluster, pods[1])


def assert_goes_on(cluster, pod):
    """This pod completes the training alone, without a restart."""
    cluster.wait_completed([pod])
    last = starts_of([pod])[-1]
    assert last.processes == 1, f"one of two pods is to remain:\n{cluster.logs()}"
    assert last.first > 0, f"it is to resume:\n{cluster.logs()}"
    assert pod.failures == 0, f"the other pod is not to restart:\n{cluster.logs()}"


def trainjob_trains(cluster):
    pods = cluster.apply(documents_of("trainjob.yaml-template", SCRIPT="fashionmnist_ddp",
                                      ARGS="--fake-data --epochs=1"))
    cluster.wait_completed(pods)
    log = pods[0].log.read_text()
    assert "world size 2 on cpu, threads 1 " in log, f"not two processes of one thread:\n{log}"
    assert "test loss" in log, f"it is to train and test:\n{cluster.logs()}"


STORIES = {function.__name__: function for function in (
    job_without_a_claim, pytorchjob_goes_on_without_a_lost_pod, job_with_a_claim,
    with_etcd_any_pod_may_be_lost, trainjob_trains)}


@pytest.fixture(scope="module")
def stories(request, tmp_path_factory):
    """The stories (futures) of the chosen tests, side by side, each in a cluster of its own."""
    chosen = {item.name for item in request.session.items}
    lab.images()

    def tell(name, folder):
        with contextlib.closing(lab.Cluster(folder)) as cluster:
            STORIES[name](cluster)

    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(tell, name, tmp_path_factory.mktemp(name))
               for name in STORIES if f"test_story[{name}]" in chosen}


@pytest.mark.parametrize("name", STORIES)
def test_story(stories, name):
    stories[name].result(timeout=900)

"""containers/kubernetes/: what the manifests say, and pods that run by them (kubernetes_lab.py)."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import kubernetes_lab as lab
import pytest
from scripts import ROOT

FOLDER = ROOT / "containers/kubernetes"
ETCD = {"RDZV_BACKEND": "etcd"}
# The templates of the table of fields, and what is exported for them.
TEMPLATES = {"job": {}, "pytorchjob": {}, "pytorchjob with etcd": ETCD, "trainjob": {}}
REQUIRED = {"IMAGE_URI": lab.OUR_IMAGE, "CLAIM_NAME": "fsx-claim"}
# Debian's yq takes jq's options. Another program has this name, too.
HAS_YQ = shutil.which("yq") and subprocess.run(["yq", "--slurp", "."], input=b"{}",
                                               capture_output=True).returncode == 0
needs_yq = pytest.mark.skipif(not HAS_YQ, reason="requires Debian's yq: apt-get install yq")


def render(template, path=os.environ["PATH"], **variables):
    """Run render.sh and return the finished process."""
    return subprocess.run(
        [shutil.which("bash"), FOLDER / "render.sh", FOLDER / f"{template}.yaml-template"],
        capture_output=True, text=True, env={"PATH": str(path), **variables})


def text_of(manifest, **variables):
    """Return the text of a manifest: FILE.yaml, or the name of a template, which is rendered."""
    if manifest.endswith(".yaml"):
        return (FOLDER / manifest).read_text()
    done = render(manifest, **REQUIRED, **variables)
    assert done.returncode == 0, f"render.sh {manifest} failed:\n{done.stderr}"
    return done.stdout


def values(pattern, text):
    """Return what the group of the pattern matches, wherever it does, as numbers if it can be."""
    found = re.findall(pattern, text)
    assert found, f"nothing matches {pattern}"
    return [int(value) if value.isdecimal() else value for value in found]


def documents_of(manifest, changes=(), **variables):
    """Return the documents of a manifest (FILE.yaml, or the name of a template, to be rendered).

    changes: pairs of texts, the first of which is replaced by the second.
    """
    text = text_of(manifest, **variables)
    for old, new in changes:
        assert old in text, f"{manifest} has no {old}"
        text = text.replace(old, new)
    return json.loads(lab.sh("yq", "--slurp", ".", input=text))


# --- render.sh ---
@pytest.mark.parametrize("variables, named", [
    ({"IMAGE_URI": ""}, "export IMAGE_URI"),
    ({"CPU_PER_NODE": "500m"}, "CPU_PER_NODE=500m"),
    ({"NUM_NODES": "0"}, "NUM_NODES=0"),
    ({"RDZV_BACKEND": "c10"}, "RDZV_BACKEND=c10"),
])
def test_a_mistake_is_named_and_nothing_is_printed(variables, named):
    done = render("job", **{**REQUIRED, **variables})
    assert done.returncode != 0, f"{variables} is to be an error:\n{done.stdout}"
    assert named in done.stderr, f"the error is to say {named}:\n{done.stderr}"
    assert done.stdout == "", f"no part of a manifest is to be printed:\n{done.stdout}"


def test_a_template_is_rendered_where_there_is_no_envsubst(tmp_path):
    for name in ("bash", "date", "grep", "sort"):  # what every system has
        (tmp_path / name).symlink_to(shutil.which(name))
    variables = {"ARGS": r"""--name="$HOME & \1" """, "GPU_PER_NODE": "1"}
    done = render("job", tmp_path, **REQUIRED, **variables)
    assert done.stdout, f"render.sh is to require bash and coreutils only:\n{done.stderr}"
    assert variables["ARGS"] in done.stdout, f"ARGS has changed:\n{done.stdout}"
    left = re.findall(r"[$]\{?[A-Z]\w*", done.stdout.replace(variables["ARGS"], ""))
    assert not left, f"variables are left: {left}"


def test_render_explains_every_variable_and_its_default():
    text = (FOLDER / "render.sh").read_text()
    rows = dict(re.findall(r"^#   ([A-Z_]+)  +([^ :]+)", text, re.M))
    printed = dict(re.findall(r"^([A-Z_]+)=(.*)", "".join(
        render(name.split()[0], **REQUIRED).stderr for name in TEMPLATES), re.M))
    computed = {"BACKOFF_LIMIT", "CHECKPOINT", "MAX_RESTARTS", "RDZV_HOST", "RDZV_ID", "RDZV_PORT",
                "THREADS_PER_WORKER"}
    different = sorted(rows.keys() ^ (printed.keys() - computed))
    assert not different, f"read by render.sh, or explained in its first lines: {different}"
    for name, default in rows.items():
        if re.search(r"\d", default) and name != "MEMORY_PER_NODE":
            assert default == printed[name], f"{name} is {printed[name]} by default"


# --- numbers and paths that have to fit each other ---
TRAINING = ["job.yaml", "job", "pytorchjob", "trainjob"]


@pytest.mark.parametrize("manifest", TRAINING)
def test_kubernetes_kills_a_pod_after_torchrun_has_waited_for_it_to_save(manifest):
    text = text_of(manifest)
    (grace,) = values(r"terminationGracePeriodSeconds: (\d+)", text)
    (saving,) = values(r'TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "(\d+)"', text)
    assert saving + 5 <= grace, (
        f"torchrun gives processes {saving} s to save, Kubernetes kills the pod after {grace} s")


@pytest.mark.parametrize("manifest", ["job.yaml", "job"])
def test_pods_wait_for_longer_than_a_pod_on_a_lost_node_takes_to_be_replaced(manifest):
    (waiting,) = values(r"read_timeout=(\d+)", text_of(manifest))
    lost = 50 + 300  # until the node is not ready, and its pods are evicted
    assert waiting > lost, f"pods wait {waiting} s for pod 0, which takes {lost} s on a lost node"


@pytest.mark.parametrize("manifest", [*TRAINING, "files"])
def test_pods_run_as_the_user_of_the_image(manifest):
    (user,) = values(r"--uid (\d+)", lab.DOCKERFILE.read_text())
    found = values(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", text_of(manifest))
    assert found == [user] * 3, f"user, group and fsGroup are {found}, the image has user {user}"


def test_etcd_is_where_a_job_looks_for_it_and_says_so_itself():
    """The address that etcd advertises is the one to which clients turn after their first request.

    (python-etcd does so if it is told to reconnect.)
    """
    job = text_of("pytorchjob", **ETCD)
    (host,) = values(r"rdzvHost: (\S+)", job)
    (port,) = values(r"rdzvPort: (\d+)", job)
    etcd = text_of("etcd.yaml")
    (name,) = values(r"\n  name: (\S+)", etcd.split("\n---\n")[0])
    assert name == host, f"the job looks for {host}, the Service is called {name}"
    ports = values(r"(?:port: |--listen-client-urls=\S+:)(\d+)", etcd)
    assert set(ports) == {port}, f"the job looks for port {port}; Service, probe, server: {ports}"
    advertised = values(r"--advertise-client-urls=(\S+)", etcd)
    assert advertised == [f"http://{host}:{port}"], f"etcd advertises {advertised}"


def test_a_second_render_has_another_id_of_the_rendezvous():
    """etcd does not accept that of a finished one."""
    first = values(r"rdzvId: (\S+)", text_of("pytorchjob", **ETCD))
    time.sleep(1.1)
    second = values(r"rdzvId: (\S+)", text_of("pytorchjob", **ETCD))
    assert first != second, f"two renders have the same id {first}"


# --- what is exported, and what the manifests say then ---
class Case(NamedTuple):
    """What is exported before render.sh, and what the manifest is to say then."""
    variables: dict
    script: str = "cpu_ddp"
    name: str = "cpu-ddp"
    flags: str = " --checkpoint=/fsx/cpu-ddp.pt"
    nodes: int = 2
    workers: int = 1
    threads: int = 1
    cpu: int = 1
    gpus: int = 0
    memory: str = "4Gi"


CASES = {
    "defaults": Case({}),
    "GPUs": Case({"SCRIPT": "cifar10_ddp", "NUM_NODES": "3", "GPU_PER_NODE": "4",
                  "CPU_PER_NODE": "33", "ARGS": "--epochs=30 --bf16"},
                 "cifar10_ddp", "cifar10-ddp",
                 " --checkpoint=/fsx/cifar10-ddp.pt --epochs=30 --bf16", 3, 4, 8, 33, 4, "16Gi"),
    "CPUs, a name": Case({"SCRIPT": "fashionmnist_ddp", "CPU_PER_NODE": "4", "JOB_NAME": "mine"},
                         "fashionmnist_ddp", "mine", " --checkpoint=/fsx/mine.pt", 2, 4, 1, 4, 0,
                         "16Gi"),
    "more processes than CPUs": Case({"SCRIPT": "synthetic_ddp", "CPU_PER_NODE": "2",
                                      "WORKERS_PER_NODE": "4", "MEMORY_PER_NODE": "5Gi"},
                                     "synthetic_ddp", "synthetic-ddp",
                                     " --checkpoint=/fsx/synthetic-ddp.pt", 2, 4, 1, 2, 0, "5Gi"),
    "mnist_dp": Case({"SCRIPT": "mnist_dp", "NUM_NODES": "2", "GPU_PER_NODE": "8",
                      "WORKERS_PER_NODE": "8", "CPU_PER_NODE": "32"},
                     "mnist_dp", "mnist-dp", "", 1, 1, 32, 32, 8, "4Gi"),
}


ON_THE_CLAIM = {
    "volumes/fsx/persistentVolumeClaim/claimName": "fsx-claim",
    "container/volumeMounts/fsx/mountPath": "/fsx",
    # otherwise Kubernetes walks through a large volume for hours
    "securityContext/fsGroupChangePolicy": "OnRootMismatch",
}


def fields_of_a_pod(case):
    return {
        "container/image": lab.OUR_IMAGE,
        "container/resources/limits": {"cpu": str(case.cpu), "memory": case.memory,
                                       "nvidia.com/gpu": str(case.gpus)},
        "container/env/OMP_NUM_THREADS/value": f"0{case.threads}",
        # void where there are no GPUs; else Kubernetes sets it
        "container/env/NVIDIA_VISIBLE_DEVICES/value": None if case.gpus else "void",
        "script": f"/workspace/{case.script}/train.py{case.flags}",
    }


def fields_of_a_job(case):
    return {
        "spec/completions": case.nodes,
        "spec/parallelism": case.nodes,
        "--nnodes": str(case.nodes),
        "--nproc-per-node": str(case.workers),
        "--rdzv-endpoint": f"{case.name}-0.{case.name}:29500",  # the name of pod 0
    }


def fields_of_a_pytorchjob(case, host, port, restarts, backend="c10d"):
    return NO_OPTIONS | {
        "spec/nprocPerNode": str(case.workers),
        "spec/elasticPolicy/rdzvBackend": backend,
        "spec/elasticPolicy/rdzvHost": host,
        "spec/elasticPolicy/rdzvPort": port,
        "spec/elasticPolicy/maxReplicas": case.nodes,
        "spec/elasticPolicy/maxRestarts": restarts,
        "spec/runPolicy/backoffLimit": 20 * case.nodes,  # 20 restarts per pod
        "spec/pytorchReplicaSpecs/Worker/replicas": case.nodes,
    }


def fields_of_a_trainjob(case):
    return NO_OPTIONS | {
        "spec/trainer/numNodes": case.nodes,
        "spec/trainer/numProcPerNode": case.workers,
        "spec/runtimePatches/0/manager": f"user.example/{case.name}",
    }


NO_OPTIONS = {"options": set()}  # torchrun's options replace the variables of an operator
RESTRICTED = {  # what restricted clusters require
    "securityContext/runAsNonRoot": True,
    "securityContext/seccompProfile/type": "RuntimeDefault",
    "container/securityContext": {"allowPrivilegeEscalation": False,
                                  "capabilities": {"drop": ["ALL"]}},
}
# Whoever runs commands in a pod could use its token. (A TrainJob has no field for it)
NO_TOKEN = {"automountServiceAccountToken": False}
TRAINS = RESTRICTED | {
    "container/volumeMounts/shm/mountPath": "/dev/shm",  # 64 MiB are too few for NCCL
    "volumes/shm/emptyDir/medium": "Memory",
}
# torchrun's store keeps addresses of lost processes
OWN_STORE = {"container/env/TORCH_DISABLE_SHARE_RDZV_TCP_STORE/value": "1"}
JOB = TRAINS | NO_TOKEN | OWN_STORE | {
    "spec/completionMode": "Indexed",
    "spec/maxFailedIndexes": 0,
    # a pod that is lost after the last step fails no complete job
    "spec/successPolicy": {"rules": [{"succeededIndexes": "0"}]},
}
# What Kubernetes and the operators require, and the stories below would not all miss.
REQUIREMENTS = {
    "job.yaml": JOB,
    "job": JOB | ON_THE_CLAIM,
    "pytorchjob": TRAINS | NO_TOKEN | OWN_STORE | ON_THE_CLAIM | {
        "spec/pytorchReplicaSpecs/Worker/restartPolicy": "OnFailure",
        "container/name": "pytorch",  # by which the operator finds it
    },
    "trainjob": TRAINS | ON_THE_CLAIM | {
        "spec/runtimeRef/name": "torch-distributed",
        # by which Trainer finds them
        "spec/runtimePatches/0/trainingRuntimeSpec/template/spec/replicatedJobs/node/name": "node",
        "container/name": "node",
    },
    "files": RESTRICTED | NO_TOKEN | ON_THE_CLAIM | {"container/image": lab.OUR_IMAGE},
    "etcd.yaml": RESTRICTED | NO_TOKEN,
}


def field(node, path):
    """Return a field by its path (keys, or an item of a list by its name or number), or None."""
    for key in path.split("/"):
        if isinstance(node, list):
            node = {item.get("name", str(number)): item for number, item in enumerate(node)}
        if not isinstance(node, dict):
            return None
        node = node.get(key)
    return node


def launch_of(container):
    """Return torchrun's options by name, the set of these names, and the script with its flags."""
    command = " ".join("".join(container.get("args", [])).split())
    launcher, start, script = command.partition("/workspace/")
    options = dict(re.findall(r"(--[\w-]+)[= ](\S+)", launcher))
    return options | {"options": set(options), "script": start + script}


def assert_fields(documents, needed):
    """The last document, its pods, or their container have the fields that are needed."""
    pod = lab.pods_of(documents[-1])[0].spec
    (container,) = pod["containers"]
    places = documents[-1] | pod | {"container": container} | launch_of(container)
    found = {path: field(places, path) for path in needed}
    wrong = [f"{path}: {found[path]!r}, not {value!r}"
             for path, value in needed.items() if found[path] != value]
    assert not wrong, "\n".join([f"fields of a {documents[-1]['kind']} are wrong", *wrong])


@needs_yq
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_exported_is_in_the_manifest(template, case):
    special = {
        "job": fields_of_a_job(case),
        "pytorchjob": fields_of_a_pytorchjob(case, f"{case.name}-worker-0", 23456, 10),
        "pytorchjob with etcd": fields_of_a_pytorchjob(case, "etcd", 2379, 100, "etcd"),
        "trainjob": fields_of_a_trainjob(case),
    }
    variables = case.variables | TEMPLATES[template]
    documents = documents_of(template.split()[0], **variables)
    assert documents[-1]["metadata"]["name"] == case.name, f"the job is not called {case.name}"
    assert_fields(documents, fields_of_a_pod(case) | special[template])


@needs_yq
@pytest.mark.parametrize("manifest", REQUIREMENTS)
def test_a_manifest_has_what_clusters_require(manifest):
    assert_fields(documents_of(manifest), REQUIREMENTS[manifest])


@needs_yq
@pytest.mark.parametrize("manifest", ["job.yaml", "job"])
def test_the_service_gives_the_pods_of_a_job_their_names(manifest):
    service, job = documents_of(manifest)
    selected = {"clusterIP": "None", "selector": {"job-name": job["metadata"]["name"]}}
    assert service["spec"] == selected, f"the Service selects not the pods of the Job: {service}"
    name = service["metadata"]["name"]
    subdomain = job["spec"]["template"]["spec"]["subdomain"]
    assert name == subdomain, f"pods are in the subdomain {subdomain}, their Service is {name}"


# --- running, with the image of the Dockerfile ---
def next_start(cluster, pods, processes=2):
    """Wait until the training starts (again) and saves. Return the last start but one, the last."""
    count = len(lab.starts_of(pods))

    def has_saved():
        starts = lab.starts_of(pods)
        return len(starts) > count and starts[-1].processes == processes and starts[-1].done > 1
    cluster.wait_until(f"start {count + 1} of the training, of {processes} processes, to save",
                       has_saved)
    return lab.starts_of(pods)[-2:]


DISTURBED = "--epochs=1500 --samples=256"  # saves after each epoch of 4 steps, which takes time
BRIEFLY = [('"300"', '"5"')]  # for how long the pods of a PyTorchJob wait for others


def job_without_a_claim(cluster):
    """It resumes after the loss of pod 1, and starts over after that of pod 0."""
    pods = cluster.apply(documents_of("job.yaml", [
        ("--epochs=200", "--epochs=20000"), ("--nproc-per-node=2", "--nproc-per-node=1")]))
    next_start(cluster, pods)
    pods[1].stop("TERM")  # as kubectl delete pod does
    before, after = next_start(cluster, pods)
    assert after.first >= before.done - 1, f"lost pod 1: {before} {after}\n{cluster.report()}"
    failures = [pod.failures for pod in pods]
    assert failures == [0, 1], f"lost pod 1 is to fail no other: {failures}\n{cluster.report()}"
    pods[0].stop("KILL")
    _, after = next_start(cluster, pods)
    assert after.first == 0, f"without a claim, pod 0 starts over: {after}\n{cluster.report()}"


def job_with_a_claim(cluster):
    """When all pods are stopped, it resumes in new ones. It survives a lost process."""
    pods = cluster.apply(documents_of("job", ARGS=DISTURBED))
    next_start(cluster, pods)
    for pod in reversed(pods):  # as kubectl drain does. Without pod 0, pod 1 would fail
        pod.stop("TERM")
    before, after = next_start(cluster, pods)
    assert after.first >= before.done - 1, f"not resumed: {before} {after}\n{cluster.report()}"
    pods[1].kill_worker()
    before, after = next_start(cluster, pods)
    assert after.first >= before.done - 1, f"lost process: {before} {after}\n{cluster.report()}"
    failures = [pod.failures for pod in pods]
    assert failures == [1, 1], f"a lost process is to fail no pod: {failures}\n{cluster.report()}"
    cluster.wait_completed(pods)


def with_etcd_any_pod_may_be_lost(cluster):
    cluster.apply(documents_of("etcd.yaml"))
    pods = cluster.apply(documents_of("pytorchjob", BRIEFLY, ARGS=DISTURBED, **ETCD))
    next_start(cluster, pods)
    pods[0].stop("KILL")
    assert_goes_on(cluster, pods[1])


def assert_goes_on(cluster, pod):
    """This pod completes the training alone, without a restart."""
    cluster.wait_completed([pod])
    last = lab.starts_of([pod])[-1]
    assert last.processes == 1, f"one of two pods is to remain:\n{cluster.report()}"
    assert last.first > 0, f"it is to resume:\n{cluster.report()}"
    assert pod.failures == 0, f"the other pod is not to restart:\n{cluster.report()}"


def files_are_copied_through_a_pod(cluster):
    """Onto the volume and from it, as kubectl cp does: by tar in the pod."""
    (pod,) = cluster.apply(documents_of("files"))
    cluster.wait_until("the pod to run", pod.runs)
    name = "slurm/requirements.txt"
    text = (ROOT / name).read_text()
    pod.exec("tar", "-xmf", "-", "-C", "/fsx", input=lab.sh("tar", "-cf", "-", "-C", ROOT, name))
    found = (cluster.claim / name).read_text()
    assert found == text, f"the volume has another {name}:\n{found}"
    archive = pod.exec("tar", "-cf", "-", f"/fsx/{name}")
    assert text in archive, f"what comes back is not {name}:\n{archive}"


def trainjob_trains(cluster):
    pods = cluster.apply(documents_of("trainjob", ARGS="--epochs=2"))
    cluster.wait_completed(pods)
    (start,) = lab.starts_of(pods)
    assert start == (2, 0, 2), f"two processes are to train for 2 epochs:\n{cluster.report()}"


STORIES = {function.__name__: function for function in (
    job_without_a_claim, job_with_a_claim, with_etcd_any_pod_may_be_lost,
    trainjob_trains, files_are_copied_through_a_pod)}


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    """The stories (futures) of the chosen tests, side by side, each in a cluster of its own."""
    chosen = {item.name for item in request.session.items}
    lab.images()

    def run_story(name, folder):
        with contextlib.closing(lab.Cluster(folder)) as cluster:
            STORIES[name](cluster)

    with ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(run_story, name, tmp_path_factory.mktemp(name))
               for name in STORIES if f"test_story[{name}]" in chosen}


@needs_yq
@pytest.mark.pods
@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())
@pytest.mark.parametrize("name", STORIES)
def test_story(running, name):
    running[name].result()

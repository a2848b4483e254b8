"""A Job trains in pods that are lost and replaced, and all manifests say the same of their pods.

The pods of a Job run in containers (kubernetes_lab.py). Operators do not: what a PyTorchJob and a
TrainJob say is compared with the Job that runs.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import kubernetes_lab as lab
import pytest
from scripts import ROOT

FOLDER = ROOT / "containers/kubernetes"
TEMPLATES = ["job", "pytorchjob", "trainjob"]
ETCD = {"RDZV_BACKEND": "etcd"}
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
        render(name, **REQUIRED).stderr for name in TEMPLATES), re.M))
    computed = {"BACKOFF_LIMIT", "CHECKPOINT", "MAX_RESTARTS", "RDZV_HOST", "RDZV_ID", "RDZV_PORT",
                "THREADS_PER_WORKER"}
    different = sorted(rows.keys() ^ (printed.keys() - computed))
    assert not different, f"read by render.sh, or explained in its first lines: {different}"
    for name, default in rows.items():
        if re.search(r"\d", default) and name != "MEMORY_PER_NODE":
            assert default == printed[name], f"{name} is {printed[name]} by default"


# --- numbers and paths that have to fit each other ---
TRAINING = ["job.yaml", *TEMPLATES]


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
EXPORTED = {  # variables, and what each manifest then says
    "GPUs": ({"SCRIPT": "cifar10_ddp", "NUM_NODES": "3", "GPU_PER_NODE": "4", "CPU_PER_NODE": "33",
              "ARGS": "--epochs=30 --bf16"}, {
        "all": ["metadata: {name: cifar10-ddp}", "image: ddp:1", "{claimName: fsx-claim}",
                'cpu: "33"', "memory: 16Gi", 'nvidia.com/gpu: "4"', 'OMP_NUM_THREADS, value: "08"',
                "/cifar10_ddp/train.py --checkpoint=/fsx/cifar10-ddp.pt --epochs=30 --bf16"],
        "job": ["completions: 3", "parallelism: 3", "--nnodes=3", "--nproc-per-node=4",
                "--rdzv-endpoint=cifar10-ddp-0.cifar10-ddp:29500", "{job-name: cifar10-ddp}"],
        "pytorchjob": ['nprocPerNode: "4"', "rdzvBackend: c10d", "rdzvPort: 23456",
                       "rdzvHost: cifar10-ddp-worker-0", "minReplicas: 1", "maxReplicas: 3",
                       "maxRestarts: 10", "backoffLimit: 60", " replicas: 3"],
        "trainjob": ["numNodes: 3", "numProcPerNode: 4", "user.example/cifar10-ddp"]}),
    "CPUs": ({"SCRIPT": "fashionmnist_ddp", "CPU_PER_NODE": "2", "WORKERS_PER_NODE": "4",
              "MEMORY_PER_NODE": "5Gi", "JOB_NAME": "mine", **ETCD}, {
        "all": ["{name: mine}", 'cpu: "2"', "memory: 5Gi", 'nvidia.com/gpu: "0"', "value: void}",
                'OMP_NUM_THREADS, value: "01"',
                "/fashionmnist_ddp/train.py --checkpoint=/fsx/mine.pt"],
        "pytorchjob": ["rdzvBackend: etcd", "rdzvHost: etcd", "rdzvPort: 2379",
                       "maxRestarts: 100", "backoffLimit: 40"]}),
    "mnist_dp": ({"SCRIPT": "mnist_dp", "NUM_NODES": "2", "GPU_PER_NODE": "8",
                  "WORKERS_PER_NODE": "8", "CPU_PER_NODE": "32"}, {
        "all": ["memory: 4Gi", 'OMP_NUM_THREADS, value: "032"', "/mnist_dp/train.py  \n"],
        "job": ["completions: 1", "--nproc-per-node=1"]}),
    # what the operators require
    "defaults": ({}, {
        "pytorchjob": ["- name: pytorch ", "restartPolicy: OnFailure"],
        "trainjob": ["runtimeRef: {name: torch-distributed}", "- name: node\n" + 12 * " "]}),
}


@pytest.mark.parametrize("case", EXPORTED)
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_exported_is_in_the_manifest(template, case):
    variables, texts = EXPORTED[case]
    found = text_of(template, **variables)
    missing = [text for text in texts.get("all", []) + texts.get(template, []) if text not in found]
    assert not missing, f"{template} with {variables} lacks {missing}:\n{found}"
    void = "NVIDIA_VISIBLE_DEVICES" in found
    assert void != ("GPU_PER_NODE" in variables), f"NVIDIA_VISIBLE_DEVICES: {void}, {variables}"


def said(node, key=""):
    """Return what a document says, as texts: each field, variable, word of a command."""
    if isinstance(node, dict) and "value" in node:
        return {f"{node.get('name')} = {node['value']}"}
    if isinstance(node, dict):
        return {text for name, value in node.items() for text in said(value, name)}
    if isinstance(node, list):
        return {text for item in node for text in said(item, key)}
    return {f"{key}: {word}" for word in str(node).split()}


OF_A_JOB = {
    "kind: Service", "apiVersion: v1", "clusterIP: None", "kind: Job", "apiVersion: batch/v1",
    "completionMode: Indexed", "completions: 2", "parallelism: 2", "backoffLimitPerIndex: 3",
    "maxFailedIndexes: 0", "succeededIndexes: 0", "job-name: cpu-ddp", "subdomain: cpu-ddp",
    "restartPolicy: Never", "name: train"}
OPTIONS = {f"args: {word}" for word in (
    "--nnodes=2", "--nproc-per-node=2", "--max-restarts=3", "--rdzv-backend=c10d",
    "--rdzv-endpoint=cpu-ddp-0.cpu-ddp:29500", "--rdzv-conf=is_host=$((JOB_COMPLETION_INDEX", "==",
    "0)),read_timeout=600")}
LACKS = {  # what job.yaml-template says, and another manifest does not
    "job.yaml": {
        "args: cd", "args: /fsx", "args: &&", "args: /workspace/cpu_ddp/train.py",
        "args: --checkpoint=/fsx/cpu-ddp.pt", "claimName: fsx-claim", "mountPath: /fsx",
        "name: fsx", "fsGroupChangePolicy: OnRootMismatch", "image: ddp:1", "cpu: 1",
        "memory: 8Gi", "nvidia.com/gpu: 0", "OMP_NUM_THREADS = 01"},
    "pytorchjob": OF_A_JOB | OPTIONS,
    # It has no field for the token, and Trainer no store to share.
    "trainjob": OF_A_JOB | OPTIONS | {"automountServiceAccountToken: False",
                                      "TORCH_DISABLE_SHARE_RDZV_TCP_STORE = 1"},
}


ADDS = {  # what job.yaml says, and job.yaml-template does not
    "args: /script/train.py", "args: --epochs=200", "args: --checkpoint=/checkpoint/cpu-ddp.pt",
    "mountPath: /script", "name: script", "mountPath: /checkpoint", "name: checkpoint",
    f"image: {lab.OFFICIAL_IMAGE}", "cpu: 2", "cpu: 500m", "memory: 2Gi", "memory: 4Gi",
    "OMP_NUM_THREADS = 1"}


@needs_yq
@pytest.mark.parametrize("manifest", LACKS)
def test_all_manifests_say_the_same(manifest):
    job, other = (said(documents_of(name, WORKERS_PER_NODE="2")) for name in ("job", manifest))
    wrong = (job - other) ^ LACKS[manifest]
    if manifest == "job.yaml":
        wrong |= (other - job) ^ ADDS
    assert not wrong, f"{manifest} and job.yaml-template differ in {wrong}, see LACKS and ADDS"


@needs_yq
@pytest.mark.parametrize("manifest", ["job", "files", "etcd.yaml"])
def test_restricted_clusters_accept_the_pods(manifest):
    """Whoever runs commands in a pod could use a token."""
    missing = {"automountServiceAccountToken: False", "runAsNonRoot: True", "type: RuntimeDefault",
               "allowPrivilegeEscalation: False", "drop: ALL"} - said(documents_of(manifest))
    assert not missing, f"{manifest} lacks {missing}"


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


STORIES = {function.__name__: function for function in (
    job_without_a_claim, job_with_a_claim, files_are_copied_through_a_pod)}


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

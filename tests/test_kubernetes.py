"""A Job trains in pods that are lost and replaced, and all manifests say the same of their pods.

The pods of a Job run in containers (kubernetes_lab.py). Operators do not: what a PyTorchJob and a
TrainJob say is compared with the Job that runs.
"""

import contextlib
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


def render(template, path=os.environ["PATH"], **variables):
    """Run render.sh and return the finished process."""
    return subprocess.run(
        [shutil.which("bash"), FOLDER / "render.sh", FOLDER / f"{template}.yaml-template"],
        capture_output=True, text=True, env={"PATH": str(path), **variables})


def text_of(manifest, **variables):
    """Return the text of a manifest: FILE.yaml, or the name of a template, which is rendered."""
    if manifest.endswith(".yaml"):
        return (FOLDER / manifest).read_text()
    done = render(manifest, **{**REQUIRED, **variables})
    assert done.returncode == 0, f"render.sh {manifest} failed:\n{done.stderr}"
    return done.stdout


def lines_of(text):
    """Return the lines of a manifest, without comments and indentation."""
    lines = [re.sub("(^| +)#.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line]


def only_in(text, other):
    """Return the lines that only the first of two manifests has. The other may break them."""
    words = f" {' '.join(lines_of(other))} "
    return {line for line in lines_of(text) if f" {line} " not in words}


def values(pattern, text):
    """Return what the group of the pattern matches, wherever it does, as numbers if it can be."""
    found = re.findall(pattern, text)
    assert found, f"nothing matches {pattern}"
    return [int(value) if value.isdecimal() else value for value in found]


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
def test_kubernetes_kills_a_pod_after_torchrun_has_waited_for_it_to_save():
    text = text_of("job")
    (grace,) = values(r"terminationGracePeriodSeconds: (\d+)", text)
    (saving,) = values(r'TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "(\d+)"', text)
    assert saving + 5 <= grace, (
        f"torchrun gives processes {saving} s to save, Kubernetes kills the pod after {grace} s")


def test_pods_wait_for_longer_than_a_pod_on_a_lost_node_takes_to_be_replaced():
    (waiting,) = values(r"read_timeout=(\d+)", text_of("job"))
    lost = 50 + 300  # until the node is not ready, and its pods are evicted
    assert waiting > lost, f"pods wait {waiting} s for pod 0, which takes {lost} s on a lost node"


@pytest.mark.parametrize("manifest", ["job", "files"])
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


# --- what is exported, and what a manifest says then ---
GPUS = {"SCRIPT": "cifar10_ddp", "NUM_NODES": "3", "GPU_PER_NODE": "4", "CPU_PER_NODE": "33",
        "ARGS": "--epochs=30 --bf16"}
CPUS = {"SCRIPT": "fashionmnist_ddp", "CPU_PER_NODE": "2", "WORKERS_PER_NODE": "4",
        "MEMORY_PER_NODE": "5Gi", "JOB_NAME": "mine"}
ONE_PROCESS = {"SCRIPT": "mnist_dp", "NUM_NODES": "2", "GPU_PER_NODE": "8",
               "WORKERS_PER_NODE": "8", "CPU_PER_NODE": "32"}


@pytest.mark.parametrize("template, variables, texts", [
    ("job", GPUS, [
        "kind: Service metadata: {name: cifar10-ddp} spec: clusterIP: None "
        "selector: {job-name: cifar10-ddp}", "kind: Job metadata: {name: cifar10-ddp}",
        "completions: 3 parallelism: 3", "subdomain: cifar10-ddp", "image: ddp:1",
        "--nnodes=3 --nproc-per-node=4", "--rdzv-endpoint=cifar10-ddp-0.cifar10-ddp:29500",
        "/workspace/cifar10_ddp/train.py --checkpoint=/fsx/cifar10-ddp.pt --epochs=30 --bf16 env:",
        'OMP_NUM_THREADS, value: "08"', 'cpu: "33" memory: 16Gi nvidia.com/gpu: "4"',
        "{claimName: fsx-claim}"]),
    ("pytorchjob", GPUS, [
        "metadata: {name: cifar10-ddp}", 'nprocPerNode: "4"', "rdzvBackend: c10d",
        "rdzvHost: cifar10-ddp-worker-0 rdzvPort: 23456", "minReplicas: 1 maxReplicas: 3",
        "maxRestarts: 10", "backoffLimit: 60", "replicas: 3 restartPolicy: OnFailure",
        "- name: pytorch image:"]),  # the operator requires the name
    ("trainjob", GPUS, [
        "metadata: {name: cifar10-ddp}", "numNodes: 3 numProcPerNode: 4",
        "manager: user.example/cifar10-ddp",
        "runtimeRef: {name: torch-distributed}", "- name: node template:"]),  # and these
    ("job", CPUS, [
        "{name: mine}", "--nproc-per-node=4", "--checkpoint=/fsx/mine.pt", "value: void}",
        'OMP_NUM_THREADS, value: "01"', 'cpu: "2" memory: 5Gi nvidia.com/gpu: "0"']),
    ("pytorchjob", CPUS | ETCD, [
        "rdzvBackend: etcd rdzvHost: etcd rdzvPort: 2379", "maxRestarts: 100", "backoffLimit: 40"]),
    ("job", ONE_PROCESS, [
        "completions: 1 parallelism: 1", "--nnodes=1 --nproc-per-node=1",
        "/workspace/mnist_dp/train.py env:", 'OMP_NUM_THREADS, value: "032"', "memory: 4Gi"]),
])
def test_what_is_exported_is_in_the_manifest(template, variables, texts):
    found = " ".join(lines_of(text_of(template, **variables)))
    missing = [text for text in texts if text not in found]
    assert not missing, f"{template} with {variables} lacks {missing}:\n{found}"
    void = "NVIDIA_VISIBLE_DEVICES" in found
    assert void != ("GPU_PER_NODE" in variables), f"NVIDIA_VISIBLE_DEVICES: {void}, {variables}"


# --- what all manifests say ---
def test_job_yaml_is_the_template_without_an_image_and_a_volume_of_your_own():
    template = text_of("job", IMAGE_URI=lab.OFFICIAL_IMAGE, CPU_PER_NODE="2", MEMORY_PER_NODE="4Gi")
    manifest = text_of("job.yaml")
    missing = only_in(template, manifest)
    assert missing == {
        "cd /fsx && exec torchrun", "/workspace/cpu_ddp/train.py --checkpoint=/fsx/cpu-ddp.pt",
        '- {name: OMP_NUM_THREADS, value: "01"}', 'cpu: "2"', "memory: 4Gi", 'nvidia.com/gpu: "0"',
        "fsGroupChangePolicy: OnRootMismatch", "- {name: fsx, mountPath: /fsx}", "- name: fsx",
        "persistentVolumeClaim: {claimName: fsx-claim}"}, f"job.yaml lacks {missing}"
    missing = only_in(manifest, template)
    assert missing == {
        "/script/train.py --epochs=200 --checkpoint=/checkpoint/cpu-ddp.pt",
        '- {name: OMP_NUM_THREADS, value: "1"}', "requests: {cpu: 500m, memory: 2Gi}",
        'limits: {cpu: "2", memory: 4Gi}', "- {name: script, mountPath: /script}",
        "- {name: checkpoint, mountPath: /checkpoint}", "- name: script",
        "configMap: {name: cpu-ddp}", "- name: checkpoint", "emptyDir: {}",
    }, f"job.yaml-template lacks {missing}"


OPTIONS = {"--nnodes=$NUM_NODES --nproc-per-node=$WORKERS_PER_NODE --max-restarts=3",
           "--rdzv-backend=c10d --rdzv-endpoint=$JOB_NAME-0.$JOB_NAME:29500",
           "--rdzv-conf=is_host=$((JOB_COMPLETION_INDEX == 0)),read_timeout=600"}


@pytest.mark.parametrize("template, expected", [
    ("pytorchjob", OPTIONS | {"- name: train"}),
    # It has no field for the token, and Trainer no store to share.
    ("trainjob", OPTIONS | {
        "- name: train", "resources:", "automountServiceAccountToken: false",
        '- {name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE, value: "1"}'}),
])
def test_the_pods_of_an_operator_are_those_of_the_job(template, expected):
    job, other = ((FOLDER / f"{name}.yaml-template").read_text() for name in ("job", template))
    missing = only_in(job[job.index("automountServiceAccountToken"):], other)
    assert missing == expected, f"of the pods of job.yaml-template, {template} lacks {missing}"


def test_the_pod_that_sleeps_has_the_image_and_the_volume_of_the_job():
    job, files = ((FOLDER / f"{name}.yaml-template").read_text() for name in ("job", "files"))
    own = only_in(files, job)
    assert own == {
        "kind: Pod", "metadata: {name: files}", "terminationGracePeriodSeconds: 1",
        "- name: files", 'command: [sleep, "86400"]', 'limits: {cpu: "1", memory: 1Gi}',
    }, f"job.yaml-template lacks these lines of files.yaml-template: {own}"


RESTRICTED = """
automountServiceAccountToken: false
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
"""


@pytest.mark.parametrize("manifest", ["job", "files", "etcd.yaml"])
def test_restricted_clusters_accept_the_pods(manifest):
    """Whoever runs commands in a pod could use a token."""
    missing = only_in(RESTRICTED, text_of(manifest))
    assert not missing, f"{manifest} lacks {missing}"


@pytest.mark.skipif(not shutil.which("yq"), reason="requires yq: apt-get install yq")
@pytest.mark.parametrize("manifest", ["job.yaml", "etcd.yaml", "files", *TEMPLATES])
def test_a_manifest_is_yaml(manifest):
    lab.sh("yq", ".", input=text_of(manifest))


# --- running, with the image of the Dockerfile ---
def next_start(cluster, pods):
    """Wait until the training starts (again) and saves. Return the last start but one, the last."""
    count = len(lab.starts_of(pods))

    def has_saved():
        starts = lab.starts_of(pods)
        return len(starts) > count and starts[-1].done > 1
    cluster.wait_until(f"start {count + 1} of the training, of two processes, to save", has_saved)
    return lab.starts_of(pods)[-2:]


DISTURBED = "--epochs=1500 --samples=256"  # saves after each epoch of 4 steps, which takes time


def job_without_a_claim(cluster):
    """It resumes after the loss of pod 1, and starts over after that of pod 0."""
    text = text_of("job.yaml").replace("--epochs=200", "--epochs=20000")
    pods = cluster.apply(text.replace("--nproc-per-node=2", "--nproc-per-node=1"))
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
    pods = cluster.apply(text_of("job", ARGS=DISTURBED))
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
    cluster.wait_until("the end of the pods",
                       lambda: all(pod.process.poll() == 0 for pod in pods))


STORIES = {function.__name__: function for function in (job_without_a_claim, job_with_a_claim)}


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    """The stories (futures) of the chosen tests, side by side, each in a cluster of its own."""
    chosen = {item.name for item in request.session.items}
    lab.images()

    def run_story(name, folder):
        with contextlib.closing(lab.Cluster(folder)) as cluster:
            STORIES[name](cluster)

    with ThreadPoolExecutor(len(STORIES)) as pool:
        yield {name: pool.submit(run_story, name, tmp_path_factory.mktemp(name))
               for name in STORIES if f"test_story[{name}]" in chosen}


@pytest.mark.pods
@pytest.mark.skipif(bool(lab.missing()), reason=lab.missing())
@pytest.mark.parametrize("name", STORIES)
def test_story(running, name):
    running[name].result()

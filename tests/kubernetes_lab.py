"""Runs Kubernetes manifests without a cluster: each pod is a container in a network namespace.

podman and ip take the part of Kubernetes and of Kubeflow's operators. Pods have addresses and
names, and start with the manifest's user, command, limits and volumes and with the operator's
variables. They restart if they fail, until the job's backoffLimit.

The image is built from containers/Dockerfile on a Debian base, which borrows torch from the
environment of the tests. The official images of PyTorch and etcd are too large to download: the
same base, with Debian's etcd, takes their place.
"""

import atexit
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from checkpoints import load_checkpoint
from scripts import ROOT

DEBIAN_PACKAGES = {
    "buildah": "buildah",
    "podman": "podman",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "envsubst": "gettext-base",
    "yq": "yq",
    "etcd": "etcd-server",
}
DEBIAN_OF_PYTHON = {(3, 11): "bookworm", (3, 13): "trixie"}  # base and tests need the same Python
SITE_PACKAGES = next(path for path in sys.path if (Path(path) / "torch").is_dir())
BORROWED = f"{SITE_PACKAGES}:/opt/borrowed:ro"
DOCKERFILE = ROOT / "containers/Dockerfile"
OFFICIAL_IMAGE = re.search(r"ARG BASE_IMAGE=(\S+)", DOCKERFILE.read_text())[1]
OUR_IMAGE = "ddp:1"  # IMAGE_URI of the tests
ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.16"


def sh(*command, timeout=60, **options):
    """Return the output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)
    output = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"{' '.join(words)} failed:\n{output}"
    return done.stdout


def missing():
    """Return what this machine lacks, or an empty string."""
    if os.geteuid() != 0 or sys.version_info[:2] not in DEBIAN_OF_PYTHON:
        return "requires root and the Python of Debian (3.11 or 3.13)"
    packages = [DEBIAN_PACKAGES[tool] for tool in DEBIAN_PACKAGES if not shutil.which(tool)]
    if packages:
        return f"requires apt-get install {' '.join(packages)}"
    return ""


# --- images ---
@functools.cache
def images():
    """Build containers/Dockerfile, once. Return podman's arguments by the name of an image."""
    base = base_image()
    image = f"localhost/ddp-tests:{os.getpid()}"
    command = ["buildah", "bud", "--isolation", "chroot", "--network", "host",
               "--volume", BORROWED, "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro",
               "--build-arg", f"BASE_IMAGE={base}", "--file", DOCKERFILE, "--tag", image]
    settings = sh(sys.executable, "-m", "pip", "config", "list")
    for url in re.findall(r"\.index-url='(.*)'", settings):  # this machine's mirror, if any
        command += ["--build-arg", f"PIP_INDEX_URL={url}"]
    sh(*command, ROOT, timeout=400)
    atexit.register(sh, "podman", "rmi", "--force", image)
    etcd = ["--volume", f"{shutil.which('etcd')}:/usr/local/bin/etcd:ro", base]
    return {OUR_IMAGE: [image], OFFICIAL_IMAGE: [base], ETCD_IMAGE: etcd}


def base_image():
    """Return the name of a Debian image with Python, pip and torchrun, made once per machine."""
    suite = DEBIAN_OF_PYTHON[sys.version_info[:2]]
    name = f"localhost/ddp-tests-base:{suite}-2"
    exists = subprocess.run(["podman", "image", "exists", name])
    if exists.returncode == 0:
        return name
    with tempfile.TemporaryDirectory() as folder:
        packages = "python3,python3-pip,python-is-python3,ca-certificates"
        sh("debootstrap", "--variant=minbase", f"--include={packages}", suite, folder, timeout=400)
        borrowed = Path(folder, "usr/lib/python3/dist-packages/borrowed.pth")
        borrowed.write_text("/opt/borrowed\n")
        torchrun = Path(folder, "usr/local/bin/torchrun")
        torchrun.write_text("#!/usr/bin/python3\n"
                            "from torch.distributed.run import main\n"
                            "main()\n")
        torchrun.chmod(0o755)
        archive = Path(folder, "image.tar")
        sh("tar", "-C", folder, "--exclude=./var/cache/apt", "--exclude=./image.tar",
           "-cf", archive, ".", timeout=200)
        sh("podman", "import", "-q", archive, name, timeout=200)
    return name


def podman_run(*options):
    """Return the command that runs a container, also on a machine without systemd."""
    return ["podman", "--runtime", "runc", "run", "--volume", BORROWED,
            "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=30000:30000", *options]


# --- manifests ---
def render(template, **variables):
    """Run containers/kubernetes/render.sh and return the finished process."""
    environment = {"PATH": os.environ["PATH"]}
    for name, value in variables.items():
        environment[name] = str(value)
    script = ROOT / "containers/kubernetes/render.sh"
    command = ["bash", script, ROOT / "containers/kubernetes" / template]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def parse(yaml):
    """Return the documents of a YAML text. yq reads them: the project imports no YAML package."""
    return json.loads(sh("yq", "--slurp", ".", input=yaml))


class PodTemplate(NamedTuple):
    name: str
    spec: dict
    backoff_limit: float  # restarts of all pods of the job together


def pods_of(documents):
    """Return the pods that Kubernetes and the operators make of the documents."""
    pods = []
    for document in documents:
        kind = document["kind"]
        name = document["metadata"]["name"]
        spec = document["spec"]
        if kind == "Pod":
            pods.append(PodTemplate(name, spec, math.inf))
        elif kind == "Deployment":  # its pod gets the name of its Service, which is the same
            pods.append(PodTemplate(name, spec["template"]["spec"], math.inf))
        elif kind == "PyTorchJob":
            pods += pods_of_pytorchjob(name, spec)
        elif kind == "TrainJob":
            pods += pods_of_trainjob(name, spec)
        else:
            assert kind == "Service", f"the lab does not know the kind {kind}"
    return pods


def with_env(container, **variables):
    """Return the container with more environment variables."""
    added = [{"name": name, "value": str(value)} for name, value in variables.items()]
    return {**container, "env": container.get("env", []) + added}


def pods_of_pytorchjob(name, spec):
    """Return what the Training Operator 1.8 and 1.9 makes of an elastic PyTorchJob."""
    elastic = spec["elasticPolicy"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch", "the operator finds the container by this name"
    host = elastic.get("rdzvHost", f"{name}-worker-0")
    port = elastic.get("rdzvPort", 23456)
    variables = {
        "PYTHONUNBUFFERED": 1,
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{host}:{port}",
        "PET_NNODES": f'{elastic["minReplicas"]}:{elastic["maxReplicas"]}',
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_MAX_RESTARTS": elastic["maxRestarts"],
    }
    if "rdzvId" in elastic:
        variables["PET_RDZV_ID"] = elastic["rdzvId"]
    if "rdzvConf" in elastic:
        settings = [f'{setting["key"]}={setting["value"]}' for setting in elastic["rdzvConf"]]
        variables["PET_RDZV_CONF"] = ",".join(settings)
    pod = {
        **worker["template"]["spec"],
        "restartPolicy": worker["restartPolicy"],
        "containers": [with_env(container, **variables)],
    }
    limit = spec["runPolicy"]["backoffLimit"]
    names = [f"{name}-worker-{index}" for index in range(worker["replicas"])]
    return [PodTemplate(pod_name, pod, limit) for pod_name in names]


def pods_of_trainjob(name, spec):
    """Return what Kubeflow Trainer 2.3 makes of a TrainJob on its runtime torch-distributed."""
    trainer = spec["trainer"]
    patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    (job,) = patch["replicatedJobs"]
    patched_pod = job["template"]["spec"]["template"]["spec"]
    (patched_container,) = patched_pod["containers"]
    assert job["name"] == patched_container["name"] == "node", "Trainer finds them by this name"
    container = {
        **patched_container,
        "resources": trainer["resourcesPerNode"],
        "image": trainer["image"],
        "command": trainer["command"],
        "args": trainer["args"],
        "env": trainer["env"],
    }
    pods = []
    for rank in range(trainer["numNodes"]):
        node = with_env(
            container,
            PET_NNODES=trainer["numNodes"],
            PET_NPROC_PER_NODE=trainer["numProcPerNode"],
            PET_NODE_RANK=rank,
            PET_MASTER_ADDR=f"{name}-node-0-0.{name}",
            PET_MASTER_PORT=29500,
        )
        pod = {
            **patched_pod,
            "restartPolicy": "OnFailure",
            "subdomain": name,
            "containers": [node],
        }
        pods.append(PodTemplate(f"{name}-node-0-{rank}", pod, 6))  # the default limit of a Job
    return pods


# --- cluster ---
class JobFailed(Exception):
    """The pods of a job have restarted, or were lost, more often than its backoffLimit allows."""


class Pod:
    """A container in a network namespace, started again if it fails, as by the kubelet."""

    def __init__(self, cluster, template):
        self.cluster = cluster
        self.name = template.name
        self.spec = template.spec
        self.backoff_limit = template.backoff_limit
        self.starts = 0  # of its containers
        self.restarts = 0  # as Kubernetes counts them
        self.losses = 0
        self.log = cluster.folder / f"{self.name}.log"
        cluster.pods.append(self)
        cluster.connect(self)
        cluster.share_claim(self.spec["securityContext"].get("fsGroup"))
        self.start()

    def start(self):
        self.starts += 1
        self.container = f"{self.cluster.name}-{self.name}-{self.starts}"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT)

    def command(self):
        """Return the podman command of the pod's container."""
        (container,) = self.spec["containers"]
        security = self.spec["securityContext"]
        limits = container["resources"]["limits"]
        options = [
            "--rm", "--name", self.container, "--hostname", self.name,
            "--entrypoint", json.dumps(container["command"]),
            "--network", f"ns:/run/netns/{self.namespace}",
            "--no-hosts", "--volume", f"{self.cluster.hosts}:/etc/hosts:ro",
            "--user", f'{security["runAsUser"]}:{security["runAsGroup"]}',
            "--security-opt", "no-new-privileges", "--cap-drop", "all",
            "--cpus", limits["cpu"],
            "--memory", limits["memory"].removesuffix("i"),
        ]
        if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
            # No cgroups v2: a file shows the container the quota that they would show.
            cgroup = self.cluster.folder / "cgroup"
            cgroup.mkdir(exist_ok=True)
            (cgroup / "cpu.max").write_text(f'{limits["cpu"]}00000 100000\n')
            options += ["--volume", f"{cgroup}:/sys/fs/cgroup:ro"]
        for variable in container.get("env", []):
            options.append(f'--env={variable["name"]}={variable["value"]}')
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            source = self.cluster.source(volumes[mount["name"]])
            options += ["--mount", f'{source},destination={mount["mountPath"]}']
        image = self.cluster.images[container["image"]]
        return podman_run(*options, *image, *container.get("args", []))

    def lose(self, signal="KILL"):
        """Kill all processes of the pod, as if its node was lost, or stop it with SIGTERM."""
        sh("podman", "kill", "--signal", signal, self.container)
        seconds = self.spec.get("terminationGracePeriodSeconds", 30)
        status = self.process.wait(timeout=seconds)
        assert status != 0, f"{self.name} has completed, it was not lost:\n{self.cluster.logs()}"
        hosts = self.cluster.hosts.read_text()
        self.cluster.hosts.write_text(hosts.replace(f"{self.address} ", "# "))

    def come_back(self):
        """Start the lost pod on another node, with another address and 0 restarts."""
        self.restarts = 0
        self.losses += 1
        if "subdomain" in self.spec:  # a Job replaces its lost pods after 10 s, 20 s, ...
            end = time.monotonic() + 5 * 2 ** self.losses
            others = [pod for pod in self.cluster.pods if pod is not self]
            self.cluster.wait_until(lambda: time.monotonic() > end, others)
        self.cluster.connect(self)
        self.start()

    def completed(self):
        """Return whether the pod has completed. A failed container is started again."""
        status = self.process.poll()
        if status is None:
            return False
        if status == 0:
            return True
        assert self.spec["restartPolicy"] == "OnFailure", f"{self.name} failed for good"
        self.restarts += 1
        self.start()
        return False


class Cluster:
    """Pods that reach each other by name, and nothing else, until close()."""

    def __init__(self, folder):
        self.folder = folder
        self.images = images()
        self.name = f"k8s-{os.getpid()}"
        self.pods = []
        self.namespaces = []
        self.claim = folder / "claim"  # the volume
        self.claim.mkdir(mode=0o755)
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.bridge = self.add_namespace()
        sh("ip", "-n", self.bridge, "link", "add", "br0", "up", "type", "bridge")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for pod in self.pods:
            remove = ["podman", "rm", "-f", "-t", "0", "--ignore", pod.container]
            while pod.process.poll() is None:  # its container may not be there yet
                subprocess.run(remove, capture_output=True)
        for namespace in self.namespaces:
            sh("ip", "netns", "delete", namespace)

    def add_namespace(self):
        name = f"{self.name}-{len(self.namespaces)}"
        self.namespaces.append(name)
        sh("ip", "netns", "add", name)
        sh("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def connect(self, pod):
        """Give the pod a new namespace and address, and make its names known."""
        number = len(self.namespaces)
        veth = f"veth{number}"
        pod.address = f"10.244.0.{number}"
        pod.namespace = self.add_namespace()
        sh("ip", "-n", pod.namespace, "link", "add", "eth0", "up",
           "type", "veth", "peer", veth, "netns", self.bridge)
        sh("ip", "-n", self.bridge, "link", "set", veth, "master", "br0", "up")
        sh("ip", "-n", pod.namespace, "address", "add", f"{pod.address}/24", "dev", "eth0")
        names = [pod.name]
        if "subdomain" in pod.spec:
            names.append(f'{pod.name}.{pod.spec["subdomain"]}')
        with self.hosts.open("a") as hosts:
            print(pod.address, *names, file=hosts)

    def share_claim(self, group):
        """Let the members of fsGroup write to the volume, as Kubernetes does."""
        if group is not None:
            os.chown(self.claim, 0, group)
            self.claim.chmod(0o2775)

    def source(self, volume):
        """Return a volume of a pod in podman's words."""
        if "emptyDir" in volume:
            return "type=tmpfs,tmpfs-mode=1777"
        if "configMap" in volume:
            folder = self.folder / volume["configMap"]["name"]
            return f"type=bind,source={folder},readonly"
        return f"type=bind,source={self.claim}"

    def apply(self, documents):
        """Start all pods of the documents and return them."""
        return [Pod(self, template) for template in pods_of(documents)]

    def step(self, job):
        """Return the step of the job's checkpoint, or 0."""
        try:
            return load_checkpoint(self.claim / f"{job}.pt")["step"]
        except FileNotFoundError:
            return 0

    def wait_until(self, condition, pods, timeout=300):
        """Restart failed pods until condition() is true. None may complete before."""
        end = time.monotonic() + timeout
        while not condition():
            completed = self.check(pods)
            assert not any(completed), f"a pod completed too early:\n{self.logs()}"
            assert time.monotonic() < end, f"not seen in {timeout} s:\n{self.logs()}"
            time.sleep(0.2)

    def wait_completed(self, pods, timeout=300):
        """Restart failed pods until all have completed."""
        names = [pod.name for pod in pods]
        end = time.monotonic() + timeout
        while not all(self.check(pods)):
            message = f"{names} have not completed in {timeout} s"
            assert time.monotonic() < end, f"{message}:\n{self.logs()}"
            time.sleep(0.2)

    def check(self, pods):
        """Restart failed pods, as often as the job allows. Return which have completed."""
        completed = [pod.completed() for pod in pods]
        restarts = sum(pod.restarts for pod in pods)
        losses = sum(pod.losses for pod in pods)
        limit = pods[0].backoff_limit
        if restarts >= limit or losses > limit:
            names = [pod.name for pod in pods]
            counts = f"{restarts} restarts and {losses} losses of {names}"
            raise JobFailed(f"{counts}:\n{self.logs()}")
        return completed

    def logs(self):
        """Return the end of the log of each pod."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name} ---\n{log.read_text()[-5000:]}" for log in logs)

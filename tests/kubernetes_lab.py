"""Runs Kubernetes manifests without a cluster: each pod is a container in its own network namespace.

podman and ip act as Kubernetes and Kubeflow's operators: pods have addresses and names, start with the manifest's user,
command, limits and volumes and the operator's variables, and restart if they fail, until the job's backoffLimit.
The image is built from containers/Dockerfile on a Debian base, which gets torch from the environment of the tests.
PyTorch's and etcd's images are too large to download: the same base, with Debian's etcd, takes their place.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from helpers import ROOT, load_checkpoint

PACKAGES = {"buildah": "buildah", "podman": "podman", "runc": "runc", "debootstrap": "debootstrap", "ip": "iproute2",
            "envsubst": "gettext-base", "yq": "yq", "etcd": "etcd-server"}
DEBIANS = {(3, 11): "bookworm", (3, 13): "trixie"}  # by the version of Python, which the base shares with the tests
SITE_PACKAGES = next(path for path in sys.path if (Path(path) / "torch").is_dir())
BORROWED = f"{SITE_PACKAGES}:/opt/borrowed:ro"
OFFICIAL_IMAGE = re.search(r"ARG BASE_IMAGE=(\S+)", (ROOT / "containers/Dockerfile").read_text())[1]


def sh(*command, timeout=60, **options):
    """Return the output of a command that must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def missing():
    """Return what this machine lacks, or an empty string."""
    packages = " ".join(package for tool, package in PACKAGES.items() if not shutil.which(tool))
    if os.geteuid() or sys.version_info[:2] not in DEBIANS:
        return "requires root and the Python of Debian (3.11 or 3.13)"
    return packages and f"requires apt-get install {packages}"


# --- images ---
def base_image(folder):
    """Return the name of a Debian image with Python, pip and the borrowed torch. It is made once per machine."""
    suite = DEBIANS[sys.version_info[:2]]
    name = f"localhost/ddp-tests-base:{suite}-2"
    if subprocess.run(["podman", "image", "exists", name]).returncode:
        rootfs = folder / "rootfs"
        sh("debootstrap", "--variant=minbase", "--include=python3,python3-pip,python-is-python3,ca-certificates", suite,
           rootfs, timeout=400)
        (rootfs / "usr/lib/python3/dist-packages/borrowed.pth").write_text("/opt/borrowed\n")
        torchrun = rootfs / "usr/local/bin/torchrun"
        torchrun.write_text("#!/usr/bin/python3\nfrom torch.distributed.run import main\nmain()\n")
        torchrun.chmod(0o755)
        sh("bash", "-c", f"tar -C {rootfs} --exclude=./var/cache/apt -c . | podman import -q - {name}", timeout=200)
        shutil.rmtree(rootfs)
    return name


def build_images(folder):
    """Build containers/Dockerfile. Return the image and its base."""
    base, name = base_image(folder), f"localhost/ddp-tests:{os.getpid()}"
    index = re.findall(r"\.index-url='(.*)'", sh(sys.executable, "-m", "pip", "config", "list"))
    sh("buildah", "bud", "--isolation", "chroot", "--network", "host", "--volume", BORROWED, "--volume",
       "/etc/ssl/certs:/etc/ssl/certs:ro", *(f"--build-arg=PIP_INDEX_URL={url}" for url in index),
       "--build-arg", f"BASE_IMAGE={base}", "--file", "containers/Dockerfile", "--tag", name, ROOT, timeout=400)
    return name, base


def podman_run(*options):
    """Return the command that runs a container on a machine without systemd."""
    return ["podman", "--runtime", "runc", "run", "--volume", BORROWED,
            "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=30000:30000", *options]


# --- manifests ---
def render(template, variables):
    """Run containers/kubernetes/render.sh and return the finished process."""
    return subprocess.run(["bash", ROOT / "containers/kubernetes/render.sh", template], capture_output=True, text=True,
                          env={"PATH": os.environ["PATH"]} | {name: str(value) for name, value in variables.items()})


def parse(yaml):
    """Return the documents of a YAML text. yq reads them: the project imports no YAML package."""
    return json.loads(sh("yq", "--slurp", ".", input=yaml))


def pods_of(documents):
    """Return (name, spec, backoff limit) of each pod that Kubernetes and the operators make of the documents."""
    pods = []
    for document in documents:
        name, kind, spec = document["metadata"]["name"], document["kind"], document["spec"]
        if kind in ("Pod", "Deployment"):  # a Deployment's pod is named as its Service
            pods.append((name, spec.get("template", {}).get("spec", spec), math.inf))
        elif kind != "Service":
            pods += {"PyTorchJob": pytorchjob_pods, "TrainJob": trainjob_pods}[kind](name, spec)
    return pods


def with_env(container, **variables):
    added = [{"name": name, "value": str(value)} for name, value in variables.items()]
    return {**container, "env": container.get("env", []) + added}


def pytorchjob_pods(name, spec):
    """What the Training Operator 1.8 and 1.9 makes of an elastic PyTorchJob."""
    elastic, ((kind, worker),) = spec["elasticPolicy"], spec["pytorchReplicaSpecs"].items()
    (container,) = worker["template"]["spec"]["containers"]
    assert kind == "Worker" and container["name"] == "pytorch"
    container = with_env(
        container, PYTHONUNBUFFERED=1, **({"PET_RDZV_ID": elastic["rdzvId"]} if "rdzvId" in elastic else {}),
        PET_RDZV_ENDPOINT=f'{elastic.get("rdzvHost", f"{name}-worker-0")}:{elastic.get("rdzvPort", 23456)}',
        PET_RDZV_BACKEND=elastic["rdzvBackend"], PET_NNODES=f'{elastic["minReplicas"]}:{elastic["maxReplicas"]}',
        PET_NPROC_PER_NODE=spec["nprocPerNode"], PET_MAX_RESTARTS=elastic["maxRestarts"],
        PET_RDZV_CONF=",".join(f'{setting["key"]}={setting["value"]}' for setting in elastic["rdzvConf"]))
    pod = {**worker["template"]["spec"], "restartPolicy": worker["restartPolicy"], "containers": [container]}
    return [(f"{name}-worker-{index}", pod, spec["runPolicy"]["backoffLimit"]) for index in range(worker["replicas"])]


def trainjob_pods(name, spec):
    """What Kubeflow Trainer 2.3 makes of a TrainJob on its runtime torch-distributed."""
    trainer, pods = spec["trainer"], []
    (replicated,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patch = replicated["template"]["spec"]["template"]["spec"]
    assert replicated["name"] == patch["containers"][0]["name"] == "node"
    container = {**patch["containers"][0], "resources": trainer["resourcesPerNode"],
                 **{key: trainer[key] for key in ("image", "command", "args", "env")}}
    for rank in range(trainer["numNodes"]):
        node = with_env(container, PET_NNODES=trainer["numNodes"], PET_NPROC_PER_NODE=trainer["numProcPerNode"],
                        PET_NODE_RANK=rank, PET_MASTER_ADDR=f"{name}-node-0-0.{name}", PET_MASTER_PORT=29500)
        pod = {**patch, "restartPolicy": "OnFailure", "subdomain": name, "containers": [node]}
        pods.append((f"{name}-node-0-{rank}", pod, 6))  # the default of a Job
    return pods


# --- cluster ---
class Pod:
    """A container in its own network namespace, started again if it fails, as the kubelet would."""

    def __init__(self, cluster, name, spec, backoff_limit):
        self.cluster, self.name, self.spec, self.backoff_limit = cluster, name, spec, backoff_limit
        self.starts = self.restarts = self.losses = 0  # of this container, and as Kubernetes counts
        self.log = cluster.folder / f"{name}.log"
        cluster.pods.append(self)
        cluster.connect(self)
        self.start()

    def start(self):
        self.starts += 1
        self.container = f"{self.cluster.name}-{self.name}-{self.starts}"
        self.process = subprocess.Popen(self.command(), stdout=self.log.open("a"), stderr=subprocess.STDOUT)

    def command(self):
        (container,) = self.spec["containers"]
        security, limits = self.spec["securityContext"], container["resources"]["limits"]
        options = ["--rm", "--name", self.container, "--hostname", self.name,
                   "--entrypoint", json.dumps(container["command"]), "--network", f"ns:/run/netns/{self.namespace}",
                   "--no-hosts", "--volume", f"{self.cluster.folder}/hosts:/etc/hosts:ro",
                   "--user", f'{security["runAsUser"]}:{security["runAsGroup"]}', "--security-opt", "no-new-privileges",
                   "--cap-drop", "all", "--cpus", str(limits["cpu"]), "--memory", limits["memory"].removesuffix("i")]
        if not Path("/sys/fs/cgroup/cgroup.controllers").exists():  # no cgroups v2: write what they would show
            (self.cluster.folder / "cgroup").mkdir(exist_ok=True)
            (self.cluster.folder / "cgroup/cpu.max").write_text(f'{limits["cpu"]}00000 100000\n')
            options += ["--volume", f"{self.cluster.folder}/cgroup:/sys/fs/cgroup:ro"]
        options += [f'--env={variable["name"]}={variable["value"]}' for variable in container.get("env", [])]
        for mount in container["volumeMounts"]:
            volume = next(volume for volume in self.spec["volumes"] if volume["name"] == mount["name"])
            options += ["--mount", f'{self.cluster.source(volume)},destination={mount["mountPath"]}']
        return podman_run(*options, *self.cluster.images[container["image"]], *container.get("args", []))

    def lose(self, signal="KILL"):
        """Kill all processes of the pod, as if its node was lost, or stop it with SIGTERM."""
        sh("podman", "kill", "--signal", signal, self.container)
        assert self.process.wait(timeout=self.spec.get("terminationGracePeriodSeconds", 30)) != 0
        hosts = self.cluster.folder / "hosts"
        hosts.write_text(hosts.read_text().replace(f"{self.address} ", "# "))

    def come_back(self):
        """Start the lost pod on another node, with another address. Kubernetes counts its restarts from 0 again."""
        self.restarts, self.losses = 0, self.losses + 1
        if "subdomain" in self.spec:  # a Job counts its lost pods, and replaces them after 10 s, 20 s, ...
            back = time.monotonic() + 5 * 2 ** self.losses
            self.cluster.wait([pod for pod in self.cluster.pods if pod is not self], lambda: time.monotonic() > back)
        self.cluster.connect(self)
        self.start()

    def completed(self):
        """Return whether the pod has completed. A failed container is started again."""
        status = self.process.poll()
        if status:
            assert self.spec["restartPolicy"] == "OnFailure"
            self.restarts += 1
            self.start()
        return status == 0


class Cluster:
    """Pods that reach each other by name, and nothing else, until close()."""

    def __init__(self, folder, images):
        self.folder, self.images, self.name = folder, images, f"k8s-{os.getpid()}"
        self.claim, self.pods, self.namespaces = folder / "claim", [], []
        self.claim.mkdir()
        os.chown(self.claim, 0, 1001)  # what fsGroup does
        self.claim.chmod(0o2775)
        (folder / "hosts").write_text("127.0.0.1 localhost\n")
        self.bridge = self.add_namespace()
        sh("ip", "-n", self.bridge, "link", "add", "br0", "up", "type", "bridge")

    def close(self):
        for pod in self.pods:
            while pod.process.poll() is None:  # its container may not be there yet
                subprocess.run(["podman", "rm", "-f", "-t", "0", "--ignore", pod.container], capture_output=True)
        for namespace in self.namespaces:
            sh("ip", "netns", "delete", namespace)

    def add_namespace(self):
        self.namespaces.append(f"{self.name}-{len(self.namespaces)}")
        sh("ip", "netns", "add", self.namespaces[-1])
        sh("ip", "-n", self.namespaces[-1], "link", "set", "lo", "up")
        return self.namespaces[-1]

    def connect(self, pod):
        """Give the pod a new namespace and address, and make its names known."""
        veth, pod.address = f"veth{len(self.namespaces)}", f"10.244.0.{len(self.namespaces)}"
        pod.namespace = self.add_namespace()
        sh("ip", "-n", pod.namespace, "link", "add", "eth0", "up", "type", "veth", "peer", veth, "netns", self.bridge)
        sh("ip", "-n", self.bridge, "link", "set", veth, "master", "br0", "up")
        sh("ip", "-n", pod.namespace, "address", "add", f"{pod.address}/24", "dev", "eth0")
        with (self.folder / "hosts").open("a") as hosts:
            print(pod.address, pod.name, f'{pod.name}.{pod.spec.get("subdomain")}', file=hosts)

    def source(self, volume):
        """Return a volume of a pod in podman's words."""
        if "emptyDir" in volume:
            return "type=tmpfs,tmpfs-mode=1777"
        folder = self.claim if "persistentVolumeClaim" in volume else self.folder / volume["configMap"]["name"]
        return f"type=bind,source={folder}"

    def apply(self, documents):
        """Start all pods of the documents and return them."""
        return [Pod(self, *pod) for pod in pods_of(documents)]

    def checkpoint(self, name):
        """Return the job's checkpoint, or that of step 0."""
        try:
            return load_checkpoint(self.claim / f"{name}.pt")
        except FileNotFoundError:
            return {"step": 0}

    def wait(self, pods, until=None, timeout=300):
        """Restart failed pods until all have completed, or until until() is true, and as often as the job allows."""
        limit, deadline = pods[0].backoff_limit, time.monotonic() + timeout
        while not (until and until()):
            completed = [pod.completed() for pod in pods]
            assert not until or not any(completed), f"completed too early:\n{self.logs()}"
            if all(completed):
                return
            if sum(pod.restarts for pod in pods) >= limit or sum(pod.losses for pod in pods) > limit:
                logs = self.logs()
                for pod in pods:
                    pod.log.unlink()  # the operators delete the pods, then the job is Failed
                raise AssertionError(f"the job is Failed:\n{logs}")
            assert time.monotonic() < deadline, f"not done in {timeout} s:\n{self.logs()}"
            time.sleep(0.2)

    def logs(self):
        return "\n".join(f"--- {path.name} ---\n{path.read_text()[-5000:]}" for path in self.folder.glob("*.log"))

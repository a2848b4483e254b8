"""Runs Kubernetes manifests without a cluster: each pod is a container in a network namespace of its own.

What Kubernetes, Kubeflow's operators and the kubelet would do for the manifests in containers/kubernetes is done
here by podman and ip: pods have addresses and names, start as the user, with the command, environment and volumes
that the manifest says plus what the operator injects, and are restarted as their restartPolicy says. The image is
built from containers/Dockerfile on a Debian base that borrows torch and torchvision from the environment that
runs the tests, which saves their installation; the images of others (PyTorch's and etcd's) are stood in for by
that base and Debian's etcd.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = {"buildah": "buildah", "podman": "podman", "runc": "runc", "debootstrap": "debootstrap", "ip": "iproute2",
         "envsubst": "gettext-base", "yq": "yq", "etcd": "etcd-server"}
DEBIANS = {(3, 11): "bookworm", (3, 13): "trixie"}  # by their Python, which must be the one of the tests
SITE_PACKAGES = next(path for path in sys.path if (Path(path) / "torch").is_dir())
BORROWED = f"{SITE_PACKAGES}:/opt/borrowed:ro"
OFFICIAL_IMAGE = re.search(r"ARG BASE_IMAGE=(\S+)", (ROOT / "containers/Dockerfile").read_text())[1]


def sh(*command, timeout=60, **options):
    """The output of a command that must succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, f"{shlex.join(map(str, command))} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def skip_without(*tools):
    missing = " ".join(TOOLS[tool] for tool in tools if not which(tool))
    if missing:
        pytest.skip(f"apt-get install {missing}")


def skip_unless_images_can_be_built():
    skip_without("buildah", "podman", "runc", "debootstrap")
    if os.geteuid():
        pytest.skip("building images needs root: sudo bash tests/run.sh")
    if sys.version_info[:2] not in DEBIANS:
        pytest.skip("needs Debian's Python: PYTHON=python3.11 bash slurm/create-venv.sh, or python3.13")


# --- images ---
def base_image(folder):
    """The name of a Debian image with Python, pip and the borrowed torch; made once per machine and recipe."""
    suite = DEBIANS[sys.version_info[:2]]
    torchrun = "#!/usr/bin/python3\nfrom torch.distributed.run import main\nmain()\n"
    packages = "python3,python3-pip,python-is-python3,ca-certificates"
    name = "localhost/ddp-tests-base:" + hashlib.sha256(f"{suite} {packages} {torchrun} 1".encode()).hexdigest()[:12]
    if subprocess.run(["podman", "image", "exists", name], timeout=60).returncode:
        rootfs = folder / "rootfs"
        sh("debootstrap", "--variant=minbase", f"--include={packages}", suite, rootfs, timeout=300)
        (rootfs / "opt/borrowed").mkdir()
        python = "python%d.%d" % sys.version_info[:2]
        (rootfs / f"usr/local/lib/{python}/dist-packages/borrowed.pth").write_text("/opt/borrowed\n")
        (rootfs / "usr/local/bin/torchrun").write_text(torchrun)
        (rootfs / "usr/local/bin/torchrun").chmod(0o755)
        for archive in rootfs.glob("var/cache/apt/archives/*.deb"):
            archive.unlink()
        sh("bash", "-c", 'set -o pipefail; tar -C "$0" -c . | podman import --quiet - "$1"', rootfs, name, timeout=120)
        shutil.rmtree(rootfs)
    return name


def pip_settings(folder):
    """Options for `buildah bud` that let pip in the image reach its index the way this machine's pip is configured to."""
    settings = {}
    for line in sh(sys.executable, "-m", "pip", "config", "list").splitlines():
        key, value = line.split("=", 1)
        key, value = key.rpartition(".")[2], value.strip("'\"")
        if key in ("index-url", "proxy", "cert", "trusted-host", "timeout"):
            settings[key] = value
    config = folder / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    options = ["--volume", f"{config}:/etc/pip.conf:ro"]
    if "cert" in settings:
        options += ["--volume", f'{settings["cert"]}:{settings["cert"]}:ro']
    return options


def build_image(folder, base):
    """Build containers/Dockerfile as its README says, on `base`."""
    name = f"localhost/ddp-tests:{os.getpid()}"
    sh("buildah", "bud", "--isolation", "chroot", "--network", "host", "--build-arg", f"BASE_IMAGE={base}",
       "--volume", BORROWED, *pip_settings(folder), "--file", "containers/Dockerfile", "--tag", name, ".",
       cwd=ROOT, timeout=300)
    return name


def podman_run(*options):
    """The command that runs a container as far as a machine without systemd or cgroups v2 can."""
    return ["podman", "--runtime", "runc", "run", "--volume", BORROWED,
            "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=30000:30000", *options]


# --- manifests ---
def render(template, **variables):
    """containers/kubernetes/render.sh's result: status, output, errors."""
    environment = {"PATH": os.environ["PATH"], **{name: str(value) for name, value in variables.items() if value is not None}}
    return subprocess.run(["bash", ROOT / "containers/kubernetes/render.sh", template], env=environment,
                          capture_output=True, text=True, timeout=30)


def parse(yaml):
    """The documents of a YAML text. By a command, since the project's Python files import no YAML package."""
    return json.loads(sh("yq", "--slurp", ".", input=yaml))


def container_of(template):
    (container,) = template["spec"]["containers"]
    return container


def injected(**variables):
    return [{"name": name, "value": str(value)} for name, value in variables.items()]


def pytorchjob_pods(job):
    """The pods that the Training Operator (1.8 and 1.9) makes of an elastic PyTorchJob: name, host names, template."""
    name, spec = job["metadata"]["name"], job["spec"]
    elastic, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"], "this lab knows elastic jobs only"
    environment = injected(
        PYTHONUNBUFFERED=0,
        PET_RDZV_ENDPOINT=f'{elastic.get("rdzvHost", f"{name}-worker-0")}:{elastic.get("rdzvPort", 23456)}',
        PET_RDZV_BACKEND=elastic.get("rdzvBackend", "c10d"),
        PET_NNODES=f'{elastic["minReplicas"]}:{elastic["maxReplicas"]}',
        PET_NPROC_PER_NODE=spec["nprocPerNode"],
        PET_MAX_RESTARTS=elastic["maxRestarts"],
        **{f"PET_{key}": elastic[field] for key, field in {"RDZV_ID": "rdzvId"}.items() if field in elastic})
    assert container_of(worker["template"])["name"] == "pytorch", "the operator fills in the container `pytorch` only"
    for index in range(worker["replicas"]):
        pod = f"{name}-worker-{index}"
        template = json.loads(json.dumps(worker["template"]))
        container = container_of(template)
        container["env"] = container.get("env", []) + environment
        template["spec"]["restartPolicy"] = worker["restartPolicy"]
        yield pod, [pod], template


def trainjob_pods(job):
    """The pods that Kubeflow Trainer 2.2 makes of a TrainJob on its runtime `torch-distributed`."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    assert job["spec"]["runtimeRef"]["name"] == "torch-distributed"
    pod_spec = {"restartPolicy": "OnFailure"}  # JobSet's default
    container = {"name": "node", "image": trainer["image"], "command": trainer["command"], "args": trainer["args"],
                 "resources": trainer["resourcesPerNode"]}
    for patch in job["spec"]["runtimePatches"]:
        for replicated in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            assert replicated["name"] == "node"
            pod_patch = replicated["template"]["spec"]["template"]["spec"]
            pod_spec.update({key: value for key, value in pod_patch.items() if key != "containers"})
            for container_patch in pod_patch.get("containers", []):
                assert container_patch["name"] == "node"
                container.update(container_patch)
    for index in range(trainer["numNodes"]):
        environment = trainer.get("env", []) + injected(
            PET_NNODES=trainer["numNodes"], PET_NPROC_PER_NODE=trainer["numProcPerNode"], PET_NODE_RANK=index,
            PET_MASTER_ADDR=f"{name}-node-0-0.{name}", PET_MASTER_PORT=29500)
        pod = f"{name}-node-0-{index}"
        yield pod, [pod, f"{pod}.{name}"], {"spec": {**pod_spec, "containers": [{**container, "env": environment}]}}


def pods_of(documents):
    """(name, host names, pod template) of every pod of the documents."""
    services = [document["metadata"]["name"] for document in documents if document["kind"] == "Service"]
    for document in documents:
        name = document["metadata"]["name"]
        if document["kind"] == "PyTorchJob":
            yield from pytorchjob_pods(document)
        elif document["kind"] == "TrainJob":
            yield from trainjob_pods(document)
        elif document["kind"] == "Deployment":
            yield name, services, document["spec"]["template"]
        elif document["kind"] == "Pod":
            yield name, [name], document


def pod_templates(document):
    """The pods of a document as complete Pods, so that a validator of the built-in kinds can check them."""
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
            for name, _, template in pods_of([document])]


# --- cluster ---
class Pod:
    """One pod: a container in its own network namespace, started again as the kubelet and the operator would."""

    def __init__(self, cluster, name, hosts, template):
        self.cluster, self.name, self.hosts, self.spec = cluster, name, hosts, template["spec"]
        self.starts, self.process = 0, None
        self.log = cluster.folder / f"{name}.log"
        cluster.connect(self)
        self.start()

    def start(self):
        self.starts += 1
        self.container_name = f"{self.cluster.name}-{self.name}-{self.starts}"
        self.process = subprocess.Popen(self.command(), stdout=self.log.open("a"), stderr=subprocess.STDOUT)

    def command(self):
        container, spec, volumes = container_of({"spec": self.spec}), self.spec, self.volumes()
        security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        assert security["runAsNonRoot"] and security["runAsUser"] > 0
        assert security["allowPrivilegeEscalation"] is False and security["capabilities"] == {"drop": ["ALL"]}
        options = ["--rm", "--name", self.container_name, "--network", f"ns:/run/netns/{self.namespace}",
                   "--no-hosts", "--volume", f"{self.cluster.hosts}:/etc/hosts:ro", "--hostname", self.name,
                   "--user", f'{security["runAsUser"]}:{security["runAsGroup"]}',
                   "--cap-drop", "all", "--security-opt", "no-new-privileges",
                   "--entrypoint", json.dumps(container["command"])]
        limits = container["resources"]["limits"]
        options += ["--cpus", re.sub(r"^(\d+)m$", lambda milli: str(int(milli[1]) / 1000), str(limits["cpu"])),
                    "--memory", limits["memory"].removesuffix("i")]
        for variable in container.get("env", []):
            options += ["--env", f'{variable["name"]}={variable["value"]}']
        for mount in container.get("volumeMounts", []):
            options += ["--mount", volumes[mount["name"]] + f',destination={mount["mountPath"]}']
        image, more_options = self.cluster.images[container["image"]]
        return podman_run(*options, *more_options, image, *container.get("args", []))

    def volumes(self):
        """podman's words for the volumes, by name."""
        words = {}
        for volume in self.spec["volumes"]:
            name, ((kind, source),) = volume["name"], [item for item in volume.items() if item[0] != "name"]
            if kind == "emptyDir":
                words[name] = "type=tmpfs,tmpfs-mode=1777"
            elif kind == "persistentVolumeClaim":
                words[name] = f'type=bind,source={self.cluster.claims[source["claimName"]]}'
            elif kind == "configMap":
                words[name] = f'type=bind,readonly,source={self.cluster.config_maps[source["name"]]}'
        return words

    def lose(self):
        """Lose the pod with its node: it ends without a word and is made again elsewhere, with a new address."""
        sh("podman", "kill", "--signal", "KILL", self.container_name)
        assert self.process.wait(timeout=30) == 137
        self.cluster.connect(self)
        self.start()

    def tend(self):
        """Start the container again if it failed. Return whether the pod has completed."""
        status = self.process.poll()
        if status in (None, 0):
            return status == 0
        assert self.spec["restartPolicy"] == "OnFailure", f"{self.name} failed with status {status}"
        assert self.starts < 10, f"{self.name} fails again and again"
        time.sleep(1)
        self.start()
        return False

    def stop(self):
        subprocess.run(["podman", "rm", "--force", "--time", "0", "--ignore", self.container_name],
                       capture_output=True, timeout=60)
        self.process.wait(timeout=30)


class Cluster:
    """Pods that reach each other by name, and nothing else. A context manager that leaves nothing behind."""

    def __init__(self, folder, images):
        self.folder, self.images = folder, images
        self.name = f"k8s{os.getpid()}"
        self.hosts = folder / "hosts"
        self.claims, self.config_maps, self.pods, self.namespaces = {}, {}, [], []

    def __enter__(self):
        self.bridge = f"{self.name}-net"
        self.add_namespace(self.bridge)
        sh("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", self.bridge, "link", "set", "br0", "up")
        return self

    def __exit__(self, *_):
        self.delete()
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], timeout=30)

    def add_namespace(self, name):
        sh("ip", "netns", "add", name)
        self.namespaces.append(name)
        sh("ip", "-n", name, "link", "set", "lo", "up")

    def connect(self, pod):
        """Give the pod a namespace of its own, a new address, and its names."""
        number = len(self.namespaces)
        pod.namespace, pod.address = f"{self.name}-{number}", f"10.244.0.{number}"
        self.add_namespace(pod.namespace)
        sh("ip", "-n", pod.namespace, "link", "add", "eth0", "type", "veth", "peer", f"veth{number}", "netns", self.bridge)
        sh("ip", "-n", self.bridge, "link", "set", f"veth{number}", "master", "br0", "up")
        sh("ip", "-n", pod.namespace, "address", "add", f"{pod.address}/24", "dev", "eth0")
        sh("ip", "-n", pod.namespace, "link", "set", "eth0", "up")
        pods = [*(other for other in self.pods if other is not pod), pod]
        lines = "127.0.0.1 localhost\n" + "".join(f'{each.address} {" ".join(each.hosts)}\n' for each in pods)
        with open(self.hosts, "r+" if self.hosts.exists() else "w") as file:  # not emptied first: pods are reading it
            file.write(lines)
            file.truncate()

    def claim(self, name, user=1001):
        """The folder of a new PersistentVolumeClaim, which fsGroup makes writable."""
        folder = self.folder / name
        folder.mkdir()
        os.chown(folder, 0, user)
        folder.chmod(0o2775)
        self.claims[name] = folder
        return folder

    def config_map(self, name, file):
        """kubectl create configmap NAME --from-file=FILE"""
        self.config_maps[name] = self.folder / f"configmap-{name}"
        self.config_maps[name].mkdir()
        shutil.copy(file, self.config_maps[name])

    def apply(self, documents):
        """Start all pods of a manifest and return them."""
        pods = []
        for name, hosts, template in pods_of(documents):
            pod = Pod(self, name, hosts, template)
            self.pods.append(pod)
            pods.append(pod)
        return pods

    def wait(self, pods, timeout, until=None):
        """Tend the pods until all have completed, or until `until()`."""
        deadline = time.monotonic() + timeout
        while not all([pod.tend() for pod in pods]):
            if until and until():
                return
            assert time.monotonic() < deadline, "not done in time:\n" + "\n".join(self.logs(pod) for pod in pods)
            time.sleep(0.1)
        assert not until, "completed before it should:\n" + "\n".join(self.logs(pod) for pod in pods)

    def logs(self, pod):
        return f"--- {pod.name} ---\n{pod.log.read_text()[-4000:]}"

    def delete(self):
        """kubectl delete: all pods."""
        for pod in self.pods:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pod.stop()
        self.pods.clear()

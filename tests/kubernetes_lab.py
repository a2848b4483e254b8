"""Runs a Job without a cluster: each pod is a container in a network namespace.

podman and ip take the part of Kubernetes. A failed pod of a Job is replaced after 1 s, 2 s, 3 s.

The image is built from containers/Dockerfile on a Debian base, which borrows torch from the
environment of the tests, and which takes the place of PyTorch's official image.
"""

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from scripts import ROOT
from slurm_lab import Machine, Network

TOOLS = ["buildah", "podman", "runc", "debootstrap", "ip", "yq"]
PACKAGES = "buildah podman runc debootstrap iproute2 yq"
DEBIAN_OF_PYTHON = {(3, 11): "bookworm", (3, 13): "trixie"}  # base and tests need the same Python
SITE_PACKAGES = next(path for path in sys.path if (Path(path) / "torch").is_dir())
BORROWED = f"{SITE_PACKAGES}:/opt/borrowed:ro"
DOCKERFILE = ROOT / "containers/Dockerfile"
OFFICIAL_IMAGE = re.search(r"ARG BASE_IMAGE=(\S+)", DOCKERFILE.read_text())[1]
OUR_IMAGE = "ddp:1"  # IMAGE_URI of the tests
LIMIT = 3  # failures of a pod: no story has more
# Starts a container, also on a machine without systemd.
PODMAN_RUN = ["podman", "--runtime", "runc", "run", "--volume", BORROWED,
              "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=30000:30000", "--rm"]


def sh(*command, timeout=60, **options):
    """Return the output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **options)
    output = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"{words} failed:\n{output}"
    return done.stdout


def missing():
    """Return what this machine lacks, or an empty string."""
    if (os.geteuid() == 0 and sys.version_info[:2] in DEBIAN_OF_PYTHON
            and all(map(shutil.which, TOOLS))):
        return ""
    return f"requires root, the Python of Debian (3.11 or 3.13), apt-get install {PACKAGES}"


# --- images ---
MAKE_BASE_IMAGE = r"""
podman image exists "$1" && exit
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
packages=python3,python3-pip,python-is-python3,ca-certificates
debootstrap --variant=minbase --include=$packages "$0" "$folder"
echo /opt/borrowed >"$folder"/usr/lib/python3/dist-packages/borrowed.pth
torchrun=$folder/usr/local/bin/torchrun
printf '#!/usr/bin/python3\nfrom torch.distributed.run import main\nmain()\n' >"$torchrun"
chmod 755 "$torchrun"
tar -C "$folder" --exclude=./var/cache/apt -c . | podman import -q - "$1"
"""


@functools.cache
def images():
    """Build containers/Dockerfile, once. Return podman's image by the name in a manifest.

    Its base, a Debian with Python, pip and torchrun, is made once per machine.
    """
    suite = DEBIAN_OF_PYTHON[sys.version_info[:2]]
    base = f"localhost/ddp-tests-base:{suite}-2"
    sh("bash", "-euo", "pipefail", "-c", MAKE_BASE_IMAGE, suite, base, timeout=600)
    image = f"localhost/ddp-tests:{os.getpid()}"
    command = ["buildah", "bud", "--isolation", "chroot", "--network", "host",
               "--volume", BORROWED, "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro",
               "--build-arg", f"BASE_IMAGE={base}", "--file", DOCKERFILE, "--tag", image]
    settings = sh(sys.executable, "-m", "pip", "config", "list")
    for url in re.findall(r"\.index-url='(.*)'", settings):  # this machine's mirror, if any
        command += ["--build-arg", f"PIP_INDEX_URL={url}"]
    sh(*command, ROOT, timeout=400)
    atexit.register(sh, "podman", "rmi", "--force", image)
    return {OUR_IMAGE: image, OFFICIAL_IMAGE: base}


# --- cluster ---
class Start(NamedTuple):
    """A start of cpu_ddp: epochs that were done before, epochs that are done now."""
    first: int
    done: int


def starts_of(pods):
    """Return the starts of two processes by the logs of these pods: only rank 0 logs."""
    text = "".join(pod.log.read_text() for pod in pods)
    first_line = r"^world size 2\b.*? epochs(?:, resumed after (\d+))?.*$"
    parts = re.split(first_line, text, flags=re.MULTILINE)
    starts = []
    for first, log in zip(parts[1::2], parts[2::2], strict=True):
        done = re.findall(r"^epoch (\d+)/", log, re.M) or [0]
        starts.append(Start(int(first or 0), int(done[-1])))
    return starts


class Pod:
    """A container in a network namespace. start() makes a new one, as on another node."""

    def __init__(self, cluster, name, spec, index):
        self.cluster, self.name, self.spec, self.index = cluster, name, spec, index
        self.failures = 0  # the Job then makes a new pod
        self.log = cluster.folder / f"{name}.log"
        self.dns = f'{name}.{spec["subdomain"]}'
        os.chown(cluster.claim, 0, spec["securityContext"].get("fsGroup", 0))
        cluster.pods.append(self)
        self.start()

    def start(self):
        self.machine = self.cluster.connect(self.dns)
        self.container = f"ddp-tests-{self.machine.pid}-{self.failures}"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=subprocess.STDOUT)

    def command(self):
        (container,) = self.spec["containers"]
        security = self.spec["securityContext"]
        limits = container["resources"]["limits"]
        options = [
            "--name", self.container, "--hostname", self.dns,
            "--entrypoint", json.dumps(container["command"]),
            "--network", f"ns:/proc/{self.machine.pid}/ns/net",
            "--no-hosts", "--volume", f"{self.cluster.hosts}:/etc/hosts:ro",
            "--volume", f"{self.cluster.only_hosts}:/etc/nsswitch.conf:ro",
            "--user", f'{security["runAsUser"]}:{security["runAsGroup"]}',
            "--security-opt", "no-new-privileges", "--cap-drop", "all",
            "--cpus", limits["cpu"],
            "--memory", limits["memory"].removesuffix("i"),
        ]
        options += [f"--env={item['name']}={item['value']}" for item in container["env"]]
        options += [f"--env=JOB_COMPLETION_INDEX={self.index}"]
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes[mount["name"]]
            source = "type=tmpfs,tmpfs-mode=1777"  # emptyDir
            if "configMap" in volume:
                source = f"type=bind,readonly,source={ROOT / 'cpu_ddp'}"
            if "persistentVolumeClaim" in volume:
                source = f"type=bind,source={self.cluster.claim}"
            options += ["--mount", f'{source},destination={mount["mountPath"]}']
        return [*PODMAN_RUN, *options, images()[container["image"]], *container.get("args", [])]

    def kill_worker(self):
        """Kill a training process, a child of torchrun."""
        number = sh("podman", "inspect", "--format", "{{.State.Pid}}", self.container).strip()
        sh("pkill", "--signal", "KILL", "--newest", "--parent", number)

    def stop(self, signal):
        """Delete the pod with SIGTERM (later with SIGKILL), or lose it by SIGKILL."""
        for signum in (signal, "KILL"):
            # On a busy machine, podman gives up before the container has ended.
            subprocess.run(["podman", "kill", "--signal", signum, self.container],
                           capture_output=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self.process.wait(self.spec["terminationGracePeriodSeconds"])
                break
        assert status != 0, f"{self.name} had completed before {signal}\n{self.cluster.report()}"
        self.cluster.disconnect(self)

    def tend(self):
        """Replace a pod of a Job that has failed, as Kubernetes does."""
        if self.process.poll() in (None, 0):
            return
        self.failures += 1
        assert self.failures <= LIMIT, (
            f"{self.name} fails again and again\n{self.cluster.report()}")
        self.cluster.disconnect(self)
        time.sleep(self.failures)
        self.start()


class Namespace(Machine):
    """The network of a pod."""

    def command(self):
        return ["unshare", "--net", "--pid", "--fork", "--kill-child=KILL",
                "sh", "-c", "ip link set lo up; exec sleep infinity"]


class Cluster:
    """Pods that reach each other by name, and nothing else, until close()."""

    def __init__(self, folder):
        self.folder = folder
        self.pods = []
        self.claim = folder / "claim"  # the volume
        self.claim.mkdir()
        self.claim.chmod(0o2775)  # for the members of fsGroup
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self.only_hosts = folder / "nsswitch.conf"  # unknown names fail at once
        self.only_hosts.write_text("hosts: files\n")
        self.network = Network(folder, 0, Namespace)
        self.network.up()

    def close(self):
        for pod in self.pods:
            remove = ["podman", "rm", "-f", "-t", "0", "--ignore", pod.container]
            while pod.process.poll() is None:  # its container may not be there yet
                subprocess.run(remove, capture_output=True)
        for machine in self.network.machines.values():
            machine.kill()

    def connect(self, name):
        """Return a new network with an address that has a name."""
        number = len(self.network.machines) + 1
        machine = Namespace(self.network, f"pod{number}", f"10.9.8.{number}")
        self.network.machines[machine.name] = machine
        machine.boot()
        with self.hosts.open("a") as hosts:
            hosts.write(f"{machine.address} {name}\n::ffff:{machine.address} {name}\n")
        return machine

    def disconnect(self, pod):
        """Take the pod's address out of the network and of the names."""
        if pod.machine:
            pod.machine.kill()
            hosts = self.hosts.read_text()
            self.hosts.write_text(hosts.replace(f"{pod.machine.address} ", "# "))
            pod.machine = None

    def apply(self, manifest):
        """Start the pods of a Job, which stands behind its Service. Return them."""
        _, job = json.loads(sh("yq", "--slurp", ".", input=manifest))
        name, spec = job["metadata"]["name"], job["spec"]
        return [Pod(self, f"{name}-{index}", spec["template"]["spec"], index)
                for index in range(spec["completions"])]

    def wait_until(self, what, condition, timeout=600):
        """Tend the pods until condition() is true."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, (
                f"waited {timeout} s for {what}\n{self.report()}")
            for pod in self.pods:
                pod.tend()
            time.sleep(0.2)

    def report(self):
        """Return how often each pod has failed, and the end of its log."""
        return "".join(f"--- {pod.name} failed {pod.failures} times ---\n"
                       f"{pod.log.read_text()[-3000:]}\n" for pod in self.pods)

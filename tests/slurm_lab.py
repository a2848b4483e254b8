"""A real Slurm cluster on one machine: a head (controller, login) and nodes, in namespaces.

The commands that slurm/install-slurm.sh prints install Slurm on them. The machine's own network,
Slurm and /etc stay untouched. The kernel ends every process of the lab when the test run ends.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

INSTALL = Path(__file__).resolve().parent.parent / "slurm" / "install-slurm.sh"
NAMESPACES = ("--net", "--uts", "--mount", "--ipc", "--pid")
# What takes the place of ssh and scp, as there is no server, of apt-get, and of sleep.
STAND_INS = {
    "ssh": 'exec nsenter --target "$(cat "$LAB/$1")" --net --uts --mount --ipc --pid bash -c "$2"',
    "scp": 'to=${*: -1}; cp "${@:1:$#-1}" "/proc/$(cat "$LAB/${to%%:*}")/root${to#*:}"',
    "apt-get": '[[ $1 = update ]] || dpkg --status "${@:3}" >/dev/null',
    "sleep": "",    # `service slurmd restart` waits for the end of a daemon that does not run yet
}
# Shorter waits, and more hardware than there is.
SETTINGS = """
SlurmdParameters=config_overrides   # more CPUs and memory than there are
LaunchParameters=use_interactive_step   # a shell of salloc runs on the first node
ProctrackType=proctrack/linuxproc   # cgroups v2 require a systemd per node
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SlurmdTimeout=5                     # a lost node is down sooner
KillWait=30                         # the default: on a busy machine, a step takes long
AuthInfo=cred_expire=5              # a requeued job waits 7 s, not 121
JobRequeue=0                        # unless a job requests it
MinJobAge=3600                      # ended jobs stay visible
PartitionName=DEFAULT Nodes=ALL DefaultTime=30 PriorityTier=1 PreemptMode=REQUEUE
PartitionName=main Default=YES
PartitionName=low
PartitionName=grace GraceTime=60
PartitionName=high PriorityTier=10 PreemptMode=OFF
"""
FINAL = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}

# PID 1 of a machine: sets up its namespaces, reaps orphans.
INIT = r"""set -e
hostname "$1"
mount -t sysfs sysfs /sys   # /sys/class/net shows this machine's interfaces
for folder in /run /dev/shm /etc/{munge,slurm} /var/log/{munge,slurm} /var/lib/{munge,slurm}; do
    mount -t tmpfs -o mode=755 tmpfs $folder
done
chmod 1777 /dev/shm
mkdir /run/{lock,munge}
chown munge: /run/munge {/etc,/var/log,/var/lib}/munge
chown slurm: {/var/log,/var/lib}/slurm
mount --bind "$2/hosts" /etc/hosts
echo hosts: files >/run/nsswitch.conf
mount --bind /run/nsswitch.conf /etc/nsswitch.conf    # unknown names fail at once
ip link set lo up
sleep infinity &
wait $!
"""


def write_program(path, text):
    """Write a shell script, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def namespaces(pid):
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "pid")}


class Machine:
    """The head or a node."""

    def __init__(self, lab, name, address):
        self.lab, self.name, self.address = lab, name, address

    def command(self):
        """What starts PID 1."""
        return ["unshare", *NAMESPACES, "--mount-proc", "--fork", "--kill-child=KILL",
                "bash", "-c", INIT, "init", self.name, self.lab.root]

    def boot(self):
        """Start PID 1, then connect eth0 to the switch, which is the head's eth0."""
        # The kernel kills the machine when this process dies, and all of its processes when its
        # PID 1 dies.
        self.process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *self.command()],
                                        stdin=subprocess.DEVNULL, start_new_session=True)
        self.pid = self._first_process()
        (self.lab.root / f"root@{self.address}").write_text(str(self.pid))  # for ssh
        head = self.lab.machines["head"]
        if self is head:
            self.ip("link add eth0 type bridge")
        else:
            head.ip(f"link add {self.name} type veth peer name eth0 netns {self.pid}")
            head.ip(f"link set {self.name} master eth0 up")
        self.ip(f"addr add {self.address}/24 dev eth0")
        self.ip("link set eth0 up")

    def _first_process(self):
        """Return PID 1 of the machine, as this machine numbers it."""
        own = namespaces("self")
        for _ in range(500):
            pids = [self.process.pid]
            for pid in pids:
                with contextlib.suppress(OSError):  # helpers come and go
                    if not own & namespaces(pid):
                        return pid
                    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                    pids.extend(map(int, children.split()))
            time.sleep(0.01)
        raise RuntimeError(f"{self.name} does not boot")

    def ip(self, arguments):
        subprocess.run(f"nsenter --net=/proc/{self.pid}/ns/net ip {arguments}".split(), check=True,
                       timeout=30)

    def kill(self):
        """End all processes at once."""
        self.process.kill()
        self.process.wait(30)

    def exec(self, command, timeout=30, check=True, env=None):
        """Run a shell command on this machine and return its output, stderr included."""
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        environment |= {name: str(value) for name, value in (env or {}).items()}
        done = subprocess.run(
            ["nsenter", "--target", str(self.pid), *NAMESPACES, "timeout", "--kill-after=5",
             str(timeout), "bash", "-c", command], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=environment)
        assert not check or done.returncode == 0, (
            f"on {self.name}, exit status {done.returncode}: {command}\n{done.stdout}")
        return done.stdout


class Network:
    """The head and the nodes c1, c2, ..., connected by a switch."""

    def __init__(self, root, nodes, machine=Machine):
        self.root = Path(root)
        self.nodes = [f"c{number}" for number in range(1, nodes + 1)]
        self.machines = {}
        for number, name in enumerate(["head", *self.nodes], start=1):
            self.machines[name] = machine(self, name, f"10.9.8.{number}")

    def up(self):
        for machine in self.machines.values():
            machine.boot()


class Lab(Network):
    """The machines, and Slurm on them.

    hardware: for each node, its cores, and the hyperthreads of a core. With gpus, each has two.
    Without affinity, nodes may have more cores than this machine.
    """

    def __init__(self, root, hardware, gpus=True, affinity=True):
        super().__init__(root, len(hardware))
        self.hardware, self.gpus = hardware, gpus
        self.task_plugin = "task/affinity" if affinity else "task/none"  # many sites have affinity
        self.lock = threading.Lock()
        self.jobs, self.asked = [], 0  # what Slurm has said of each job, and when

    def up(self):
        self.folder = self.root / "shared disk"      # for the tests: every machine sees it
        self.folder.mkdir()
        hosts = "127.0.0.1 localhost\n"
        for name, machine in self.machines.items():
            hosts += f"{machine.address} {name}\n::ffff:{machine.address} {name}\n"
        (self.root / "hosts").write_text(hosts)
        super().up()
        self._install()
        self.sh('until [ "$(sinfo -hNo %t | sort -u)" = idle ]; do sleep 0.1; done')

    def _install(self):
        """Run what install-slurm.sh prints."""
        etc = self.root / "my cluster"
        head = self.machines["head"].address
        command = ["bash", INSTALL, "--out", etc, "--controller", f"head={head}"]
        for name, (cores, threads) in zip(self.nodes, self.hardware, strict=True):
            hardware = (f"CPUs={cores * threads},CoresPerSocket={cores},ThreadsPerCore={threads},"
                        f"RealMemory=40000{',Gres=gpu:2' * self.gpus}")
            command += ["--node", f"{name}={self.machines[name].address},{hardware}"]
        commands = subprocess.check_output(command, text=True, timeout=30)
        # GPUs are counted, and never opened.
        gpus = "Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n" if self.gpus else ""
        (etc / "gres.conf").write_text(gpus)
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        replaced = r"^(TaskPlugin|ProctrackType|PartitionName)=.*\n"
        if not self.gpus:
            replaced += r"|^GresTypes=.*\n"
        text = re.sub(replaced, "", (etc / "slurm.conf").read_text(), flags=re.MULTILINE)
        (etc / "slurm.conf").write_text(f"{text}TaskPlugin={self.task_plugin}\n{SETTINGS}")
        for name, program in STAND_INS.items():
            write_program(self.root / name, program)
        env = os.environ | {"PATH": f"{self.root}:{os.environ['PATH']}", "LAB": str(self.root)}
        done = subprocess.run(["bash", "-euc", commands], env=env, capture_output=True, text=True,
                              timeout=200)
        assert done.returncode == 0, (
            f"what install-slurm.sh prints fails:\n{commands}{done.stdout}{done.stderr}")

    def sh(self, command, timeout=60, env=None):
        """Run a shell command in the folder on the head and return its output."""
        command = f"cd {shlex.quote(str(self.folder))} && {command}"
        return self.machines["head"].exec(command, timeout, env=env)

    def sbatch(self, command, nodes="c1,c2", inside="", **variables):
        """Submit a job on some of the nodes, inside a command as srun or salloc. Return its id."""
        others = ",".join(name for name in self.nodes if name not in nodes.split(","))
        said = self.sh(f"{inside} sbatch --parsable --exclude={others} {command}", env=variables)
        with self.lock:
            self.asked = 0
        return int(re.search(r"^\d+$", said, re.MULTILINE)[0])

    def record(self, job):
        """Return what `scontrol show job` has said within this second. All jobs are asked at once,
        since many threads ask.
        """
        with self.lock:
            if time.monotonic() > self.asked + 1:
                self.jobs = self.sh("scontrol show job").split("\n\n")
                self.asked = time.monotonic()
            number, _, task = str(job).partition("_")
            names = [f"JobId={number} "]
            if task:    # while the array is pending, its tasks are one job
                names = [f"ArrayJobId={number} ArrayTaskId={task} ", f"ArrayJobId={number} "]
            return next(text for name in names for text in self.jobs if name in f" {text}")

    def show(self, job, field):
        """Return a field of `scontrol show job`."""
        return re.search(rf"\b{field}=(.*?)( \w+[=:]|$)", self.record(job), re.MULTILINE)[1]

    def restarts(self, job):
        """Return how often the job was requeued."""
        return int(self.show(job, "Restarts"))

    def output(self, job):
        """Return what the job has printed so far."""
        path = Path(self.show(job, "StdOut"))
        return path.read_text(errors="replace") if path.exists() else ""

    def report(self, job):
        return self.record(job) + self.output(job)

    def wait_for(self, job, what, condition, timeout=600):
        """Wait until condition() is true. If the job ends before that, the test fails soon."""
        deadline = time.monotonic() + timeout
        ended = 0  # a job that is being requeued passes through such a state
        while not condition():
            ended = ended + 1 if self.show(job, "JobState") in FINAL else 0
            assert ended < 20, f"job {job} has ended, not {what}:\n{self.report(job)}"
            assert time.monotonic() < deadline, f"job {job} is not {what}:\n{self.report(job)}"
            time.sleep(0.5)

    def wait_for_state(self, job, state):
        self.wait_for(job, state, lambda: self.show(job, "JobState") == state)


@contextlib.contextmanager
def booted(lab):
    """Boot lab(folder), a Network, or skip the test. Afterwards nothing of it remains."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    folder = tempfile.TemporaryDirectory(prefix="slurm_lab.", ignore_cleanup_errors=True)
    with folder as root:
        os.chmod(root, 0o755)
        network = lab(root)
        try:
            network.up()
            yield network
        finally:
            for machine in network.machines.values():
                machine.kill()


def reason_to_skip():
    """Return None, or why there can be no lab here, with the command that enables it."""
    programs = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "systemd-nspawn")
    if os.geteuid() != 0 or not all(map(shutil.which, programs)):
        return ("requires root and apt-get install slurmctld slurmd slurm-client munge iproute2 "
                "systemd-container dbus")
    probe = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True, text=True, timeout=20)
    if probe.returncode:
        return f"needs namespaces, in a container `docker run --privileged`: {probe.stderr.strip()}"
    return None

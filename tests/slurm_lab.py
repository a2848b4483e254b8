"""A real Slurm cluster on one machine: a head (controller, login) and nodes, each in its own network, UTS, mount, IPC
and PID namespaces, configured by slurm/install-slurm.sh. The machine's own network, Slurm and /etc stay untouched, and
the kernel ends every process of the lab when the test run ends, however it ends.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

INSTALL = Path(__file__).resolve().parent.parent / "slurm" / "install-slurm.sh"
FINAL = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}

# PID 1 of a machine: sets up its namespaces, starts its daemons, reaps orphans.
INIT = r"""set -e
name=$1 own=$2 lab=$3
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"
mount -t sysfs sysfs /sys                               # /sys/class/net shows this machine's interfaces
for folder in /run /dev/shm; do mount -t tmpfs -o mode=755 tmpfs "$folder"; done
chmod 1777 /dev/shm
mkdir -p "$own/log/munge" "$own/log/slurm" "$own/munge" "$own/slurm/slurmctld" "$own/slurm/slurmd"
chown -R munge: "$own/log/munge" "$own/munge"
chown -R slurm: "$own/log/slurm" "$own/slurm"
mount --bind "$own/log" /var/log
mount --bind "$own/munge" /var/lib/munge
mount --bind "$own/slurm" /var/lib/slurm
mount --bind "$lab/key" /etc/munge
mount --bind "$lab/etc" /etc/slurm
mount --bind "$lab/hosts" /etc/hosts
sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$own/nsswitch.conf"
mount --bind "$own/nsswitch.conf" /etc/nsswitch.conf    # unknown names fail at once
read -r _                                               # the cable is plugged in
ip link set lo up
install -d -o munge -g munge -m 755 /run/munge
runuser -u munge -- munged
unset SLURM_CONF
if [ "$name" = head ]; then slurmctld; else slurmd; fi  # they return when they listen
while :; do sleep 3600 & wait $!; done
"""


class Machine:
    """The head or a node."""

    def __init__(self, lab, name, address):
        self.lab, self.name, self.address = lab, name, address
        self.own = lab.root / name
        self.own.mkdir()

    def command(self):
        """What starts PID 1, and with it the daemons."""
        return ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child=KILL",
                "bash", "-c", INIT, "init", self.name, self.own, self.lab.root]

    def boot(self):
        with open(self.own / "console.log", "ab") as log:
            # The kernel kills the machine when this process dies, and all its processes when its PID 1 dies.
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command()],
                stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        self.pid = self._first_process()
        self._plug_in()
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def _first_process(self):
        for _ in range(500):
            with contextlib.suppress(OSError):  # helpers come and go
                for pid in (pids := [self.process.pid]):
                    if all(os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
                           for kind in ("net", "pid")):
                        return pid
                    pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            time.sleep(0.01)
        raise RuntimeError(f"{self.name} does not boot: {(self.own / 'console.log').read_text()}")

    def _plug_in(self):
        """Connect eth0 to the switch, which is the head's eth0."""
        head = self.lab.head
        if self is head:
            self._ip("link", "add", "eth0", "type", "bridge")
        else:
            head._ip("link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.pid)
            head._ip("link", "set", self.name, "master", "eth0", "up")
        self._ip("addr", "add", f"{self.address}/24", "dev", "eth0")
        self._ip("link", "set", "eth0", "up")

    def _ip(self, *arguments):
        subprocess.run(["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", *map(str, arguments)],
                       check=True, timeout=30)

    def cut(self):
        """Pull the network cable: no other machine is notified."""
        self.lab.head._ip("link", "set", self.name, "down")

    def kill(self):
        """End all processes at once."""
        self.process.kill()
        self.process.wait(30)

    def exec(self, command, timeout=30, check=True, env=None, cwd="/"):
        """Run a shell command on this machine and return its output, stderr included."""
        base = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
        done = subprocess.run(
            ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--ipc", "--pid",
             "timeout", "--kill-after=5", str(timeout), "bash", "-c", 'cd "$0" && eval "$1"', cwd, command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=timeout + 15, env=base | {name: str(value) for name, value in (env or {}).items()})
        if check and done.returncode:
            raise AssertionError(f"on {self.name}, exit status {done.returncode}: {command}\n{done.stdout}")
        return done.stdout


class Network:
    """The head and the nodes, connected by a switch."""

    machine = Machine

    def __init__(self, root, nodes=3):
        self.root = Path(root)
        self.nodes = [f"c{i + 1}" for i in range(nodes)]
        self.addresses = {"head": "10.9.8.1"} | {name: f"10.9.8.{11 + i}" for i, name in enumerate(self.nodes)}
        self.folder = self.root / "shared disk"      # for the tests: every machine sees it
        self.machines = []
        self.outputs = {}

    def up(self):
        self.folder.mkdir()
        for name, address in self.addresses.items():
            self.machines.append(self.machine(self, name, address))
            self.machines[-1].boot()

    @property
    def head(self):
        return self.machines[0]

    def node(self, name):
        return self.machines[1 + self.nodes.index(name)]

    def down(self):
        for machine in self.machines:
            machine.kill()


class Lab(Network):
    """The machines, and Slurm on them."""

    cores = {}  # of a node, if not 4
    settings = {
        "SlurmdParameters": "config_overrides", "TaskPlugin": "task/none",      # accept these CPUs and this memory
        "ProctrackType": "proctrack/linuxproc",         # cgroups v2 require a systemd per node
        "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=2,bf_interval=2",
        "SlurmdTimeout": "10", "KillWait": "15",        # a lost node is down sooner, and what hangs is killed sooner
        "AuthInfo": "cred_expire=5",                    # a requeued job waits 7 s, not 121
        "MinJobAge": "3600",                            # ended jobs stay visible
    }
    partitions = ("main Nodes=ALL Default=YES DefaultTime=30 PriorityTier=1 PreemptMode=REQUEUE GraceTime=25",
                  "low Nodes=ALL DefaultTime=30 PriorityTier=1 PreemptMode=REQUEUE",
                  "high Nodes=ALL DefaultTime=30 PriorityTier=10 PreemptMode=OFF")

    def up(self):
        (self.root / "key").mkdir()
        self._configure()
        (self.root / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n::ffff:{address} {name}\n" for name, address in self.addresses.items()))
        super().up()
        states, deadline = None, time.monotonic() + 60
        while states != {"idle"}:
            assert time.monotonic() < deadline, f"nodes are {states}\n{self.logs()}"
            time.sleep(0.1)
            states = set(self.sh("sinfo -hN -o %t", check=False).split())

    def _configure(self):
        """Write slurm.conf with install-slurm.sh, then edit it: shorter waits, and more hardware than there is."""
        etc = self.root / "etc"
        command = ["bash", INSTALL, "--out", etc, "--controller", f"head={self.addresses['head']}"]
        for name in self.nodes:
            n = self.cores.get(name, 4)     # more than there is, as memory and GPUs: tests train small models
            command += ["--node",
                        f"{name}={self.addresses[name]},CPUs={n},CoresPerSocket={n},RealMemory=10000,Gres=gpu:2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=30)
        (etc / "munge.key").rename(self.root / "key" / "munge.key")
        for path in (self.root / "key", self.root / "key" / "munge.key"):
            shutil.chown(path, "munge", "munge")
            path.chmod(0o700)
        (etc / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")  # counted, never opened
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        lines = (etc / "slurm.conf").read_text().splitlines()
        lines = [line for line in lines if line.split("=")[0] not in (*self.settings, "PartitionName")]
        lines += [f"{key}={value}" for key, value in self.settings.items()]
        lines += [f"PartitionName={partition} MaxTime=INFINITE State=UP" for partition in self.partitions]
        (etc / "slurm.conf").write_text("\n".join(lines) + "\n")

    def sh(self, command, timeout=60, check=True, env=None, cwd=None):
        """Run a shell command on the head and return its output, stderr included."""
        return self.head.exec(command, timeout, check, env, cwd or self.folder)

    def sbatch(self, *args, env=None, cwd=None):
        """Submit a job and return its id."""
        return int(self.sh("sbatch --parsable " + shlex.join(map(str, args)), env=env, cwd=cwd).split()[-1])

    def show(self, job, field):
        """A field of `scontrol show job`."""
        return re.search(rf"\b{field}=(.*?)( \w+[=:]|$)", self.sh(f"scontrol show job {job}"), re.MULTILINE)[1]

    def output(self, job):
        if job not in self.outputs:
            self.outputs[job] = Path(self.show(job, "StdOut"))
        return self.outputs[job].read_text(errors="replace") if self.outputs[job].exists() else ""

    def wait_for(self, job, condition, timeout=900):
        """Wait until condition() is true. If the job ends before that, the test fails soon."""
        deadline, ended = time.monotonic() + timeout, 0
        while not condition():
            final = self.show(job, "JobState") in FINAL
            ended = ended + 1 if final else 0   # a job that is being requeued passes through such a state
            assert ended < 10 and time.monotonic() < deadline, self.report(job)
            time.sleep(1)

    def wait(self, job, state):
        self.wait_for(job, lambda: self.show(job, "JobState") == state)

    def report(self, job):
        return f"{self.sh(f'scontrol show job {job}', check=False)}\n{self.output(job)[-6000:]}\n{self.logs()}"

    def logs(self):
        return "\n".join(f"---- {log}\n{log.read_text(errors='replace')[-2000:]}" for log in self.root.rglob("*.log"))


@contextlib.contextmanager
def running(kind, nodes=3):
    """A Network that is up; afterwards nothing of it remains."""
    with tempfile.TemporaryDirectory(prefix="slurm_lab.", ignore_cleanup_errors=True) as root:
        os.chmod(root, 0o755)
        lab = kind(Path(root), nodes)
        try:
            lab.up()
            yield lab
        finally:
            lab.down()


def why_not():
    """Return None, or why there can be no lab here, with the command that enables it."""
    if os.geteuid() != 0:
        return "needs root: sudo env PATH=$PATH python -m pytest tests"
    if missing := [p for p in ("slurmctld", "slurmd", "sbatch", "munged", "ip") if not shutil.which(p)]:
        return f"needs {missing[0]}: apt-get install -y slurmctld slurmd slurm-client munge iproute2"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork",
                            "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, timeout=20)
    if probe.returncode:
        return f"needs namespaces, in a container `docker run --privileged`: {probe.stderr.strip()}"

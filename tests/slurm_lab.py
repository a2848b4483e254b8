"""A real Slurm cluster on one machine: a head (controller, login) and nodes, each in its own network, UTS, mount,
IPC and PID namespaces, with its own hostname, address, /run, /var/log, /dev/shm and munged, configured by
slurm/install-slurm.sh. The machine's own network, Slurm and /etc stay untouched, and the kernel ends every process of
the lab when the test run ends, however it ends.

By hand: `python tests/slurm_lab.py` gives a shell on the head.
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

INSTALL = Path(__file__).resolve().parent.parent / "slurm" / "install-slurm.sh"
APT = "apt-get install -y slurmctld slurmd slurm-client munge iproute2"
FINAL = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}

# A machine's own root of every cgroup tree there is. $own/cgroups holds lines of mount point, type and options.
MOUNT_CGROUPS = r"""
mount_cgroups() {       # mount_cgroups SYS
    [ -e /sys/fs/cgroup/cgroup.procs ] || mount -t tmpfs tmpfs "$1/fs/cgroup"       # v1: many trees side by side
    while read -r at type options; do
        mkdir -p "$1${at#/sys}"
        mount -t "$type" -o "$options" cgroup "$1${at#/sys}"
    done <"$own/cgroups"
}
"""

# PID 1 of a machine: dresses up its namespaces, starts its daemons, reaps orphans. $1 its name, $2 its own folder,
# $3 what all share, the rest the daemons.
INIT = MOUNT_CGROUPS + r"""set -e
name=$1 own=$2 lab=$3
shift 3
mount --make-rprivate /
mount -t proc proc /proc
hostname "$name"
mount -t sysfs sysfs "$own/sys"                         # so that /sys/class/net shows this machine's interfaces
mount_cgroups "$own/sys"
mount --move "$own/sys" /sys
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
mount --bind "$own/hosts" /etc/hosts
mount --bind "$lab/nsswitch.conf" /etc/nsswitch.conf    # files only: unknown names fail at once
read -r _                                               # the cable is plugged in
ip link set lo up
install -d -o munge -g munge -m 755 /run/munge
runuser -u munge -- munged
unset SLURM_CONF
for daemon in "$@"; do "$daemon"; done                  # they come back when they listen
touch "$own/up"
trap 'exit 0' TERM INT
while :; do sleep 3600 & wait $!; done
"""


class Machine:
    """The head or a node; its life and death."""

    init = INIT

    def __init__(self, lab, name, address, daemons):
        self.lab, self.name, self.address, self.daemons = lab, name, address, daemons
        self.own = lab.root / name
        self.process = self.network = None
        (self.own / "sys").mkdir(parents=True)
        self.write_hosts()
        self.cgroups = make_cgroups(f"{lab.root.name}/{name}")
        (self.own / "cgroups").write_text("".join(f"{at} {kind} {options}\n" for _, at, kind, options in self.cgroups))

    def write_hosts(self, loopback=False):
        """What this machine takes names for; `loopback`: its own for 127.0.1.1, as Debian's installer does."""
        lines = ["127.0.0.1 localhost"]
        for name, address in self.lab.addresses.items():
            if loopback and name == self.name:
                lines.append(f"127.0.1.1 {name}")
            else:   # the mapped line silences c10d's "hostname of the client socket cannot be retrieved"
                lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        (self.own / "hosts").write_text("\n".join(lines) + "\n")    # in place: the file is bind-mounted

    def boot(self):
        """Power on; Lab.wait_for_nodes() waits for it to be of use."""
        assert self.process is None, f"{self.name} is up"
        if self.network is not None:    # the cable of the life before goes with its namespace, only later
            os.close(self.network)
            subprocess.run(self.lab.on_head_network("ip", "link", "del", self.name), capture_output=True)
        (self.own / "up").unlink(missing_ok=True)
        log = open(self.own / "console.log", "ab")
        self.process = subprocess.Popen(
            # the kernel kills the machine when this process dies, and all its processes when its PID 1 dies
            ["setpriv", "--pdeathsig", "KILL",
             "bash", "-c", 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs"; shift; done; shift; exec "$@"', "join",
             *(folder for folder, *_ in self.cgroups), "--",
             "unshare", "--net", "--uts", "--mount", "--ipc", "--cgroup", "--pid", "--fork", "--kill-child=KILL",
             "bash", "-c", self.init, "init", self.name, self.own, self.lab.root, *self.daemons],
            stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        log.close()
        self.pid = self._first_child()
        self.network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        self._plug_in()
        self.process.stdin.write(b"\n")
        self.process.stdin.close()

    def _first_child(self):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for _ in range(500):
            pids = children.read_text().split()
            if pids and os.readlink(f"/proc/{pids[0]}/ns/net") != os.readlink("/proc/self/ns/net"):
                return int(pids[0])
            time.sleep(0.01)
        raise RuntimeError(f"{self.name} does not boot: {(self.own / 'console.log').read_text()}")

    def _plug_in(self):
        def inside(*command):
            subprocess.run(["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", *command], check=True, timeout=10)

        interface = "eth0"
        if self.lab.head is self:
            inside("link", "add", "eth0", "type", "bridge")     # the head is the switch too
        else:
            mac = "02:00:" + ":".join(f"{int(byte):02x}" for byte in self.address.split("."))   # survives a reboot
            subprocess.run(self.lab.on_head_network(
                "ip", "link", "add", self.name, "type", "veth",
                "peer", "name", "eth0", "address", mac, "netns", str(self.pid)), check=True, timeout=10)
            subprocess.run(self.lab.on_head_network(
                "ip", "link", "set", self.name, "master", "eth0", "up"), check=True, timeout=10)
        inside("addr", "add", f"{self.address}/24", "dev", interface)
        inside("link", "set", interface, "up")

    def kill(self):
        """All processes die at once, and their peers are told so by the network (RST)."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def poweroff(self):
        """The plug is pulled: nobody is told. Down until boot()."""
        self.cut()
        self.kill()

    def cut(self):
        """The network cable is pulled."""
        subprocess.run(self.lab.on_head_network("ip", "link", "set", self.name, "down"), check=True, timeout=10)

    def inside(self, *command):
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--ipc", "--cgroup", "--pid",
                *command]

    def exec(self, command, timeout=30, check=True, env=None, cwd="/"):
        """Run a shell command on this machine; returns what it prints, stderr included."""
        done = subprocess.run(
            self.inside("timeout", "--kill-after=5", str(timeout), "bash", "-c", 'cd "$0" && eval "$1"', cwd, command),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            timeout=timeout + 15, env=clean_environment() | {k: str(v) for k, v in (env or {}).items()})
        if check and done.returncode:
            raise AssertionError(f"on {self.name}, exit status {done.returncode}: {command}\n{done.stdout}")
        return done.stdout


def clean_environment():
    """Not a job's, should the tests themselves run in one, nor what their user means for tests/run.sh."""
    foreign = "SLURM", "SBATCH", "SRUN", "SALLOC", "VENV", "CONDA_ENV", "MODULES", "SCRIPT"
    return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}


def make_cgroups(name):
    """A folder in every cgroup tree; a list of (folder, the tree's mount point, its type, its options)."""
    made = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, at, kind, options, *_ = line.split()
        if kind.startswith("cgroup") and at.startswith("/sys/fs/cgroup") and os.access(at, os.W_OK):
            folder = Path(at)
            for part in name.split("/"):
                folder /= part
                folder.mkdir(exist_ok=True)
                for file in ("cpuset.cpus", "cpuset.mems"):     # v1: none until told
                    if (folder / file).exists() and kind == "cgroup":
                        (folder / file).write_text((folder.parent / file).read_text())
            tree = [word for word in options.split(",") if word not in ("rw", "nosuid", "nodev", "noexec", "relatime")]
            if kind == "cgroup2":
                tree = ["rw"]
            elif tree[0].startswith("name="):
                tree = ["none", *tree]
            made.append((folder, at, kind, ",".join(tree)))
    return made


class Network:
    """Machines joined by a switch: the head, and nodes."""

    machine = Machine

    def __init__(self, root, nodes=3):
        self.root = Path(root)
        self.nodes = [f"c{i + 1}" for i in range(nodes)]
        self.addresses = {"head": "10.9.8.1"} | {name: f"10.9.8.{11 + i}" for i, name in enumerate(self.nodes)}
        self.folder = self.root / "shared"      # for the tests: every machine sees it
        self.head = None
        self._node = {}

    def up(self):
        self.folder.mkdir()
        self.head = self.machine(self, "head", self.addresses["head"], ["slurmctld"])
        self._node = {name: self.machine(self, name, self.addresses[name], ["slurmd"]) for name in self.nodes}
        for machine in self.machines:
            machine.boot()

    @property
    def machines(self):
        return [self.head, *self._node.values()] if self.head else []

    def down(self):
        for machine in self.machines:
            machine.kill()

    def node(self, name):
        return self._node[name]

    def on_head_network(self, *command):
        return ["nsenter", f"--net=/proc/{self.head.pid}/ns/net", *command]


class Lab(Network):
    """The machines, and Slurm on them."""

    def up(self):
        for folder in ("etc", "key", "dev"):
            (self.root / folder).mkdir()
        self._configure()
        nsswitch = Path("/etc/nsswitch.conf").read_text().splitlines()
        (self.root / "nsswitch.conf").write_text(
            "\n".join("hosts: files" if line.startswith("hosts:") else line for line in nsswitch) + "\n")
        super().up()
        self.wait_for_nodes()

    def _configure(self):
        """slurm.conf from install-slurm.sh; set otherwise is only what makes tests fast and lets nodes pretend."""
        gpus = [self.root / "dev" / f"gpu{i}" for i in range(2)]    # counted, never opened; not in /dev: not seen there
        for gpu in gpus:
            os.mknod(gpu, 0o666 | 0o020000, os.makedev(1, 3))
        etc = self.root / "etc"
        cgroup = "v1" if os.access("/sys/fs/cgroup/freezer", os.W_OK) else "none"   # v2: a systemd per node
        command = ["bash", INSTALL, "--out", etc, "--cgroup", cgroup, "--controller", f"head={self.addresses['head']}"]
        for name in self.nodes:
            command += ["--node", f"{name}={self.addresses[name]},CPUs=4,RealMemory=10000,Gres=gpu:2"]
        for setting in (
            "SlurmdParameters=config_overrides", "TaskPlugin=task/none",    # more CPUs and memory than there are
            "PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE",
            "SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5",
            "SlurmdTimeout=10", "SlurmctldTimeout=10",                      # a lost node is noticed sooner
            "AuthInfo=cred_expire=5",                                       # a requeued job waits 7 s, not 121
            "MinJobAge=3600",                                               # finished jobs stay to be looked at
        ):
            command += ["--set", setting]
        command += ["--partition", "main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP "
                                   "PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
                    "--partition", "high Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP "
                                   "PriorityTier=10 PreemptMode=OFF"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=30)
        gres = etc / "gres.conf"
        gres.write_text(gres.read_text().replace("/dev/nvidia", f"{self.root}/dev/gpu"))
        (etc / "munge.key").rename(self.root / "key" / "munge.key")
        for path in (self.root / "key", self.root / "key" / "munge.key"):
            shutil.chown(path, "munge", "munge")
            path.chmod(0o700)

    def wait_for_nodes(self, timeout=20):
        """Until every node that is switched on is idle."""
        on = [name for name, node in self._node.items() if node.process]
        states, deadline = "", time.monotonic() + timeout
        while time.monotonic() < deadline:
            states = self.sh(f"sinfo -hN -p main -n {','.join(on)} -o %t", check=False).split()
            if states == ["idle"] * len(on) and all((self._node[name].own / "up").exists() for name in on):
                return
            time.sleep(0.1)
        raise AssertionError(f"nodes are {states} after {timeout} s\n{self.logs()}")

    def loopback_hostnames(self, on):
        """Every machine takes its own name for 127.0.1.1 (Debian's way), or for its address."""
        for machine in self.machines:
            machine.write_hosts(on)

    def sh(self, command, timeout=60, check=True, env=None, cwd=None):
        """Run a shell command on the head; returns what it prints, stderr included."""
        return self.head.exec(command, timeout, check, env, cwd or self.folder)

    def sbatch(self, *args, env=None, cwd=None, timeout=30):
        """Submit from the head; returns the job's number."""
        out = self.sh("sbatch --parsable " + shlex.join(map(str, args)), timeout, env=env, cwd=cwd)
        return int(out.split()[-1].split(";")[0])

    def show(self, job):
        """The fields of `scontrol show job`."""
        words = self.sh(f"scontrol -o show job {job}").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job):
        return self.show(job)["JobState"]

    def wait(self, job, states=FINAL, timeout=120):
        """Until the job is in one of the states; returns it. A job that ended in another one fails the test soon."""
        states = {states} if isinstance(states, str) else set(states)
        deadline, ended = time.monotonic() + timeout, None
        while True:
            state = self.state(job)
            if state in states:
                return state
            now = time.monotonic()
            ended = (ended or now) if state in FINAL else None      # a requeued job passes through such a state
            if now > deadline or (ended and now > ended + 5):
                raise AssertionError(f"job {job} is {state}, not {' or '.join(sorted(states))}\n{self.report(job)}")
            time.sleep(0.2)

    def report(self, job):
        """What one wants to see of a job that went wrong."""
        show = self.sh(f"scontrol show job {job}", check=False)
        out = Path(self.show(job).get("StdOut", "/none"))
        text = out.read_text(errors="replace")[-6000:] if out.exists() else "(none)"
        return f"{show}\n---- output {out}\n{text}\n{self.logs()}"

    def logs(self):
        out = []
        for log in sorted(self.root.glob("*/log/slurm/*.log")) + sorted(self.root.glob("*/console.log")):
            out += [f"---- {log}", *log.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(out)


PREFIX = "slurm_lab."


@contextlib.contextmanager
def running(kind, nodes=3):
    """A Lab or Network, and nothing of it afterwards."""
    for left in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        # FileNotFoundError: it is just being made, or removed; BlockingIOError: it is in use
        with contextlib.suppress(FileNotFoundError, BlockingIOError), open(left / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(left)        # its test run was killed, and so were its processes; files remain
    root = Path(tempfile.mkdtemp(prefix=PREFIX))
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root.chmod(0o755)
        lab = kind(root, nodes)
        try:
            lab.up()
            yield lab
        finally:
            lab.down()
            remove(root)


def remove(root):
    """What the file systems hold of a lab that is down."""
    cgroups = Path("/sys/fs/cgroup")
    for top in (cgroups / root.name, *cgroups.glob(f"*/{root.name}")):
        for folder, _, _ in os.walk(top, topdown=False):
            for _ in range(100):
                try:
                    os.rmdir(folder)
                    break
                except OSError:     # its last process is still dying
                    time.sleep(0.05)
    shutil.rmtree(root, ignore_errors=True)


def why_not():
    """None, or why there can be no lab here, with the command that mends it."""
    if os.geteuid() != 0:
        return "needs root: sudo env PATH=$PATH python -m pytest tests"
    if missing := [p for p in ("slurmctld", "slurmd", "sbatch", "munged", "ip") if not shutil.which(p)]:
        return f"needs {missing[0]}: {APT}"
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "--ipc", "--cgroup", "--pid", "--fork",
                            "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True, timeout=20)
    if probe.returncode:
        return f"needs namespaces, in a container `docker run --privileged`: {probe.stderr.strip()}"


@pytest.fixture(scope="session")
def slurm_lab():
    if reason := why_not():
        pytest.skip(reason)
    with running(Lab) as lab:
        yield lab


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start = time.monotonic()
    with running(Lab, int(sys.argv[1]) if len(sys.argv) > 1 else 3) as lab:
        print(f"up in {time.monotonic() - start:.1f} s: {' '.join(lab.nodes)}; {lab.folder} is shared", flush=True)
        subprocess.run(lab.head.inside("bash", "-c", 'cd "$0" && exec bash', lab.folder))

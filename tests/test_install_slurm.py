"""slurm/install-slurm.sh on copies of this machine, by systemd-nspawn.

What a copy writes to its disk is gone when it ends; everything else is real, systemd included. The
machine's own Slurm and /etc stay untouched.
"""

import os
import shlex
import shutil
import subprocess
import time

import pytest
from slurm_lab import INSTALL, Machine, Network, running, why_not

# PID 1 of a copy starts here.
COPY = """set -e
for folder in /run /tmp; do     # nspawn's own files
    mount -t tmpfs tmpfs $folder
done
mkdir /run/root
mount --bind / /run/root
exec systemd-nspawn --quiet --register=no --keep-unit --link-journal=no \
    --directory=/run/root --volatile=overlay --private-network "$@"
"""
# A machine without Slurm's configuration, whose own name nobody resolves.
PREPARE = """mkdir -p /run/lock
rm -rf /etc/slurm/*.conf /var/l*/slurm/*/* /var/log/slurm/*
echo 127.0.0.1 localhost >/etc/hosts
sed -i 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf
"""
CONFIGURATION = ("slurm.conf", "gres.conf", "cgroup.conf")
DAEMONS = {"slurmctld", "slurmd", "munged"}


class Copy(Machine):
    """A copy of this machine, with systemd or with one process that sleeps."""

    def command(self):
        if self.lab.kind == "systemd":
            start = ["--boot", "systemd.unit=basic.target", f"systemd.hostname={self.name}"]
        else:
            start = [f"--hostname={self.name}", "--as-pid2", "sleep", "infinity"]
        return ["unshare", "--mount-proc", "--pid", "--fork", "--kill-child=KILL",
                "bash", "-c", COPY, "copy", *start]

    def install(self, check=True):
        """Run install-slurm.sh and return its output."""
        shutil.copy(INSTALL, f"/proc/{self.pid}/root/run/")
        return self.exec(f"bash /run/{INSTALL.name}", 120, check)

    def running_daemons(self):
        return set(self.exec("ps -eo comm=").split()) & DAEMONS

    def wait_until_up(self):
        deadline = time.monotonic() + 60
        while not self.is_up():
            console = (self.own / "console.log").read_text()
            assert time.monotonic() < deadline, f"the copy {self.name} does not start:\n{console}"
            time.sleep(0.1)

    def is_up(self):
        if self.lab.kind == "systemd":
            state = self.exec("systemctl is-system-running", check=False).strip()
            return state.endswith(("running", "degraded"))
        return "sleep" in self.exec("pgrep -lx sleep", check=False)


class Copies(Network):
    """The copies, connected by a switch."""

    machine = Copy

    def __init__(self, kind, nodes, root):
        super().__init__(root, nodes)
        self.kind = kind

    def up(self):
        super().up()
        for machine in self.machines:
            machine.wait_until_up()
            machine.exec(PREPARE)


def copies(kind="plain", nodes=0):
    if reason := why_not():
        pytest.skip(reason)
    if not shutil.which("systemd-nspawn"):
        pytest.skip("needs systemd-nspawn: apt-get install -y systemd-container dbus")
    return running(lambda root, nodes: Copies(kind, nodes, root), nodes)


# --- one machine ---
# The tests of this part change the same machine, in this order.
@pytest.fixture(scope="module", params=["plain", "systemd"])
def machine(request):
    """A machine with two GPUs, before install-slurm.sh."""
    with copies(request.param) as lab:
        # They are /dev/zero and /dev/full.
        lab.head.exec("mknod -m 666 /dev/nvidia0 c 1 5; mknod -m 666 /dev/nvidia1 c 1 7")
        yield lab.head


@pytest.fixture(scope="module")
def refusals(machine):
    """What install-slurm.sh says where a file of the configuration is another's."""
    said = {}
    for name in CONFIGURATION:
        machine.exec(f"echo '# mine' > /etc/slurm/{name}")
        said[name] = machine.install(check=False)
        text = machine.exec("cat /etc/slurm/*.conf; rm /etc/slurm/*.conf")
        assert text.endswith("# mine\n"), f"{name} of somebody else was changed to:\n{text}"
    daemons = machine.running_daemons()
    assert not daemons, f"install-slurm.sh has refused, and started {daemons}"
    return said


@pytest.fixture(scope="module")
def installed(machine, refusals):
    """What install-slurm.sh has printed."""
    return machine.install()


@pytest.mark.parametrize("name", CONFIGURATION)
def test_configuration_of_somebody_else_is_refused(refusals, name):
    said = refusals[name]
    assert said.startswith("error: "), f"no error line for a {name} of somebody else:\n{said}"
    assert said.count("\n") == 1, f"more than one error line:\n{said}"
    assert f"/etc/slurm/{name}" in said, f"the error line does not name {name}:\n{said}"


def test_a_job_runs(machine, installed):
    assert "srun hostname: head" in installed, f"no job has run:\n{installed}"
    daemons = machine.running_daemons()
    assert daemons == DAEMONS, f"of {DAEMONS}, only {daemons} run:\n{installed}"


def test_hardware_is_found(machine, installed):
    hardware = {}
    for word in machine.exec("slurmd -C | head -1").split():
        key, value = word.split("=")
        hardware[key] = value
    cpus, memory, gpus = machine.exec("sinfo -ho '%c %m %G' --partition=main").split()
    assert cpus == hardware["CPUs"], f"Slurm has {cpus} CPUs, the machine {hardware['CPUs']}"
    share = int(memory) / int(hardware["RealMemory"])
    assert 0.9 < share < 1, f"Slurm has {share:.2f} of the memory, not a little less than all"
    assert gpus.startswith("gpu:2"), f"Slurm has the GPUs {gpus}, the machine 2"


def test_a_job_gets_a_gpu(machine, installed):
    visible = machine.exec("srun --gpus=1 printenv CUDA_VISIBLE_DEVICES").strip()
    assert visible == "0", f"a job that requests a GPU sees {visible!r}"


@pytest.fixture(scope="module")
def installed_again(machine, installed):
    """The output of a job beside which slurm.conf was edited and install-slurm.sh run again."""
    submit(machine, "job", "until [ -e /run/go ]; do sleep 0.1; done; echo went")
    machine.exec("until squeue -ho %t | grep R; do sleep 0.1; done")
    machine.exec("echo MaxJobCount=77 >> /etc/slurm/slurm.conf")
    again = machine.install()
    assert "srun hostname: head" in again, f"no job has run after an edit:\n{again}"
    machine.exec("touch /run/go; while squeue -ho %i | grep .; do sleep 0.1; done")
    return machine.exec("cat /run/job.out")


def submit(machine, name, command, options=""):
    command = shlex.quote(command)
    machine.exec(f"sbatch {options} --output=/run/{name}.out --wrap={command}")


def test_edited_setting_is_used(machine, installed_again):
    setting = machine.exec("scontrol show config | grep MaxJobCount")
    assert "= 77" in setting, f"MaxJobCount=77 in slurm.conf has no effect: {setting}"


def test_job_survives_another_installation(installed_again):
    assert installed_again == "went\n", f"a job beside it has printed:\n{installed_again}"


def test_urgent_job_preempts_and_the_other_is_requeued(machine, installed_again):
    """The first life of the job waits for ever. KillWait is shorter here; so is the delay."""
    machine.exec("printf 'KillWait=2\\nAuthInfo=cred_expire=5\\n' >> /etc/slurm/slurm.conf")
    machine.install()
    life = "echo life ${SLURM_RESTART_COUNT:-0}; [ $SLURM_RESTART_COUNT ] || sleep 600"
    submit(machine, "preempted", life, "--exclusive")
    machine.exec("until grep life /run/preempted.out; do sleep 0.1; done")
    urgent = "timeout 50 srun --partition=urgent --exclusive echo urgent has run"
    said = machine.exec(urgent, timeout=60, check=False)
    assert "urgent has run" in said, f"a job of urgent does not preempt one of main:\n{said}"
    machine.exec("while squeue -ho %i | grep .; do sleep 0.1; done", timeout=60)
    text = machine.exec("cat /run/preempted.out")
    assert "life 1" in text, f"a job of main was not requeued after one of urgent:\n{text}"


# --- several machines ---
SSH = """#!/usr/bin/env bash
# Takes the place of ssh and scp, as no copy has a server: enters the machine that has the address.
set -euo pipefail
enter() {{
    case $1 in
        {cases}
        *) exit 255 ;;
    esac
}}
if [ "${{0##*/}}" = scp ]; then
    to=${{*: -1}}
    cp "${{@:1:$#-1}}" "/proc/$(enter "${{to%%:*}}")/root${{to#*:}}"
else
    exec nsenter --target "$(enter "$1")" --net --uts --mount --ipc --pid bash -c "$2"
fi
"""
APT_GET = """#!/bin/sh
# Takes the place of apt-get, as there is no network: the packages must be there.
[ "$1" = update ] || { shift 2; dpkg --status "$@" >/dev/null; }
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head and two nodes, after the printed commands were run."""
    folder = tmp_path_factory.mktemp("install")
    with copies(nodes=2) as lab:
        cases = []
        for machine in lab.machines:
            cases.append(f"root@{machine.address}) echo {machine.pid} ;;")
            apt_get = "/usr/local/bin/apt-get"
            machine.exec(f"echo {shlex.quote(APT_GET)} > {apt_get}; chmod +x {apt_get}")
            machine.exec("rm /etc/munge/munge.key")     # which all copies have from this machine
        for name in ("ssh", "scp"):
            (folder / name).write_text(SSH.format(cases="\n        ".join(cases)))
            (folder / name).chmod(0o755)
        run_printed_commands(lab, folder)
        lab.written = folder / "my cluster"
        yield lab


def run_printed_commands(lab, folder):
    address = lab.addresses
    printed = subprocess.check_output(
        ["bash", INSTALL, "--controller", f"head={address['head']}",
         "--node", f"c1={address['c1']},CPUs=2,RealMemory=1000",
         "--node", f"c2={address['c2']}",
         "--out", folder / "my cluster"],
        text=True, timeout=60)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", printed], env=env, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, (
        f"the commands that install-slurm.sh prints fail:\n{printed}{done.stdout}{done.stderr}")


def test_each_machine_has_its_daemons(cluster):
    head = cluster.head.running_daemons()
    assert head == {"munged", "slurmctld"}, f"on the controller run {head}"
    for name in cluster.nodes:
        node = cluster.node(name).running_daemons()
        assert node == {"munged", "slurmd"}, f"on the node {name} run {node}"


def test_a_job_runs_on_all_nodes(cluster):
    names = sorted(cluster.node("c1").exec("srun --nodes=2 hostname").split())
    assert names == ["c1", "c2"], f"srun --nodes=2 hostname has printed {names}"


def test_key_is_private(cluster):
    mode = (cluster.written / "munge.key").stat().st_mode & 0o777
    assert mode == 0o600, f"munge.key has the permissions {mode:o}"

"""slurm/install-slurm.sh, on machines that are copies of this one in namespaces: what they write to their disk is gone
when they are, and everything else, systemd included, is real."""

import os
import re
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from slurm_lab import INSTALL, MOUNT_CGROUPS, Machine, Network, running, why_not

# PID 1 of a copy: this machine's disk under a layer in memory, which /run/written shows. Its arguments: as in INIT; the
# first "daemon" says which kind of machine it is.
COPY = MOUNT_CGROUPS + r"""
set -e
name=$1 own=$2 lab=$3 kind=$4
mount --make-rprivate /
mount -t tmpfs tmpfs "$own/disk"
cd "$own/disk"
mkdir written work root
mount -t overlay -o "lowerdir=/,upperdir=$PWD/written,workdir=$PWD/work" overlay root
mount --bind written root/mnt
cd root
rm -rf etc/slurm/{slurm,gres,cgroup}.conf var/l*/slurm/*/* var/log/slurm/* run
mkdir run
mount -t proc proc proc
mount -t sysfs sysfs sys
[ "$kind" = no-cgroup ] || mount_cgroups sys
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do touch dev/$device; mount --bind /dev/$device dev/$device; done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 tmpfs run
mkdir run/lock run/written
mount --move mnt run/written
hostname "$name"
echo "$name" >etc/hostname                      # systemd reads it
echo 127.0.0.1 localhost >etc/hosts             # nobody resolves the machine's own name
sed -i 's/^hosts:.*/hosts: files/' etc/nsswitch.conf
read -r _                                       # the cable is plugged in
ip link set lo up
mkdir -p "run/old"
pivot_root . run/old
cd /
umount -l /run/old
rmdir /run/old
if [ "$kind" = systemd ]; then
    exec env -i container=lxc PATH="$PATH" \
        /lib/systemd/systemd --unit=basic.target systemd.mask=systemd-tmpfiles-setup.service
fi
touch /run/up
while :; do sleep 3600 & wait $!; done
"""


class Copy(Machine):
    init = COPY

    def __init__(self, lab, name, address, daemons):
        super().__init__(lab, name, address, [lab.kind])
        (self.own / "disk").mkdir()

    def install(self, *args, check=True):
        shutil.copy(INSTALL, f"/proc/{self.pid}/root/run/")
        return self.exec(f"bash /run/{INSTALL.name} {shlex.join(args)}", 90, check)

    def written(self):
        """What is on its disk that is not on this machine's."""
        return set(self.exec("cd /run/written && find . -type f | sort").splitlines())

    def daemons_running(self):
        """{name: process}"""
        found = re.findall(r"^ *(\d+) (slurmctld|slurmd|munged)$", self.exec("ps -eo pid=,comm="), re.M)
        return {name: pid for pid, name in found}


class Copies(Network):
    machine = Copy

    def __init__(self, kind, nodes, root):
        super().__init__(root, nodes)
        self.kind = kind

    def up(self):
        super().up()
        up = "systemctl is-system-running" if self.kind == "systemd" else "cat /run/up"
        for machine in self.machines:
            for _ in range(200):
                if machine.exec(up, check=False).strip() in ("", "running", "degraded"):
                    break
                time.sleep(0.1)
            else:
                raise AssertionError((machine.own / "console.log").read_text())


def copies(kind="plain", nodes=0):
    if reason := why_not():
        pytest.skip(reason)
    if kind == "systemd" and not os.path.exists("/lib/systemd/systemd"):
        pytest.skip("needs systemd: apt-get install -y systemd dbus")
    return running(lambda root, nodes: Copies(kind, nodes, root), nodes)


@pytest.mark.parametrize("kind", ["plain", "no-cgroup", "systemd"])
def test_one_machine(kind):
    """Installed, again, changed under a running job, removed."""
    with copies(kind) as lab:
        machine = lab.head
        before = machine.written()

        assert "srun hostname: head" in machine.install()
        daemons = machine.daemons_running()
        assert daemons.keys() == {"munged", "slurmctld", "slurmd"}
        hardware = dict(word.split("=") for word in machine.exec("slurmd -C | head -1").split())
        cpus, memory, state = machine.exec("sinfo -ho '%c %m %t'").split()
        assert (cpus, state) == (hardware["CPUs"], "idle")
        assert 0.94 < int(memory) / int(hardware["RealMemory"]) <= 0.95

        stat = "stat -c '%n %y' /etc/slurm/*.conf"
        times = machine.exec(stat)
        assert "srun hostname: head" in machine.install()
        assert (machine.daemons_running(), machine.exec(stat)) == (daemons, times)      # nothing was done

        waits = "srun hostname; until [ -e /run/go ]; do sleep 0.1; done; echo went"
        job = machine.exec(f"sbatch --parsable --output=/run/job.out --wrap={shlex.quote(waits)}").strip()
        machine.exec("until [ -s /run/job.out ]; do sleep 0.1; done")
        machine.install("--set", "MaxJobCount=77")
        assert "MaxJobCount             = 77" in machine.exec("scontrol show config")
        assert machine.daemons_running()["slurmctld"] != daemons["slurmctld"]
        refusal = machine.install("--remove", check=False)
        assert "there are jobs" in refusal and len(refusal.splitlines()) == 1
        machine.exec(f"touch /run/go; while squeue -h | grep {job}; do sleep 0.2; done")
        assert machine.exec("cat /run/job.out").split() == ["head", "went"]

        machine.install("--remove")
        assert not machine.daemons_running()
        left = machine.written() - before
        assert not {file for file in left if not re.match(r"\./var/(log/(munge|journal)|lib/munge)/", file)}
        assert "no configuration" in machine.install("--remove")


@pytest.mark.parametrize("file", ["slurm.conf", "gres.conf", "cgroup.conf"])
def test_refuses_a_configuration_of_someone_else(file):
    with copies() as lab:
        machine = lab.head
        machine.exec(f"echo '# mine' > /etc/slurm/{file}")
        before = machine.written()
        for args in ([], ["--remove"]):
            refusal = machine.install(*args, check=False)
            assert f"/etc/slurm/{file}" in refusal and len(refusal.splitlines()) == 1
        assert machine.written() == before
        assert machine.exec(f"cat /etc/slurm/{file}") == "# mine\n"
        assert not machine.daemons_running()


def test_gpus_are_found_counted_and_fenced():
    with copies() as lab:
        machine = lab.head
        for gpu in (0, 2):      # devices are numbered with gaps in a container that was given some of them
            machine.exec(f"mknod -m 666 /dev/nvidia{gpu} c 1 {5 + 2 * gpu}")     # really /dev/zero, /dev/urandom
        machine.install()
        assert machine.exec("sinfo -ho %G").strip().startswith("gpu:2")
        for count, seen in ((1, "0"), (2, "0,1")):
            assert machine.exec(f"srun -Q --gpus={count} printenv CUDA_VISIBLE_DEVICES").strip() == seen
        assert "Requested node configuration is not available" in machine.exec("srun -Q --gpus=3 true", check=False)
        if os.access("/sys/fs/cgroup/devices", os.W_OK):
            assert "Operation not permitted" in machine.exec("srun -Q --gpus=1 head -c 1 /dev/nvidia2", check=False)
        machine.install("--remove")
        assert not machine.exec("ls /etc/slurm/gres.conf", check=False).startswith("/etc")


SSH = """#!/usr/bin/env bash
# Stands in for ssh and scp, there being no server on the copies: enters the machine that has the address.
set -euo pipefail
enter() {{ case $1 in {cases} *) echo "no such machine: $1" >&2; exit 255 ;; esac; }}
if [ "${{0##*/}}" = scp ]; then
    [ "$1" = -pr ]
    cp -pr "$2" "/proc/$(enter "${{3%%:*}}")/root${{3#*:}}"
else
    exec nsenter --target "$(enter "$1")" --net --uts --mount --ipc --cgroup --pid bash -c "$2"
fi
"""
APT_GET = """#!/usr/bin/env bash
# Stands in for apt-get, there being no network: the packages must be there.
[ "$1" = update ] || {{ [ "$1 $2" = "install -y" ] && dpkg --status "${@:3}" >/dev/null; }}
""".replace("{{", "{").replace("}}", "}")


def test_several_machines_by_the_printed_commands(tmp_path):
    with copies(nodes=2) as lab:
        cases = " ".join(f"root@{m.address}) echo {m.pid} ;;" for m in lab.machines)
        for name in ("ssh", "scp"):
            (tmp_path / name).write_text(SSH.format(cases=cases))
            (tmp_path / name).chmod(0o755)
        lab.head.exec("printf '#!/bin/sh\\nexit 100\\n' > /usr/local/bin/apt-get; chmod +x /usr/local/bin/apt-get")
        shell = {"timeout": 60, "stdout": subprocess.DEVNULL, "env": os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}}
        address = lab.addresses
        arguments = ("--controller", f"head={address['head']}", "--node", f"c1={address['c1']},CPUs=2,RealMemory=1000",
                     "--node", f"c2={address['c2']}", "--out", tmp_path / "cluster")
        done = run(*arguments)
        assert done.returncode == 0
        commands = done.stdout[done.stdout.index("# head"):done.stdout.index("Then, on any")]
        assert subprocess.run(["bash", "-euc", commands], **shell).returncode
        assert not lab.head.exec("ls /root"), "a failure leaves nothing that the next attempt would take for its own"
        for machine in lab.machines:
            machine.exec("mkdir /root/slurm-cluster; touch /root/slurm-cluster/slurm.conf")  # of an attempt that was cut off
            machine.exec(f"echo {shlex.quote(APT_GET)} > /usr/local/bin/apt-get; chmod +x /usr/local/bin/apt-get")
        assert oct((tmp_path / "cluster" / "munge.key").stat().st_mode)[-3:] == "600"
        subprocess.run(["bash", "-euc", commands], check=True, **shell)
        assert lab.head.daemons_running().keys() == {"munged", "slurmctld"}
        for node in lab.nodes:
            assert lab.node(node).daemons_running().keys() == {"munged", "slurmd"}
            assert lab.node(node).exec("stat -c '%U %a' /etc/munge/munge.key; ls /root").split() == ["munge", "400"]
        lab.head.exec("until [ \"$(sinfo -ho '%D %t')\" = '2 idle' ]; do sleep 0.2; done")
        assert sorted(lab.node("c1").exec("srun --nodes=2 hostname").split()) == ["c1", "c2"]
        assert run(*arguments).stdout == done.stdout
        key = (tmp_path / "cluster" / "munge.key").read_bytes()     # a new one would lock out who has the old one
        assert all(Path(f"/proc/{m.pid}/root/etc/munge/munge.key").read_bytes() == key for m in lab.machines)
        for machine in lab.machines:
            machine.install("--remove")
            assert not machine.daemons_running()


def run(*args, **env):
    """On this machine, in ways that change nothing on it."""
    return subprocess.run(["bash", INSTALL, *args], capture_output=True, text=True, timeout=60, env=os.environ | env)


def test_print_config():
    done = run("--print-config", "--controller", "boss=10.1.1.1", "--set", "SlurmUser=root", "--set", "ReturnToService=",
               "--set", "KillWait=60", "--partition", "a Nodes=ALL Default=YES", "--partition", "b Nodes=n1",
               "--node", "n1=10.1.1.2,CPUs=8,RealMemory=16000,Gres=gpu:h200:4", "--node", "n2,CPUs=4,RealMemory=4000")
    lines = done.stdout.splitlines()
    for line in ("SlurmctldHost=boss(10.1.1.1)", "SlurmUser=root", "KillWait=60", "GresTypes=gpu", "DefMemPerCPU=1000",
                 "NodeName=n1 NodeAddr=10.1.1.2 CPUs=8 RealMemory=16000 Gres=gpu:h200:4 State=UNKNOWN",
                 "NodeName=n2 NodeAddr=n2 CPUs=4 RealMemory=4000 State=UNKNOWN",
                 "PartitionName=a Nodes=ALL Default=YES", "PartitionName=b Nodes=n1"):
        assert lines.count(line) == 1, line
    keys = [line.split("=")[0] for line in lines if not line.startswith(("NodeName", "PartitionName", "#"))]
    assert len(keys) == len(set(keys)) and "ReturnToService" not in keys


@pytest.mark.parametrize("args, remedy", [
    (["--controller", "a=1.2.3.4"], "--node NAME=ADDRESS"),
    (["--node", "a=1.2.3.4,CPUs=1,RealMemory=100"], "--controller NAME=ADDRESS"),
    (["--print-config", "--node", "a=1.2.3.4,CPUs=1,RealMemory=100"], "--controller NAME=ADDRESS"),
    (["--controller", "a", "--node", "b,CPUs=1"], "slurmd -C"),
    (["--controller", "a", "--node", "b,CPUs=1,RealMemory=60G"], "slurmd -C"),
    (["--controller", "a", "--node", "b,CPUs=0,RealMemory=6000"], "slurmd -C"),
    (["--set", "KillWait"], "KEY=VALUE"),
    (["--cgroup", "v3"], "v1, v2 or none"),
    (["--out"], "needs a value"),
    (["--nodes", "3"], "--help"),
    (["--print-config"], "apt-get install slurmd"),
])
def test_a_mistake_is_one_line(args, remedy):
    done = run(*args, PATH="/usr/bin:/bin")     # without /usr/sbin/slurmd
    assert done.returncode == 1 and remedy in done.stderr and len(done.stderr.splitlines()) == 1

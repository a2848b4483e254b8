"""slurm/install-slurm.sh on copies of this machine, by systemd-nspawn. What a copy writes to its disk is gone when it
ends; everything else is real, systemd included. The machine's own Slurm and /etc stay untouched."""

import os
import shlex
import shutil
import subprocess
import time

import pytest
from slurm_lab import INSTALL, Machine, Network, running, why_not

COPY = """set -e
for folder in /run /tmp; do mount -t tmpfs tmpfs $folder; done  # nspawn's own files
mkdir /run/root
mount --bind / /run/root
exec systemd-nspawn --quiet --register=no --keep-unit --link-journal=no --directory=/run/root --volatile=overlay \
    --private-network "$@"
"""
PREPARE = """mkdir -p /run/lock
rm -rf /etc/slurm/*.conf /var/l*/slurm/*/* /var/log/slurm/*
echo 127.0.0.1 localhost >/etc/hosts  # nobody resolves the machine's own name
sed -i 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf
"""


class Copy(Machine):
    def command(self):
        boot = ["--boot", "systemd.unit=basic.target", f"systemd.hostname={self.name}"]
        plain = [f"--hostname={self.name}", "--as-pid2", "sleep", "infinity"]
        return ["unshare", "--mount-proc", "--pid", "--fork", "--kill-child=KILL",
                "bash", "-c", COPY, "copy", *(boot if self.lab.kind == "systemd" else plain)]

    def install(self, check=True):
        shutil.copy(INSTALL, f"/proc/{self.pid}/root/run/")
        return self.exec(f"bash /run/{INSTALL.name}", 120, check)

    def running_daemons(self):
        return set(self.exec("ps -eo comm=").split()) & {"slurmctld", "slurmd", "munged"}


class Copies(Network):
    machine = Copy

    def __init__(self, kind, nodes, root):
        super().__init__(root, nodes)
        self.kind = kind

    def up(self):
        super().up()
        up = "systemctl is-system-running" if self.kind == "systemd" else "pgrep -x sleep && echo running"
        for machine in self.machines:
            end = time.monotonic() + 60
            while machine.exec(up, check=False).split()[-1:] not in (["running"], ["degraded"]):
                assert time.monotonic() < end, (machine.own / "console.log").read_text()
                time.sleep(0.1)
            machine.exec(PREPARE)


def copies(kind="plain", nodes=0):
    if reason := why_not():
        pytest.skip(reason)
    if not shutil.which("systemd-nspawn"):
        pytest.skip("needs systemd-nspawn: apt-get install -y systemd-container dbus")
    return running(lambda root, nodes: Copies(kind, nodes, root), nodes)


@pytest.mark.parametrize("kind", ["plain", "systemd"])
def test_one_machine(kind):
    """Refuses another's configuration; runs a job, counts GPUs; runs again with an edited slurm.conf, beside a job."""
    with copies(kind) as lab:
        machine = lab.head
        for name in "slurm.conf", "gres.conf", "cgroup.conf":
            machine.exec(f"echo '# mine' > /etc/slurm/{name}")
            refusal = machine.install(check=False)
            assert refusal.startswith("error: ") and f"/etc/slurm/{name}" in refusal and refusal.count("\n") == 1
            assert machine.exec("cat /etc/slurm/*.conf; rm /etc/slurm/*.conf").endswith("# mine\n")
        assert not machine.running_daemons()

        for gpu in (0, 1):
            machine.exec(f"mknod -m 666 /dev/nvidia{gpu} c 1 {5 + 2 * gpu}")     # really /dev/zero and /dev/full
        assert "srun hostname: head" in machine.install()
        assert machine.running_daemons() == {"munged", "slurmctld", "slurmd"}
        hardware = dict(word.split("=") for word in machine.exec("slurmd -C | head -1").split())
        cpus, memory, gpus = machine.exec("sinfo -ho '%c %m %G'").split()
        assert cpus == hardware["CPUs"] and 0.9 < int(memory) / int(hardware["RealMemory"]) < 1
        assert gpus.startswith("gpu:2") and machine.exec("srun --gpus=1 printenv CUDA_VISIBLE_DEVICES").strip() == "0"

        waits = shlex.quote("until [ -e /run/go ]; do sleep 0.1; done; echo went")
        machine.exec(f"sbatch --output=/run/job.out --wrap={waits}; until squeue -ho %t | grep R; do sleep 0.1; done")
        machine.exec("echo MaxJobCount=77 >> /etc/slurm/slurm.conf")
        assert "srun hostname: head" in machine.install()
        assert "= 77" in machine.exec("scontrol show config | grep MaxJobCount")
        machine.exec("touch /run/go; while squeue -ho %i | grep .; do sleep 0.1; done")
        assert machine.exec("cat /run/job.out") == "went\n"


SSH = """#!/usr/bin/env bash
# Takes the place of ssh and scp, as no copy has a server: enters the machine that has the address.
set -euo pipefail
enter() {{ case $1 in {cases} *) exit 255 ;; esac; }}
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


def test_several_machines_by_the_printed_commands(tmp_path):
    with copies(nodes=2) as lab:
        cases = " ".join(f"root@{machine.address}) echo {machine.pid} ;;" for machine in lab.machines)
        for name in ("ssh", "scp"):
            (tmp_path / name).write_text(SSH.format(cases=cases))
            (tmp_path / name).chmod(0o755)
        for machine in lab.machines:
            machine.exec(f"echo {shlex.quote(APT_GET)} > /usr/local/bin/apt-get; chmod +x /usr/local/bin/apt-get")
            machine.exec("rm /etc/munge/munge.key")     # which all copies have from this machine
        address = lab.addresses
        arguments = ["--controller", f"head={address['head']}", "--node", f"c1={address['c1']},CPUs=2,RealMemory=1000",
                     "--node", f"c2={address['c2']}", "--out", tmp_path / "my cluster"]
        env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        commands = subprocess.check_output(["bash", INSTALL, *arguments], text=True, timeout=60)
        done = subprocess.run(["bash", "-euc", commands], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert lab.head.running_daemons() == {"munged", "slurmctld"}
        assert all(lab.node(name).running_daemons() == {"munged", "slurmd"} for name in lab.nodes)
        assert sorted(lab.node("c1").exec("srun --nodes=2 hostname").split()) == ["c1", "c2"]
        assert (tmp_path / "my cluster/munge.key").stat().st_mode & 0o777 == 0o600

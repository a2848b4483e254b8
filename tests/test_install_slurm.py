"""slurm/install-slurm.sh for one machine, on a copy of this one, by systemd-nspawn.

What the copy writes to its disk is gone when it ends; everything else is real, systemd included.
"""

import shlex
import shutil

import pytest
from slurm_lab import INSTALL, Machine, Network, booted, reason_to_skip

pytestmark = pytest.mark.slurm

# PID 1 of the copy starts here. It has no configuration of Slurm, and nobody resolves its name.
COPY = """set -e
for folder in /run /tmp; do     # nspawn's own files
    mount -t tmpfs tmpfs $folder
done
mkdir /run/root
mount --bind / /run/root
exec systemd-nspawn --quiet --register=no --keep-unit --link-journal=no --directory=/run/root \
    --volatile=overlay --private-network --boot systemd.unit=basic.target systemd.hostname=head
"""
PREPARE = """until [[ $(systemctl is-system-running) =~ running|degraded ]]; do sleep 0.1; done
mkdir -p /run/lock
rm -rf /etc/slurm/*.conf /var/l*/slurm/*/* /var/log/slurm/*
echo 127.0.0.1 localhost >/etc/hosts
sed -i 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf
mknod -m 666 /dev/nvidia0 c 1 5     # two GPUs
mknod -m 666 /dev/nvidia1 c 1 7
"""
RUN = "bash /run/install-slurm.sh"


class Copy(Machine):
    def command(self):
        return ["unshare", "--mount-proc", "--pid", "--fork", "--kill-child=KILL",
                "bash", "-c", COPY]


# The tests change this machine, in their order.
@pytest.fixture(scope="module")
def machine():
    """The copy, as the head of a network without nodes."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with booted(lambda root: Network(root, 0, Copy)) as network:
        head = network.machines["head"]
        head.exec(PREPARE, timeout=60)
        shutil.copy(INSTALL, f"/proc/{head.pid}/root/run/")
        yield head


@pytest.mark.parametrize("name", ["slurm.conf", "gres.conf", "cgroup.conf"])
def test_configuration_of_somebody_else_is_refused(machine, name):
    machine.exec(f"echo '# mine' > /etc/slurm/{name}")
    said = machine.exec(RUN, check=False)
    text = machine.exec("cat /etc/slurm/*.conf; rm /etc/slurm/*.conf")
    assert said.startswith(f"error: /etc/slurm/{name}"), f"no error line for a {name}:\n{said}"
    assert text.endswith("# mine\n"), f"{name} of somebody else was changed to:\n{text}"


def test_the_machine_becomes_a_cluster_with_its_hardware(machine):
    said = machine.exec(RUN, timeout=120)
    assert "srun hostname: head" in said, f"no job has run:\n{said}"
    hardware = dict(word.split("=") for word in machine.exec("slurmd -C | head -1").split())
    cpus, memory, gpus = machine.exec("sinfo -ho '%c %m %G' --partition=main").split()
    assert cpus == hardware["CPUs"], f"Slurm has {cpus} CPUs, the machine {hardware['CPUs']}"
    share = int(memory) / int(hardware["RealMemory"])
    assert 0.9 < share < 1, f"Slurm has {share:.2f} of the memory, not a little less than all"
    assert gpus.startswith("gpu:2"), f"Slurm has the GPUs {gpus}, the machine 2"
    visible = machine.exec("srun --gpus=1 printenv CUDA_VISIBLE_DEVICES").splitlines()[-1]
    assert visible == "0", f"a job that requests a GPU sees {visible!r}"


def test_another_installation_reads_what_was_edited_in_slurm_conf(machine):
    """Here: shorter waits, for the next test."""
    settings = "KillWait=2\nAuthInfo=cred_expire=5\nSchedulerParameters=sched_interval=1\n"
    machine.exec(f"printf '{settings}' >>/etc/slurm/slurm.conf")
    again = machine.exec(RUN, timeout=120)
    setting = machine.exec("scontrol show config | grep KillWait")
    assert "= 2 sec" in setting, f"KillWait=2 in slurm.conf has no effect: {setting}\n{again}"


def test_urgent_job_preempts_and_the_other_is_requeued(machine):
    """The first life of the job waits for ever."""
    life = "echo life ${SLURM_RESTART_COUNT:-0}; [ $SLURM_RESTART_COUNT ] || sleep 600"
    machine.exec(f"sbatch --exclusive --output=/run/preempted.out --wrap={shlex.quote(life)}; "
                 "until grep life /run/preempted.out; do sleep 0.1; done")
    said = machine.exec("srun --partition=urgent --exclusive echo urgent has run", timeout=60,
                        check=False)
    assert "urgent has run" in said, f"a job of urgent does not preempt one of main:\n{said}"
    text = machine.exec("while squeue -ho %i | grep .; do sleep 0.1; done >/dev/null; "
                        "cat /run/preempted.out", timeout=60)
    assert "life 1" in text, f"a job of main was not requeued after one of urgent:\n{text}"

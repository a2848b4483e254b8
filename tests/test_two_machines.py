"""The commands of cpu_ddp's page for several machines, on two whose hosts files are Debian's.

There, a machine's own name is 127.0.1.1, which other machines cannot reach.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripts import ROOT, script_path
from slurm_lab import Network, booted, reason_to_skip

HOSTS = """
printf '%s\\n' '127.0.0.1 localhost' '127.0.1.1 {own}' >/run/hosts
mount --bind /run/hosts /etc/hosts
"""
# By section: what the first machine has in its command, and the others have in place of it.
OTHERS = {
    "Two machines by hand": ("--node-rank=0", "--node-rank=1"),
    "Machines that come and go": ("--rdzv-conf=is_host=1 --local-addr=HOST",
                                  "--rdzv-conf=is_host=0"),
}


class Machines(Network):
    def up(self):
        (self.root / "hosts").write_text("127.0.0.1 localhost\n")
        super().up()


@pytest.mark.parametrize("section", OTHERS)
def test_two_machines_train_together(section, tmp_path):
    if reason := reason_to_skip():
        pytest.skip(reason)
    page = (ROOT / "cpu_ddp/README.md").read_text().split(f"### {section}")[1]
    command = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1]
    command = command.replace("--nnodes=1:4", "--nnodes=1:2")  # does not wait for more
    first_has, others_have = OTHERS[section]
    for old, new in [("--nproc-per-node=4", "--nproc-per-node=1"),
                     ("cifar10_ddp/train.py", f"{script_path('cpu_ddp')} --epochs 2"),
                     ("/shared/run.pt", str(tmp_path / "run.pt")),
                     (first_has, first_has)]:
        assert command.count(old) == 1, f"the page's command has no {old}:\n{command}"
        command = command.replace(old, new)
    with booted(lambda root: Machines(root, 2)) as network:
        first, second = network.machines["c1"], network.machines["c2"]
        for machine in (first, second):
            machine.exec(HOSTS.format(own=machine.name))
        other_command = command.replace(first_has, others_have).replace("HOST", first.address)
        env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
        with ThreadPoolExecutor() as pool:
            other = pool.submit(second.exec, other_command, timeout=200, check=False, env=env)
            text = first.exec(command.replace("HOST", first.address), timeout=200, check=False,
                              env=env)
            text += f"the other machine: {other.result()}"
    assert "world size 2" in text, f"the machines do not train together:\n{text}"
    assert (tmp_path / "run.pt").exists(), f"the training does not end:\n{text}"

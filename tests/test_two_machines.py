"""The command of cpu_ddp's page for two machines by hand, on two whose hosts files are Debian's.

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
printf '%s\\n' '127.0.0.1 localhost' '127.0.1.1 {own}' '{other}' >/run/hosts
mount --bind /run/hosts /etc/hosts
"""


class Machines(Network):
    def up(self):
        (self.root / "hosts").write_text("127.0.0.1 localhost\n")
        super().up()


def test_two_machines_train_together(tmp_path):
    if reason := reason_to_skip():
        pytest.skip(reason)
    section = (ROOT / "cpu_ddp/README.md").read_text().split("### Two machines by hand")[1]
    command = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    for old, new in [("--nproc-per-node=4", "--nproc-per-node=1"),
                     ("cifar10_ddp/train.py", f"{script_path('cpu_ddp')} --epochs 2"),
                     ("/shared/run.pt", str(tmp_path / "run.pt"))]:
        assert command.count(old) == 1, f"the page's command has no {old}:\n{command}"
        command = command.replace(old, new)
    with booted(lambda root: Machines(root, 2)) as network:
        first, second = network.machines["c1"], network.machines["c2"]
        first.exec(HOSTS.format(own=first.name, other=f"{second.address} {second.name}"))
        second.exec(HOSTS.format(own=second.name, other=f"{first.address} {first.name}"))
        command = command.replace("HOST", first.address)
        env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
        with ThreadPoolExecutor() as pool:
            other = pool.submit(second.exec, command.replace("--node-rank=0", "--node-rank=1"),
                                timeout=200, check=False, env=env)
            text = first.exec(command, timeout=200, check=False, env=env)
            text += f"the other machine: {other.result()}"
    assert "world size 2" in text, f"the machines do not train together:\n{text}"
    assert (tmp_path / "run.pt").exists(), f"the training does not end:\n{text}"

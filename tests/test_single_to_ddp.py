"""The two loops of the diff on cpu_ddp's page: on any number of processes, the same weights."""

import re
import subprocess
from typing import NamedTuple

import pytest
import torch
from launchers import GPUS, run
from scripts import ROOT

PAGE = (ROOT / "cpu_ddp" / "README.md").read_text()


def side(sign):
    """Return one side of the page's diff, by its sed command: + for several processes, or -."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (script,) = re.findall(r"^sed -n '(.*?)' change.txt >loop.py$", PAGE, re.MULTILINE)
    command = ["sed", "-n", script.replace("+", sign)]
    return subprocess.check_output(command, input=diff, text=True)


class Trained(NamedTuple):
    weights: dict
    devices: set  # of the weights that were saved
    losses: list  # the lines that were printed

    def difference(self, other):
        return max((self.weights[name] - other.weights[name]).abs().max().item()
                   for name in other.weights)


def train(code, folder, **how):
    """Run the code as loop.py in a new folder."""
    def on_cpu(storage, device):
        devices.add(device)
        return storage

    folder.mkdir()
    (folder / "loop.py").write_text(code)
    status, text = run(folder / "loop.py", cwd=folder, **how)
    assert status == 0, f"loop.py fails when started by {how}:\n{text}"
    devices = set()
    weights = torch.load(folder / "model.pt", map_location=on_cpu)
    return Trained(weights, devices, re.findall(r"^epoch .*", text, re.MULTILINE))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train(side("-"), tmp_path_factory.mktemp("page") / "single")


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_several_processes_train_as_one(tmp_path, single, nproc):
    several = train(side("+"), tmp_path / "ddp", launcher="torchrun", nproc=nproc)
    difference = several.difference(single)
    assert difference < 1e-6, f"on {nproc} processes, weights differ by {difference}"
    assert several.losses == single.losses, f"on {nproc} processes, other losses are printed"


@pytest.mark.skipif(not GPUS, reason="requires a GPU")
def test_gpus_train_as_one_process(tmp_path, single):
    several = train(side("+"), tmp_path / "ddp", launcher="torchrun", nproc=len(GPUS),
                    env={"CUDA_VISIBLE_DEVICES": ",".join(GPUS)})
    assert several.devices == {"cuda:0"}, f"rank 0 trains on {several.devices}"
    difference = several.difference(single)
    assert difference < 1e-4, f"on {len(GPUS)} GPUs, weights differ by {difference}"

"""The diffs on cpu_ddp's page: on any number of processes, the loop has the weights of one."""

import contextlib
import os
import re
import subprocess
from typing import NamedTuple

import pytest
import torch
import torch._dynamo  # as the first optimizer does: once, before processes are forked
import torch.multiprocessing as mp
from launchers import GPUS, clean_environment, free_port, run
from scripts import ROOT, code_blocks

PATH = ROOT / "cpu_ddp/README.md"
PAGE = PATH.read_text()
LISTING, LOADER = code_blocks(PATH, "diff")
(PRINTED,) = re.findall(r"^```\n((?:epoch \d  loss .*\n)+)```$", PAGE, re.MULTILINE)


def side(diff, sign):
    """Return one side of a diff by the page's sed command: + for several processes, or -."""
    (script,) = re.findall(r"^sed -n '(.*?)' change.txt >loop.py$", PAGE, re.MULTILINE)
    command = ["sed", "-n", script.replace("+", sign)]
    return subprocess.check_output(command, input=diff, text=True)


def with_loader(sign):
    """Return one side of the loop, with the page's DataLoader in place of indices."""
    code = side(LISTING, sign)
    begin, rest = code.split("for epoch in range(5):\n")
    end = rest[re.search(r"^(if rank|torch\.save)", rest, re.MULTILINE).start():]
    imports = "from torch.utils.data import DataLoader, DistributedSampler, TensorDataset\n"
    model = "ddp_model" if sign == "+" else "model"
    step = f"""\
        optimizer.zero_grad()
        F.mse_loss({model}(inputs), targets).backward()
        optimizer.step()
"""
    return imports + begin + "data = TensorDataset(x, y)\n" + side(LOADER, sign) + step + end


class Trained(NamedTuple):
    weights: dict
    losses: list  # the lines that were printed

    def difference(self, other):
        return max((self.weights[name] - other.weights[name]).abs().max().item()
                   for name in other.weights)


def train(code, folder, nproc=1):
    """Run the code in a new folder, in forked processes with torchrun's variables."""
    port = str(free_port())

    def loop(rank):
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(clean_environment(), RANK=str(rank), WORLD_SIZE=str(nproc),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        torch.set_num_threads(1)  # OpenMP's threads are not forked
        with open("log", "a") as log, contextlib.redirect_stdout(log):
            exec(code, {})

    folder.mkdir()
    mp.start_processes(loop, nprocs=nproc, start_method="fork")
    return Trained(torch.load(folder / "model.pt"), (folder / "log").read_text().splitlines())


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train(side(LISTING, "-"), tmp_path_factory.mktemp("page") / "single")


def test_the_page_shows_what_the_loop_prints(single):
    assert single.losses == PRINTED.splitlines(), "the page's output is not that of the loop"


@pytest.mark.parametrize("nproc", [1, 3])
def test_several_processes_train_as_one(tmp_path, single, nproc):
    several = train(side(LISTING, "+"), tmp_path / "ddp", nproc)
    difference = several.difference(single)
    assert difference < 1e-6, f"on {nproc} processes, weights differ by {difference}"
    assert several.losses == single.losses, f"on {nproc} processes, other losses are printed"


def test_with_a_dataloader_two_processes_train_as_one(tmp_path):
    one, two = (train(with_loader("+"), tmp_path / str(nproc), nproc) for nproc in (1, 2))
    difference = two.difference(one)
    assert difference < 1e-6, f"on two processes, weights differ by {difference}"
    train(with_loader("-"), tmp_path / "before")


def test_without_ddp_each_process_trains_a_model_of_its_own(tmp_path):
    """The page's example of a line to delete. Nothing but the numbers shows that it is missing."""
    first, last = re.search(r"Delete a line.*?falls from\s+(\S+)\s+to\s+(\S+), but", PAGE,
                            re.DOTALL).groups()
    code = re.sub(r"^ddp_model = .*\n", "", side(LISTING, "+"), flags=re.MULTILINE)
    trained = train(code.replace("ddp_model(", "model("), tmp_path / "ddp", 2)
    losses = [line.split()[-1] for line in (trained.losses[0], trained.losses[-1])]
    assert losses == [first, last], f"without DDP, losses are {losses}, not the page's"


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="requires a GPU")
def test_gpus_train_as_one_process(tmp_path, single):
    """By torchrun."""
    def on_cpu(storage, device):
        devices.add(device)
        return storage

    (tmp_path / "loop.py").write_text(side(LISTING, "+"))
    status, text = run(tmp_path / "loop.py", cwd=tmp_path, launcher="torchrun", nproc=len(GPUS),
                       env={"CUDA_VISIBLE_DEVICES": ",".join(GPUS)})
    assert status == 0, f"loop.py fails on {len(GPUS)} GPUs:\n{text}"
    devices = set()
    difference = Trained(torch.load(tmp_path / "model.pt", on_cpu), []).difference(single)
    assert devices == {"cuda:0"}, f"rank 0 trains on {devices}"
    assert difference < 1e-4, f"on {len(GPUS)} GPUs, weights differ by {difference}"

"""The diffs on cpu_ddp's page: on any number of processes, the loop has the weights of one."""

import functools
import re
import subprocess
from pathlib import Path

import pytest
import torch
from harness import run_to_end
from launchers import GPUS, run
from scripts import ROOT, code_blocks

PATH = ROOT / "cpu_ddp/README.md"
PAGE = PATH.read_text()
LISTING, LOADER = code_blocks(PATH, "diff")
(PRINTED,) = re.findall(r"^```\n((?:epoch \d  loss .*\n)+)```$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
        print("step of epoch", epoch, inputs.sum().item())
"""
    return imports + begin + "data = TensorDataset(x, y)\n" + side(LOADER, sign) + step + end


def train(code, nproc=1):
    """Run the code in forked processes. Return its weights, and what all of them print."""
    Path("loop.py").write_text(f"def main():\n    exec({code!r}, {{}})\n")
    ranks = run_to_end("loop.py", nproc=nproc, problem="own")
    return torch.load("model.pt"), "".join(rank.text for rank in ranks)


@functools.cache
def single():
    return train(side(LISTING, "-"))


def difference(weights, others):
    return max((weights[name] - others[name]).abs().max().item() for name in others)


def losses(text):
    return "".join(re.findall(r"^epoch .*\n", text, re.MULTILINE))


def test_the_page_shows_what_the_loop_prints():
    assert losses(single()[1]) == PRINTED, "the page's output is not that of the loop"


@pytest.mark.parametrize("nproc", [2, 3])
def test_several_processes_train_as_one(nproc):
    weights, text = train(side(LISTING, "+"), nproc)
    error = difference(weights, single()[0])
    assert error < 1e-6, f"on {nproc} processes, weights differ by {error}"
    assert losses(text) == PRINTED, f"on {nproc} processes, other losses are printed"


def test_with_a_dataloader_two_and_four_processes_train_alike():
    train(with_loader("-"))  # the loop of one process has another order
    (two, _), (four, _) = (train(with_loader("+"), nproc) for nproc in (2, 4))
    error = difference(four, two)
    assert error < 1e-6, f"on two and on four processes, weights differ by {error}"


def test_with_a_dataloader_each_epoch_has_another_order():
    _, text = train(with_loader("+"), 2)
    steps = re.findall(r"^step of epoch (\d) (.*)", text, re.MULTILINE)
    orders = {str([total for epoch, total in steps if epoch == number]) for number in "01234"}
    assert len(orders) == 5, f"with the page's DataLoader, 5 epochs have {len(orders)} orders"


def test_without_ddp_each_process_trains_a_model_of_its_own():
    """The page's example of a line to delete. Nothing but the numbers shows that it is missing."""
    first, last = re.search(r"Delete a line.*?falls from\s+(\S+)\s+to\s+(\S+), but", PAGE,
                            re.DOTALL).groups()
    code = re.sub(r"^ddp_model = .*\n", "", side(LISTING, "+"), flags=re.MULTILINE)
    _, text = train(code.replace("ddp_model(", "model("), 2)
    found = [line.split()[-1] for line in losses(text).splitlines()]
    assert [found[0], found[-1]] == [first, last], f"without DDP, losses are {found}"


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="requires a GPU")
def test_gpus_train_as_one_process(tmp_path):
    """By torchrun."""
    def on_cpu(storage, device):
        devices.add(device)
        return storage

    Path("loop.py").write_text(side(LISTING, "+"))
    status, text = run(tmp_path / "loop.py", cwd=tmp_path, launcher="torchrun", nproc=len(GPUS),
                       env={"CUDA_VISIBLE_DEVICES": ",".join(GPUS)})
    assert status == 0, f"loop.py fails on {len(GPUS)} GPUs:\n{text}"
    devices = set()
    error = difference(torch.load("model.pt", on_cpu), single()[0])
    assert devices == {"cuda:0"}, f"rank 0 trains on {devices}"
    assert error < 1e-4, f"on {len(GPUS)} GPUs, weights differ by {error}"

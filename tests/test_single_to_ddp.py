"""The two loops on cpu_ddp's page: on any number of processes, the weights of the single one."""

import re

import pytest
import torch
from launchers import GPUS, run
from scripts import ROOT

PAGE = (ROOT / "cpu_ddp" / "README.md").read_text()


def block(language):
    """Return the page's only block in this language."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return text


def side(sign):
    """Return one side of the diff: its lines that begin with the sign, and the common ones."""
    return "".join(line[1:] for line in block("diff").splitlines(keepends=True)
                   if line[0] in f" {sign}")


def weights_and_losses(code, folder, **how):
    """Run the code as loop.py in a new folder."""
    folder.mkdir()
    (folder / "loop.py").write_text(code)
    status, text = run(folder / "loop.py", cwd=folder, **how)
    assert status == 0, f"loop.py fails when started by {how}:\n{text}"
    return torch.load(folder / "model.pt"), re.findall(r"^epoch .*", text, re.MULTILINE)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return weights_and_losses(block("python"), tmp_path_factory.mktemp("page") / "single")


def difference(weights, others):
    return max((weights[name].cpu() - others[name]).abs().max().item() for name in others)


def test_the_diff_begins_at_the_single_process():
    assert side("-") == block("python"), "the diff changes another loop than the page shows"


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_several_processes_train_as_one(tmp_path, single, nproc):
    weights, losses = weights_and_losses(side("+"), tmp_path / "ddp", launcher="torchrun",
                                         nproc=nproc)
    different = difference(weights, single[0])
    assert different < 1e-6, f"on {nproc} processes, weights differ by {different}"
    assert losses == single[1], f"on {nproc} processes, other losses are printed"


@pytest.mark.skipif(not GPUS, reason="requires a GPU")
def test_gpus_train_as_one_process(tmp_path, single):
    weights, _ = weights_and_losses(side("+"), tmp_path / "ddp", launcher="torchrun",
                                    nproc=len(GPUS), env={"CUDA_VISIBLE_DEVICES": ",".join(GPUS)})
    assert weights["weight"].is_cuda, "with GPUs, the loop trains on the CPU"
    different = difference(weights, single[0])
    assert different < 1e-4, f"on {len(GPUS)} GPUs, weights differ by {different}"

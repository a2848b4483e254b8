"""On GPUs: every script on one and on all of this machine, bfloat16, stop and resume, the error lines.

Skipped without a GPU. Not run yet: read against the scripts and PyTorch's documentation.
"""

import re
import signal

import pytest
from helpers import GPUS, difference, load_checkpoint, run, start

if not GPUS:
    pytest.skip("requires a GPU", allow_module_level=True)

ONE, ALL = ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} for gpus in (GPUS[:1], GPUS))
LEARN = {  # flags that are enough to learn; batch size of all processes; least test accuracy
    "mnist_dp": (("--fake-data", "--lr", "2e-3"), 16, 0.7),
    "cifar10_ddp": (("--fake-data", "--lr", "0.6", "--epochs", "4"), 16, 0.5),
    "fashionmnist_ddp": (("--fake-data",), 16, 0.5),
    "synthetic_ddp": (("--lr", "0.05"), 32, 0.85),
}


def learn(script, *more, launcher="python", nproc=1, env=ALL):
    """Train for an epoch or two, and return the line that names the devices."""
    flags, batch_size, least = LEARN[script]
    how = {"launcher": launcher, "nproc": nproc, "env": env}
    result = run(script, "--epochs", 1, "--batch-size", max(1, batch_size // nproc), *flags, *more, timeout=400, **how)
    assert result.status == 0 and "Traceback" not in result.text, result.text
    assert float(re.findall(r"test accuracy ([\d.]+)", result.text)[-1]) > least, result.text
    return re.search(r"^.*\| torch .*", result.text, re.MULTILINE)[0]


@pytest.mark.parametrize("flags", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("script", LEARN)
def test_one_gpu(script, flags):
    assert ("GPUs [0]" if script == "mnist_dp" else "world size 1 on cuda") in learn(script, *flags, env=ONE)


@pytest.mark.parametrize("script, launcher", [("cifar10_ddp", "torchrun"), ("fashionmnist_ddp", "torchrun"),
                                              ("fashionmnist_ddp", "python"), ("synthetic_ddp", "torchrun")])
def test_a_process_for_each_gpu(script, launcher):
    """python starts them by mp.spawn."""
    assert f"world size {len(GPUS)} on cuda" in learn(script, launcher=launcher, nproc=len(GPUS))


def test_data_parallel_on_all_gpus_and_on_the_last():
    last = len(GPUS) - 1
    assert f"GPUs {list(range(len(GPUS)))}" in learn("mnist_dp", "--bf16")
    assert f"GPUs [{last}]" in learn("mnist_dp", "--device-ids", last)


def test_stop_and_resume(tmp_path):
    """The weights are close to those of an uninterrupted run, if not equal."""
    flags = ("--lr", 0.005, "--batch-size", 2048 // 16 // len(GPUS), "--epochs", 4, "--log-every", 0, "--checkpoint")
    how = {"launcher": "torchrun", "nproc": len(GPUS), "env": ALL}
    assert run("synthetic_ddp", *flags, tmp_path / "whole", **how).status == 0
    with start("synthetic_ddp", *flags, tmp_path / "parts", **how) as job:
        job.wait_for("step 7/", timeout=200)
        job.send(signal.SIGTERM)
        assert job.finish().status != 0
    assert 7 <= load_checkpoint(tmp_path / "parts")["step"] < load_checkpoint(tmp_path / "whole")["step"]
    assert run("synthetic_ddp", *flags, tmp_path / "parts", **how).status == 0
    assert difference(tmp_path / "parts", tmp_path / "whole") < 1e-3


@pytest.mark.parametrize("script, launcher", [("synthetic_ddp", "torchrun"), ("fashionmnist_ddp", "spawn")])
def test_more_processes_than_gpus(script, launcher):
    result = run(script, *LEARN[script][0], launcher=launcher, nproc=len(GPUS) + 1, env=ALL)
    lines = range(1, 2 if launcher == "spawn" else len(GPUS) + 2)  # torchrun: at most one of each process
    assert result.status != 0 and len(result.errors) in lines and "GPUs" in result.errors[0], result.text


def test_measure():
    result = run("synthetic_ddp", "--model", "resnet18", launcher="torchrun", nproc=len(GPUS), env=ALL)
    assert result.status == 0 and f"world size {len(GPUS)} on cuda" in result.text, result.text
    assert re.search(r"[1-9][\d,.]* images/s", result.text)

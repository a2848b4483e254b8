"""On GPUs: every script on one and on all of this machine, bfloat16, stop and resume, the error lines.

Skipped without a GPU. Run on an emulated CUDA driver with 1, 2 and 4 GPUs (2026-11-24, torch 2.14.1), not on real GPUs.
"""

import re
import signal

import pytest
import torch
from helpers import GPUS, load_checkpoint, run, script_path, start

if not GPUS:
    pytest.skip("requires a GPU (run on an emulated driver so far, not on real GPUs)", allow_module_level=True)

ONE, ALL = ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} for gpus in (GPUS[:1], GPUS))
WARNING = r"\b(User)?Warning: "  # of strides, of devices, of a process group that was not destroyed
LEARN = {  # flags that are enough to learn; batch size of all processes; least test accuracy
    "mnist_dp": (("--fake-data", "--lr", "2e-3"), 16, 0.7),
    "cifar10_ddp": (("--fake-data", "--lr", "0.6", "--epochs", "4"), 16, 0.5),
    "fashionmnist_ddp": (("--fake-data",), 16, 0.5),
    "synthetic_ddp": (("--lr", "0.05"), 32, 0.85),
}


def finish(*command, **how):
    """Run a script that ends with status 0 and warns of nothing, and return what it prints."""
    result = run(*command, timeout=400, **how)
    assert result.status == 0 and not re.search(f"Traceback|{WARNING}", result.text), result.text
    return result.text


def learn(script, *more, launcher="python", nproc=1, env=ALL):
    """Train for an epoch or two, and return the line that names the devices."""
    flags, batch_size, least = LEARN[script]
    text = finish(script, "--epochs", 1, "--batch-size", max(1, batch_size // nproc), *flags, *more,
                  launcher=launcher, nproc=nproc, env=env)
    assert float(re.findall(r"test accuracy ([\d.]+)", text)[-1]) > least, text
    return re.search(r"^.*\| torch .*", text, re.MULTILINE)[0]


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


STEP = "            step += 1\n"
WAIT = """            while step == 7 and not signals:  # until this process, too, has received the signal
                time.sleep(0.01)
"""
SAME = """            weights = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
            assert abs(all_reduce_sum(weights, device=device)[0] / world_size / weights - 1) < 1e-6
"""


def distance(one, other):
    """The norm of the difference between the weights of two checkpoints, relative to the norm of the weights."""
    one, other = (torch.cat([tensor.double().flatten() for tensor in load_checkpoint(path)["model"].values()
                             if tensor.is_floating_point()]) for path in (one, other))
    return ((one - other).norm() / one.norm()).item()


@pytest.mark.parametrize("script, launcher", [("mnist_dp", "python"), ("cifar10_ddp", "torchrun"),
                                              ("fashionmnist_ddp", "python"), ("synthetic_ddp", "torchrun")])
def test_stop_and_resume(script, launcher, tmp_path):
    """Weights are equal on all GPUs after each step, and in the end close to those of an uninterrupted run.

    synthetic_ddp has neither dropout nor BatchNorm: also to those of one GPU, and it is resumed on fewer GPUs.
    """
    count, text, any_number = len(GPUS), script_path(script).read_text(), script == "synthetic_ddp"
    flags = ("--samples" if any_number else "--fake-data", 45 * count, "--epochs", 2, "--log-every", 0, "--batch-size")
    batch = 5 * count if script == "mnist_dp" else 5
    assert text.count(STEP) == 1
    (copy := tmp_path / "train.py").write_text(text.replace(STEP, STEP + WAIT + SAME * (script != "mnist_dp")))

    def how(gpus):  # full float32, which depends less on the kernel that is chosen
        env = {"CUDA_VISIBLE_DEVICES": ",".join(GPUS[:gpus]), "NVIDIA_TF32_OVERRIDE": 0}
        return {"launcher": launcher, "nproc": gpus, "env": env}

    finish(script, *flags, batch, "--checkpoint", tmp_path / "whole", **how(count))
    with start(copy, *flags, batch, "--checkpoint", tmp_path / "parts", **how(count)) as job:
        job.wait_for("step 6/", timeout=200)
        job.send(signal.SIGTERM)
        result = job.finish()
    assert result.status != 0 and not re.search(WARNING, result.text), result.text
    assert load_checkpoint(tmp_path / "parts")["step"] == 7
    finish(copy, *flags, batch, "--checkpoint", tmp_path / "parts", **how(max(1, count - any_number)))
    assert distance(tmp_path / "parts", tmp_path / "whole") < 1e-3
    if any_number:
        finish(script, *flags, 5 * count, "--checkpoint", tmp_path / "one", **how(1))
        assert distance(tmp_path / "whole", tmp_path / "one") < 1e-3


@pytest.mark.parametrize("script, launcher", [("synthetic_ddp", "torchrun"), ("fashionmnist_ddp", "spawn")])
def test_more_processes_than_gpus(script, launcher):
    result = run(script, *LEARN[script][0], launcher=launcher, nproc=len(GPUS) + 1, env=ALL)
    lines = range(1, 2 if launcher == "spawn" else len(GPUS) + 2)  # torchrun: at most one of each process
    assert result.status != 0 and len(result.errors) in lines and "GPUs" in result.errors[0], result.text


def test_measure():
    text = finish("synthetic_ddp", "--model", "resnet18", "--image-size", 64, "--batch-size", 4, "--steps", 5,
                  launcher="torchrun", nproc=len(GPUS), env=ALL)
    assert f"world size {len(GPUS)} on cuda" in text and re.search(r"[1-9][\d,.]* images/s", text), text

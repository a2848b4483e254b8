"""On GPUs: every script on one and on all of this machine, bfloat16, stop and resume, the error lines.

Skipped without a GPU. Run on an emulated CUDA driver with 1, 2 and 4 GPUs (2026-11-24, torch 2.14.1), not on real GPUs.
"""

import re
import signal

import pytest
from helpers import GPUS, difference, load_checkpoint, run, script_path, start

if not GPUS:
    pytest.skip("requires a GPU (run on an emulated driver so far, not on real GPUs)", allow_module_level=True)

ONE, ALL = ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} for gpus in (GPUS[:1], GPUS))
WARNING = r"\b(UserW|W|w)(arning|ARNING): "  # of a barrier without a device, of strides; not FutureWarning
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
WAIT = """            while step == 3 and not signals:
                print("waiting", flush=True)
                time.sleep(0.1)
"""
COMPARE = """            for parameter in model.parameters():
                dist.broadcast(first := parameter.detach().clone(), 0)
                assert torch.allclose(first, parameter)
"""


# Low learning rates: with other kernels, the result differs by 3 % of what training changes, not by 30 %.
@pytest.mark.parametrize("script, launcher, lr", [
    ("mnist_dp", "python", 1e-4), ("cifar10_ddp", "torchrun", 0.01), ("fashionmnist_ddp", "python", 3e-4),
    ("synthetic_ddp", "torchrun", 0.05)])
def test_stop_and_resume(script, launcher, lr, tmp_path):
    """A copy waits in step 3 for the signal, and compares the weights of all GPUs after each step."""
    count, text, synthetic = len(GPUS), script_path(script).read_text(), script == "synthetic_ddp"
    (copy := tmp_path / "train.py").write_text(text.replace(STEP, STEP + WAIT + COMPARE * (script != "mnist_dp")))
    flags = ("--samples" if synthetic else "--fake-data", 20 * count, "--epochs", 2, "--lr", lr, "--log-every", 0)
    batch = ("--batch-size", 5 * count if script == "mnist_dp" else 5, "--checkpoint")

    def how(gpus):  # without TensorFloat-32
        env = {"CUDA_VISIBLE_DEVICES": ",".join(GPUS[:gpus]), "NVIDIA_TF32_OVERRIDE": 0}
        return {"launcher": launcher, "nproc": gpus, "env": env}

    finish(script, *flags, *batch, tmp_path / "whole", **how(count))
    with start(copy, *flags, *batch, tmp_path / "parts", **how(count)) as job:
        job.wait_for("waiting", timeout=200)
        job.send(signal.SIGTERM)
        result = job.finish()
    assert result.status != 0 and not re.search(WARNING, result.text), result.text
    assert (stopped := load_checkpoint(tmp_path / "parts"))["step"] == 3
    finish(copy, *flags, *batch, tmp_path / "parts", **how(max(1, count - synthetic)))  # on fewer GPUs, if the same
    whole, parts = (load_checkpoint(tmp_path / name)["model"] for name in ("whole", "parts"))
    for name, before in stopped["model"].items():
        assert (parts[name] - whole[name]).float().norm() <= 0.3 * (whole[name] - before).float().norm(), name
    if synthetic:
        finish(script, *flags, "--batch-size", 5 * count, "--checkpoint", tmp_path / "one", **how(1))
        assert difference(tmp_path / "whole", tmp_path / "one") < 1e-3


@pytest.mark.parametrize("script, launcher", [("synthetic_ddp", "torchrun"), ("fashionmnist_ddp", "spawn")])
def test_more_processes_than_gpus(script, launcher):
    result = run(script, *LEARN[script][0], launcher=launcher, nproc=len(GPUS) + 1, env=ALL)
    assert result.status != 0 and "GPUs" in result.errors[0], result.text
    assert len(result.errors) <= (1 if launcher == "spawn" else len(GPUS) + 1)  # torchrun: one of each process


def test_measure():
    text = finish("synthetic_ddp", "--model", "resnet18", "--image-size", 64, "--batch-size", 4, "--steps", 5,
                  launcher="torchrun", nproc=len(GPUS), env=ALL)
    assert f"world size {len(GPUS)} on cuda" in text and re.search(r"[1-9][\d,.]* images/s", text), text

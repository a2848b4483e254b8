"""On GPUs: each script on one and on all of this machine, bfloat16, kill and resume.

Skipped without a GPU. Run on one NVIDIA H200, and with 2 and 4 GPUs on an emulated CUDA driver.
"""

import os
import re
import signal

import pytest
import torch
from copies import make_copy
from launchers import GPUS, run, start
from scripts import DDP_SCRIPTS, ROOT, SCRIPTS, script_path

pytestmark = pytest.mark.gpu
if not GPUS:
    pytest.skip("requires a GPU", allow_module_level=True)

COUNT = len(GPUS)
GPU_SCRIPTS = [script for script in DDP_SCRIPTS if " on cpu " in SCRIPTS[script].header]
# Of a barrier without a device, of strides: not FutureWarning
WARNING = re.compile(r"\b(UserW|W|w)(arning|ARNING): ")


def run_on_gpus(script, *flags, gpus=GPUS, **how):
    """Run a script on some of GPUS. It must end well. Return what it prints."""
    result = run(script, *flags, timeout=400, env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)}, **how)
    assert result.status == 0, f"{script} ends with status {result.status}:\n{result.text}"
    assert not WARNING.search(result.text), f"{script} warns on GPUs:\n{result.text}"
    return result.text


def learn(script, *more, nproc=1, **how):
    """Train for an epoch, and return what is printed.

    With 4 GPUs, a process would have a quarter of the table's batch, of which BatchNorm learns
    little: it gets half.
    """
    details = SCRIPTS[script]
    flags = list(details.learn)
    if nproc > 2:
        place = flags.index("--global-batch") + 1
        flags[place] = flags[place] // 2 * nproc
        more = (*more, "--epochs", nproc // 2)
    text = run_on_gpus(script, "--epochs", 1, *flags, *more, nproc=nproc, **how)
    name, least = details.learned
    value = float(re.findall(rf"\b{name} ([\d.]+)", text)[-1])
    assert value > least, f"{script} has not learned on GPUs: {name} {value}\n{text}"
    return text


@pytest.mark.parametrize("flags", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("script", GPU_SCRIPTS)
def test_one_gpu(script, flags):
    text = learn(script, *flags, gpus=GPUS[:1])
    assert "world size 1 on cuda" in text, f"{script}: not one process on a GPU: {text}"
    assert re.search(r"  GPU GB \d", text), f"{script} does not print the memory: {text}"


@pytest.mark.parametrize("script", GPU_SCRIPTS)
def test_a_process_for_each_gpu(script):
    """python starts them by mp.spawn where the table says so."""
    launcher = "python" if SCRIPTS[script].start[0] == "spawn" else "torchrun"
    text = learn(script, launcher=launcher, nproc=COUNT)
    assert f"world size {COUNT} on cuda" in text, f"{script}: not {COUNT} processes: {text}"


@pytest.mark.parametrize("script", GPU_SCRIPTS)
def test_more_processes_than_gpus_are_an_error_line(script):
    """nccl refuses two on one GPU."""
    launcher = SCRIPTS[script].start[0]
    result = run(script, *SCRIPTS[script].learn, launcher=launcher, nproc=COUNT + 1,
                 env={"CUDA_VISIBLE_DEVICES": ",".join(GPUS)})
    assert result.status != 0, f"{script} trains with a process too many\n{result.text}"
    assert re.search("error: .*CUDA_VISIBLE_DEVICES=", result.text), (
        f"{script} with {COUNT + 1} processes on {COUNT} GPUs: no error line\n{result.text}")


@pytest.mark.parametrize("flags, gpus", [
    ((), list(range(COUNT))),
    (("--bf16",), list(range(COUNT))),
    (("--device-ids", COUNT - 1), [COUNT - 1]),
])
def test_data_parallel(flags, gpus):
    text = learn("mnist_dp", *flags)
    assert f"GPUs {gpus}," in text, f"mnist_dp {flags} must use the GPUs {gpus}, but: {text}"


def test_measure_exchange():
    text = run_on_gpus(ROOT / "tests/measure_exchange.py", "--model", "resnet18",
                       "--image-size", 64, "--batch-size", 4, "--steps", 5, launcher="torchrun",
                       nproc=COUNT)
    assert f"world size {COUNT} on cuda" in text, f"{COUNT} processes, but:\n{text}"
    assert re.search(r"[1-9][\d,.]* images/s", text), f"no images/s are measured:\n{text}"


# ---- a run that is stopped on all GPUs and resumed on fewer ----
WAIT = ('before "optimizer.zero_grad()"', """
if scheduler.last_epoch == 6 and os.environ.get("WAIT"):  # in the second epoch of 4 steps
    print("waiting", flush=True)
    time.sleep(1)
""")


@pytest.mark.parametrize("script", GPU_SCRIPTS)
def test_a_run_stopped_on_all_gpus_and_resumed_on_fewer_ends_near_the_whole_one(
        script, tmp_path, monkeypatch):
    """With other kernels, weights differ by 3 % of what training changes; with other samples or
    masks, by 30 %. Without random numbers, which differ by rank in the scripts of an epoch.
    """
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # without TensorFloat-32
    edits = [WAIT]
    if "def augment(" in script_path(script).read_text() and SCRIPTS[script].saves == "epoch":
        edits.append((None, "def augment(args, images, labels):\n    return images, labels"))
        edits.append(('after "model = CNN()"', "model.dropout1.p = model.dropout2.p = 0.0"))
    copy = make_copy(script, tmp_path / "train.py", *edits)
    flags = (SCRIPTS[script].own[0], 64 if script == "synthetic_ddp" else 48, "--global-batch",
             12, "--epochs", 3, "--lr", 1e-3)
    if script == "cifar10_ddp":  # fewer GPUs compute the same parts
        flags += ("--batch-size", 12 // COUNT)
    flags += ("--checkpoint",)
    launcher = SCRIPTS[script].start[0]
    run_on_gpus(copy, *flags, tmp_path / "whole", launcher=launcher, nproc=COUNT)
    with start(copy, *flags, tmp_path / "parts", launcher=launcher, nproc=COUNT,
               env={"CUDA_VISIBLE_DEVICES": ",".join(GPUS), "WAIT": "1"}) as job:
        job.wait_for("waiting", timeout=200)
        os.killpg(job.launcher.pid, signal.SIGTERM)
        result = job.result()
    assert result.status != 0, f"a stopped run ends with status 0:\n{result.text}"
    stopped = torch.load(tmp_path / "parts", map_location="cpu")
    place = stopped["progress"].get("step", stopped["progress"].get("epoch"))
    expected = (1,) if SCRIPTS[script].saves == "epoch" else (7, 8)
    assert place in expected, f"stopped in step 7 of 12, it has saved {place}:\n{result.text}"

    fewer = COUNT // 2 if COUNT % 2 == 0 else 1
    run_on_gpus(copy, *flags, tmp_path / "parts", launcher=launcher, nproc=fewer, gpus=GPUS[:fewer])
    whole, resumed = (torch.load(tmp_path / name, map_location="cpu")
                      for name in ("whole", "parts"))
    for name, before in stopped["model"].items():
        if "running_" in name or "num_batches_tracked" in name:
            continue  # the statistics of rank 0's shares
        change = (whole["model"][name] - before).float().norm()
        difference = (resumed["model"][name] - whole["model"][name]).float().norm()
        assert difference <= 0.1 * change, (
            f"{script}, stopped and resumed on {fewer} of {COUNT} GPUs: {name} differs by "
            f"{difference:.2g} from the whole run, which changes it by {change:.2g} meanwhile")

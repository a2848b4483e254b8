"""On GPUs: each script on one and on all of this machine, bfloat16, stop and resume.

Skipped without a GPU. Run on one NVIDIA H200, and with 2 and 4 GPUs on an emulated CUDA driver.
"""

import re
import signal

import pytest
from checkpoints import load_checkpoint
from copies import make_copy
from launchers import GPUS, run, start
from scripts import ROOT, SCRIPTS

if not GPUS:
    pytest.skip("requires a GPU", allow_module_level=True)

COUNT = len(GPUS)
# Of a barrier without a device, of strides: not FutureWarning
WARNING = re.compile(r"\b(UserW|W|w)(arning|ARNING): ")


def run_on_gpus(script, *flags, gpus=GPUS, **how):
    """Run a script on some of GPUS. It must end well. Return what it prints."""
    result = run(script, *flags, timeout=400, env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)}, **how)
    assert result.status == 0, f"{script} ends with status {result.status}:\n{result.text}"
    assert not WARNING.search(result.text), f"{script} warns on GPUs:\n{result.text}"
    return result.text


def learn(script, *more, nproc=1, **how):
    """Train for about as many steps as with 2 processes in an epoch, and return the header.

    BatchNorm learns little from a smaller batch per process than in the table of the scripts.
    """
    details = SCRIPTS[script]
    batch_size = details.batch_size
    if details.several_processes and nproc == 1:
        batch_size = 2 * batch_size
    text = run_on_gpus(script, "--epochs", (nproc + 1) // 2, "--batch-size", batch_size,
                       *details.learn, *more, nproc=nproc, **how)
    accuracy = float(re.findall(r"test loss [\d.]+  accuracy ([\d.]+)", text)[-1])
    assert accuracy > details.least_accuracy, f"{script} has not learned on GPUs:\n{text}"
    return re.search(r"^.*\| torch .*", text, re.MULTILINE)[0]


@pytest.mark.parametrize("flags", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp", "synthetic_ddp"])
def test_one_gpu(script, flags):
    header = learn(script, *flags, gpus=GPUS[:1])
    assert "world size 1 on cuda" in header, f"not one process on a GPU: {header}"


@pytest.mark.parametrize("script, launcher", [
    ("cifar10_ddp", "torchrun"), ("fashionmnist_ddp", "python"), ("synthetic_ddp", "torchrun")])
def test_a_process_for_each_gpu(script, launcher):
    """python starts them by mp.spawn."""
    header = learn(script, launcher=launcher, nproc=COUNT)
    assert f"world size {COUNT} on cuda" in header, f"{COUNT} processes, but: {header}"


@pytest.mark.parametrize("flags, gpus", [
    ((), list(range(COUNT))),
    (("--bf16",), list(range(COUNT))),
    (("--device-ids", COUNT - 1), [COUNT - 1]),
])
def test_data_parallel(flags, gpus):
    header = learn("mnist_dp", *flags)
    assert f"GPUs {gpus}," in header, f"mnist_dp {flags} must use the GPUs {gpus}, but: {header}"


def test_measure():
    text = run_on_gpus(ROOT / "tests/measure_exchange.py", "--model", "resnet18",
                       "--image-size", 64, "--batch-size", 4, "--steps", 5, launcher="torchrun",
                       nproc=COUNT)
    assert f"world size {COUNT} on cuda" in text, f"{COUNT} processes, but:\n{text}"
    assert re.search(r"[1-9][\d,.]* images/s", text), f"no images/s are measured:\n{text}"


# --- a run that is stopped on all GPUs and resumed on fewer ---
WAIT_AND_COMPARE = """
while step == 2 and not signals:
    print("waiting", flush=True)
    time.sleep(0.1)
for parameter in model.parameters():
    of_rank_0 = parameter.detach().clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.allclose(of_rank_0, parameter), "the ranks have other weights"
"""


@pytest.mark.parametrize("script, launcher, lr", [("cifar10_ddp", "torchrun", 0.01),
                                                  ("fashionmnist_ddp", "python", 3e-4)])
def test_a_run_stopped_on_all_gpus_and_resumed_on_fewer_ends_near_the_whole_one(
        script, launcher, lr, tmp_path, monkeypatch):
    """A copy waits after step 2 for SIGTERM, and compares the weights of all GPUs in each step.

    With other kernels, weights differ by 3 % of what training changes; with other samples or
    masks, by 30 %.
    """
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # without TensorFloat-32
    copy = make_copy(script, tmp_path / "train.py", ('after "step += 1"', WAIT_AND_COMPARE),
                     (None, "CHECK_EVERY = 1"))
    flags = ("--fake-data", 20 * COUNT, "--batch-size", 5, "--epochs", 2, "--lr", lr,
             "--checkpoint")
    run_on_gpus(script, *flags, tmp_path / "whole", launcher=launcher, nproc=COUNT)
    with start(copy, *flags, tmp_path / "parts", launcher=launcher, nproc=COUNT,
               env={"CUDA_VISIBLE_DEVICES": ",".join(GPUS)}) as job:
        job.wait_for("waiting", timeout=200)
        job.send(signal.SIGTERM)
        result = job.result()
    assert result.status != 0, f"a stopped run ends with status 0:\n{result.text}"
    assert not WARNING.search(result.text), f"a stopped run warns on GPUs:\n{result.text}"
    stopped = load_checkpoint(tmp_path / "parts")
    assert stopped["step"] in (2, 3), (
        f"a signal after step 2 stops the run after step {stopped['step']}:\n{result.text}")

    fewer = COUNT // 2 if COUNT % 2 == 0 else 1
    run_on_gpus(copy, *flags, tmp_path / "parts", launcher=launcher, nproc=fewer, gpus=GPUS[:fewer])
    whole = load_checkpoint(tmp_path / "whole")
    resumed = load_checkpoint(tmp_path / "parts")
    assert resumed["step"] == whole["step"], f"the resumed run ends after step {resumed['step']}"
    for name, before in stopped["model"].items():
        if "running_" in name or "num_batches_tracked" in name:
            continue  # the statistics of rank 0's shares
        change = (whole["model"][name] - before).float().norm()
        difference = (resumed["model"][name] - whole["model"][name]).float().norm()
        assert difference <= 0.1 * change, (
            f"{script}, stopped and resumed on {fewer} of {COUNT} GPUs: {name} differs by "
            f"{difference:.2g} from the whole run, which changes it by {change:.2g} meanwhile")

"""On GPUs: each script on one and on all of this machine, bfloat16, stop and resume, error lines.

Skipped without a GPU. Run on an emulated CUDA driver with 1, 2 and 4 GPUs, not on real GPUs.
"""

import re
import signal
from typing import NamedTuple

import pytest
from checkpoints import load_checkpoint
from processes import GPUS, run, start
from scripts import SCRIPTS, script_path

if not GPUS:
    pytest.skip("requires a GPU (run on an emulated driver so far, not on real GPUs)",
                allow_module_level=True)

GPU_SCRIPTS = [script for script in SCRIPTS if script != "cpu_ddp"]
COUNT = len(GPUS)
# Of a barrier without a device, of strides: not FutureWarning
WARNING = re.compile(r"\b(UserW|W|w)(arning|ARNING): ")


def visible(gpus):
    """Return the environment that shows these GPUs, of the list GPUS."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def finish(script, *flags, **how):
    """Run a script to its end, and return what it prints."""
    result = run(script, *flags, timeout=400, **how)
    assert result.status == 0, f"{script} ends with status {result.status}:\n{result.text}"
    assert not WARNING.search(result.text), f"{script} warns on GPUs:\n{result.text}"
    return result.text


def learn(script, *more, launcher="python", nproc=1, gpus=GPUS):
    """Train for about as many steps as with 2 processes in an epoch, and return the header.

    BatchNorm learns little from a smaller batch per process than in the table of the scripts.
    """
    details = SCRIPTS[script]
    batch_size = details.batch_size
    if details.several_processes and nproc == 1:
        batch_size = 2 * batch_size
    epochs = (nproc + 1) // 2
    text = finish(script, "--epochs", epochs, "--batch-size", batch_size, *details.learn, *more,
                  launcher=launcher, nproc=nproc, env=visible(gpus))
    accuracy = float(re.findall(r"test loss [\d.]+  accuracy ([\d.]+)", text)[-1])
    assert accuracy > details.least_accuracy, f"{script} has not learned on GPUs:\n{text}"
    return re.search(r"^.*\| torch .*", text, re.MULTILINE)[0]


# --- training ---
@pytest.mark.parametrize("flags", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("script", GPU_SCRIPTS)
def test_one_gpu(script, flags):
    header = learn(script, *flags, gpus=GPUS[:1])
    expected = "GPUs [0]" if script == "mnist_dp" else "world size 1 on cuda"
    assert expected in header, f"{script} trains on one GPU, but its header is {header}"


@pytest.mark.parametrize("script, launcher", [
    ("cifar10_ddp", "torchrun"), ("fashionmnist_ddp", "torchrun"), ("fashionmnist_ddp", "python"),
    ("synthetic_ddp", "torchrun")])
def test_a_process_for_each_gpu(script, launcher):
    """python starts them by mp.spawn."""
    header = learn(script, launcher=launcher, nproc=COUNT)
    assert f"world size {COUNT} on cuda" in header, f"{COUNT} processes, but: {header}"


def test_data_parallel_on_all_gpus():
    header = learn("mnist_dp", "--bf16")
    assert f"GPUs {list(range(COUNT))}" in header, f"all {COUNT} GPUs, but: {header}"


def test_data_parallel_on_the_last_gpu():
    header = learn("mnist_dp", "--device-ids", COUNT - 1)
    assert f"GPUs [{COUNT - 1}]" in header, f"--device-ids {COUNT - 1}, but: {header}"


def test_measure():
    text = finish("synthetic_ddp", "--model", "resnet18", "--image-size", 64, "--batch-size", 4,
                  "--steps", 5, launcher="torchrun", nproc=COUNT, env=visible(GPUS))
    assert f"world size {COUNT} on cuda" in text, f"{COUNT} processes, but:\n{text}"
    assert re.search(r"[1-9][\d,.]* images/s", text), f"no images/s are measured:\n{text}"


# --- a run that is stopped on all GPUs and resumed on fewer ---
STEP = "            step += 1\n"
WAIT = """            while step == 3 and not {signals}:
                print("waiting", flush=True)
                time.sleep(0.1)
"""
COMPARE = """            for parameter in model.parameters():
                of_rank_0 = parameter.detach().clone()
                dist.broadcast(of_rank_0, 0)
                assert torch.allclose(of_rank_0, parameter), "the ranks have other weights"
"""
STOPPED = {  # launcher, and a low learning rate: see test_the_resumed_run_ends_near_the_whole_one
    "mnist_dp": ("python", 1e-4),
    "cifar10_ddp": ("torchrun", 0.01),
    "fashionmnist_ddp": ("python", 3e-4),
    "synthetic_ddp": ("torchrun", 0.05),
}


class Stopped(NamedTuple):
    script: str
    result: object  # of the copy that was stopped
    stopped: dict  # its checkpoint
    whole: dict  # that of an undisturbed run on all GPUs
    resumed: dict  # that of the copy, resumed on fewer GPUs


def fewer_gpus(script):
    """Return a number of GPUs that divides COUNT: DataParallel has other masks on fewer."""
    if script == "mnist_dp":
        return COUNT
    return COUNT // 2 if COUNT % 2 == 0 else 1


@pytest.fixture(scope="module", params=STOPPED)
def disturbed(request, tmp_path_factory):
    """A copy waits in step 3 for SIGTERM, and compares the weights of all GPUs in each step."""
    script = request.param
    launcher, lr = STOPPED[script]
    folder = tmp_path_factory.mktemp(script)
    copy = folder / "train.py"
    text = script_path(script).read_text()
    assert text.count(STEP) == 1, f"{script} has {text.count(STEP)} lines 'step += 1' in train()"
    if script == "mnist_dp":
        more = WAIT.format(signals="signals")
    else:
        more = WAIT.format(signals="progress.signals") + COMPARE
    copy.write_text(text.replace(STEP, STEP + more))

    batch_size = 5 * COUNT if script == "mnist_dp" else 5
    flags = (SCRIPTS[script].data_flag, 20 * COUNT, "--batch-size", batch_size, "--epochs", 2,
             "--lr", lr, "--log-every", 0, "--checkpoint")

    def how(count):  # without TensorFloat-32
        env = visible(GPUS[:count])
        env["NVIDIA_TF32_OVERRIDE"] = 0
        return {"launcher": launcher, "nproc": count, "env": env}

    finish(script, *flags, folder / "whole", **how(COUNT))
    with start(copy, *flags, folder / "parts", **how(COUNT)) as job:
        job.wait_for("waiting", timeout=200)
        job.send(signal.SIGTERM)
        result = job.finish()
    stopped = load_checkpoint(folder / "parts")
    finish(copy, *flags, folder / "parts", **how(fewer_gpus(script)))
    return Stopped(script, result, stopped, load_checkpoint(folder / "whole"),
                   load_checkpoint(folder / "parts"))


def test_a_signal_stops_and_saves(disturbed):
    text = disturbed.result.text
    assert disturbed.result.status != 0, f"a stopped run ends with status 0:\n{text}"
    step = disturbed.stopped["step"]
    assert step == 3, f"the signal came in step 3, and step {step} was saved:\n{text}"
    assert not WARNING.search(text), f"a stopped run warns on GPUs:\n{text}"


def test_the_resumed_run_ends_near_the_whole_one(disturbed):
    """With other kernels, 3 % of what training changes; with other samples or masks, 30 %."""
    step = disturbed.resumed["step"]
    assert step == disturbed.whole["step"], f"it ends after step {step}"
    for name, before in disturbed.stopped["model"].items():
        if "running_" in name or "num_batches_tracked" in name:
            continue  # the statistics of rank 0's shares
        whole = disturbed.whole["model"][name]
        change = (whole - before).float().norm()
        difference = (disturbed.resumed["model"][name] - whole).float().norm()
        assert difference <= 0.3 * change, (
            f"{disturbed.script}, stopped and resumed: {name} differs by {difference:.2g} from "
            f"the whole run, which changes it by {change:.2g} in the same steps")


def test_one_gpu_ends_as_all(tmp_path):
    """With the same global batch: synthetic_ddp has no dropout."""
    flags = ("--samples", 20 * COUNT, "--epochs", 2, "--batch-size", 5, "--checkpoint")
    env = {"NVIDIA_TF32_OVERRIDE": 0}
    finish("synthetic_ddp", *flags, tmp_path / "all", launcher="torchrun", nproc=COUNT,
           env=visible(GPUS) | env)
    finish("synthetic_ddp", "--global-batch", 5 * COUNT, *flags, tmp_path / "one",
           env=visible(GPUS[:1]) | env)
    weights_of_all = load_checkpoint(tmp_path / "all")["model"]
    for name, weights in load_checkpoint(tmp_path / "one")["model"].items():
        difference = (weights_of_all[name] - weights).abs().max().item()
        assert difference < 1e-3, f"{name} differs by {difference:.1e} between {COUNT} GPUs and one"


# --- error lines ---
def more_processes_than_gpus(script, launcher):
    details = SCRIPTS[script]
    result = run(script, *details.learn, launcher=launcher, nproc=COUNT + 1, env=visible(GPUS))
    assert result.status != 0, f"{COUNT + 1} processes on {COUNT} GPUs end with 0:\n{result.text}"
    assert result.errors, f"no error line:\n{result.text}"
    assert "GPUs" in result.errors[0], f"the error line does not name the GPUs:\n{result.text}"
    return result


def test_more_processes_than_gpus_under_torchrun():
    result = more_processes_than_gpus("synthetic_ddp", "torchrun")
    assert len(result.errors) <= COUNT + 1, f"at most one line of each process:\n{result.text}"


def test_more_processes_than_gpus_of_python():
    result = more_processes_than_gpus("fashionmnist_ddp", "spawn")
    assert len(result.errors) == 1, f"one error line:\n{result.text}"

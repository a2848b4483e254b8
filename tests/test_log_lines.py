"""What is printed is true: every number is computed a second time from the model's outputs.

5 epochs of 5 steps of 32 samples, in two parts per process. A clock that the test owns makes a step
take 2 seconds on rank 0 and 3 on rank 1. Runs with checkpoints are resumed after step 7.
"""

import argparse
import functools
import re
import tempfile
import time
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
from checkpoints import load_checkpoint
from functions import watch
from recorder import Recorder, output_of, use_small_model
from scripts import CHECKPOINT_SCRIPTS, SCRIPTS
from stopped_runs import stop

EPOCHS = range(1, 6)
RESUMED = 7
STEPS = range(RESUMED + 1, 26)
ONE_LINE = ("mnist_dp", "synthetic_ddp")  # print one line for each epoch, and save nothing


class Printed(NamedTuple):
    """A run: what it has done and printed."""

    ranks: list[Recorder]
    lines: list[str]
    checkpoint: str  # its path
    saved_step: int  # in the checkpoint


@functools.cache
def printed(script):
    """Train on 2 processes, or mnist_dp in one."""
    def setup(module, rank):
        use_small_model(module)
        recorder = Recorder(module, rank)
        module.time = argparse.Namespace(
            perf_counter=lambda: (2 + rank) * len(recorder.steps), sleep=time.sleep)
        return recorder

    nproc = 1 if script == "mnist_dp" else 2
    flags = [SCRIPTS[script].data_flag, 164, "--epochs", 5, "--seed", 3, "--lr", 0.1,
             *SCRIPTS[script].no_children]
    if script in ONE_LINE:
        ranks, text = output_of(script, *flags, "--batch-size", 32 // nproc, nproc=nproc,
                                setup=setup)
        return Printed(ranks, text.splitlines(), "", 0)
    flags += ["--batch-size", 8, "--global-batch", 32, "--log-every", 4, "--save-every", 0.1,
              "--checkpoint"]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run.pt"
        stop(script, *flags, path, nproc=2, after=RESUMED, setup=setup)
        ranks, text = output_of(script, *flags, path, nproc=2, setup=setup)
        return Printed(ranks, text.splitlines(), path, load_checkpoint(path)["step"])


def means(script, parts, smoothing):
    """Return the mean loss and the accuracy of the model's outputs as they are to be printed."""
    outputs = torch.cat([part.outputs for part in parts]).double()
    targets = torch.cat([part.batch[1] for part in parts])
    if script == "cpu_ddp":
        return f"loss {((outputs - targets) ** 2).mean():.4f}"
    losses = torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=smoothing)
    return f"loss {losses:.4f}  accuracy {(outputs.argmax(1) == targets).double().mean():.4f}"


def training_means(script, recorders, epoch, last_step):
    """Return those of the recorders' ranks from the begin of the epoch to this step."""
    begin = RESUMED if script in CHECKPOINT_SCRIPTS else 0  # what was trained before is not known
    steps = range(max(5 * epoch - 5, begin), last_step)
    parts = [part for recorder in recorders for step in steps
             for part in recorder.steps[step - begin]]
    return means(script, parts, SCRIPTS[script].label_smoothing)


def means_of_test_set(script, epoch):
    first = 2 if script in CHECKPOINT_SCRIPTS else 1
    parts = [part for recorder in printed(script).ranks
             for part in recorder.evaluations[epoch - first]]
    return means(script, parts, 0.0)


def assert_lines(script, pattern, expected):
    """Fail unless the lines with this pattern are those expected, up to rounding."""
    lines = printed(script).lines
    found = [line for line in lines if re.search(pattern, line)]
    number = r"\d[\d,.]*"
    for line, right in zip([*found, "no line"], [*expected, "no line"]):
        assert re.sub(number, "N", line) == re.sub(number, "N", right), (
            f"{script} prints\n{line}\n but not\n{right}\nAll it prints:\n" + "\n".join(lines))
        values, right_values = (
            [float(value.replace(",", "")) for value in re.findall(number, text)]
            for text in (line, right))
        assert values == pytest.approx(right_values, abs=1.01e-4), (
            f"{script} prints numbers that are not true:\n{line}\nTrue:\n{right}")


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_lines_of_rank_0_every_log_every_seconds(script):
    """Its own samples' means in the epoch so far; the speed since the start, without step 1 to 7.

    --log-every 4 are two steps of 2 seconds each. 32 samples in 2 seconds are 16 samples/s.
    """
    ranks = printed(script).ranks
    unit = "samples" if script == "cpu_ddp" else "images"
    expected = []
    for step in STEPS[1::2]:
        epoch = (step + 4) // 5
        expected.append(
            f"epoch {epoch}/5  step {step}/25  {training_means(script, ranks[:1], epoch, step)}  "
            f"16 {unit}/s  {timedelta(seconds=2 * (25 - step))} left")
    assert_lines(script, "  step ", expected)


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_means_over_all_ranks_at_the_end_of_an_epoch(script):
    expected = [f"epoch {epoch}/5  " + training_means(script, printed(script).ranks, epoch,
                                                      5 * epoch) for epoch in EPOCHS[1:]]
    assert_lines(script, r"^epoch ./5  loss ", expected)


@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_means_over_the_test_set_and_seconds_of_an_epoch(script):
    """The seconds of rank 0, of the steps since a resume."""
    expected = [f"epoch {epoch}/5  test {means_of_test_set(script, epoch)}  "
                f"{10 if epoch > 2 else 6}.0 s" for epoch in EPOCHS[1:]]
    assert_lines(script, "  test ", expected)


@pytest.mark.parametrize("script", ONE_LINE)
def test_the_line_of_an_epoch(script):
    """Speed: 160 samples in 5 steps of 2 seconds; mnist_dp takes the last 4 images, too."""
    run = printed(script)
    speed = "14 images" if script == "mnist_dp" else "16 samples"
    steps = 6 if script == "mnist_dp" else 5
    expected = []
    for epoch in EPOCHS:
        parts = [part for recorder in run.ranks
                 for step in recorder.steps[(epoch - 1) * steps:epoch * steps] for part in step]
        expected.append(f"epoch {epoch}/5  {means(script, parts, 0.0)}  "
                        f"test {means_of_test_set(script, epoch)}  {speed}/s")
    assert_lines(script, "^epoch", expected)


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_each_save_has_a_line(script):
    """With --save-every 0.1: after 3 steps of 2 seconds; if there is a test set, before its use."""
    run = printed(script)
    steps = {"cpu_ddp": (10, 13, 16, 19, 22, 25)}.get(script, (10, 13, 15, 18, 20, 23, 25))
    assert_lines(script, "^saved", [f"saved step {step} in {run.checkpoint}" for step in steps])
    assert run.saved_step == 25, f"{script}: after step 25, the checkpoint has {run.saved_step}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_header(script):
    header = {
        "cpu_ddp": "world size 2, threads 1 | torch N | global batch 32 of 164 samples | "
                   "steps 7 to 25",
        "mnist_dp": "GPUs none, threads 1 | torch N | batch 32 of 164 images",
        "cifar10_ddp": "world size 2 on cpu, threads 1 | torch N | resnet18 | global batch 32 of "
                       "164 images in 10 classes | steps 7 to 25",
        "fashionmnist_ddp": "world size 2 on cpu, threads 1 | torch N | global batch 32 of 164 "
                            "images | steps 7 to 25",
        "synthetic_ddp": "world size 2 on cpu, threads 1 | torch N | global batch 32 of 164 "
                         "samples"}[script].replace("torch N", f"torch {torch.__version__}")
    line = printed(script).lines[0]
    assert line == header, f"{script}: the first line is not\n{header}\nbut\n{line}"


# ---- synthetic_ddp --model ----
@functools.cache
def measured():
    """Return the gradients' sums of each step, and what is printed on 2 ranks.

    Five warm-up steps, one with exchange of gradients and one without. With exchange, rank 0 takes
    2 seconds and rank 1 takes 4; without, both take 3.
    """
    def setup(module, rank):
        gradients = []
        seconds = [100, 100, 2, 2, 2, 2 + 2 * rank, 3]

        def before_step(optimizer):
            gradients.append(optimizer.param_groups[0]["params"][0].grad.sum().item())

        watch(torch.optim.SGD, "step", before_step)
        module.time = argparse.Namespace(
            perf_counter=lambda: sum(seconds[:len(gradients)]), sleep=time.sleep)
        return gradients

    return output_of("synthetic_ddp", "--model", "squeezenet1_1", "--image-size", 64,
                     "--batch-size", 2, "--steps", 1, nproc=2, setup=setup)


def test_measured_steps_exchange_gradients_only_where_they_say_so():
    (one, other), _ = measured()
    assert one[-2] == other[-2], f"the step with exchange has other gradients on rank 1: {one[-2]}"
    assert one[-1] != other[-1], "the step without exchange has exchanged its gradients"


def test_measured_numbers():
    """4 images in the 4 seconds of the slowest rank; 1.2 million weights of 4 bytes."""
    text = measured()[1].splitlines()[-1]
    expected = (r"1\.0 images/s  step 4000\.0 ms, without exchange 3000\.0 ms  communication "
                r"overhead 25\.0 %  gradients 4\.9 MB  peak memory of rank 0 (\d,)?\d\d\d MB")
    assert re.fullmatch(expected, text), f"the line is not as {expected}, but:\n{text}"

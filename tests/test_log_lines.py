"""What is printed is true: every number is computed a second time from the model's outputs.

5 epochs of 5 steps of 32 samples. A clock that the test owns makes a step take 1 second on rank 0
and 3 seconds on rank 1; mnist_dp, one process, takes 2.
"""

import argparse
import functools
import re
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from checkpoints import load_checkpoint
from functions import redirect, train, watch
from recorder import Recorder, use_small_model
from scripts import DDP_SCRIPTS, SCRIPTS, TESTED_SCRIPTS

EPOCHS = 5
STEPS_PER_EPOCH = 5
STEPS = EPOCHS * STEPS_PER_EPOCH
GLOBAL_BATCH = 32
SAMPLES = 164  # 4 are left over in each epoch

STEP_LINE = re.compile(
    r"^epoch (?P<epoch>\d+)/5  step (?P<step>\d+)/25  loss (?P<loss>\d+\.\d{4})  "
    r"(accuracy (?P<accuracy>\d\.\d{4})  )?(?P<speed>[\d,]+) (?P<unit>\w+)/s  (?P<left>\S+) left$",
    re.MULTILINE)
TEST_LINE = re.compile(
    r"^epoch (?P<epoch>\d+)/5  test loss (?P<loss>\d+\.\d{4})  accuracy (?P<accuracy>\d\.\d{4})  "
    r"(?P<seconds>\d+\.\d) s$", re.MULTILINE)


class Printed(NamedTuple):
    """A run: what it has printed, and what it has done."""

    ranks: list[Recorder]
    texts: list[str]  # what each rank has printed
    saved_step: int  # of its checkpoint
    path: str  # of its checkpoint

    def lines(self, pattern):
        """Return the matches of the pattern in the lines of rank 0."""
        return list(pattern.finditer(self.texts[0]))


def set_clock(module, seconds_per_step, recorder):
    """Give the script a clock that moves when a step ends."""
    module.time = argparse.Namespace(
        perf_counter=lambda: seconds_per_step * len(recorder.steps), sleep=time.sleep)


@functools.cache
def printed(script):
    """Train on 2 processes that take 16 samples in two parts; mnist_dp on one."""
    nproc = 2 if SCRIPTS[script].several_processes else 1
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run.pt"

        def setup(module, rank):
            redirect("stdout", f"{folder}/{rank}.txt")
            use_small_model(module, script)
            recorder = Recorder(module, script)
            set_clock(module, 2 if nproc == 1 else 1 + 2 * rank, recorder)
            return recorder

        flags = [SCRIPTS[script].data_flag, SAMPLES, "--epochs", EPOCHS, "--seed", 3, "--lr", 0.1,
                 "--save-every", 2, "--log-every", 4, "--checkpoint", path,
                 *SCRIPTS[script].no_children]
        if nproc == 2:
            flags += ["--batch-size", 8, "--global-batch", GLOBAL_BATCH]
        else:
            flags += ["--batch-size", GLOBAL_BATCH]
        ranks = train(script, *flags, nproc=nproc, setup=setup)
        texts = [Path(f"{folder}/{rank}.txt").read_text() for rank in range(nproc)]
        codes = [code for _, code, _ in ranks]
        assert codes == [0] * nproc, f"{script} has ended with {codes}:\n{texts[0]}"
        return Printed([recorder for recorder, _, _ in ranks], texts,
                       load_checkpoint(path)["step"], path)


def loss_and_accuracy(script, parts, smoothing):
    """Return the mean loss and the accuracy of the model's outputs, in float64."""
    outputs = torch.cat([part.outputs for part in parts]).double()
    targets = torch.cat([part.targets for part in parts])
    if script == "cpu_ddp":
        return ((outputs - targets) ** 2).mean().item(), None
    logs = outputs - outputs.logsumexp(1, keepdim=True)
    of_target = -logs.gather(1, targets[:, None]).squeeze(1)
    losses = (1 - smoothing) * of_target - smoothing * logs.mean(1)
    return losses.mean().item(), (outputs.argmax(1) == targets).double().mean().item()


def parts_of_epoch(run, step):
    """Return the parts of all ranks from the begin of the epoch to this step."""
    first = (step - 1) // STEPS_PER_EPOCH * STEPS_PER_EPOCH
    return [part for recorder in run.ranks for parts in recorder.steps[first:step]
            for part in parts]


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_end_of_each_epoch_has_a_step_line(script):
    run = printed(script)
    steps = {int(line["step"]) for line in run.lines(STEP_LINE)}
    missing = {5, 10, 15, 20, 25} - steps
    assert not missing, (
        f"{script}: no line of the form 'epoch E/5  step S/25  loss L  accuracy A  "
        f"N images/s  H:MM:SS left' for steps {sorted(missing)}. Printed:\n{run.texts[0]}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_line_is_printed_every_log_every_seconds(script):
    """At 2 seconds a step and --log-every 4: every second step, and at the end of an epoch."""
    run = printed(script)
    steps = [0] + [int(line["step"]) for line in run.lines(STEP_LINE)]
    intervals = [later - earlier for earlier, later in zip(steps, steps[1:])]
    assert intervals and max(intervals) == 2, (
        f"{script}: with --log-every 4 and steps of 2 seconds, a line is due every 2 steps. "
        f"Printed:\n{run.texts[0]}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_epoch_of_a_step_line(script):
    for line in printed(script).lines(STEP_LINE):
        epoch = (int(line["step"]) - 1) // STEPS_PER_EPOCH + 1
        assert int(line["epoch"]) == epoch, f"{script}: the epoch is {epoch}, not in:\n{line[0]}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_loss_is_the_mean_of_the_epoch_so_far(script):
    run = printed(script)
    for line in run.lines(STEP_LINE):
        parts = parts_of_epoch(run, int(line["step"]))
        loss, _ = loss_and_accuracy(script, parts, SCRIPTS[script].label_smoothing)
        assert float(line["loss"]) == pytest.approx(loss, abs=1e-4), (
            f"{script}: the mean loss of all ranks in the epoch so far is {loss:.4f}, not in:\n"
            f"{line[0]}")


@pytest.mark.parametrize("script", TESTED_SCRIPTS)
def test_the_accuracy_is_the_mean_of_the_epoch_so_far(script):
    run = printed(script)
    for line in run.lines(STEP_LINE):
        parts = parts_of_epoch(run, int(line["step"]))
        _, accuracy = loss_and_accuracy(script, parts, 0.0)
        assert float(line["accuracy"] or "nan") == pytest.approx(accuracy, abs=1e-4), (
            f"{script}: the accuracy of all ranks in the epoch so far is {accuracy:.4f}, not in:\n"
            f"{line[0]}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_speed_counts_the_samples_of_all_ranks(script):
    """32 samples in the mean time of a step of the ranks, 2 seconds, are 16 samples/s."""
    for line in printed(script).lines(STEP_LINE):
        assert line["speed"] == "16", f"{script}: the speed is 16 samples/s, not in:\n{line[0]}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_counted(script):
    unit = "images" if SCRIPTS[script].has_images else "samples"
    for line in printed(script).lines(STEP_LINE):
        assert line["unit"] == unit, f"{script}: counts {unit}, not as in:\n{line[0]}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_time_left(script):
    for line in printed(script).lines(STEP_LINE):
        left = str(timedelta(seconds=2 * (STEPS - int(line["step"]))))
        assert line["left"] == left, (
            f"{script}: with 2 seconds a step, {left} are left, not as in:\n{line[0]}")


@pytest.mark.parametrize("script", TESTED_SCRIPTS)
def test_each_epoch_has_a_test_line(script):
    run = printed(script)
    epochs = [int(line["epoch"]) for line in run.lines(TEST_LINE)]
    assert epochs == [1, 2, 3, 4, 5], (
        f"{script}: not one line of the form 'epoch E/5  test loss L  accuracy A  S s' for each "
        f"epoch. Printed:\n{run.texts[0]}")


@pytest.mark.parametrize("script", TESTED_SCRIPTS)
def test_the_loss_of_the_test_set(script):
    """It is the mean over the test samples of all ranks, without smoothing of the labels."""
    for line, parts in evaluation_lines(script):
        loss, _ = loss_and_accuracy(script, parts, 0.0)
        assert float(line["loss"]) == pytest.approx(loss, abs=1e-4), (
            f"{script}: the test samples' mean loss is {loss:.4f}, not as in:\n{line[0]}")


@pytest.mark.parametrize("script", TESTED_SCRIPTS)
def test_the_accuracy_of_the_test_set(script):
    for line, parts in evaluation_lines(script):
        _, accuracy = loss_and_accuracy(script, parts, 0.0)
        assert float(line["accuracy"]) == pytest.approx(accuracy, abs=1e-4), (
            f"{script}: the test samples' accuracy is {accuracy:.4f}, not as in:\n{line[0]}")


def evaluation_lines(script):
    """Return pairs: a test line, and the parts of all ranks in that evaluation."""
    run = printed(script)
    lines = run.lines(TEST_LINE)
    pairs = []
    for number, line in enumerate(lines):
        parts = [part for recorder in run.ranks for part in recorder.evaluations[number]]
        pairs.append((line, parts))
    return pairs


@pytest.mark.parametrize("script", TESTED_SCRIPTS)
def test_the_seconds_of_an_epoch(script):
    seconds = 5.0 if SCRIPTS[script].several_processes else 10.0
    for line in printed(script).lines(TEST_LINE):
        assert float(line["seconds"]) == seconds, (
            f"{script}: an epoch of rank 0 takes {seconds} s, not as in:\n{line[0]}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_save_has_a_line(script):
    """With --save-every 2: after epochs 2 and 4, and at the end."""
    run = printed(script)
    saved = re.findall(r"^saved step (\d+) in (.*)$", run.texts[0], re.MULTILINE)
    expected = [(step, run.path) for step in ("10", "20", "25")]
    assert saved == expected, (
        f"{script}: with --save-every 2, lines 'saved step S in {run.path}' are due for steps 10, "
        f"20 and 25. Printed:\n{run.texts[0]}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_last_step_is_in_the_checkpoint(script):
    run = printed(script)
    assert run.saved_step == STEPS, f"{script}: the checkpoint has step {run.saved_step}, not 25"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_only_rank_0_prints(script):
    run = printed(script)
    assert run.texts[1] == "", f"{script}: only rank 0 prints, but rank 1 has printed:\n" + (
        run.texts[1])


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_header_names_processes_batch_parts_and_steps(script):
    header = printed(script).texts[0].splitlines()[0]
    unit = "images" if SCRIPTS[script].has_images else "samples"
    begin = f"world size 2 on cpu, threads 1 | torch {torch.__version__} | "
    end = f"global batch 32 of 164 {unit}, 2 parts per process | steps 0 to 25"
    assert header.startswith(begin), f"{script}: the first line does not begin {begin!r}:\n{header}"
    assert header.endswith(end), f"{script}: the first line does not end {end!r}:\n{header}"


def test_the_header_of_mnist_dp_names_batch_and_steps():
    header = printed("mnist_dp").texts[0].splitlines()[0]
    end = "batch 32 of 164 images | steps 0 to 25"
    assert header.endswith(end), f"mnist_dp: the first line does not end {end!r}:\n{header}"


# ---- fast steps ----
@functools.cache
def fast_run():
    """Return what synthetic_ddp prints in an epoch of 80 steps that take a microsecond."""
    with tempfile.TemporaryDirectory() as folder:
        def setup(module, rank):
            redirect("stdout", f"{folder}/{rank}.txt")
            set_clock(module, 1e-6, Recorder(module, "synthetic_ddp"))

        train("synthetic_ddp", "--samples", 320, "--batch-size", 2, "--epochs", 1, nproc=2,
              setup=setup)
        return Path(f"{folder}/0.txt").read_text()


def test_the_steps_to_the_next_line_at_most_double():
    """A speed measured on prefetched or cached data does not delay the next check for a signal."""
    text = fast_run()
    steps = [int(step) for step in re.findall(r"  step (\d+)/80", text)]
    assert steps == [1, 3, 7, 15, 31, 63, 80], (
        f"the number of steps from line to line must double while they are fast, and no more. "
        f"Lines of steps {steps}:\n{text}")


def test_the_header_names_no_parts_if_there_is_one():
    header = fast_run().splitlines()[0]
    assert "parts" not in header, f"a step has one part, but the first line says:\n{header}"


# ---- synthetic_ddp --model ----
@functools.cache
def measured():
    """Return what synthetic_ddp --model prints on 2 ranks, and the gradients' sums of each step.

    Five warm-up steps, one with exchange of gradients and one without. With exchange, rank 0 takes
    2 seconds and rank 1 takes 4; without, both take 3.
    """
    with tempfile.TemporaryDirectory() as folder:
        def setup(module, rank):
            redirect("stdout", f"{folder}/{rank}.txt")
            sums = []
            seconds = [100, 100, 2, 2, 2, 2 + 2 * rank, 3]

            def before_step(optimizer):
                parameter = optimizer.param_groups[0]["params"][0]
                sums.append(parameter.grad.sum().item())

            watch(torch.optim.SGD, "step", before_step)
            module.time = argparse.Namespace(
                perf_counter=lambda: sum(seconds[:len(sums)]), sleep=time.sleep)
            return sums

        ranks = train("synthetic_ddp", "--model", "squeezenet1_1", "--image-size", 64,
                      "--batch-size", 2, "--steps", 1, nproc=2, setup=setup)
        return Path(f"{folder}/0.txt").read_text(), [sums for sums, _, _ in ranks]


def test_measured_steps_exchange_gradients_only_where_they_say_so():
    _, (one, other) = measured()
    assert one[-2] == other[-2], f"the step with exchange has other gradients on rank 1: {one[-2]}"
    assert one[-1] != other[-1], "the step without exchange has exchanged its gradients"


@pytest.mark.parametrize("promise, expected", [
    ("4 images in the 4 seconds of the slowest rank", r"^1\.0 images/s  "),
    ("the time of a step", r"  step 4000\.0 ms, without exchange 3000\.0 ms  "),
    ("the part of it that the exchange takes", r"  communication overhead 25\.0 %  "),
    ("1.2 million weights of 4 bytes", r"  gradients 4\.9 MB  "),
    ("hundreds of MB, or a few thousands", r"  peak memory of rank 0 (\d,)?\d\d\d MB$"),
])
def test_measured_numbers(promise, expected):
    text, _ = measured()
    assert re.search(expected, text, re.MULTILINE), (
        f"synthetic_ddp --model: {promise} must be printed as {expected!r}. Printed:\n{text}")

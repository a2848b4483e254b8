"""What is printed is true: each number is computed a second time, from the model's outputs.

5 epochs of 5 steps; in the large scripts, shares of 16 and 15 samples in two parts. A clock that
the test owns makes a step take 2 seconds on rank 0 and 3 on rank 1. Runs of the large scripts are
resumed in the second epoch.
"""

import itertools
import os
import re
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from forked import signal_after, train_forked, train_to_end, train_until, watch
from recorder import record_small_model, use_small_model
from scripts import ROOT, SCRIPTS, STEP_SCRIPTS
from torch.nn.modules.module import register_module_forward_pre_hook

SMOOTHING = {"cifar10_ddp": 0.1, "fashionmnist_ddp": 0.1}  # of labels, in training
HEADERS = {
    "cpu_ddp": ("world size 2  global batch 32 (2 x 16) of 164  learning rate 0.1 | epochs 0 to 5 "
                "| without --checkpoint, nothing is saved"),
    "mnist_dp": "GPUs none  threads 1  batch 32 of 164",
    "cifar10_ddp": ("world size 2 on cpu  threads 1  batch 31 (2 x 15.5) of 164  10 classes  "
                    "steps {} to 25, resumed"),
    "fashionmnist_ddp": ("world size 2 on cpu  threads 1  batch 31 (2 x 15.5) of 164  "
                         "steps {} to 25, resumed"),
    "synthetic_ddp": ("world size 2 on cpu  global batch 32 (2 x 16) of 164  learning rate 0.1 | "
                      "epochs 0 to 5 | without --checkpoint, nothing is saved"),
}


def with_clock(module, rank):
    """Record the training of a small model by a clock that counts steps, on two machines.

    Where images are read one by one, the first second of each step passes when it reads.
    """
    os.environ["LOCAL_RANK"] = "0"
    recorder = record_small_model(module, rank)
    reads = []  # numbers of steps before these
    time.perf_counter = (
        lambda: (2 + rank) * len(recorder.steps) + (len(recorder.steps) in reads))
    if hasattr(module, "SeededData"):
        watch(module.SeededData, "__getitem__",
              lambda data, key: key[1] >= 0 and reads.append(len(recorder.steps)))
    return recorder


def with_slow_start(module, rank):
    recorder = with_clock(module, rank)
    clock = time.perf_counter
    time.perf_counter = lambda: clock() + (6 if recorder.steps else 0)
    return recorder


def flags_of(script):
    return [SCRIPTS[script].data_flag, 164, "--epochs", 5, "--seed", 3, "--lr", 0.1,
            *SCRIPTS[script].no_children]


def means(script, parts, training=True):
    """Return the mean loss and the accuracy of the model's outputs as they are to be printed."""
    outputs = torch.cat([part.outputs for part in parts]).double()
    targets = torch.cat([part.batch[1] for part in parts])
    if script == "cpu_ddp":
        return f"loss {((outputs - targets) ** 2).mean():.4f}"
    smoothing = SMOOTHING.get(script, 0) if training else 0
    loss = torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=smoothing)
    return f"loss {loss:.4f}  accuracy {(outputs.argmax(1) == targets).double().mean():.4f}"


def parts_of(recorders, first, last):
    """Return the parts of the recorded steps from first to last, without last."""
    return [part for recorder in recorders for step in recorder.steps[first:last] for part in step]


def means_of_test_set(script, recorders, number):
    parts = [part for recorder in recorders for part in recorder.evaluations[number]]
    return f"test {means(script, parts, training=False)}"


def assert_lines(script, text, expected):
    """Fail unless each line has the words expected, with their numbers up to rounding.

    The expected line has two spaces where the line may have more words.
    """
    number = r"\d[\d,]*\.?\d*"
    for line, right in itertools.zip_longest(text.splitlines(), expected, fillvalue="no line"):
        words = ".*?".join(map(re.escape, re.sub(number, "N", right).split("  ")))
        found = re.search(words.replace("N", f"({number})"), line)
        assert found, f"{script} prints\n{line}\n but not\n{right}\nAll it prints:\n{text}"
        values, right_values = (
            [float(value.replace(",", "")) for value in numbers]
            for numbers in (found.groups(), re.findall(number, right)))
        assert values == pytest.approx(right_values, abs=1.01e-4), (
            f"{script} prints numbers that are not true:\n{line}\nTrue:\n{right}")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_each_line_of_a_resumed_run(script, tmp_path):
    """--log-every 4 are two steps of rank 0, and --save-every 0.1 are three.

    A log line has the mean loss of rank 0's samples in this epoch, and the speed after the first
    step, which takes 6 seconds longer. At the end of an epoch, means are those of all ranks.
    """
    path = tmp_path / "run.pt"
    flags = [*flags_of(script), "--batch-size", 8, "--global-batch", 31, "--log-every", 4,
             "--save-every", 0.1, "--checkpoint", path]
    resumed = train_until(script, *flags, nproc=2, after=7, setup=with_clock)
    ranks, _, text = train_to_end(script, *flags, nproc=2, setup=with_slow_start)
    lines = [HEADERS[script].format(resumed)]
    saved = resumed - 2  # the first step takes as long as three
    for step in range(resumed + 1, 26):
        epoch = (step + 4) // 5
        steps = max(0, 5 * epoch - 5 - resumed), step - resumed  # of this epoch, since the resume
        if step > resumed + 1 and (step - resumed) % 2 == 1:
            wait = "wait 50 %  " if script == "cifar10_ddp" else ""
            lines.append(f"epoch {epoch}/5  step {step}/25  "
                         f"{means(script, parts_of(ranks[:1], *steps)).split('  ')[0]}  "
                         f"16 images/s  {wait}"
                         f"{timedelta(seconds=2 * (25 - step))} left")
        if step == saved + 3 or step % 5 == 0:
            saved = step
            lines.append(f"saved step {step} in {path}")
        if step % 5 == 0:
            lines.append(f"epoch {epoch}/5  {means(script, parts_of(ranks, *steps))}")
            lines.append(f"epoch {epoch}/5  {means_of_test_set(script, ranks, epoch - 2)}  "
                         f"{2 * (steps[1] - steps[0]) + (6 if epoch == 2 else 0)}.0 s")
    assert_lines(script, text, lines)


@pytest.mark.parametrize("script, nproc, speed", [
    ("mnist_dp", 1, "14 images/s"),  # 164 in 6 steps
    ("cpu_ddp", 2, ""),
    ("synthetic_ddp", 2, "16 samples/s")])
def test_each_line_of_a_script_that_prints_one_an_epoch(script, nproc, speed):
    """Speed: in steps of 2 seconds."""
    ranks, _, text = train_to_end(script, *flags_of(script), "--batch-size", 32 // nproc,
                                     nproc=nproc, setup=with_clock)
    steps = len(ranks[0].steps) // 5
    lines = [HEADERS[script]]
    for epoch in range(5):
        parts = parts_of(ranks, epoch * steps, (epoch + 1) * steps)
        of_test_set = ""
        if SCRIPTS[script].has_test_set:
            of_test_set = means_of_test_set(script, ranks, epoch)
        lines.append(f"epoch {epoch + 1}/5  {means(script, parts)}  {of_test_set}  {speed}")
    assert_lines(script, text, lines)


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_are_printed_at_once(script, tmp_path):
    """To a file, as in Slurm: what a process that is killed has not written there is lost."""
    def setup(module, rank):
        use_small_model(module)
        sys.stdout = open(tmp_path / "log", "w")
        signal_after(6, signal.SIGKILL)

    end = train_forked(script, SCRIPTS[script].data_flag, 8, "--batch-size", 8, "--epochs", 8,
                       *SCRIPTS[script].no_children, setup=setup)
    lines = (tmp_path / "log").read_text()
    assert "epoch 5/8" in lines, (
        f"{script}, killed in its sixth epoch, has written\n{lines}\nand ended with {end.statuses}")


def test_a_line_that_the_terminal_cannot_show_does_not_end_the_run(tmp_path):
    def setup(module, rank):
        sys.stdout = open(tmp_path / "log", "w", encoding="ascii")

    path = tmp_path / "\N{GREEK SMALL LETTER ALPHA}.pt"
    train_to_end("fashionmnist_ddp", "--fake-data", 64, "--epochs", 1, "--checkpoint", path,
                 setup=setup)
    assert path.exists(), "its name cannot be printed, and nothing is saved"


def test_measure_exchange():
    """Five warm-up steps, three with exchange of gradients and three without, on 2 ranks.

    Of the slowest rank, they take 4, 9, 5 seconds and 3, 2, 7: medians are 5 and 3.
    4 images in 5 seconds; 1.2 million weights of 4 bytes.
    """
    def setup(module, rank):
        gradients, events, inputs, types = [], [], [], []
        steps = [2 + 2 * rank, 3, 9, 1 + rank, 5 - rank, 7 - 2 * rank]
        seconds = [100, 100, 2, 2, 2, *steps]

        def clock():
            events.append("clock")
            return float(sum(seconds[:len(gradients)]))

        watch(torch.optim.SGD, "step", lambda optimizer: gradients.append(
            optimizer.param_groups[0]["params"][0].grad.sum().item()))
        watch(dist, "barrier", lambda *_: events.append("barrier"))
        watch(torch.nn.functional, "cross_entropy", lambda logits, *_: types.append(logits.dtype))
        register_module_forward_pre_hook(lambda _, images: inputs.append(images[0].shape))
        time.perf_counter = clock
        return gradients, events, inputs, types

    ranks, _, text = train_to_end(
        ROOT / "tests/measure_exchange.py", "--model", "squeezenet1_1", "--image-size", 64,
        "--batch-size", 2, "--steps", 3, "--bf16", nproc=2, setup=setup)
    (one, events, (shape, *_), types), (other, *_) = ranks
    exchanged = [before == after for before, after in zip(one, other)][5:]
    assert exchanged == 3 * [True, False], (
        f"of three pairs of steps, the first must exchange its gradients alone: {exchanged}")
    assert events[:33] == 11 * ["barrier", "clock", "clock"], (
        f"ranks must wait for each other before a step is timed, not {events}")
    assert (shape, *set(types)) == ((2, 3, 64, 64), torch.bfloat16), (
        f"--image-size 64 --batch-size 2 --bf16 measures images {shape} in {set(types)}")
    expected = (r"0\.8 images/s  step 5000\.0 ms, without exchange 3000\.0 ms  communication "
                r"overhead 40\.0 %  gradients 4\.9 MB")
    line = text.splitlines()[-1]
    assert re.fullmatch(expected, line), f"the line is not as {expected}, but:\n{line}"

"""What is printed is true: speeds, waits, rates and times by a clock that counts steps; means.

The losses of the other scripts are computed a second time in test_equal.py.
"""

import re
import sys
import time

import pytest
import torch
from harness import BEST, TRAIN, VAL, kill_at, own_flags, run, run_to_end, text_of
from scripts import SCRIPTS

CIFAR = "cifar10_ddp"
FLAGS = ("--global-batch", 8, "--epochs", 2, "--lr", 0.1)  # 7 steps in an epoch


def with_clock(module, rank, seen):
    """Let a step take 2 seconds. On rank 1, it waits for its samples for half of them."""
    def clock():
        steps = [event[0] for event in seen if event[0] in ("step", "wait")]
        return 2.0 * steps.count("step") + (steps[-1:] == ["wait"])

    def waited(batches):
        for batch in batches:
            if rank == 1 and torch.is_grad_enabled():  # no evaluation
                seen.append(("wait",))
            yield batch

    time.monotonic = time.perf_counter = clock
    if hasattr(module, "OnDevice"):
        plain = module.OnDevice
        module.OnDevice = lambda batches, device: plain(waited(batches), device)


@pytest.mark.parametrize("script", BEST)
def test_the_results_of_an_epoch_and_a_line_every_ten_seconds(script):
    """Rate at its start, speed, and the wait of the slowest process. 8 samples take 2 seconds."""
    text = run_to_end(script, *FLAGS, change=with_clock)[0].text
    found = re.findall(r"^epoch \d/2 .*  (lr .*)", text, re.MULTILINE)
    wait = "" if script == "fashionmnist_ddp" else "  wait 50%"
    expected = [f"lr {rate}  seconds 14.0  samples/s 4{wait}" for rate in (0.1, 0.05)]
    assert found == expected, f"{script} prints {found}, not {expected}\n{text}"
    found = re.findall(r"^  step (\d+) of this epoch  loss \d", text, re.MULTILINE)
    expected = [] if script == CIFAR else ["6", "6"]
    assert found == expected, f"{script}: lines after the steps {found}, not {expected}\n{text}"


def test_the_line_of_progress():
    """From the end of an epoch's first step on: every 4 seconds, with speed, wait and time left."""
    text = run_to_end(CIFAR, *FLAGS, "--log-every", 4, change=with_clock)[0].text
    found = re.findall(r"step (\d+)/14 .* (\d+) samples/s  wait (\d+)%  (\S+) left", text)
    expected = [(str(step), "4", "50", f"0:00:{2 * (14 - step):02}")
                for step in (3, 5, 7, 10, 12, 14)]
    assert found == expected, f"{CIFAR} prints {found}, not {expected}\n{text}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_are_printed_at_once(script, tmp_path):
    """To a file, as in Slurm: what a process that is killed has not written there is lost."""
    def change(module, rank, seen):
        sys.stdout = open(tmp_path / "log", "w")
        kill_at(torch.optim.Optimizer, "zero_grad", 6)

    flags = ("--fake-data", 32) if script == "mnist_dp" else own_flags(script)
    (rank,) = run(script, *flags, "--global-batch", 8 if script == "mnist_dp" else 12, nproc=1,
                  problem="own", change=change)
    lines = (tmp_path / "log").read_text()
    assert re.search(r"^epoch 1/\d  loss ", lines, re.MULTILINE), (
        f"{script}, killed in its second epoch, has written {lines!r}\n{rank.text}")


def test_mnist_dp_uses_each_sample_once_and_prints_means():
    """In steps of 16, 16, 16 and 8."""
    def change(module, rank, seen):
        def loss_and_counts(*arguments):
            loss, correct = plain(*arguments)
            seen[-1] = (*seen[-1], loss.item(), correct.item())
            return loss, correct

        plain, module.loss_and_counts = module.loss_and_counts, loss_and_counts
        module.CNN = module.build_model

    ranks = run_to_end("mnist_dp", "--fake-data", "--global-batch", 16, "--epochs", 2, nproc=1, change=change)
    seen, expected = ranks[0].seen, {}
    for kind, first, count in (("train", 0, TRAIN), ("val", TRAIN, VAL)):
        batches = [event for event in seen if event[0] == kind]
        batches = batches[len(batches) // 2:]  # of the second epoch
        numbers = sorted(number for batch in batches for number in batch[1])
        assert numbers == [*range(first, first + count)], f"mnist_dp uses the samples {numbers}"
        prefix = "val_" if kind == "val" else ""
        expected[f"{prefix}loss"] = sum(len(batch[1]) * batch[3] for batch in batches) / count
        expected[f"{prefix}accuracy"] = sum(batch[4] for batch in batches) / count
    line = ranks[0].text.splitlines()[-1]
    found = {name: float(re.search(rf"\b{name} (\S+)", line)[1]) for name in expected}
    assert found == pytest.approx(expected, abs=1e-4), f"{expected}, but:\n{text_of(ranks)}"

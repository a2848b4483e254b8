"""What is printed is true: speeds, waits and times by a clock that counts steps; means of mnist_dp.

The losses of the other scripts are computed a second time in test_equal.py.
"""

import re
import sys
import time

import pytest
import torch
from forked import at_step, kill_after, train_and_kill, train_to_end, watch
from recorder import FewPixels, change_sets, use_small_model, with_numbers
from scripts import BEST_SCRIPTS, SCRIPTS, STEP_SCRIPTS, load_script


def flags_of(script, *more):
    """Return flags for 3 epochs of 6 steps of 12 samples."""
    samples = 96 if SCRIPTS[script].data_flag == "--samples" and SCRIPTS[script].best else 72
    return [SCRIPTS[script].data_flag, samples, "--global-batch", 12, "--epochs", 3,
            *SCRIPTS[script].no_children, *more]


def with_clock(module, rank):
    """Let a step take 2 seconds. The first of them is spent with waiting for its images."""
    steps, reads = [], set()

    def clock():
        return 2.0 * len(steps) + (len(steps) in reads)

    use_small_model(module)
    at_step(steps.append)
    time.monotonic = time.perf_counter = clock
    def see(batches, part):
        if len(batches.data) == 72:  # the training set
            reads.add(len(steps))

    if hasattr(module, "SeededBatches"):
        watch(module.SeededBatches, "__getitem__", see)


@pytest.mark.parametrize("script", BEST_SCRIPTS)
def test_the_speed_of_an_epoch_and_a_line_every_ten_seconds(script):
    """Two processes."""
    text = train_to_end(script, *flags_of(script), nproc=2, setup=with_clock).text
    found = re.findall(r"seconds ([\d.]+)  samples/s ([\d,]+)", text)
    assert found == 3 * [("12.0", "6")], (
        f"{script}: 6 steps of 12 samples take 12 s, and it prints {found}\n{text}")
    found = re.findall(r"^  step (\d+) of this epoch  loss \d", text, re.MULTILINE)
    expected = [] if script in STEP_SCRIPTS else ["6", "6", "6"]
    assert found == expected, f"{script}: lines after the steps {found}, not {expected}\n{text}"


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_the_line_of_progress(script):
    """From an epoch's first step on: every 4 seconds, with speed, wait and time left."""
    text = train_to_end(script, *flags_of(script, "--log-every", 4), setup=with_clock).text
    found = re.findall(r"step (\d+)/18 .* (\d+) samples/s  wait (\d+)%  (\S+) left", text)
    expected = [(str(step), "6", "50", f"0:00:{2 * (18 - step):02}")
                for step in (3, 5, 9, 11, 15, 17)]
    assert found == expected, f"{script} prints {found}, not {expected}\n{text}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_are_printed_at_once(script, tmp_path):
    """To a file, as in Slurm: what a process that is killed has not written there is lost."""
    def setup(module, rank):
        use_small_model(module)
        sys.stdout = open(tmp_path / "log", "w")
        kill_after(5)

    train_and_kill(script, SCRIPTS[script].data_flag, 32, "--global-batch", 8, "--epochs", 2,
                   *SCRIPTS[script].no_children, setup=setup)
    lines = (tmp_path / "log").read_text()
    assert "epoch 1/2  loss " in lines, f"{script}, killed in its second epoch, has written {lines}"


def test_mnist_dp_uses_each_image_once_and_prints_means():
    """40 images in steps of 16, 16 and 8, and 10 to validate."""
    def setup(module, rank):
        def see(args, model, images, labels):
            batches[model.training].append((images.clone(), labels))
            seen["model"] = model

        batches, seen = {True: [], False: []}, {}
        change_sets(module, with_numbers)
        module.CNN = lambda bf16: FewPixels()
        watch(module, "loss_and_counts", see)
        return batches, seen

    end = train_to_end("mnist_dp", "--fake-data", 40, "--global-batch", 16, "--epochs", 2,
                       setup=setup)
    batches, seen = end.results[0]
    numbers = {training: sorted(int(image[0, 0, 0]) for images, _ in found for image in images)
               for training, found in batches.items()}
    twice = {True: sorted([*range(40)] * 2), False: sorted([*range(10)] * 2)}
    assert numbers == twice, f"mnist_dp must use each image once an epoch, and uses {numbers}"
    module = load_script("mnist_dp")
    images, labels = (torch.cat(tensors) for tensors in zip(*batches[False][-1:]))
    with torch.no_grad():
        loss, counts = module.loss_and_counts(None, seen["model"], images, labels)
    expected = f"val_loss {loss:.4f}  val_accuracy {counts / 10:.4f}"
    assert expected in end.text, f"mnist_dp: no {expected!r} in\n{end.text}"

"""Write small folders of images, and train on them in forked processes."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from functions import no_setup, train, watch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torchvision.transforms.v2.functional import to_pil_image

CLASSES = ["cat", "dog"]
TINY = ("--model", "squeezenet1_1", "--image-size", 32, "--lr", 0.01, "--log-every", 0)


def write_images(folder, train=12, val=5):
    """Write so many images of each part, of the classes in turn, and return the folder.

    The red of an image says which part it is of, and the green which class: see part_and_label.
    """
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("val", val)):
        for number in range(count):
            label = number % len(CLASSES)
            image = torch.randint(40, (3, 40, 40), generator=generator)
            if part == "val":
                image[0] += 200
            image[1] += 200 * label
            image[2] += 15 * number
            suffix = "png" if number % 4 == 0 else "jpg"
            path = folder / part / CLASSES[label] / f"{number}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            to_pil_image(image.to(torch.uint8)).save(path)
    return folder


def part_and_label(image):
    """Return of which part and class an image (3, H, W) of write_images is."""
    red, green, _ = image.float().mean((1, 2)).tolist()
    return "val" if red > 120 else "train", int(green > 120)


class Run(NamedTuple):
    """The end of a run."""
    statuses: list  # of each rank, as sys.exit gets them; [] if it did not come to that
    text: str  # of all processes
    loaders: list  # pairs (rank, pid): each loader process that was started
    left: list  # the pids of those that were left 20 s after the end


def run(script, folder, *flags, nproc=1, prepare=no_setup):
    """Run a script in forked processes, after prepare(module, rank). Write two files to folder."""
    log, starts = folder / "log", folder / "starts"
    starts.touch()

    def setup(module, rank):
        sys.modules["script"] = module  # pickle finds no module with a dot in its name
        module.read_image.__module__ = "script"
        print_to(log)

        def note_start(worker):
            with open(starts, "a") as file:
                print(rank, os.getpid(), file=file)

        watch(module, "ignore_signals", note_start)
        prepare(module, rank)

    statuses, error = [], ""
    try:
        statuses = [code for _, code, _ in train(script, *TINY, *flags, nproc=nproc, setup=setup)]
    except (AssertionError, ProcessExitedException, ProcessRaisedException) as failure:
        error = str(failure)
    loaders = [tuple(map(int, line.split())) for line in starts.read_text().splitlines()]
    load = os.getloadavg()[0] / os.cpu_count()  # where others use the cores, it takes longer
    end = time.monotonic() + 20 * max(1, load)
    while living(loaders) and time.monotonic() < end:
        time.sleep(0.1)
    left = living(loaders)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Run(statuses, f"{log.read_text()}{error}\n{statuses}\n", loaders, left)


def print_to(path):
    """Append what this process and its children print to the file at path."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w")  # pytest has replaced them
    sys.stderr = open(2, "w")


def living(loaders):
    """Return the pids of the loader processes that have not ended. A zombie has."""
    found = []
    for _, pid in loaders:
        with contextlib.suppress(OSError):  # it is gone
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found.append(pid)
    return found

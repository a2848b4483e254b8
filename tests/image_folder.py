"""Write small folders of images, train on them in forked processes, and see who reads which."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import functions
import torch
from functions import train, watch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils.data import get_worker_info
from torchvision.transforms.v2.functional import to_pil_image

CLASSES = ["cat", "dog"]
TINY = ("--model", "squeezenet1_1", "--image-size", 32, "--lr", 0.01, "--log-every", 0)


def write_images(folder, train=12, val=5, size=40):
    """Write so many images of each part, of the classes in turn, and return the folder.

    The red of an image says which part it is of, and the green which class: see part_and_label.
    """
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", train), ("val", val)):
        for number in range(count):
            label = number % len(CLASSES)
            image = torch.randint(40, (3, size, size), generator=generator)
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
    part = "val" if red > 120 else "train"
    label = 1 if green > 120 else 0
    return part, label


class Read(NamedTuple):
    """A process has read an image."""
    rank: int
    loader: int  # the loader process that has read it, or 0
    epoch: int
    train_set: int
    index: int


class Run(NamedTuple):
    """The end of a run."""
    statuses: list  # of each rank, as sys.exit gets them; [] if it did not come to that
    text: str  # of all processes
    reads: list
    left: list  # the loader processes that were left 20 s after the end


def nothing(*_):
    """Do nothing: for prepare and at_step."""


def run(script, folder, *flags, nproc=1, prepare=nothing, at_step=nothing):
    """Run a script in forked processes, after prepare(module, rank). Write two files to folder.

    at_step(step) is called after each step.
    """
    log, reads = folder / "log", folder / "reads"
    reads.touch()

    def setup(module, rank):
        sys.modules["script"] = module  # pickle finds no module with a dot in its name
        module.read_image.__module__ = "script"
        print_to(log)

        def write_read(data, key):
            with open(reads, "a") as file:
                print(rank, os.getpid() if get_worker_info() else 0, *map(int, key[1:]), file=file)

        watch(module.SeededData, "__getitem__", write_read)
        functions.at_step(at_step)
        prepare(module, rank)

    statuses, error = [], ""
    try:
        statuses = [code for _, code, _ in train(script, *TINY, *flags, nproc=nproc, setup=setup)]
    except (AssertionError, ProcessExitedException, ProcessRaisedException) as failure:
        error = str(failure)
    found = [Read(*map(int, line.split())) for line in reads.read_text().splitlines()]
    loaders = {read.loader for read in found} - {0}
    load = os.getloadavg()[0] / os.cpu_count()  # where others use the cores, it takes longer
    end = time.monotonic() + 20 * max(1, load)
    while living(loaders) and time.monotonic() < end:
        time.sleep(0.1)
    left = living(loaders)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Run(statuses, f"{log.read_text()}{error}\n{statuses}\n", found, left)


def print_to(path):
    """Append what this process and its children print to the file at path."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w")  # pytest has replaced them
    sys.stderr = open(2, "w")


def living(pids):
    """Return those of the processes that have not ended."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":  # a zombie has ended
            found.append(pid)
    return found

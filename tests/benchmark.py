"""Measure the speed of two scripts beside the loops of their tutorials: README's table.

    python tests/benchmark.py

A script, and the data loading and loop of the tutorial that it follows (in float32), train the same
model on generated images, with the same batch size, threads, and processes: one per GPU, or two on
CPUs. They run in turn. The ratio is the median of the ratios of each round, so that what else the
machine does affects it little. Speeds are without start, first step, evaluation and saving.

It is a tool, and no test: it is run by hand, and nothing depends on its numbers but pages.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launchers import free_port
from scripts import ROOT, load_script
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

GPUS = torch.cuda.device_count()
NPROC = GPUS or 2
CORES = len(os.sched_getaffinity(0))
BATCH_SIZES = {"cifar10_ddp": 128, "fashionmnist_ddp": 64}
STEPS = {"cifar10_ddp": 200 if GPUS else 4, "fashionmnist_ddp": 600 if GPUS else 100}
LOADER_WORKERS = {"cifar10_ddp": 8, "fashionmnist_ddp": 4}  # of the tutorials


# --- the tutorial's loop, in processes of torchrun ---
def tutorial_dataset(script, inputs, targets):
    """Return the tutorial's data set, with generated images in place of those in its files."""
    if script == "cifar10_ddp":
        dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)
        dataset.data = inputs.permute(0, 2, 3, 1).numpy()
        dataset.targets = targets.tolist()
        dataset.transform = transforms.Compose([
            transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))])
    else:
        dataset = datasets.FashionMNIST.__new__(datasets.FashionMNIST)
        dataset.data = inputs.squeeze(1)
        dataset.targets = targets
        dataset.transform = transforms.ToTensor()
    dataset.target_transform = None
    return dataset


def train_as_the_tutorial(script, flags):
    """Train for an epoch as the tutorial does, and print the speed since the first step."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if GPUS else torch.device("cpu")
    torch.set_num_threads(max(1, CORES // NPROC))
    module = load_script(script)
    args = module.parse_args(flags)
    data, _ = module.load_data(args)
    dataset = tutorial_dataset(script, *(data.tensors if script == "cifar10_ddp" else data))
    model = module.build_model(args).to(device, memory_format=torch.contiguous_format)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if script == "cifar10_ddp":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    dist.init_process_group("nccl" if GPUS else "gloo")
    sampler = DistributedSampler(dataset, NPROC, rank)
    model = DistributedDataParallel(model, [rank] if GPUS else None)
    steps = 0
    for x, y in DataLoader(dataset, BATCH_SIZES[script], sampler=sampler, pin_memory=bool(GPUS),
                           num_workers=LOADER_WORKERS[script]):
        x = x.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        if script == "fashionmnist_ddp":
            loss.item()
            (output.argmax(1) == y).sum().item()
        steps += 1
        if steps == 1:
            start = time.perf_counter()
    if GPUS:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if rank == 0:
        print(f"samples/s {(steps - 1) * BATCH_SIZES[script] * NPROC / seconds:,.0f}", flush=True)
    os._exit(0)  # at once: without waiting for the tutorial's loader processes


# --- the measurement ---
def speed(program):
    """Run a program (its path and arguments) to its end, and return its last samples/s.

    Of cifar10_ddp, those of a line within an epoch, which are without the first step.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-addr=localhost",
                f"--master-port={free_port()}", f"--nproc-per-node={NPROC}"]
    result = subprocess.run([*torchrun, *program], env={**os.environ, "PYTHONWARNINGS": "ignore"},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"error: {program} has failed:\n{result.stdout}")
    within = re.findall(r"([\d,]+) samples/s  wait", result.stdout)
    found = within or re.findall(r"samples/s ([\d,]+)", result.stdout)
    return float(found[-1].replace(",", ""))


def show(values, digits):
    """Return the median and the range of values as text."""
    median = statistics.median(values)
    return f"{median:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=[*STEPS])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program")
    args = parser.parse_args()
    print(f"{CORES} cores, {GPUS} GPUs | torch {torch.__version__} | {args.rounds} rounds, median "
          "(least to most)\n\n| script, processes x batch size | samples/s | times tutorial |\n"
          "|---|---|---|", flush=True)
    for script in args.only:
        global_batch = BATCH_SIZES[script] * NPROC
        flags = ["--fake-data", str(STEPS[script] * global_batch), "--global-batch",
                 str(global_batch)]
        more = ["--epochs", "1", "--log-every", "0.1"]
        if script == "fashionmnist_ddp":
            more = ["--epochs", "2"]
        speeds = [(speed([ROOT / script / "train.py", *flags, *more]),
                   speed([__file__, "--tutorial", script, *flags])) for _ in range(args.rounds)]
        print(f"| {script}, {NPROC} x {BATCH_SIZES[script]} | "
              f"{show([ours for ours, _ in speeds], 0)} | "
              f"{show([ours / theirs for ours, theirs in speeds], 2)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tutorial"]:
        train_as_the_tutorial(sys.argv[2], sys.argv[3:])
    else:
        main()

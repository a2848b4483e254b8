"""Measure the speed of two scripts beside the loops of their tutorials (README's table), and more.

    python tests/benchmark.py
    python tests/benchmark.py --only mlp loader     # what a step, and an image, costs a CPU

A script, and the data loading and loop of the tutorial that it follows (in float32), train the same
model on generated images, with the same batch size, threads, and processes: one per GPU, or two on
CPUs. They run in turn. The ratio is the median of the ratios of each round, so that what else the
machine does affects it little. Speeds are without start, first step, evaluation and saving.

mlp is a step of a small model (20, 64, 3; batch 64; one process on the CPU): a copy of
fashionmnist_ddp beside a plain loop that does the same work. loader is the CPU time that a loader
process of cifar10_ddp takes for an image.

It is a tool, and no test: it is run by hand, and nothing depends on its numbers but pages.
"""
import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from copies import make_copy
from launchers import free_port
from scripts import ROOT, load_script
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
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


# --- a step of a small model, and an image of the loader ---
MLP = """
def load_data(args):
    inputs = torch.randn(32000, 20)
    labels = inputs[:, :3].argmax(1)
    return (inputs, labels), (inputs[:640], labels[:640])


def build_model(args):
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))


def scale(inputs, labels):
    return inputs, labels


def augment(args, inputs, labels):
    return inputs, labels


def loss_and_counts(args, model, inputs, labels):
    logits = model(inputs)
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()
"""


def plain_loop(epochs=3):
    """Train the small model of MLP in a loop of one's own. Return the us of a step."""
    torch.manual_seed(0)
    inputs = torch.randn(32000, 20)
    labels = inputs[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    for _ in range(epochs):
        start = time.perf_counter()
        loss_sum = correct_sum = 0
        for batch in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            logits = model(inputs[batch])
            loss = F.cross_entropy(logits, labels[batch])
            loss.backward()
            optimizer.step()
            loss_sum += len(batch) * loss.detach()
            correct_sum += (logits.argmax(1) == labels[batch]).sum()
        float(loss_sum)
        float(correct_sum)
        microseconds = 1e6 * (time.perf_counter() - start) / (len(inputs) / 64)
    return microseconds


def measure_mlp(rounds):
    """Print the us of a step in a copy of fashionmnist_ddp and in the plain loop, in turn."""
    copied, plain = [], []
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        copy = make_copy("fashionmnist_ddp", Path(folder) / "train.py", (None, MLP))
        command = [sys.executable, copy, "--fake-data", "--global-batch", "64", "--epochs", "3"]
        for _ in range(rounds):
            text = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
            speed = re.findall(r"samples/s ([\d,]+)", text.stdout)[-1]
            copied.append(64e6 / float(speed.replace(",", "")))
            text = subprocess.run([sys.executable, __file__, "--plain"], env=env,
                                  check=True, capture_output=True, text=True)
            plain.append(float(text.stdout))
    ratios = [one / other for one, other in zip(copied, plain)]
    print(f"| mlp, 1 x 64 | {show(copied, 0)} us a step | "
          f"{show(ratios, 2)} times {show(plain, 0)} us of the plain loop |", flush=True)


def measure_loader(rounds):
    """Print the CPU time of a loader process of cifar10_ddp for an image of CIFAR-10."""
    module = load_script("cifar10_ddp")
    images = torch.zeros(50000, 3, 32, 32, dtype=torch.uint8)
    data = TensorDataset(images, torch.zeros(50000, dtype=torch.long))
    args = module.parse_args(["--fake-data", "--workers", "1", "--global-batch", "128"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def seconds(count):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        batches, _ = module.build_loaders(args, 1, data, [], 0)
        for _ in range(count):
            next(batches)
        del batches
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    times = [1e6 * (seconds(420) - seconds(20)) / (400 * 128) for _ in range(rounds)]
    print(f"| loader of cifar10_ddp | {show(times, 1)} us of CPU an image | |", flush=True)


def show(values, digits):
    """Return the median and the range of values as text."""
    median = statistics.median(values)
    return f"{median:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    choices = [*STEPS, "mlp", "loader"]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each program")
    args = parser.parse_args()
    print(f"{CORES} cores, {GPUS} GPUs | torch {torch.__version__} | {args.rounds} rounds, median "
          "(least to most)\n\n| script, processes x batch size | samples/s | times tutorial |\n"
          "|---|---|---|", flush=True)
    for script in [name for name in args.only if name in STEPS]:
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
    if "mlp" in args.only:
        measure_mlp(args.rounds)
    if "loader" in args.only:
        measure_loader(args.rounds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tutorial"]:
        train_as_the_tutorial(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:] == ["--plain"]:
        print(plain_loop())
    else:
        main()

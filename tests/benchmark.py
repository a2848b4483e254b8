"""Measure the speed of scripts beside their tutorials' loops, and beside computation alone.

    python tests/benchmark.py
    python tests/benchmark.py --only mnist_dp --bf16      # on GPUs: some 2 minutes for each

Three programs train the same model on generated data, with the same batch size, processes, threads:
    script    train.py as it is;
    tutorial  the data loading and the loop of the tutorial that the script follows, in float32;
    compute   the steps of the script on one batch in memory, without input and exchange.
They run in turn. A ratio is the median of the ratios of each round, so that what else the machine
does affects it little. Speeds are without start, first step, evaluation and saving.

It is a tool, and no test: it is run by hand, and nothing depends on its numbers but pages.
"""
import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from launchers import free_port
from scripts import ROOT, load_script
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

BATCH_SIZES = {"mnist_dp": 128, "cifar10_ddp": 128, "fashionmnist_ddp": 64}
STEPS = {"mnist_dp": 60, "cifar10_ddp": 4, "fashionmnist_ddp": 100}  # of an epoch on a CPU
GPU_STEPS = {"mnist_dp": 300, "cifar10_ddp": 200, "fashionmnist_ddp": 600}
LOADER_WORKERS = {"mnist_dp": 0, "cifar10_ddp": 8, "fashionmnist_ddp": 4}  # of the tutorials
GPUS = torch.cuda.device_count()
CORES = len(os.sched_getaffinity(0))


# --- the other programs, each in a process of its own ---
def build_model(script, module, args, device, global_batch):
    """Return the script's model and optimizer."""
    if script == "cifar10_ddp":
        model = module.build_model(args, 10)
    elif script == "fashionmnist_ddp":
        model = module.build_model(args)
    else:
        model = module.CNN(args.bf16)
    model.to(device, memory_format=torch.channels_last)
    if script == "cifar10_ddp":
        return model, module.build_optimizer(args, model, global_batch)
    return model, torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)


def tutorial_dataset(script, inputs, targets):
    """Return the tutorial's data set, with generated images in place of those in its files."""
    # FashionMNIST differs from MNIST in its files alone
    kind = datasets.CIFAR10 if script == "cifar10_ddp" else datasets.MNIST
    dataset = kind.__new__(kind)
    dataset.data = inputs.squeeze(1)
    dataset.targets = targets
    steps = [transforms.ToTensor()]
    if script == "mnist_dp":
        steps.append(transforms.Normalize((0.1307,), (0.3081,)))
    elif script == "cifar10_ddp":
        dataset.data = inputs.permute(0, 2, 3, 1).numpy()
        dataset.targets = targets.tolist()
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), *steps,
                 transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))]
    dataset.transform = transforms.Compose(steps)
    dataset.target_transform = None
    return dataset


def tutorial_steps(script, model, data, args, rank, nproc, device):
    """Train for an epoch as the tutorial does; yield after every step."""
    model.to(memory_format=torch.contiguous_format)
    dataset = tutorial_dataset(script, *data)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if script == "cifar10_ddp":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sampler = None
    if script == "mnist_dp":
        model = nn.DataParallel(model)
    else:
        dist.init_process_group("nccl" if GPUS else "gloo")
        sampler = DistributedSampler(dataset, nproc, rank)
        model = DistributedDataParallel(model, [rank] if GPUS else None)
    for x, y in DataLoader(dataset, args.batch_size, shuffle=sampler is None, sampler=sampler,
                           num_workers=LOADER_WORKERS[script], pin_memory=bool(GPUS)):
        x = x.to(device, non_blocking=True)
        y = y.to(device, non_blocking=True)
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        optimizer.step()
        if script != "cifar10_ddp":
            loss.item()
        if script == "fashionmnist_ddp":
            (output.argmax(1) == y).sum().item()
        yield


def compute_steps(script, module, model, optimizer, data, args, device):
    """Make the script's steps on one batch in memory; yield after every step."""
    x, y = (tensor[:args.batch_size].to(device) for tensor in data[:2])
    while True:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            if script == "mnist_dp":  # which returns a sum
                loss = module.loss_and_correct(model, x, y)[0] / len(x)
            else:
                loss, _ = module.loss_and_counts(args, model, x, y)
        loss.backward()
        optimizer.step()
        yield


def run_program(name, script, flags):
    """Run a process of the tutorial's loop, or of compute, and print its speed after each step."""
    module = load_script(script)
    args = module.parse_args(flags)
    rank, nproc = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if GPUS else torch.device("cpu")
    if name == "tutorial":
        args.bf16 = False
        torch.set_num_threads(max(1, CORES // nproc))
    else:
        if GPUS:
            torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    model, optimizer = build_model(script, module, args, device, args.batch_size * nproc)
    data, _ = module.load_data(args)
    if script == "cifar10_ddp":
        data = data.tensors
    steps = compute_steps(script, module, model, optimizer, data, args, device)
    if name == "tutorial":
        steps = tutorial_steps(script, model, data, args, rank, nproc, device)
    count = len(data[0]) // (args.batch_size * nproc)
    next(steps)
    start = time.perf_counter()
    for _ in itertools.islice(steps, count - 1):
        pass
    if GPUS:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if rank == 0:
        print(f"{(count - 1) * args.batch_size * nproc / seconds:,.0f} images/s", flush=True)
    os._exit(0)  # at once: without waiting for the tutorial's loader processes


# --- the measurement ---
def speed(program, nproc):
    """Run a program (its path and arguments) to its end, and return its last images/s."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-addr=localhost",
                f"--master-port={free_port()}", f"--nproc-per-node={nproc}"]
    result = subprocess.run([*torchrun, *program], env={**os.environ, "PYTHONWARNINGS": "ignore"},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"error: {program} has failed:\n{result.stdout}")
    return float(re.findall(r"([\d,]+) images/s", result.stdout)[-1].replace(",", ""))


def measure(script, nproc, args):
    """Return for each program a list of its speeds, one for each round."""
    samples = (GPU_STEPS if GPUS else STEPS)[script] * BATCH_SIZES[script] * nproc
    flags = ["--fake-data", str(samples), "--batch-size", str(BATCH_SIZES[script])]
    flags += ["--epochs", "2" if script == "mnist_dp" else "1"]
    if args.bf16:
        flags.append("--bf16")
    log_flags = [] if script == "mnist_dp" else ["--log-every", "0.1"]
    programs = {"script": [ROOT / script / "train.py", *flags, *log_flags]}
    for name in ("tutorial", "compute"):
        programs[name] = [__file__, "--program", name, script, *flags]
    speeds = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            speeds[name].append(speed(program, nproc))
    return speeds


def show(values, digits):
    """Return the median and the range of values as text."""
    median = statistics.median(values)
    return f"{median:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=1 if GPUS else 5,
                        help="runs of each program")
    parser.add_argument("--nproc", type=int, default=GPUS or 2, help="processes")
    parser.add_argument("--bf16", action="store_true", help="in the scripts, and compute")
    args = parser.parse_args()
    print(f"{CORES} cores, {GPUS} GPUs | torch {torch.__version__} | {args.rounds} rounds, median "
          f"(least to most){' | bfloat16' if args.bf16 else ''}\n\n"
          "| script, processes x batch size | images/s | times tutorial | times compute |\n"
          "|---|---|---|---|", flush=True)
    for script in args.only:
        nproc = 1 if script == "mnist_dp" else args.nproc
        speeds = measure(script, nproc, args)
        cells = [f"{script}, {nproc} x {BATCH_SIZES[script]}", show(speeds["script"], 0)]
        for name in ("tutorial", "compute"):
            ratios = [one / other for one, other in zip(speeds["script"], speeds[name])]
            cells.append(show(ratios, 2))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        run_program(sys.argv[2], sys.argv[3], sys.argv[4:])
    main()

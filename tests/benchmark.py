"""Measure the speed of scripts beside their tutorials' loops, and beside computation alone.

    python tests/benchmark.py
    python tests/benchmark.py --only mnist_dp --bf16      # on GPUs: some 2 minutes for each
    python tests/benchmark.py --only mlp loader           # what a step, and an image, costs a CPU

Three programs train the same model on generated data, with the same batch size, processes, threads:
    script    train.py as it is;
    tutorial  the data loading and the loop of the tutorial that the script follows, in float32;
    compute   the steps of the script on one batch in memory, without input and exchange.
They run in turn. A ratio is the median of the ratios of each round, so that what else the machine
does affects it little. Speeds are without start, first step, evaluation and saving.

mlp is a step of a small model (20, 64, 3; batch 64; one process on the CPU): a copy of
fashionmnist_ddp beside a plain loop that does the same work. loader is the CPU time that a loader
process of cifar10_ddp takes for a CIFAR-10 image.

It is a tool, and no test: it is run by hand, and nothing depends on its numbers but pages.
"""
import argparse
import itertools
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

BATCH_SIZES = {"mnist_dp": 128, "cifar10_ddp": 128, "fashionmnist_ddp": 64}
STEPS = {"mnist_dp": 60, "cifar10_ddp": 4, "fashionmnist_ddp": 100}  # of an epoch on a CPU
GPU_STEPS = {"mnist_dp": 300, "cifar10_ddp": 200, "fashionmnist_ddp": 600}
LOADER_WORKERS = {"mnist_dp": 0, "cifar10_ddp": 8, "fashionmnist_ddp": 4}  # of the tutorials
GPUS = torch.cuda.device_count()
CORES = len(os.sched_getaffinity(0))


# --- the other programs, each in a process of its own ---
def build_model(script, module, args, device):
    """Return the script's model and optimizer."""
    if script == "mnist_dp":
        model = module.CNN(args.bf16).to(device, memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    model = module.build_model(args).to(device)
    return model, module.build_optimizer(args, model, 1000)[0]


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
    for x, y in DataLoader(dataset, BATCH_SIZES[script], shuffle=sampler is None, sampler=sampler,
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
    x, y = (tensor[:BATCH_SIZES[script]].to(device) for tensor in data[:2])
    while True:
        optimizer.zero_grad()
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
    data, _ = module.load_data(args)
    model, optimizer = build_model(script, module, args, device)
    if script == "cifar10_ddp":
        data = data.tensors
    steps = compute_steps(script, module, model, optimizer, data, args, device)
    if name == "tutorial":
        steps = tutorial_steps(script, model, data, args, rank, nproc, device)
    global_batch = BATCH_SIZES[script] * nproc
    count = len(data[0]) // global_batch
    next(steps)
    start = time.perf_counter()
    for _ in itertools.islice(steps, count - 1):
        pass
    if GPUS:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if rank == 0:
        print(f"{(count - 1) * global_batch / seconds:,.0f} images/s", flush=True)
    os._exit(0)  # at once: without waiting for the tutorial's loader processes


# --- the measurement ---
def speed(program, nproc):
    """Run a program (its path and arguments) to its end, and return its last images/s.

    Those of cifar10_ddp's lines within an epoch, which are without the first step.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-addr=localhost",
                f"--master-port={free_port()}", f"--nproc-per-node={nproc}"]
    result = subprocess.run([*torchrun, *program], env={**os.environ, "PYTHONWARNINGS": "ignore"},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"error: {program} has failed:\n{result.stdout}")
    within = re.findall(r"([\d,]+) images/s  wait", result.stdout)
    found = within or re.findall(r"([\d,]+) images/s", result.stdout)
    return float(found[-1].replace(",", ""))


def measure(script, nproc, args):
    """Return for each program a list of its speeds, one for each round."""
    samples = (GPU_STEPS if GPUS else STEPS)[script] * BATCH_SIZES[script] * nproc
    size = "--batch-size" if script == "mnist_dp" else "--global-batch"
    flags = ["--fake-data", str(samples), size, str(BATCH_SIZES[script] * nproc)]
    flags += ["--epochs", "1" if script == "cifar10_ddp" else "2"]
    if args.bf16:
        flags.append("--bf16")
    log_flags = ["--log-every", "0.1"] if script == "cifar10_ddp" else []
    programs = {"script": [ROOT / script / "train.py", *flags, *log_flags]}
    for name in ("tutorial", "compute"):
        programs[name] = [__file__, "--program", name, script, *flags]
    speeds = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            speeds[name].append(speed(program, nproc))
    return speeds


# --- a step of a small model, and an image of the loader ---
MLP = """
def load_data(args):
    inputs = torch.randn(32000, 20)
    labels = inputs[:, :3].argmax(1)
    return (inputs, labels), (inputs[:640], labels[:640])


def build_model(args):
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))


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
            speed = re.findall(r"([\d,]+) images/s", text.stdout)[-1]
            copied.append(64e6 / float(speed.replace(",", "")))
            text = subprocess.run([sys.executable, __file__, "--program", "plain"], env=env,
                                  check=True, capture_output=True, text=True)
            plain.append(float(text.stdout))
    ratios = [one / other for one, other in zip(copied, plain)]
    print(f"| mlp, 1 x 64 | {show(copied, 0)} us a step, plain loop {show(plain, 0)} us | "
          f"{show(ratios, 2)} times the plain loop | |", flush=True)


def measure_loader(rounds):
    """Print the CPU time of a loader process of cifar10_ddp for an image of CIFAR-10."""
    module = load_script("cifar10_ddp")
    images = torch.zeros(50000, 3, 32, 32, dtype=torch.uint8)
    batches = module.SeededBatches(TensorDataset(images, torch.zeros(50000, dtype=torch.long)))
    args = module.parse_args(["--fake-data", "--workers", "1"])

    def seconds(count):
        parts = [(0, step, 0, torch.randperm(50000)[:128].tolist()) for step in range(count)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        loader = module.build_loader(args, batches, sampler=parts, batch_size=None)
        for _ in loader:
            pass
        del loader
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    times = [1e6 * (seconds(420) - seconds(20)) / (400 * 128) for _ in range(rounds)]
    print(f"| loader of cifar10_ddp | {show(times, 1)} us of CPU an image | | |", flush=True)


def show(values, digits):
    """Return the median and the range of values as text."""
    median = statistics.median(values)
    return f"{median:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    choices = [*STEPS, "mlp", "loader"]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices)
    parser.add_argument("--rounds", type=int, default=1 if GPUS else 5,
                        help="runs of each program")
    parser.add_argument("--nproc", type=int, default=GPUS or 2, help="processes")
    parser.add_argument("--bf16", action="store_true", help="in the scripts, and compute")
    args = parser.parse_args()
    print(f"{CORES} cores, {GPUS} GPUs | torch {torch.__version__} | {args.rounds} rounds, median "
          f"(least to most){' | bfloat16' if args.bf16 else ''}\n\n"
          "| script, processes x batch size | images/s | times tutorial | times compute |\n"
          "|---|---|---|---|", flush=True)
    for script in [name for name in args.only if name in STEPS]:
        nproc = 1 if script == "mnist_dp" else args.nproc
        speeds = measure(script, nproc, args)
        cells = [f"{script}, {nproc} x {BATCH_SIZES[script]}", show(speeds["script"], 0)]
        for name in ("tutorial", "compute"):
            ratios = [one / other for one, other in zip(speeds["script"], speeds[name])]
            cells.append(show(ratios, 2))
        print(f"| {' | '.join(cells)} |", flush=True)
    if "mlp" in args.only:
        measure_mlp(args.rounds)
    if "loader" in args.only:
        measure_loader(args.rounds)


if __name__ == "__main__":
    if sys.argv[1:3] == ["--program", "plain"]:
        print(plain_loop())
    elif sys.argv[1:2] == ["--program"]:
        run_program(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()

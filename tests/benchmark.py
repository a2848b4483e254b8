#!/usr/bin/env python3
"""Measure the throughput of every script, next to its tutorial's loop and to the computation alone.

    python tests/benchmark.py                       # all scripts: a table, and the bars below it
    python tests/benchmark.py --only fashionmnist_ddp mnist_dp --json results.json

Three loops train the same model, with the same batch size, number of processes and threads, on generated data:
    script    train.py as it is, timed by the step lines that it logs;
    tutorial  the loop of the tutorial that the script follows, with its DataLoader and its transforms, in float32;
    compute   the steps of the script on one batch in memory, without input and without exchange of gradients.
Their processes are started once and then run in turn: all but one loop are stopped (SIGSTOP). A ratio is the median
of the ratios of each round, so that what else the machine does affects it little. Evaluation, saving and the start of
an epoch are not measured. synthetic_ddp --model resnet18 measures itself, with and without exchange, in every round.

The exit status is 1 if a bar is missed. The bars are for 2 processes on a CPU. On GPUs, there are none, and one process
by default: SIGSTOP does not stop NCCL's kernels, which occupy a GPU while they wait for a peer. Requires Linux.
"""
import argparse
import contextlib
import importlib
import itertools
import json
import os
import re
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from helpers import ROOT, Job, free_port
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, transforms

GPUS = torch.cuda.device_count()
CORES = len(os.sched_getaffinity(0))
CPUINFO = Path("/proc/cpuinfo").read_text()
HAS_BF16 = GPUS or re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", CPUINFO)  # without, it is emulated and slow
GENERATED = ("cpu_ddp", "synthetic_ddp")  # scripts without images


class Case(NamedTuple):
    """A script with its flags, what its tutorial does, and the bars."""
    script: str
    nproc: int
    batch_size: int  # per process
    log_every: int  # steps between the lines of the other loops
    samples: int
    loader_workers: int = 0  # of the tutorial's DataLoader
    items: int = 0  # calls of item() in a step of the tutorial
    least_speedup: float = 0
    least_fraction: float = 0
    model: str = ""
    bf16: bool = False

    def command(self):
        """Return the command of the script, which trains until it is killed, or measures a model."""
        command = [sys.executable, ROOT / self.script / "train.py", "--batch-size", self.batch_size]
        if self.model:
            command += ["--model", self.model] + ([] if GPUS else ["--image-size", 64, "--steps", 10])
        else:
            data = "--samples" if self.script in GENERATED else "--fake-data"
            command += ["--epochs", 10**6, data, self.samples, "--log-every", 0.3]
        return [str(word) for word in command + ["--bf16"] * self.bf16]


def cases(nproc, quick):
    images, every = (60_000, 20) if GPUS else (12_800, 2)  # a log line waits for the GPU
    cifar = {"batch_size": 8} if quick else {"batch_size": 128, "least_fraction": 0.9}  # exchange weighs more at 8
    fp32 = [
        Case("cpu_ddp", nproc, 32, 100, 64_000),
        Case("mnist_dp", 1, 128, every, images, items=1, least_speedup=1.2),
        Case("cifar10_ddp", nproc, **cifar, log_every=every // 2, samples=images, loader_workers=8, least_speedup=1),
        Case("fashionmnist_ddp", nproc, 64, every, images, 4, items=2, least_speedup=1.2, least_fraction=0.8),
        Case("synthetic_ddp", nproc, 32, 100, 64_000),
    ]
    if quick:
        return fp32
    fp32.append(Case("synthetic_ddp", nproc, 32, 0, 0, model="resnet18"))
    bf16 = [case._replace(bf16=True, least_speedup=0, least_fraction=0) for case in fp32
            if case.model or case.script not in GENERATED]
    return fp32 + bf16 if HAS_BF16 else fp32


# --- the loops, each in a process of its own ---
def build(case, module, device, **fused):
    """Return model, optimizer and loss function."""
    if case.script == "cpu_ddp":
        model = nn.Linear(20, 1)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3), F.mse_loss
    if case.script == "cifar10_ddp":
        model = module.build_model("resnet18")[0].to(device)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, **fused), F.cross_entropy
    mlp = nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3))
    model = mlp if case.script == "synthetic_ddp" else module.CNN(*[case.bf16] * (case.script == "mnist_dp"))
    return model, torch.optim.Adam(model.to(device).parameters(), lr=1e-3, **fused), F.cross_entropy


def generate(case, module, samples):
    """Return inputs and targets as the script generates them."""
    if case.script in GENERATED:
        return module.generate_data(samples, 0, *[True] * (case.script == "synthetic_ddp"))[:2]
    return module.load_data(argparse.Namespace(fake_data=samples, seed=0), True)


def tutorial_dataset(case, module):
    """Return the tutorial's data set; torchvision's own classes hold generated images in place of their files."""
    inputs, targets = generate(case, module, case.samples)
    if case.script in GENERATED:
        return TensorDataset(inputs, targets)
    if case.script == "cifar10_ddp":
        dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)
        dataset.data, dataset.targets = inputs.permute(0, 2, 3, 1).numpy(), targets.tolist()
        dataset.transform = transforms.Compose([
            transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
            transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))])
    else:
        dataset = datasets.MNIST.__new__(datasets.MNIST)  # FashionMNIST differs in its files alone
        dataset.data, dataset.targets = inputs.squeeze(1), targets
        normalize = [transforms.Normalize((0.1307,), (0.3081,))] if case.script == "mnist_dp" else []
        dataset.transform = transforms.Compose([transforms.ToTensor(), *normalize])
    dataset.target_transform = None
    return dataset


def tutorial_steps(case, module, rank, device):
    """Train as the tutorial does; yield the epoch after every step."""
    model, optimizer, loss_function = build(case, module, device)
    dataset, sampler = tutorial_dataset(case, module), None
    if case.script == "mnist_dp":
        model = nn.DataParallel(model)
    else:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        sampler = DistributedSampler(dataset, case.nproc, rank)
        model = DistributedDataParallel(model, [rank] if device.type == "cuda" else None)
    loader = DataLoader(dataset, case.batch_size, shuffle=sampler is None, sampler=sampler,
                        num_workers=case.loader_workers, pin_memory=device.type == "cuda")
    for epoch in itertools.count(1):
        if sampler:
            sampler.set_epoch(epoch)
        total_loss = correct = 0
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            output = model(x)
            loss = loss_function(output, y)
            loss.backward()
            optimizer.step()
            if case.items > 0:
                total_loss += loss.item() * len(y)
            if case.items > 1:
                correct += (output.argmax(1) == y).sum().item()
            yield epoch


def compute_steps(case, module, rank, device):
    """Repeat the script's step on one batch in memory; yield after every step."""
    module.configure_cpu(case.nproc)
    model, optimizer, loss_function = build(case, module, device, fused=True)
    x, y = (tensor.to(device) for tensor in generate(case, module, case.batch_size))
    if hasattr(module, "preprocess"):
        size = [32] * (case.script == "cifar10_ddp")
        model, x = model.to(memory_format=torch.channels_last), module.preprocess(x, *size)
    while True:
        with torch.autocast(device.type, torch.bfloat16, enabled=case.bf16):
            loss = loss_function(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield 1


LOOPS = {"tutorial": tutorial_steps, "compute": compute_steps}


def run_loop(name, case):
    """Run one process of a loop, and log its steps as the scripts do."""
    sys.path.insert(0, str(ROOT / case.script))
    module = importlib.import_module("train")
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if GPUS and case.script != "cpu_ddp" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = name == "compute"  # as in the scripts, not in the tutorials
        torch.set_float32_matmul_precision("high" if name == "compute" else "highest")
    for step, epoch in enumerate(LOOPS[name](case, module, rank, device), 1):
        if step % case.log_every == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            if rank == 0:
                print(f"epoch {epoch}/-  step {step}/-", flush=True)


# --- the measurement ---
class Loop(Job):
    """The processes of one loop. A context manager that kills them at the end."""

    def __init__(self, command, nproc):
        self.steps = []  # (time, epoch, step) of each step line
        env = os.environ | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(nproc),
                            "LOCAL_WORLD_SIZE": str(nproc), "OMP_NUM_THREADS": str(max(1, CORES // nproc))}
        super().__init__([command] * nproc,
                         [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)])

    def signal(self, signum):
        for process in self.processes:  # each has a process group, with the workers of its DataLoader
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def run_until(self, condition):
        """Run, and read the step lines, until condition() is true; then stop."""
        self.signal(signal.SIGCONT)
        while not condition():
            assert self.running(), f"ended:\n{self.text}"
            time.sleep(0.005)
            now, lines = time.perf_counter(), re.findall(r"^epoch (\d+)/\S+  step (\d+)/.*\n", self.text, re.MULTILINE)
            self.steps += [(now, int(epoch), int(step)) for epoch, step in lines[len(self.steps):]]
        self.signal(signal.SIGSTOP)

    def measure(self, seconds):
        """Run for about that long, and return steps per second from line to line within an epoch."""
        def pairs():
            return [(b[0] - a[0], b[2] - a[2]) for a, b in itertools.pairwise(self.steps[first:]) if a[1] == b[1]]

        first = len(self.steps)  # the first line comes early: a part of its steps were done before
        self.run_until(lambda: sum(pair[0] for pair in pairs()) >= seconds)
        seconds, steps = map(sum, zip(*pairs()))
        return steps / seconds

    def peak_mb(self):
        """Return the peak resident memory of rank 0."""
        return int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{self.processes[0].pid}/status").read_text())[1]) / 1024


def measure(case, rounds, seconds):
    """Return the row of a case: a list of one value per round for each key."""
    with contextlib.ExitStack() as stack:
        start = time.perf_counter()
        loops = {"script": stack.enter_context(Loop(case.command(), case.nproc))}
        loops["script"].wait_for(r"\| torch", timeout=600)  # its header
        first_step = time.perf_counter() - start
        loops["script"].run_until(lambda: loops["script"].steps)  # the others start later, and do not slow its start
        for name in LOOPS:
            command = [sys.executable, __file__, "--loop", name, json.dumps(case)]
            loops[name] = stack.enter_context(Loop(command, case.nproc))
        for name in LOOPS:
            loops[name].run_until(lambda: loops[name].steps)
        rates = {name: [] for name in loops}
        for number in range(rounds):
            for name in [*loops][number % 3:] + [*loops][:number % 3]:
                rates[name].append(loops[name].measure(seconds))
        return {"images_per_s": [rate * case.batch_size * case.nproc for rate in rates["script"]],
                "vs_tutorial": [ours / theirs for ours, theirs in zip(rates["script"], rates["tutorial"])],
                "vs_ceiling": [ours / alone for ours, alone in zip(rates["script"], rates["compute"])],
                "peak_mb": [loops["script"].peak_mb()], "first_step_s": [first_step]}


def measure_model(case, rounds):
    """Return the row of synthetic_ddp --model from what it logs. The tutorials have no such loop."""
    row = {"images_per_s": [], "vs_tutorial": [], "vs_ceiling": [], "peak_mb": [], "first_step_s": []}
    pattern = r"([\d.,]+) images/s .* overhead ([-\d.]+) % .* ([\d,]+) MB$"
    for _ in range(rounds):
        with Loop(case.command(), case.nproc) as loop:
            match = re.search(pattern, loop.finish(600).text, re.MULTILINE)
        speed, overhead, peak = (float(number.replace(",", "")) for number in match.groups())
        for key, number in zip(("images_per_s", "vs_ceiling", "peak_mb"), (speed, 1 - overhead / 100, peak)):
            row[key].append(number)
    return row


# --- the report ---
def show(values, digits):
    numbers = [f"{function(values):,.{digits}f}" for function in (statistics.median, min, max) if values]
    return "{} ({} to {})".format(*numbers) if values else ""


def report(rows):
    columns = ("script, processes x batch size", "samples/s", "speedup over tutorial",
               "fraction of compute-only throughput", "peak memory of rank 0, MB", "time to first step, s")
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for case, row in rows:
        name = f"{case.script}{' --model ' * bool(case.model)}{case.model}{' --bf16' * case.bf16}"
        peak, first = (f"{statistics.median(row[key]):,.1f}" if row[key] else "" for key in ("peak_mb", "first_step_s"))
        print(f"| {name}, {case.nproc} x {case.batch_size} | {show(row['images_per_s'], 0)} | "
              f"{show(row['vs_tutorial'], 2)} | {show(row['vs_ceiling'], 2)} | {peak} | {first} |")


def judge(rows):
    """Print each bar and return whether all are met."""
    met = []
    for case, row in rows:
        for title, values, bar in (("speedup over tutorial", row["vs_tutorial"], case.least_speedup),
                                   ("fraction of compute-only throughput", row["vs_ceiling"], case.least_fraction)):
            if bar and not GPUS:
                met.append(statistics.median(values) >= bar)
                print(f"{case.script}: {title} {show(values, 2)}, bar {bar:.2f}: {'met' if met[-1] else 'MISSED'}")
    return all(met)


def write_json(path, rows):
    """Write the medians, without those of --model, which has no tutorial."""
    Path(path).write_text(json.dumps([
        {"script": case.script, "precision": "bf16" if case.bf16 else "fp32", "workers": case.nproc}
        | {key: round(statistics.median(values), 4) for key, values in row.items()}
        for case, row in rows if not case.model], indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    names = [case.script for case in cases(1, quick=True)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SCRIPT", help="measure these")
    parser.add_argument("--quick", action="store_true", help="under 2 minutes: short rounds, small batches, float32")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each loop")
    parser.add_argument("--seconds", type=float, default=4, help="length of a measurement")
    parser.add_argument("--nproc", type=int, default=1 if GPUS else 2, help="processes")
    parser.add_argument("--json", metavar="FILE", help="write the medians to this file, too")
    parser.add_argument("--no-bars", action="store_true", help="exit with 0 even if a bar is missed")
    parser.add_argument("--loop", nargs=2, help=argparse.SUPPRESS)  # run one process of a loop: its name and the case
    args = parser.parse_args()
    if args.loop:
        return run_loop(args.loop[0], Case(*json.loads(args.loop[1])))
    if args.quick:
        args.rounds, args.seconds = 3, 0.5

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # kills the stopped processes, as Ctrl-C does
    device = torch.cuda.get_device_name() if GPUS else re.search(r"model name\s*: (.*)|$", CPUINFO)[1]
    print(f"{device or 'CPU'}, {CORES} cores | torch {torch.__version__} | {args.nproc} processes | "
          f"{args.rounds} rounds of {args.seconds:g} s, median (least to most)", flush=True)
    rows, start = [], time.perf_counter()
    for case in (case for case in cases(args.nproc, args.quick) if case.script in args.only):
        row = measure_model(case, args.rounds) if case.model else measure(case, args.rounds, args.seconds)
        rows.append((case, row))
        print(f"{time.perf_counter() - start:4.0f} s: {case.script} measured", file=sys.stderr)
    report(rows)
    print(f"\n{time.perf_counter() - start:.0f} s\n")
    if args.json:
        write_json(args.json, rows)
    return 0 if judge(rows) or args.no_bars else 1


if __name__ == "__main__":
    sys.exit(main())

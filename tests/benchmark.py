#!/usr/bin/env python3
"""Measure the throughput of every script, next to its tutorial's loop and to computation alone.

    python tests/benchmark.py                       # all scripts: a table, and the bars below it
    python tests/benchmark.py --only fashionmnist_ddp mnist_dp --json results.json

Three loops train the same model on generated data, with the same batch size, number of processes
and threads:
    script    train.py as it is, timed by the step lines that it logs;
    tutorial  the data loading and the loop of the tutorial that the script follows, in float32;
    compute   the steps of the script on one batch in memory, without input and without exchange
              of gradients.
Their processes are started once and then run in turn: all but one loop are stopped (SIGSTOP). A
ratio is the median of the ratios of each round, so that what else the machine does affects it
little. Evaluation, saving and the start of an epoch are not measured. synthetic_ddp --model
resnet18 measures itself, with and without exchange, in every round.

The exit status is 1 if a bar is missed. The bars are for 2 processes on a CPU. On GPUs, there are
none, and one process by default: SIGSTOP does not stop NCCL's kernels, which occupy a GPU while
they wait for a peer. Requires Linux.
"""
import argparse
import contextlib
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
from functions import load_script
from processes import Job, free_port
from scripts import SCRIPTS, script_path
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets, transforms

GPUS = torch.cuda.device_count()
CORES = len(os.sched_getaffinity(0))
CPUINFO = Path("/proc/cpuinfo").read_text()
# Without these, bfloat16 is emulated and slow
HAS_BF16 = GPUS or re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", CPUINFO)


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
    model: str = ""  # if any, synthetic_ddp measures it
    bf16: bool = False

    def flags(self):
        """Return the flags of the script, which trains until it is killed, or measures a model."""
        flags = ["--batch-size", self.batch_size]
        if self.model:
            flags += ["--model", self.model]
            if not GPUS:
                flags += ["--image-size", 64, "--steps", 10]
        else:
            flags += [SCRIPTS[self.script].data_flag, self.samples]
            flags += ["--epochs", 10**6, "--log-every", 0.3]
        if self.bf16:
            flags.append("--bf16")
        return [str(flag) for flag in flags]

    def command(self):
        return [sys.executable, str(script_path(self.script)), *self.flags()]


def cases(nproc, quick):
    """Return what is measured."""
    if GPUS:
        images = 60_000
        log_every = 20  # a log line waits for the GPU
    else:
        images = 12_800
        log_every = 2
    cifar10 = Case("cifar10_ddp", nproc, 128, log_every // 2, images, loader_workers=8,
                   least_speedup=1, least_fraction=0.9)
    if quick:  # the exchange of gradients weighs more in small batches
        cifar10 = cifar10._replace(batch_size=8, least_fraction=0)
    fp32 = [
        Case("cpu_ddp", nproc, 32, 100, 64_000),
        Case("mnist_dp", 1, 128, log_every, images, items=1, least_speedup=1.2),
        cifar10,
        Case("fashionmnist_ddp", nproc, 64, log_every, images, loader_workers=4, items=2,
             least_speedup=1.2, least_fraction=0.8),
        Case("synthetic_ddp", nproc, 32, 100, 64_000),
    ]
    if quick:
        return fp32
    fp32.append(Case("synthetic_ddp", nproc, 32, 0, 0, model="resnet18"))
    bf16 = [case._replace(bf16=True, least_speedup=0, least_fraction=0) for case in fp32
            if case.model or SCRIPTS[case.script].has_images]
    if HAS_BF16:
        return fp32 + bf16
    return fp32


# --- the loops, each in a process of its own ---
def build_model(case, module, args, device):
    """Return the script's model and optimizer."""
    torch.manual_seed(args.seed)
    if case.script == "cpu_ddp":
        return module.build_model(args)
    if case.script == "cifar10_ddp":
        return module.build_model(args, 10, case.nproc * case.batch_size, device)
    return module.build_model(args, device)


def load_data(case, module, args):
    """Return inputs and targets as the script generates them."""
    if case.script == "cpu_ddp":
        return module.load_data(args)
    data = module.load_data(args, train_set=True)
    if case.script == "cifar10_ddp":
        return data.tensors
    return data


def tutorial_dataset(case, module, args):
    """Return the tutorial's data set.

    Where that is of torchvision, it holds generated images in place of those in its files.
    """
    inputs, targets = load_data(case, module, args)
    if not SCRIPTS[case.script].has_images:
        return TensorDataset(inputs, targets)
    if case.script == "cifar10_ddp":
        dataset = datasets.CIFAR10.__new__(datasets.CIFAR10)
        dataset.data = inputs.permute(0, 2, 3, 1).numpy()
        dataset.targets = targets.tolist()
        dataset.transform = transforms.Compose([
            transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))])
    else:
        dataset = datasets.MNIST.__new__(datasets.MNIST)  # FashionMNIST differs in its files alone
        dataset.data = inputs.squeeze(1)
        dataset.targets = targets
        steps = [transforms.ToTensor()]
        if case.script == "mnist_dp":
            steps.append(transforms.Normalize((0.1307,), (0.3081,)))
        dataset.transform = transforms.Compose(steps)
    dataset.target_transform = None
    return dataset


def tutorial_optimizer(case, model):
    if case.script == "cpu_ddp":
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    if case.script == "cifar10_ddp":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def tutorial_steps(case, module, args, rank, device):
    """Train as the tutorial does; yield the epoch after every step."""
    model, _ = build_model(case, module, args, device)
    model.to(memory_format=torch.contiguous_format)
    optimizer = tutorial_optimizer(case, model)
    loss_function = F.mse_loss if case.script == "cpu_ddp" else F.cross_entropy
    dataset = tutorial_dataset(case, module, args)
    sampler = None
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
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
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


def compute_steps(case, module, args, rank, device):
    """Repeat the script's step on one batch in memory; yield 1 after every step."""
    module.configure_cpu(case.nproc)
    model, optimizer = build_model(case, module, args, device)
    inputs, targets = load_data(case, module, args)
    x = inputs[:case.batch_size].to(device)
    y = targets[:case.batch_size].to(device)
    loss_function = getattr(module, SCRIPTS[case.script].loss_function)
    while True:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=case.bf16):
            loss = loss_function(model, x, y)
            if case.script != "cpu_ddp":
                loss, _ = loss
        (loss / case.batch_size).backward()
        optimizer.step()
        yield 1


LOOPS = {"tutorial": tutorial_steps, "compute": compute_steps}


def run_loop(name, case):
    """Run one process of a loop, and log its steps as the scripts do."""
    module = load_script(case.script)
    sys.argv = ["train.py", *case.flags()]
    args = module.parse_args()
    if name == "tutorial":
        args.bf16 = False
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if GPUS and case.script != "cpu_ddp":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        if name == "compute":  # as in the scripts, not in the tutorials
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
    for step, epoch in enumerate(LOOPS[name](case, module, args, rank, device), 1):
        if step % case.log_every == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            if rank == 0:
                print(f"epoch {epoch}/-  step {step}/-", flush=True)


# --- the measurement ---
class Step(NamedTuple):
    """A step line of a loop."""

    time: float
    epoch: int
    step: int


class Loop(Job):
    """The processes of one loop. A context manager that kills them at the end."""

    def __init__(self, command, nproc):
        self.steps = []  # a Step for each step line
        environments = []
        port = str(free_port())
        for rank in range(nproc):
            environments.append(os.environ | {
                "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(nproc),
                "LOCAL_WORLD_SIZE": str(nproc), "RANK": str(rank), "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": str(max(1, CORES // nproc))})
        super().__init__([command] * nproc, environments)

    def signal(self, signum):
        for process in self.processes:  # each has a group, with the workers of its DataLoader
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def run_until(self, condition):
        """Run, and read the step lines, until condition() is true; then stop."""
        self.signal(signal.SIGCONT)
        while not condition():
            assert self.running(), f"ended:\n{self.text}"
            time.sleep(0.005)
            now = time.perf_counter()
            lines = re.findall(r"^epoch (\d+)/\S+  step (\d+)/.*\n", self.text, re.MULTILINE)
            for epoch, step in lines[len(self.steps):]:
                self.steps.append(Step(now, int(epoch), int(step)))
        self.signal(signal.SIGSTOP)

    def measure(self, seconds):
        """Run for about that long, and return steps per second from line to line in an epoch."""
        first = len(self.steps)  # the first line comes early: a part of its steps was done before

        def pairs():
            return [(one, other) for one, other in itertools.pairwise(self.steps[first:])
                    if one.epoch == other.epoch]

        def measured():
            return sum(other.time - one.time for one, other in pairs())

        self.run_until(lambda: measured() >= seconds)
        return sum(other.step - one.step for one, other in pairs()) / measured()

    def peak_mb(self):
        """Return the peak resident memory of rank 0."""
        status = Path(f"/proc/{self.processes[0].pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


KEYS = ("images_per_s", "vs_tutorial", "vs_ceiling", "peak_mb", "first_step_s")


def measure(case, rounds, seconds):
    """Return the row of a case: a list of one value per round for each key."""
    row = {key: [] for key in KEYS}
    with contextlib.ExitStack() as stack:
        start = time.perf_counter()
        script = stack.enter_context(Loop(case.command(), case.nproc))
        script.wait_for(r"\| torch", timeout=600)  # its header
        row["first_step_s"].append(time.perf_counter() - start)
        script.run_until(lambda: script.steps)  # the others do not slow down its start
        loops = {"script": script}
        for name in LOOPS:
            command = [sys.executable, __file__, "--loop", name, json.dumps(case)]
            loops[name] = stack.enter_context(Loop(command, case.nproc))
        for name in LOOPS:
            loops[name].run_until(lambda: loops[name].steps)
        names = list(loops)
        for number in range(rounds):
            first = number % len(names)
            rates = {}
            for name in names[first:] + names[:first]:
                rates[name] = loops[name].measure(seconds)
            row["images_per_s"].append(rates["script"] * case.batch_size * case.nproc)
            row["vs_tutorial"].append(rates["script"] / rates["tutorial"])
            row["vs_ceiling"].append(rates["script"] / rates["compute"])
        row["peak_mb"].append(script.peak_mb())
    return row


def measure_model(case, rounds):
    """Return the row of synthetic_ddp --model from what it logs. No tutorial has such a loop."""
    row = {key: [] for key in KEYS}
    pattern = r"([\d.,]+) images/s .* overhead ([-\d.]+) % .* ([\d,]+) MB$"
    for _ in range(rounds):
        with Loop(case.command(), case.nproc) as loop:
            match = re.search(pattern, loop.finish(600).text, re.MULTILINE)
        speed, overhead, peak = (float(number.replace(",", "")) for number in match.groups())
        row["images_per_s"].append(speed)
        row["vs_ceiling"].append(1 - overhead / 100)
        row["peak_mb"].append(peak)
    return row


# --- the report ---
def show(values, digits):
    """Return the median and the range of values as text, or nothing if there are none."""
    if not values:
        return ""
    median = statistics.median(values)
    return f"{median:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def show_median(values):
    if not values:
        return ""
    return f"{statistics.median(values):,.1f}"


def report(rows):
    """Print the table."""
    columns = ("script, processes x batch size", "samples/s", "speedup over tutorial",
               "fraction of compute-only throughput", "peak memory of rank 0, MB",
               "time to first step, s")
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for case, row in rows:
        name = case.script
        if case.model:
            name += f" --model {case.model}"
        if case.bf16:
            name += " --bf16"
        cells = [f"{name}, {case.nproc} x {case.batch_size}", show(row["images_per_s"], 0),
                 show(row["vs_tutorial"], 2), show(row["vs_ceiling"], 2),
                 show_median(row["peak_mb"]), show_median(row["first_step_s"])]
        print(f"| {' | '.join(cells)} |")


def is_met(case, title, values, bar):
    """Print the bar, if there is one, and return whether it is met."""
    if not bar or GPUS:
        return True
    met = statistics.median(values) >= bar
    print(f"{case.script}: {title} {show(values, 2)}, bar {bar:.2f}: {'met' if met else 'MISSED'}")
    return met


def judge(rows):
    """Print each bar and return whether all are met."""
    met = []
    for case, row in rows:
        met.append(is_met(case, "speedup over tutorial", row["vs_tutorial"], case.least_speedup))
        met.append(is_met(case, "fraction of compute-only throughput", row["vs_ceiling"],
                          case.least_fraction))
    return all(met)


def write_json(path, rows):
    """Write the medians, without those of --model, which has no tutorial."""
    results = []
    for case, row in rows:
        if not case.model:
            precision = "bf16" if case.bf16 else "fp32"
            result = {"script": case.script, "precision": precision, "workers": case.nproc}
            for key, values in row.items():
                result[key] = round(statistics.median(values), 4)
            results.append(result)
    Path(path).write_text(json.dumps(results, indent=1))


def parse_args():
    names = [case.script for case in cases(1, quick=True)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=names, default=names, metavar="SCRIPT", help="measure these")
    add("--quick", action="store_true",
        help="under 2 minutes: short rounds, small batches, float32")
    add("--rounds", type=int, default=5, help="measurements of each loop")
    add("--seconds", type=float, default=4, help="length of a measurement")
    add("--nproc", type=int, default=1 if GPUS else 2, help="processes")
    add("--json", metavar="FILE", help="write the medians to this file, too")
    add("--no-bars", action="store_true", help="exit with 0 even if a bar is missed")
    add("--loop", nargs=2, help=argparse.SUPPRESS)  # one process of a loop: its name and the case
    return parser.parse_args()


def main():
    args = parse_args()
    if args.loop:
        name, case = args.loop
        return run_loop(name, Case(*json.loads(case)))
    if args.quick:
        args.rounds = 3
        args.seconds = 0.5

    # Kills the stopped processes, as Ctrl-C does
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(1))
    device = "CPU"
    model_name = re.search(r"model name\s*: (.*)", CPUINFO)
    if GPUS:
        device = torch.cuda.get_device_name()
    elif model_name:
        device = model_name[1]
    print(f"{device}, {CORES} cores | torch {torch.__version__} | {args.nproc} processes | "
          f"{args.rounds} rounds of {args.seconds:g} s, median (least to most)", flush=True)
    rows = []
    start = time.perf_counter()
    for case in cases(args.nproc, args.quick):
        if case.script not in args.only:
            continue
        if case.model:
            row = measure_model(case, args.rounds)
        else:
            row = measure(case, args.rounds, args.seconds)
        rows.append((case, row))
        print(f"{time.perf_counter() - start:4.0f} s: {case.script} measured", file=sys.stderr)
    report(rows)
    print(f"\n{time.perf_counter() - start:.0f} s\n")
    if args.json:
        write_json(args.json, rows)
    if judge(rows) or args.no_bars:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())

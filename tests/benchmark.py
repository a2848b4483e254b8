#!/usr/bin/env python3
"""Measure every script beside its tutorial's own loop and beside what the machine can do, in one run.

    python tests/benchmark.py                       # all scripts, a table, and the bars they must reach
    python tests/benchmark.py --quick               # under 2 minutes: one row per script, smaller batches, fewer rounds
    python tests/benchmark.py --only cpu_ddp fashionmnist_ddp --json results.json
    python tests/benchmark.py --accuracy            # also: seconds to 90 % and 92 % on the real Fashion-MNIST

Workers stay up and run in turn, with the same layers, batch, number of samples and threads,
    script    train.py's own main(), imported from its file and timed by the lines that it prints;
    tutorial  the loop as its tutorial writes it: a transform per sample, its DataLoader workers, plain DDP;
    ceiling   the same steps on one batch in memory: no loader, no exchange, all workers at once;
    by hand   the ceiling's steps and after backward one all_reduce of all gradients in one tensor;
    exchange  that all_reduce alone;
so that a busy moment of the machine hits all of them. A ratio is the median of the ratios within a round. The tutorial's
loop runs in float32 in all rows, and in processes of its own, because keep_memory() changes a whole process.
Memory and the time to the first step are those of the real command, started for the purpose. Images are
generated, and the memory holds one step's, on a GPU those of a whole measurement. synthetic_ddp's rows are
`--model resnet18`, where the script has no input path and tells its median step, and the MLP, which is not in the
file of --json but with --quick, where it is the only one.

Exit status: 0, or 1 where a bar is missed (not with --no-bars).
"""
import argparse
import contextlib
import gzip
import importlib.util
import io
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
if __name__ == "__main__" and START_METHOD == "forkserver":  # imports torch for all workers, while this process does
    multiprocessing.set_forkserver_preload(["torch", "torchvision"])
    multiprocessing.forkserver.ensure_running()

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, DistributedSampler, TensorDataset
from torchvision import transforms

ROOT = Path(__file__).resolve().parent.parent
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # apt-get install dataset-fashion-mnist
GPUS = torch.cuda.device_count()
MOST_IMAGES = 60_000  # generated for one measurement


class Case(NamedTuple):
    """What is measured: a script, its batch per worker, and what its tutorial does."""
    script: str
    precision: str
    batch: int
    loader_workers: int = 0  # of the tutorial
    items: int = 0  # how many .item() the tutorial calls per step
    flags: tuple = ()  # of the script
    label: str = ""
    explained: bool = False  # also measure the step by hand and the exchange
    bars: dict = {}  # least vs_tutorial, vs_ceiling

    def name(self):
        return f"{self.script}{self.label} {self.precision}"


def cases(quick):
    """Return what there is to measure. Where the tutorial's code is not printed, DataLoader's defaults are its."""
    cifar_batch, cifar_bars = (2, {}) if quick else (128, {"vs_ceiling": 0.93})  # the exchange weighs more on a smaller batch
    resnet = {"flags": ("--model", "resnet18", "--image-size", "224"), "label": " resnet18"}
    everything = [
        Case("cpu_ddp", "fp32", 32, explained=not quick, bars={"vs_tutorial": 1.2}),
        Case("mnist_dp", "fp32", 128, items=1),
        Case("mnist_dp", "bf16", 128, items=1),
        Case("cifar10_ddp", "fp32", cifar_batch, 8, explained=not quick, bars=cifar_bars),
        Case("cifar10_ddp", "bf16", cifar_batch, 8),
        Case("fashionmnist_ddp", "fp32", 64, 4, 2, explained=not quick, bars={"vs_tutorial": 1.25, "vs_ceiling": 0.93}),
        Case("fashionmnist_ddp", "bf16", 64, 4, 2, bars={"vs_tutorial": 2.0}),
        Case("synthetic_ddp", "fp32", 32, **resnet, explained=True, bars={"vs_ceiling": 0.93}),
        Case("synthetic_ddp", "bf16", 32, **resnet),
        Case("synthetic_ddp", "fp32", 32, label=" MLP", explained=not quick),
    ]
    return [case for case in everything if not quick or case.precision == "fp32" and case.label != " resnet18"]


# --- in a worker ---
class Clock(io.StringIO):
    """A standard output that remembers when each text was written."""

    def __init__(self):
        super().__init__()
        self.marks = []

    def write(self, text):
        self.marks.append((time.perf_counter(), text))
        return len(text)

    def between(self, pattern):
        """Return the seconds from the first line that matches to the last, and how many steps or epochs that was."""
        found = [(moment, int(match[1])) for moment, text in self.marks if (match := re.match(pattern, text))]
        (first, begin), (last, end) = found[0], found[-1]
        return last - first, end - begin


def load_script(name):
    specification = importlib.util.spec_from_file_location(name, ROOT / name / "train.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def finish(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def leave_group():
    """torch 2.6 destroys a group with Python's lock held, for which a thread of gloo's may still wait: let that one end first."""
    if dist.is_initialized():
        time.sleep(0.05)
        dist.destroy_process_group()


def run_script(module, case, flags):
    """Return what the script's own main() prints, with the time of each line."""
    clock = Clock()
    sys.argv = ["train.py", "--batch-size", str(case.batch), *case.flags, *flags] + ["--bf16"] * (case.precision == "bf16")
    with contextlib.redirect_stdout(clock):
        status = module.main()
    signal.set_wakeup_fd(-1)  # main() watches for signals: the DataLoader's own, of the tutorial, are not for it
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_DFL)
    if status not in (0, None):
        raise RuntimeError(f"{case.script} ended with {status}")
    leave_group()
    return clock


def time_script(module, case, rank, device, unit, units):
    """Return the seconds per step of the script, after the first unit of steps; None from the ranks that print nothing."""
    world = int(os.environ["WORLD_SIZE"])
    samples = (units + 1) * unit * case.batch * world
    if case.label == " resnet18":
        clock = run_script(module, case, ["--steps", str(max(2, unit * units))])
        return rank == 0 and 1e-3 * float(re.search(r"step ([\d.]+) ms", "".join(text for _, text in clock.marks))[1]) or None
    if case.script == "cpu_ddp":  # many short epochs: what happens between them counts
        clock = run_script(module, case, ["--epochs", str(units + 1), "--samples", str(samples // (units + 1)), "--log-every", "1000000"])
        pattern, length = r"epoch (\d+)/", unit
    else:
        data = ["--samples" if case.script == "synthetic_ddp" else "--fake-data", str(max(10, samples))]  # fewer are refused
        clock = run_script(module, case, ["--epochs", "1", *data, "--log-every", str(unit)])
        pattern, length = r"step (\d+)/", 1
    if rank:
        return None
    seconds, count = clock.between(pattern)
    return seconds / (count * length)


def tutorial_transform(script):
    if script == "cifar10_ddp":
        return transforms.Compose([transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
                                   transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))])
    if script == "mnist_dp":
        return transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    return transforms.ToTensor()


def as_torchvision(module, images, labels):
    """Return torchvision's own data set of this script, holding these images instead of its files."""
    kind = getattr(torchvision.datasets, module.DATASET)
    dataset = kind.__new__(kind)
    dataset.data = images.numpy() if images.shape[3] == 3 else images.squeeze(3)
    dataset.targets = labels.tolist() if images.shape[3] == 3 else labels
    dataset.transform, dataset.target_transform = tutorial_transform(module.__name__), None
    return dataset


def random_images(case, batches=1):
    pixels = int(case.flags[case.flags.index("--image-size") + 1])
    return torch.randn(batches * case.batch, 3, pixels, pixels), torch.randint(1000, (batches * case.batch,))


class TutorialCNN(nn.Sequential):
    """The CNN of mnist_dp and fashionmnist_ddp, with PyTorch's own dropout and order of features."""

    def __init__(self):
        super().__init__(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
                         nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10))


def build(module, case, tutorial):
    """Return model, optimizer and loss of a case, as the tutorial or as the script has them."""
    loss, fused = F.cross_entropy, {} if tutorial else {"fused": True}
    if case.script == "cpu_ddp":
        model, loss = nn.Linear(module.INPUTS, 1), F.mse_loss  # the tutorial's cross_entropy of one column learns nothing
    elif case.label == " resnet18":
        model = torchvision.models.resnet18()
    elif case.script == "synthetic_ddp":
        model = nn.Sequential(nn.Linear(module.INPUTS, module.HIDDEN), nn.ReLU(), nn.Linear(module.HIDDEN, module.CLASSES))
    else:
        model = module.build_model("resnet18")[0] if case.script == "cifar10_ddp" else TutorialCNN() if tutorial else module.CNN()
    if not tutorial:
        model.to(memory_format=torch.channels_last)
    model.to("cuda" if GPUS and case.script != "cpu_ddp" else "cpu")
    if case.script in ("mnist_dp", "fashionmnist_ddp") or case.label == " MLP":
        return model, torch.optim.Adam(model.parameters(), lr=1e-3, **fused), loss
    if case.script == "cpu_ddp":
        return model, torch.optim.SGD(model.parameters(), lr=1e-3), loss
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-5, **fused), loss


def tutorial_data(module, case, samples):
    """Return the tutorial's data set, which gives one sample at a time."""
    if case.script == "cpu_ddp":
        inputs, targets, *_ = module.generate_data(samples, 0)
        return list(zip(inputs, targets))
    if case.label == " resnet18":
        return ConcatDataset([TensorDataset(*random_images(case))] * (samples // case.batch))
    if case.script == "synthetic_ddp":
        return TensorDataset(*module.generate_data(samples, 0, True))
    return as_torchvision(module, *module.fake_images(samples, 0, True))


def tutorial_loader(case, dataset, seed=0):
    """Return the tutorial's DataLoader and its sampler, None where it has one process."""
    sampler = None if case.script == "mnist_dp" else DistributedSampler(dataset, dist.get_world_size(), dist.get_rank(), seed=seed)
    return DataLoader(dataset, case.batch, shuffle=sampler is None, sampler=sampler, num_workers=case.loader_workers,
                      pin_memory=GPUS > 0), sampler


def tutorial_steps(case, loader, sampler, model, optimizer, loss_of, device):
    """Train as the tutorial does, for ever: yield after every step."""
    for epoch in itertools.count():
        if case.script == "cpu_ddp":
            next(iter(loader))  # to print the batch size
        if sampler:
            sampler.set_epoch(epoch)
        total, loss_sum, correct = 0, 0.0, 0
        for x, y in loader:
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            output = model(x)
            loss = loss_of(output, y)
            loss.backward()
            optimizer.step()
            total += len(y)
            if case.items > 0:
                loss_sum += loss.item() * len(y)
            if case.items > 1:
                correct += (output.argmax(1) == y).sum().item()
            yield epoch


def wrap_as_tutorial(case, model, device):
    if case.script == "mnist_dp":
        return nn.DataParallel(model)
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def time_tutorial(module, case, rank, device, unit, units):
    model, optimizer, loss = build(module, case, tutorial=True)
    data = tutorial_data(module, case, (1 if case.script == "cpu_ddp" else units + 1) * unit * case.batch * dist.get_world_size())
    loader, sampler = tutorial_loader(case, data)
    steps = tutorial_steps(case, loader, sampler, wrap_as_tutorial(case, model, device), optimizer, loss, device)
    for _ in itertools.islice(steps, unit):
        pass
    finish(device)
    start = time.perf_counter()
    for _ in itertools.islice(steps, unit * units):
        pass
    finish(device)
    return (time.perf_counter() - start) / (unit * units)


def batch_in_memory(module, case):
    if case.script == "cpu_ddp":
        return module.generate_data(case.batch, 0)[:2]
    if case.label == " resnet18":
        images, labels = random_images(case)
        return images.contiguous(memory_format=torch.channels_last), labels
    if case.script == "synthetic_ddp":
        return module.generate_data(case.batch, 0, True)
    images, labels = module.fake_images(case.batch, 0, True)
    return module.prepare(images, *[32] * (case.script == "cifar10_ddp")), labels


def time_ceiling(module, case, rank, device, unit, units, exchange=None):
    model, optimizer, loss_of = build(module, case, tutorial=False)
    x, y = (tensor.to(device) for tensor in batch_in_memory(module, case))

    def step():
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=True) if case.precision == "bf16" else contextlib.nullcontext():
            loss = loss_of(model(x), y)
        loss.backward()
        if exchange:
            exchange(model)
        optimizer.step()

    for _ in range(unit):
        step()
    finish(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(unit * units):
        step()
    finish(device)
    return (time.perf_counter() - start) / (unit * units)


def time_by_hand(*arguments):
    """The simplest data-parallel step: backward, one flat all_reduce, the optimizer."""
    def exchange(model):
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for parameter, part in zip(model.parameters(), flat.split([parameter.numel() for parameter in model.parameters()])):
            parameter.grad.copy_(part.view_as(parameter))
    return time_ceiling(*arguments, exchange=exchange)


def time_exchange(module, case, rank, device, unit, units):
    """The gradients' all_reduce, of workers that do nothing else."""
    flat = torch.zeros(sum(parameter.numel() for parameter in build(module, case, tutorial=False)[0].parameters()), device=device)
    for _ in range(unit):
        dist.all_reduce(flat)
    finish(device)
    start = time.perf_counter()
    for _ in range(unit * units):
        dist.all_reduce(flat)
    finish(device)
    return (time.perf_counter() - start) / (unit * units)


def time_input(module, case, rank, device, unit, units):
    """Return the seconds per batch of the input path alone, the script's and the tutorial's, on one core."""
    torch.set_num_threads(1)
    samples = MOST_IMAGES // 10
    images, labels = module.fake_images(samples, 0, True)
    size = [32] if case.script == "cifar10_ddp" else []
    start = time.perf_counter()
    batches = list(BatchSampler(torch.randperm(samples).tolist(), case.batch, drop_last=True))
    for x, _ in DataLoader(module.InMemory(images, labels), sampler=batches, batch_size=None):
        module.prepare(module.augment(x), *size)
    script = (time.perf_counter() - start) / len(batches)
    loader = DataLoader(as_torchvision(module, images, labels), case.batch, shuffle=True)
    start = time.perf_counter()
    for _ in itertools.islice(loader, len(batches) // 4):
        pass
    return script, (time.perf_counter() - start) / (len(batches) // 4)


def learn_script(module, case, rank, device, flags):
    """Return training seconds and test accuracy after each epoch of the script."""
    text = "".join(text for _, text in run_script(module, case, flags).marks)
    epochs = re.findall(r"test accuracy ([\d.]+) .*?  ([\d.]+) s", text)
    return list(zip(itertools.accumulate(float(seconds) for _, seconds in epochs), (float(accuracy) for accuracy, _ in epochs)))


def learn_tutorial(module, case, rank, device, data_dir, seed, accuracy, seconds):
    """Return the same of the tutorial's loop, until it reaches the accuracy or has used up the seconds."""
    torch.manual_seed(seed)
    dataset = torchvision.datasets.FashionMNIST(data_dir, train=True, transform=tutorial_transform(case.script))
    tests = module.load_images(argparse.Namespace(fake_data=0, data_dir=Path(data_dir)), train=False)
    test_images, test_labels = (tensor.to(device) for tensor in tests)
    model, optimizer, loss = build(module, case, tutorial=True)
    loader, sampler = tutorial_loader(case, dataset, seed)
    steps = tutorial_steps(case, loader, sampler, wrap_as_tutorial(case, model, device), optimizer, loss, device)
    epochs = [(0.0, 0.0)]
    while epochs[-1][0] < seconds and epochs[-1][1] < accuracy:
        dist.barrier()
        start = time.perf_counter()
        for _ in itertools.islice(steps, len(loader)):
            pass
        finish(device)
        spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.broadcast(spent, 0)  # so that all ranks stop after the same epoch
        hits, tested = module.evaluate(model, module.prepare, test_images, test_labels)
        epochs.append((epochs[-1][0] + spent.item(), hits / tested))
    return epochs[1:]


def work(rank, world_size, threads, tutorials, start_method, connection):
    """Run what the benchmark asks for, in one process of the group, and answer with the seconds."""
    warnings.filterwarnings("ignore")
    multiprocessing.set_start_method(start_method, force=True)  # the loaders' workers start as they would without this benchmark
    modules = {}
    while True:
        try:
            job, case, port, alone, arguments = connection.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="1" if alone else str(world_size), MASTER_ADDR="127.0.0.1",
                          LOCAL_WORLD_SIZE="1" if alone else str(world_size), MASTER_PORT=str(port))
        os.environ["OMP_NUM_THREADS"] = str(threads * world_size if alone else threads)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        module = modules[case.script] = modules.get(case.script) or load_script(case.script)
        if not tutorials:
            module.keep_memory()
        device = torch.device("cuda", rank) if GPUS and case.script != "cpu_ddp" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.reset_peak_memory_stats()
        if job not in (time_script, learn_script):  # main() forms a group of its own
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        answer = job(module, case, rank, device, *arguments)
        leave_group()
        connection.send((answer, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the other group


# --- in the benchmark itself ---
def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Group:
    """Processes that run each job at the same time: world_size for the scripts, and as many for the tutorials."""

    def __init__(self, world_size, threads):
        context = multiprocessing.get_context(START_METHOD)
        pairs = [context.Pipe() for _ in range(2 * world_size)]
        connections = [ours for ours, _ in pairs]
        self.scripts, self.tutorials = connections[:world_size], connections[world_size:]
        start_method = multiprocessing.get_start_method()
        self.processes = [context.Process(target=work, args=(number % world_size, world_size, threads, number >= world_size,
                                                             start_method, theirs))
                          for number, (_, theirs) in enumerate(pairs)]
        for process, (_, theirs) in zip(self.processes, pairs):
            process.start()
            theirs.close()  # so that the end of the process is the end of its answers

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for connection in self.scripts + self.tutorials:
            connection.close()
        for process in self.processes:
            process.join(5)
            process.kill()

    def run(self, job, case, *arguments):
        """Return the answers of the workers, and the most GPU memory of any."""
        alone = case.script == "mnist_dp" or job is time_input
        connections = self.tutorials if job in (time_tutorial, learn_tutorial) else self.scripts
        connections = connections[:1] if alone else connections
        port = free_port()
        for connection in connections:
            connection.send((job, case, port, alone, arguments))
        try:
            answers = [connection.recv() for connection in connections]
        except EOFError:
            sys.exit(f"error: a worker died in {job.__name__} of {case.name()}: its own message is above")
        return [answer for answer, _ in answers], max(peak for _, peak in answers)

    def seconds(self, job, case, *arguments):
        """Return the seconds per step of the slowest worker."""
        return max(answer for answer in self.run(job, case, *arguments)[0] if answer)


def command(case, world_size):
    """Return the command of a case, as a user would type it."""
    launcher = "python" if case.script == "mnist_dp" else f"torchrun --nproc-per-node={world_size}"
    flags = ["--batch-size", str(case.batch), *case.flags, *["--bf16"] * (case.precision == "bf16")]
    return " ".join([launcher, f"{case.script}/train.py", *flags])


def first_steps(case, world_size):
    """Return that command, for a step or two."""
    launcher, *line = command(case, world_size).split()
    if launcher == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--master-addr=127.0.0.1", f"--master-port={free_port()}", line.pop(0)]
    else:
        launcher = []
    data = [] if case.script in ("cpu_ddp", "synthetic_ddp") else ["--fake-data", str(max(10, case.batch * world_size))]
    few = ["--steps", "1"] if case.label == " resnet18" else ["--epochs", "1", "--log-every", "1"]
    return [sys.executable, *launcher, str(ROOT / line[0]), *line[1:], *data, *few]


def launch(line):
    """Return the seconds from launch to the first step, and the megabytes of the largest process."""
    first, start = None, time.perf_counter()
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output = ""
    for text in process.stdout:
        output += text
        if first is None and re.match(r"step 1/|.*images/s \| step", text):
            first = time.perf_counter() - start
    problem = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)  # of the launcher and of the workers it waited for
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or first is None:
        sys.exit(f"error: {' '.join(line)} failed:\n{output}{problem}")
    return first, usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def startup(rounds):
    """Return, for each round, cpu_ddp's time from `python` to the first step, in units of a bare import of torch and an SGD."""
    bare = [sys.executable, "-c", "import torch; torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1); print('step 1/1')"]
    line = [sys.executable, str(ROOT / "cpu_ddp/train.py"), "--epochs", "1", "--log-every", "1"]
    return [(launch(line)[0], launch(bare)[0]) for _ in range(rounds)]


def middle(values):
    return statistics.median(values)


def spread(values, digits=2):
    return f"{middle(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def measure(group, case, world_size, window, rounds):
    """Return the row of a case: interleaved rounds of script, tutorial and ceiling, each about window seconds long."""
    workers = 1 if case.script == "mnist_dp" else world_size
    global_batch = case.batch * workers
    kinds = [time_script, time_tutorial, time_ceiling] + [time_by_hand, time_exchange] * case.explained
    guess = group.seconds(time_tutorial if case.script == "cpu_ddp" else time_ceiling, case, 1, 1)
    units = max(2, min(4, int(window / guess)))
    unit = max(1, min(int(window / guess / units), MOST_IMAGES // global_batch // (units + 1)))
    if case.script == "cpu_ddp":  # epochs as long as the script's own
        unit, units = 2048 // global_batch, max(4, min(1000, int(window / guess * global_batch / 2048)))
    seconds = {kind: [] for kind in kinds}
    gpu_peak = 0
    for number in range(rounds):
        for kind in kinds[number % len(kinds):] + kinds[:number % len(kinds)]:
            answers, peak = group.run(kind, case, unit, units)
            seconds[kind].append(max(answer for answer in answers if answer))
            gpu_peak = max(gpu_peak, peak if kind is time_script else 0)
    script, tutorial, ceiling = (seconds[kind] for kind in kinds[:3])
    first_step, resident = launch(first_steps(case, world_size))
    return {"case": case, "workers": workers, "images_per_s": [global_batch / value for value in script],
            "vs_tutorial": [theirs / ours for ours, theirs in zip(script, tutorial)],
            "vs_ceiling": [least / ours for ours, least in zip(script, ceiling)],
            "steps_per_s": [1 / value for value in script], "peak_mb": gpu_peak / 2**20 or resident, "first_step_s": first_step,
            "vs_by_hand": [least / ours for ours, least in zip(script, seconds.get(time_by_hand, []))],
            "exchange": [alone / ours for ours, alone in zip(script, seconds.get(time_exchange, []))]}


def find_fashion_mnist(data_dir, folder):
    """Return a folder from which torchvision reads Fashion-MNIST, made in `folder` out of Debian's package if need be; else None."""
    if data_dir or not DEBIAN.is_dir():
        return data_dir
    raw = Path(folder, "FashionMNIST/raw")
    raw.mkdir(parents=True)
    for archive in DEBIAN.glob("*.gz"):
        with gzip.open(archive) as source, open(raw / archive.stem, "wb") as target:
            shutil.copyfileobj(source, target)
    return folder


def reach(epochs, accuracy):
    """Return the training seconds and the number of epochs until the accuracy, or None."""
    return next(((seconds, number) for number, (seconds, found) in enumerate(epochs, 1) if found >= accuracy), None)


def learn(group, data_dir, seeds, epochs):
    """Print how long the script and the tutorial's loop train to 90 % and 92 %; return the bar that they give."""
    fp32, bf16 = [case for case in cases(False) if case.script == "fashionmnist_ddp"]
    runs = {"script fp32": [], "script bf16": [], "tutorial": []}
    for seed in range(seeds):
        flags = ["--data-dir", data_dir, "--epochs", str(epochs), "--seed", str(seed)]
        for case in (fp32, bf16):
            runs[f"script {case.precision}"].append(group.run(learn_script, case, flags)[0][0])
        ours = reach(runs["script bf16"][-1], 0.92)
        patience = 3.05 * (ours[0] if ours else runs["script bf16"][-1][-1][0])  # longer proves no more
        runs["tutorial"].append(group.run(learn_tutorial, fp32, data_dir, seed, 0.92, patience)[0][0])
        for name, results in runs.items():
            print(f"seed {seed}, {name}:", *(f"{100 * found:.2f} % after {seconds:.0f} s," for seconds, found in results[-1]), file=sys.stderr)
    print(f"\nFashion-MNIST, {seeds} seeds, script with --epochs {epochs}: training seconds (epochs) to a test accuracy\n")
    print("| | to 90 % | to 92 % | best accuracy |\n|---|---|---|---|")
    for name, results in runs.items():
        cells = []
        for accuracy in (0.90, 0.92):
            found = [reach(result, accuracy) for result in results]
            there = [pair for pair in found if pair]
            cells.append(f"{statistics.mean(s for s, _ in there):.0f} s ± {statistics.pstdev([s for s, _ in there]):.0f}, "
                         f"{statistics.mean(n for _, n in there):.1f} epochs" if there else "")
            cells[-1] += "" if len(there) == len(found) else f" ({len(found) - len(there)} of {len(found)} not within " \
                f"{statistics.mean(result[-1][0] for pair, result in zip(found, results) if not pair):.0f} s)"
        best = [100 * max(accuracy for _, accuracy in result) for result in results]
        print(f"| {name} | {cells[0].strip()} | {cells[1].strip()} | {statistics.mean(best):.2f} % ± {statistics.pstdev(best):.2f} |")
    ratios = []  # of the seconds to 92 %; a tutorial's run that never came counts with what it had spent, one of the script as 0
    for ours, theirs in zip(runs["script bf16"], runs["tutorial"]):
        mine, other = reach(ours, 0.92), reach(theirs, 0.92)
        ratios.append((other[0] if other else theirs[-1][0]) / mine[0] if mine else 0)
    return ("fashionmnist_ddp --bf16: times less wall time than the tutorial to 92 %", ratios, 3.0, False)


def show(rows):
    columns = ("script", "images/s", "/ tutorial", "/ ceiling", "/ by hand", "exchange / step", "steps/s", "peak MB per worker",
               "launch to first step")
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        ratios = [spread(row[key]) if row[key] else "" for key in ("vs_tutorial", "vs_ceiling", "vs_by_hand", "exchange")]
        print(f"| {row['case'].name()}, {row['workers']} x {row['case'].batch} | {spread(row['images_per_s'], 0)} | {' | '.join(ratios)} | "
              f"{middle(row['steps_per_s']):.1f} | {row['peak_mb']:.0f} | {row['first_step_s']:.1f} s |")


def as_json(row):
    numbers = {key: round(middle(row[key]), 4) for key in ("images_per_s", "vs_tutorial", "vs_ceiling")}
    return {"script": row["case"].script, "precision": row["case"].precision, "workers": row["workers"], **numbers,
            "peak_mb": round(row["peak_mb"], 1), "first_step_s": round(row["first_step_s"], 2)}


def judge(bars):
    """Print each bar (name, values, bound, whether it is an upper one); return whether all hold."""
    held = []
    print("\n| bar | wanted | measured | |\n|---|---|---|---|")
    for name, values, bound, upper in bars:
        held.append(middle(values) <= bound if upper else middle(values) >= bound)
        print(f"| {name} | {'at most' if upper else 'at least'} {bound:g} | {spread(values)} | {'held' if held[-1] else 'MISSED'} |")
    return all(held)


def machine():
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    return platform.processor() or platform.machine()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    names = sorted({case.script for case in cases(False)})
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SCRIPT", help="measure these scripts alone")
    parser.add_argument("--quick", action="store_true", help="under 2 minutes: one row per script, smaller batches, fewer rounds")
    parser.add_argument("--accuracy", action="store_true", help="train the real Fashion-MNIST to 90 %% and 92 %%, too")
    parser.add_argument("--data-dir", metavar="DIR", help=f"folder with FashionMNIST/raw (default: made of {DEBIAN}, if it is there)")
    parser.add_argument("--seeds", type=int, default=3, help="with --accuracy: runs of each")
    parser.add_argument("--epochs", type=int, default=7, help="with --accuracy: of the script")
    parser.add_argument("--rounds", type=int, help="measurements of each loop (default: 5, with --quick 2)")
    parser.add_argument("--window", type=float, help="seconds of one measurement (default: 4, with --quick 0.5)")
    parser.add_argument("--workers", type=int, default=GPUS or 2, help="workers to start, one per GPU where there are GPUs")
    parser.add_argument("--json", metavar="FILE", help="write the table there, too")
    parser.add_argument("--no-bars", action="store_true", help="only report: exit 0 though a bar is missed")
    args = parser.parse_args()
    rounds, window = args.rounds or (2 if args.quick else 5), args.window or (0.5 if args.quick else 4)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, cores // args.workers)
    start = time.perf_counter()
    print(f"{torch.cuda.get_device_name() + ', ' if GPUS else ''}{machine()}, {cores} cores | torch {torch.__version__}, torchvision "
          f"{torchvision.__version__}, Python {platform.python_version()} | {args.workers} workers, {threads} threads each, "
          f"{'nccl' if GPUS else 'gloo'} | {rounds} rounds of {window:g} s | median (least-most)\n"
          f"$ {' '.join(['python', 'tests/benchmark.py', *sys.argv[1:]])}", flush=True)
    chosen = [case for case in cases(args.quick) if case.script in args.only]
    print("\n".join(command(case, args.workers) for case in chosen), flush=True)

    rows, bars = [], []
    with tempfile.TemporaryDirectory() as folder, Group(args.workers, threads) as group:
        data_dir = find_fashion_mnist(args.data_dir, folder) if args.accuracy else None
        if args.accuracy and not data_dir:
            parser.error("--accuracy needs the real Fashion-MNIST: apt-get install dataset-fashion-mnist, or --data-dir")
        for case in chosen:
            row = measure(group, case, args.workers, window, rounds)
            rows.append(row)
            bars += [(f"{case.name()}: {key.replace('vs_', 'speed / ')}", row[key], bound, False) for key, bound in case.bars.items()]
            print(f"{time.perf_counter() - start:5.0f} s: {case.name()} is measured", file=sys.stderr)
            if case.script == "cpu_ddp" and not args.quick:
                bars.append(("cpu_ddp: step / the step written by hand", [1 / ratio for ratio in row["vs_by_hand"]], 1.05, True))
                bars.append(("cpu_ddp: launch to first step / bare import and SGD", [a / b for a, b in startup(rounds)], 1.2, True))
            if case.precision == "fp32" and case.script in ("fashionmnist_ddp", "cifar10_ddp"):
                pairs = [group.run(time_input, case._replace(batch=max(64, case.batch)), 0, 0)[0][0] for _ in range(1 if args.quick else rounds)]
                ratios = [theirs / ours for ours, theirs in pairs]
                bars.append((f"{case.script}: input path alone / tutorial's, one core", ratios, 20, False))
        show(rows)
        if args.accuracy:
            bars.append(learn(group, data_dir, args.seeds, args.epochs))
    held = judge(bars)
    print(f"\n{time.perf_counter() - start:.0f} s in all")
    if args.json:
        Path(args.json).write_text(json.dumps([as_json(row) for row in rows if args.quick or row["case"].label != " MLP"], indent=1) + "\n")
    return 0 if held or args.no_bars else 1


if __name__ == "__main__":
    sys.exit(main())

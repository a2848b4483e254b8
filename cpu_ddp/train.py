#!/usr/bin/env python3
"""Train a linear model on generated data with DistributedDataParallel (DDP) on CPUs.

    python train.py                          # one process
    torchrun --standalone --nproc-per-node=2 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --kill-on-bad-exit=1 python train.py

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of
processes. With the same PyTorch and the same number of processes and threads, the final weights are
bitwise those of an uninterrupted run.

Each process uses its share of the cores, unless OMP_NUM_THREADS is set. Under torchrun,
OMP_NUM_THREADS=1 is ignored: torchrun sets it itself.

To train something else, edit the functions above train().

Follows "PyTorch DDP on CPU" (Slurm) and "Get Started Training a Model using PyTorch DDP in 5
Minutes (CPU)" (Kubernetes) of awsome-distributed-training.
"""
import argparse
import contextlib
import ctypes
import math
import os
import re
import signal
import sys
import time
import zipfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=50, help="passes over the data")
    add("--batch-size", type=at_least(1), default=32,
        help="samples per forward pass; a larger share of a step accumulates gradients")
    add("--global-batch", type=at_least(1), metavar="N",
        help="samples per step of all processes; None: batch size times processes")
    add("--lr", type=at_least(0.0), default=0.02, help="initial learning rate of SGD")
    add("--seed", type=at_least(0), default=0, help="seed of data, weights and order")
    add("--bf16", action="store_true", help="bfloat16; slow on many CPUs")
    add("--samples", type=at_least(1), default=2048, help="samples to generate")
    add("--checkpoint", type=os.path.realpath, metavar="FILE", help="to save to and resume from")
    add("--save-every", type=at_least(1), default=10, metavar="EPOCHS", help="between checkpoints")
    add("--log-every", type=at_least(0.0), default=5, metavar="SECONDS",
        help="to the next log line, where a signal stops the run; 0: every step")
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS",
        help="to wait for other processes")
    return parser.parse_args()


# ---- A copy edits the code from here to train(): names, model, optimizer, data, loss. ----
RUN = "cpu_ddp"      # in the checkpoint: it is only resumed under the same name
SAMPLES = "samples"  # in log lines and in the checkpoint: what is counted


def build_model(args):
    """Return the model and its optimizer. Each parameter group has its own peak learning rate."""
    model = nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    # To clip gradients, after they are averaged:
    # def clip(*_):
    #     nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # optimizer.register_step_pre_hook(clip)
    return model, optimizer


def learning_rate(step, total_steps):
    """Return the factor of the peak rates: linear decay to 0."""
    return 1 - step / total_steps


def prepare_data(args):
    """Do nothing: the data is generated. A download belongs here: once on each machine."""


def generate_data(args):
    """Return inputs (N, 20), targets (N, 1) with noise of 0.1, and the true weight (1, 20)."""
    generator = torch.Generator().manual_seed(args.seed)  # the same data on every rank
    inputs = torch.randn(args.samples, 20, generator=generator)
    true_weight = torch.randn(1, 20, generator=generator)
    noise = 0.1 * torch.randn(args.samples, 1, generator=generator)
    return inputs, inputs @ true_weight.T + noise, true_weight


def load_data(args):
    """Return inputs (N, 20) and targets (N, 1)."""
    inputs, targets, _ = generate_data(args)
    return inputs, targets


def loss_of(model, inputs, targets):
    """Return the sum of the samples' losses: their squared errors."""
    return F.mse_loss(model(inputs), targets, reduction="sum")


def report(args, model):
    """Log the result of the training."""
    _, _, true_weight = generate_data(args)
    error = (model.weight - true_weight).abs().max()
    log(f"largest error of a learned weight: {error:.4f}")


# ---- A copy needs no edits below. A new flag that changes the weights belongs in settings. ----
def train(args):
    rank, local_rank, world_size = setup_environment()
    device = torch.device("cpu")
    checkpoint = {}
    if rank == 0:  # before the group is formed: if this fails, the launcher ends the others
        prepare_data(args)
        checkpoint = load_checkpoint(args.checkpoint)
    init_process(rank, world_size, device, args.timeout)
    checkpoint = broadcast(checkpoint)
    if local_rank == 0 and rank > 0:
        prepare_data(args)  # on machines that do not share the disk of rank 0
    dist.barrier()  # now each machine has the data
    x, y = load_data(args)

    # A run is defined by its global batch and batch size, not by its number of processes
    global_batch = choose_global_batch(args, checkpoint, len(x), world_size)
    steps_per_epoch = len(x) // global_batch
    total_steps = args.epochs * steps_per_epoch
    share = len(range(rank, global_batch, world_size))  # of this process in each step
    parts = math.ceil(share / args.batch_size)  # several: gradients are accumulated

    torch.manual_seed(args.seed)
    model, optimizer = build_model(args)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    state = {"model": model, "optimizer": optimizer}
    settings = {"script": RUN, SAMPLES: len(x), "batch_size": args.batch_size, "lr": args.lr,
                "seed": args.seed, "bf16": args.bf16}
    step = restore(checkpoint, settings, state, total_steps)
    del checkpoint  # a second copy of weights and optimizer
    ddp_model = wrap_ddp(model, lambda model: loss_of(model, x[:2], y[:2]))
    log(f"world size {world_size} on {device.type}, threads {torch.get_num_threads()} | "
        f"torch {torch.__version__} | global batch {global_batch} of {len(x)} {SAMPLES}"
        f"{f', {parts} parts per process' if parts > 1 else ''} | steps {step} to {total_steps}")

    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    progress = Progress(args, state, settings, global_batch, step, total_steps, device)
    for epoch in range(step // steps_per_epoch, args.epochs):
        # The order and dropout, if any, depend on seed, epoch, step and part: a resume repeats them
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(x), generator=shuffle)
        batches = order.split(global_batch)[:steps_per_epoch]  # what fills no batch is dropped
        progress.start_epoch(epoch, step)
        loss_sum = count = 0  # of this process in this epoch
        for batch in batches[step - epoch * steps_per_epoch:]:
            for group, peak_rate in zip(optimizer.param_groups, peak_rates):
                group["lr"] = peak_rate * learning_rate(step, total_steps)
            optimizer.zero_grad()
            for part in range(parts):
                first = rank + part * world_size
                indices = batch[first::parts * world_size]
                torch.default_generator.manual_seed(hash((args.seed, step, first)))
                ddp_model.require_backward_grad_sync = part == parts - 1  # exchange gradients once
                with autocast:
                    loss = loss_of(ddp_model, x[indices], y[indices])
                (loss * (world_size / global_batch)).backward()  # DDP divides by world_size
                loss_sum += loss.detach()
                count += len(indices)
            optimizer.step()
            step += 1
            if progress.is_due(step):
                progress.log_and_save(step, {"loss": loss_sum}, count)
    report(args, model)
    close_group()


# The shared blocks are identical in all scripts of this collection.
# --- shared: helpers ---
def at_least(minimum):
    """Return a type for argparse: numbers of minimum's type, from minimum on."""
    def number(text):
        value = type(minimum)(text)
        if not minimum <= value < 2**62:  # not true for nan either
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {minimum}")
        return value
    return number


def available_cores():
    """Return how many cores this process may use. Hyperthreads share a core."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count()
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read())
        except OSError:
            cores.add(cpu)
    cores = min(len(cores), int(os.environ.get("SLURM_CPUS_ON_NODE", len(cores))))
    with contextlib.suppress(OSError, ValueError):  # the quota of a container, if any
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        cores = min(cores, int(quota) // int(period))
    return cores


def configure_cpu(local_world_size):
    """Use this process's share of the cores, unless OMP_NUM_THREADS is set; keep freed memory."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or (threads == "1" and local_world_size > 1):  # 1 is torchrun's default
        torch.set_num_threads(max(1, available_cores() // local_world_size))
    with contextlib.suppress(AttributeError):  # glibc: a fifth more images/s on a CPU
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return it to the system
        ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks up to 32 MB


def handle_signals(handler):
    """Call handler on SIGTERM, Ctrl-C and a closed terminal."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, handler)


def save_checkpoint(path, state, step, settings, global_batch):
    """Replace the file at path atomically, and keep the previous one as path.previous."""
    checkpoint = {"step": step, "settings": settings, "global_batch": global_batch}
    for name, part in state.items():
        checkpoint[name] = part.state_dict()
    try:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            os.replace(path, f"{path}.previous")
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: cannot save {path} ({error}): disk full, or another run? "
                 "An older one is intact, if any")
    log(f"saved step {step} in {path}")


def load_checkpoint(path):
    """Return the checkpoint at path, or at path.previous if that cannot be loaded.

    Without a path or without files it is {}. If no file can be loaded, the process exits.
    """
    if path is None:
        return {}
    try:  # fail now, not at the first save
        open(path if os.path.isdir(path) else f"{path}.tmp", "ab").close()
    except OSError as error:
        sys.exit(f"error: cannot write --checkpoint {path} ({error.strerror}): "
                 "name a file; mkdir -p makes its folder")
    files = [file for file in (path, f"{path}.previous") if os.path.exists(file)]
    for file in files:
        try:
            damaged = zipfile.ZipFile(file).testzip()  # torch.load does not verify checksums
            if damaged:
                raise RuntimeError(f"wrong checksum of {damaged}")
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            return {**checkpoint, "file": file}
        except Exception as error:
            print(f"warning: cannot load {file} ({error})", file=sys.stderr)
    if files:
        sys.exit(f"error: cannot load --checkpoint {' or '.join(files)}: "
                 "name another one to start over")
    return {}


def restore(checkpoint, settings, state, total_steps):
    """Load the checkpoint into model and optimizer. Return its step, or 0 without a checkpoint."""
    if not checkpoint:
        return 0
    file = checkpoint["file"]
    saved = checkpoint.get("settings", {})
    different = [f"{name} {saved.get(name)}, not {value}" for name, value in settings.items()
                 if saved.get(name) != value]
    if different:
        sys.exit(f"error: {file} belongs to another run ({', '.join(different)}): "
                 "name another --checkpoint")
    if checkpoint["step"] > total_steps:
        sys.exit(f"error: {file} is of step {checkpoint['step']} of {total_steps}: "
                 "increase --epochs")
    try:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
    except (KeyError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {file} is of another model: name another --checkpoint ({error!r:.300})")
    return checkpoint["step"]


def check_finite(model):
    """Exit if a weight is infinite or not a number: on all ranks, whose weights are equal."""
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        sys.exit("error: the weights are not finite: "
                 "start over with a lower --lr and another --checkpoint")


def log(message):
    """Print on rank 0. If the terminal or pipe is closed, the run goes on, and saves."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(message, flush=True)
# --- end ---


# --- shared: processes ---
def setup_environment():
    """Return rank, local rank and world size. Set torchrun's variables in a step of srun."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when torchrun is killed
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and "RANK" not in env and "SLURM_PTY_PORT" not in env:
        first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])  # n07 of n[07-09]
        env["RANK"] = env["SLURM_PROCID"]
        env["LOCAL_RANK"] = env["SLURM_LOCALID"]
        env["WORLD_SIZE"] = str(tasks)
        env.setdefault("MASTER_ADDR", "".join(first_host.groups()))
        env.setdefault("MASTER_PORT", str(10000 + int(env["SLURM_JOB_ID"]) % 20000))
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def init_process(rank, world_size, device, timeout):
    """Set up this process and the process group: nccl for tensors on GPUs, gloo for the others.

    A lost process is noticed after timeout seconds at the latest.
    """
    configure_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    options = {"rank": rank, "world_size": world_size, "store": store,
               "timeout": timedelta(seconds=timeout)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)


def broadcast(value):
    """Return rank 0's value on all ranks. It passes through the memory of the CPU."""
    values = [value]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]


def choose_global_batch(args, checkpoint, samples, world_size):
    """Return how many samples a step uses: as many as at the run's first start."""
    global_batch = args.batch_size * world_size
    if args.global_batch:
        global_batch = args.global_batch
    global_batch = min(checkpoint.get("global_batch", global_batch), samples)
    if args.global_batch and min(args.global_batch, samples) != global_batch:
        sys.exit(f"error: {checkpoint['file']} belongs to another run (global batch "
                 f"{global_batch}, not {args.global_batch}): name another --checkpoint")
    if global_batch < world_size:
        sys.exit(f"error: more processes than samples in a step ({global_batch}): start fewer")
    return global_batch


def close_group():
    """Leave the process group, when rank 0 has saved: then the launcher may end the others."""
    dist.barrier()
    # Up to PyTorch 2.8 at least, freeing DDP holds the GIL and waits for the threads of gloo, which
    # need it to free their tensors (pytorch#154976): a hang, unless they are done
    time.sleep(0.5)
    dist.destroy_process_group()


def wrap_ddp(model, loss_of):
    """Return model in DDP, after one backward pass in evaluation mode, which changes no state.

    DDP rebuilds its buckets in its first pass, and then sums gradients in another order. A resumed
    run would do so at another step than an uninterrupted one, and its weights would differ.
    """
    if dist.get_world_size() == 1:
        return model  # nothing to exchange
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False  # evaluate() does; the argument is deprecated since 2.13
    loss_of(ddp_model.eval()).backward()
    ddp_model.zero_grad()
    return ddp_model.train()


def all_reduce_sum(numbers, device):
    """Return the sum of each number over all ranks, as floats."""
    sums = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device)
                        for number in numbers])
    dist.all_reduce(sums)
    return sums.tolist()


class Progress:
    """Logs, saves and stops, at the same steps on all ranks."""

    def __init__(self, args, state, settings, global_batch, step, total_steps, device):
        self.args = args
        self.state = state
        self.settings = settings
        self.global_batch = global_batch
        self.total_steps = total_steps
        self.steps_per_epoch = total_steps // args.epochs
        self.device = device
        self.interval = 1  # steps to the next log line
        self.next_step = step + 1
        self.signals = []
        handle_signals(lambda signum, frame: self.signals.append(signum))

    def start_epoch(self, epoch, step):
        self.epoch = epoch
        self.last_step = step
        self.last_time = self.epoch_time = time.perf_counter()

    def seconds_of_epoch(self):
        return time.perf_counter() - self.epoch_time

    def is_due(self, step):
        return step == self.next_step or step % self.steps_per_epoch == 0

    def log_and_save(self, step, sums, count):
        """Log the means of sums (name: sum over count samples) of all ranks; save if it is time.

        If any rank has received a signal, save and exit. At the end, there is nothing to stop.
        """
        stop = self.log(step, sums, count)
        check_finite(self.state["model"])
        at_save = step % (self.args.save_every * self.steps_per_epoch) == 0
        if self.args.checkpoint and dist.get_rank() == 0:
            if at_save or stop or step == self.total_steps:
                save_checkpoint(self.args.checkpoint, self.state, step, self.settings,
                                self.global_batch)
        if stop and step < self.total_steps:
            close_group()
            log(f"stopped by a signal after step {step}")
            sys.exit(1)
        self.last_step = step
        self.last_time = time.perf_counter()

    def log(self, step, sums, count):
        """Log and schedule the next log line. Return whether any rank has received a signal."""
        numbers = [float(number) for number in sums.values()]  # waits for the GPU
        seconds = time.perf_counter() - self.last_time
        *totals, count, seconds, signals = all_reduce_sum(
            [*numbers, count, seconds, len(self.signals)], self.device)
        # The mean time of all ranks, so that the next line is due at the same step on all ranks
        steps_per_second = (step - self.last_step) * dist.get_world_size() / seconds
        # At most twice as many steps as before: the first ones may be faster than those to come
        self.interval = max(1, min(int(self.args.log_every * steps_per_second), 2 * self.interval))
        self.next_step = step + self.interval
        means = "  ".join(f"{name} {total / count:.4f}" for name, total in zip(sums, totals))
        seconds_left = round((self.total_steps - step) / steps_per_second)
        log(f"epoch {self.epoch + 1}/{self.args.epochs}  step {step}/{self.total_steps}  {means}  "
            f"{steps_per_second * self.global_batch:,.0f} {SAMPLES}/s  "
            f"{timedelta(seconds=seconds_left)} left")
        return signals > 0
# --- end ---


if __name__ == "__main__":
    train(parse_args())

#!/usr/bin/env python3
"""Train ResNet-18, or any classifier of torchvision, on CIFAR-10 with DistributedDataParallel.

Mirrors the DDP part of OpenACC's "Distributed Data Parallelism" notebook (its test_ddp.py and slurm_ddp.py)
and the cifar10_example of "A complete tutorial to run a distributed training on multiple nodes".

    python train.py                                   # one worker: on a GPU, or the CPU
    torchrun --nproc-per-node=4 train.py              # one worker per GPU of this machine
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 python train.py
    torchrun --nproc-per-node=4 train.py --model swin_v2_b --batch-size 32

To train on your own images: return them from load_images, and your model from build_model.

With --checkpoint FILE the run may be killed at any moment and started again, and ends with the same
bits (on GPUs with --deterministic). FILE.previous is the snapshot before; FILE.status says running,
preempted or finished. A run that cannot save stops at once: better than hours that nothing keeps.
Exit status: 0 finished, 75 stopped by a signal (start it again), 1 failed.
"""
import argparse
import contextlib
import ctypes
import difflib
import gzip
import io
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

LAUNCHER = os.getppid()  # asked before the imports that take seconds, since it may die meanwhile
if __name__ in ("__main__", "__mp_main__"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends even imports and waits in C++

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

DATASET, IMAGE_SHAPE = "CIFAR10", (32, 32, 3)  # of torchvision.datasets
FILES = "cifar-10-batches-py/{data_batch_1,data_batch_2,data_batch_3,data_batch_4,data_batch_5,test_batch,batches.meta}"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of CIFAR-10's training images, per channel


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                            formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=30, help="passes over the data")
    add("--batch-size", type=at_least(1), default=128, help="images per worker and step")
    add("--model", default="resnet18", help="a classifier of torchvision.models; resnet18 gets a stem for small images")
    add("--lr", type=at_least(1e-9, float), default=0.1, help="learning rate of SGD for a global batch of 256, scaled linearly")
    add("--seed", type=at_least(0), default=0, help="of the weights, the order, crops, flips and dropout")
    add("--data-dir", default="data", help="folder of the data set, which is downloaded if it is not there")
    add("--fake-data", type=at_least(10), nargs="?", const=512, metavar="N", help="train on N generated images")
    add("--checkpoint", metavar="FILE", help="snapshot to save and to resume from")
    add("--save-every", type=at_least(1), default=1, metavar="EPOCHS", help="snapshot interval")
    add("--save-every-steps", type=at_least(1), metavar="STEPS", help="snapshot interval within long epochs")
    add("--fresh", action="store_true", help="start over though there is a snapshot")
    add("--log-every", type=at_least(1), default=100, metavar="STEPS", help="interval of progress lines")
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS", help="how long to wait for a silent worker")
    add("--bf16", action="store_true", help="compute in bfloat16 where autocast finds it safe")
    add("--compress", action="store_true", help="exchange gradients in bfloat16: half the bytes, for a slow network")
    add("--deterministic", action="store_true", help="the same bits in every run on a GPU, more slowly")
    return parser.parse_args()


def build_model(name):
    """Return the torchvision model of this name for 10 classes, and the side of its square input in pixels.

    ResNet-18 gets a 3 x 3 stem without max-pool, for 32 pixels; the others keep theirs. UserError lists close names.
    """
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=4, cutoff=0.4) or names[:4]
        raise UserError(f"--model {name} is not in torchvision.models: {', '.join(close)} come close")
    one_output = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, num_classes=10, **one_output)
    if name == "resnet18":
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        model.maxpool = nn.Identity()
        return model, 32
    size = torchvision.models.get_model_weights(name).DEFAULT.transforms.keywords["crop_size"]
    return model, getattr(model, "image_size", size)  # a vision transformer takes its own alone


def augment(images):
    """Flip the first half of uint8 images (N, H, W, C), then crop each at random from itself padded by 4 pixels.

    The order is random, so the first half is a random half. Rows are copied whole: on a CPU 8 times faster than pixel by pixel.
    """
    n, height, width, channels = images.shape
    half = (n + int(torch.randint(2, ()))) // 2
    images = torch.cat([images[:half].flip(2), images[half:]])
    runs = F.pad(images, (0, 0, 4, 4, 4, 4)).flatten().unfold(0, width * channels, channels)  # a row's length from each pixel on
    top, left = torch.randint(9, (2, n, 1), device=images.device)
    image, row = torch.arange(n, device=images.device).view(n, 1), torch.arange(height, device=images.device)
    first_pixels = (image * (height + 8) + top + row) * (width + 8) + left
    return runs.index_select(0, first_pixels.flatten()).view(images.shape)


def prepare(images, size):
    """Return uint8 images (N, 32, 32, 3) as normalised floats (N, 3, size, size)."""
    rows = images.flatten(2).float()  # (N, 32, 96)
    mean, std = (255 * torch.tensor(values).repeat(images.shape[2]).to(images.device, non_blocking=True) for values in (MEAN, STD))
    images = rows.sub_(mean).div_(std).view(images.shape).movedim(3, 1)
    if size != images.shape[2]:
        images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
    return images.contiguous(memory_format=torch.channels_last)


def schedule(step, total_steps):
    """Return the factor of the learning rate: linear warm-up over a twentieth of the steps, then half a cosine to 0.

    After "Accurate, Large Minibatch SGD" (Goyal et al. 2017) and "SGDR" (Loshchilov and Hutter 2017).
    """
    warm_up = max(1, total_steps // 20)
    return min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * max(0, step - warm_up) / max(1, total_steps - warm_up))))


def main():
    worker = find_worker()
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model, size = build_model(args.model)
    set_threads(worker)
    keep_memory()
    device, backend = pick_device(worker, args.deterministic)
    join_group(worker, backend, args.timeout, device)
    log = print if worker.rank == 0 else lambda *_: None
    if not args.fake_data:
        together(download, args, worker.rank == 0)
        together(download, args, worker.local_rank == 0)  # where each node has a disk of its own
    images, labels = [tensor.to(device) for tensor in together(load_images, args, True)]
    test_images, test_labels = [tensor.to(device) for tensor in together(load_images, args, False)]
    dataset = InMemory(images, labels)
    checkpoint = args.checkpoint if worker.rank == 0 else None  # rank 0 alone reads and writes
    run = {"script": "cifar10_ddp", "model": args.model, "seed": args.seed, "lr": args.lr, "bf16": args.bf16,
           "compress": args.compress, "data": args.fake_data or DATASET, "batch_size": args.batch_size,
           "global_batch": args.batch_size * worker.world_size}
    snapshot = load_snapshot(checkpoint, run, args.fresh)
    step, run = snapshot["step"], snapshot["run"]
    global_batch = run["global_batch"]  # a resumed run keeps its own when the number of workers changes
    batch_size = share(global_batch, worker.world_size, len(dataset))
    steps_per_epoch = math.ceil(len(dataset) / global_batch)
    total_steps = args.epochs * steps_per_epoch
    log(f"cifar10_ddp: {describe_group()} | {args.model} | global batch {global_batch} of {len(dataset)} images, "
        f"{len(test_labels)} to test | steps {step} to {total_steps}")

    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * global_batch / 256, momentum=0.9, nesterov=True,
                                weight_decay=5e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, total_steps))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    restore(snapshot, parts)
    if step == 0:
        together(save_snapshot, checkpoint, step, run, parts)  # a group that re-forms smaller keeps the global batch
    together(set_status, checkpoint, "running")
    stop = StopSignal()
    if step >= total_steps:
        hits, tested = evaluate(model, lambda images: prepare(images, size), test_images, test_labels, stop)
        if tested < len(test_labels):  # a signal has cut it short
            return leave(checkpoint, args, step)
        log(f"already finished, test accuracy {hits / tested:.4f} ({hits}/{tested}): more --epochs go on from {args.checkpoint}, "
            "--fresh starts over")
        set_status(checkpoint, "finished")
        return 0
    ddp_model = wrap(model, prepare(images[:2], size), args.compress)
    sampler = DistributedSampler(dataset, worker.world_size, worker.rank, seed=args.seed)
    progress = Progress(args, stop, device, steps_per_epoch)
    while step < total_steps:
        epoch, first_batch = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        batches = list(BatchSampler(sampler, batch_size, drop_last=False))[first_batch:]
        progress.start_epoch(step)
        for x, y in DataLoader(dataset, sampler=batches, batch_size=None):  # indexes a whole batch at once
            x, y = x.to(device), y.to(device)  # there already, but for a data set of your own
            seed_step(device, args.seed, step, worker.rank)  # the step is the only state, for crops too
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = ddp_model(prepare(augment(x), size))
                loss = F.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            progress.add(loss, (logits.argmax(1) == y).sum(), len(y))
            stopped = progress.after(step)
            if stopped or save_is_due(args, step, steps_per_epoch):
                together(save_snapshot, checkpoint, step, run, parts)
            if stopped and step < total_steps:
                return leave(checkpoint, args, step)
        loss, accuracy, seconds, speed = progress.epoch()
        hits, tested = evaluate(model, lambda images: prepare(images, size), test_images, test_labels, stop)
        if tested < len(test_labels):  # a signal has cut it short
            together(save_snapshot, checkpoint, step, run, parts)
            return leave(checkpoint, args, step)
        log(f"epoch {epoch + 1}/{args.epochs}  train loss {loss:.4f} accuracy {accuracy:.4f}  "
            f"test accuracy {hits / tested:.4f} ({hits}/{tested})  {seconds:.1f} s  {speed:,.0f} images/s")
    set_status(checkpoint, "finished")
    return 0


# The blocks below are the same in all scripts of this collection: they keep a run going, whatever it trains.

# --- shared: errors ---
class UserError(Exception):
    """A mistake that one line explains. Rank 0 prints it, unless `speaks` says whether this worker does."""

    def __init__(self, message, speaks=None):
        super().__init__(message)
        self.speaks = os.environ.get("RANK", "0") == "0" if speaks is None else speaks


class ArgumentParser(argparse.ArgumentParser):
    """One that raises UserError: one line, not a page from every worker."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def at_least(minimum, kind=int):
    """Return an argparse type for numbers from minimum on."""
    def number(text):
        if not minimum <= kind(text) < 2**31:  # nor nan or inf
            raise argparse.ArgumentTypeError(f"{text} is not a number from {minimum} to {2**31 - 1}")
        return kind(text)
    return number


def one_line(error):
    """Return what an exception says, on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def launch(main):
    """Exit with main()'s status; a mistake, or the loss of the other workers, is one line and status 1."""
    sys.stdout.reconfigure(line_buffering=True)  # a log is read while it grows
    status, problem = 1, None
    try:
        status = main()
        if dist.is_initialized() and dist.get_backend() == "nccl":  # gloo's can wait for ever for a peer that has left
            dist.destroy_process_group()
    except OSError as error:  # the output is a closed pipe or a full disk, for example
        problem = one_line(error)
    except UserError as error:
        if not error.speaks:
            time.sleep(5)  # one that speaks leaves first, and its launcher then ends this one
        problem = str(error) if error.speaks or not dist.is_initialized() else None
    except RuntimeError as error:
        if re.search(r"out of memory|can't allocate memory|ALLOC\w*_FAILED", str(error)):
            problem = "out of memory: lower --batch-size or start more workers"
        elif found := re.search("[^\n:]* does not have a deterministic implementation", str(error)):
            problem = f"{found[0].strip()}: leave out --deterministic, or take another model"
        elif isinstance(error, dist.DistError) or re.search("(?i)gloo|nccl|socket|connection|timed out", str(error)):
            problem = (f"lost the other workers ({one_line(error)}): see whether they run and reach "
                       f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}, whether that port is free, and "
                       "whether host names mean 127.* (then export GLOO_SOCKET_IFNAME=<interface>, for GPUs NCCL_SOCKET_IFNAME)")
        else:
            raise
        rank = int(os.environ.get("RANK", 0))
        problem += f" [rank {rank} on {socket.gethostname()}]"
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        time.sleep(min(0.3 * rank, 3))  # the lowest rank speaks; its launcher then ends the others
    with contextlib.suppress(OSError):
        if problem:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(status)  # Python's own teardown can hang in a process group whose peer is gone
# --- end ---


# --- shared: worker ---
class Worker(NamedTuple):
    """Who this process is, among all workers and among those of its machine."""
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    cpus: int = 0  # that a Slurm step grants to each task, where it says so


def find_worker():
    """Return who this process is, from torchrun's variables, else from a Slurm step's, else alone.

    A Slurm step's are translated into torchrun's, which init_process_group reads. The leftovers of
    an allocation, or the shell of `srun --pty`, are no step. UserError names what is missing or wrong.
    """
    env, cpus, names = os.environ, 0, ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    in_pty = "SLURM_PTY_PORT" in env and env.get("SLURM_TASK_PID") != str(os.getpid())
    try:
        if not any(name in env for name in names[:3]):
            if "SLURM_STEP_NUM_TASKS" not in env or in_pty:
                return Worker(0, 0, 1, 1)
            tasks, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_STEP_NUM_NODES"])
            job, restarts = int(env["SLURM_JOB_ID"]), int(env.get("SLURM_RESTART_COUNT") or 0)
            run_number = 100 * job + 10 * int(env["SLURM_STEP_ID"]) + restarts
            first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])  # n[07-09],m1 begins with n07
            env.setdefault("MASTER_ADDR", "".join(first_host.groups()))
            env.setdefault("MASTER_PORT", str(10000 + run_number % 20000))  # below the ephemeral ports
            env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"], WORLD_SIZE=str(tasks),
                       LOCAL_WORLD_SIZE=str(-(-tasks // max(1, nodes))))
            cpus = int(env.get("SLURM_CPUS_PER_TASK") or 0)
        env.setdefault("LOCAL_WORLD_SIZE", "1")  # who starts workers by hand need not say it
        rank, local_rank, world_size, local_world_size, port = [int(env[name]) for name in names[:5]]
        if not (0 <= local_rank <= rank < world_size and 0 < local_world_size and 0 < port < 2**16 and env["MASTER_ADDR"]):
            raise ValueError(" ".join(f"{name}={env[name]}" for name in names) + " do not fit together")
        return Worker(rank, local_rank, world_size, local_world_size, cpus)
    except KeyError as error:
        problem = f"{error.args[0]} is missing from the environment"
    except ValueError as error:
        problem = f"wrong environment: {error}"
    raise UserError(f"{problem}; start with torchrun or srun, or unset {', '.join(names[:3])} for one worker")


def set_threads(worker):
    """Give this worker its share of the cores it may run on, unless the user has set OMP_NUM_THREADS."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    by_torchrun = chosen == "1" and worker.local_world_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if chosen and not by_torchrun:  # which sets 1 for several workers: nobody's choice
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as limit:  # a container's
        quota, period = map(int, limit.read().split())
        cores = min(cores, max(1, quota // period))
    torch.set_num_threads(worker.cpus or max(1, cores // worker.local_world_size))


def keep_memory():
    """Let the C library keep what a step frees, in blocks below 32 MB: else Linux clears it again for each, up to a fifth of a step."""
    with contextlib.suppress(AttributeError):  # a C library that is not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: larger blocks go back, else holes could eat the memory
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: no limit to what is kept
# --- end ---


# --- shared: device ---
def pick_device(worker, deterministic):
    """Return this worker's device and its backend: its GPU and nccl, or the CPU and gloo.

    UserError where a GPU cannot be used, or a node has fewer than workers, unless Slurm shows each task one of its own.
    """
    gpus = torch.cuda.device_count()
    if not gpus:
        return torch.device("cpu"), "gloo"
    by_slurm = "SLURM_STEP_NUM_TASKS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ
    index = 0 if gpus == 1 and by_slurm else worker.local_rank
    if index >= gpus:
        raise UserError(f"{worker.local_world_size} workers on {socket.gethostname()}, which shows {gpus} GPUs: start "
                        f"{gpus} per node, or set CUDA_VISIBLE_DEVICES= to use the CPU", speaks=index == gpus)
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        torch.cuda.set_device(index)
        torch.ones(1, device="cuda").item()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:  # an old driver, a lost GPU or somebody else's, for example
        raise UserError(f"GPU {index} of {socket.gethostname()} cannot be used ({one_line(error)}): see nvidia-smi for its "
                        "driver and its users, or set CUDA_VISIBLE_DEVICES= to use the CPU") from error
    return torch.device("cuda", index), "nccl"


def seed_step(device, *state):
    """Seed what draws on the CPU and on this GPU, for a step. torch.manual_seed asks all kinds of devices: 20 times slower."""
    for generator in [torch.default_generator] + [torch.cuda] * (device.type == "cuda"):
        generator.manual_seed(hash(state))
# --- end ---


# --- shared: group ---
def fresh_store(worker, timeout):
    """Return a part of the workers' common store that no earlier start has used.

    torchrun keeps one store through all its restarts, with the addresses of workers that have died. So rank 0 names
    a new part to each worker that greets it, until all have confirmed; an old greeting does no harm.
    """
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    if orphaned():
        raise UserError("torchrun was killed: this worker leaves that port to its next start")
    token, deadline = os.urandom(8).hex(), time.monotonic() + timeout
    if worker.rank:
        store.set(f"hello {worker.rank}", token)
        part = store.get(f"answer {token}").decode()  # waits for it
        store.set(f"{part} {worker.rank}", "here")
        return dist.PrefixStore(part, store)
    for rank in range(1, worker.world_size):
        while not store.check([f"{token} {rank}"]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out waiting for rank {rank}")
            if store.check([f"hello {rank}"]):
                store.set(f"answer {store.get(f'hello {rank}').decode()}", token)
            time.sleep(0.001)
    return dist.PrefixStore(token, store)


def join_group(worker, backend, timeout, device=None):
    """Form the process group. A worker that does not come or answer within timeout seconds ends the run."""
    def give_up():
        with contextlib.suppress(OSError):
            print("error: the other workers do not answer: see whether they run, or another program has the port "
                  f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(timeout + 10 + min(0.3 * worker.rank, 3), give_up)  # the lowest rank speaks
    timer.daemon = True
    timer.start()
    store = fresh_store(worker, timeout) if worker.world_size > 1 else dist.HashStore()  # alone: needs no port
    dist.init_process_group(backend, store=store, rank=worker.rank, world_size=worker.world_size,
                            timeout=timedelta(seconds=timeout), device_id=device if backend == "nccl" else None)
    timer.cancel()


def together(action, *arguments):
    """Return action(*arguments), run on every worker; if it fails on any, the lowest one says why and all stop."""
    result = problem = None
    try:
        result = action(*arguments)
    except (UserError, OSError) as error:
        problem = f"{error} [rank {dist.get_rank()} on {socket.gethostname()}]"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, problem in enumerate(problems):
        if problem:
            raise UserError(problem, speaks=rank == dist.get_rank())
    return result


def describe_group():
    """Return the number of workers, their hosts, backend, threads and torch version, for the first line of the log."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return (f"{len(hosts)} worker{'s' * (len(hosts) > 1)} on {', '.join(dict.fromkeys(hosts))} | {dist.get_backend()}, "
            f"{torch.get_num_threads()} threads each | torch {torch.__version__}")


def average_at_once(state, bucket):
    """Average a small bucket over the workers, as a hook of DDP: each sends its own to all of them.

    That is one round of messages, where gloo's ring takes 2 * (world_size - 1), and a small exchange is all waiting for
    threads to wake up. Beyond about 256 KB for all the copies, the more bytes weigh more than the fewer rounds.
    """
    mine, world_size = bucket.buffer(), dist.get_world_size()
    if mine.is_sparse:
        return allreduce_hook(None, bucket)
    of_all = mine.new_empty(world_size, len(mine))
    dist.all_to_all_single(of_all, mine.div_(world_size).repeat(world_size, 1))  # float16's sum could overflow
    done = torch.futures.Future()
    done.set_result(mine.copy_(sum(of_all)))  # rank by rank: the same bits on any kind of CPU
    return done


def wrap(model, example, compress=False):
    """Return model in DistributedDataParallel, its gradient buckets in their final order.

    DDP reorders them after the first backward pass, and with them the order of summation. Done here, on
    zeros like `example`, a resumed run sums as the undisturbed one. Two samples will do: BatchNorm needs more than one.
    Its buffers are not broadcast every step: nobody reads them before the evaluation. On CPUs small buckets start the
    exchange sooner; on GPUs DDP's default stays. With compress, gradients travel in bfloat16: half the bytes. On CPUs a
    small model's are averaged in one round.
    """
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=None if example.is_cuda else 1)
    ddp_model.broadcast_buffers = False
    if compress:  # in a lambda, since DDP refuses the hook by its name where there is no NCCL
        ddp_model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    elif not example.is_cuda and 1 < dist.get_world_size() <= 2**18 / sum(part.nbytes for part in model.parameters()):
        ddp_model.register_comm_hook(None, average_at_once)
    buffers = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        ddp_model(torch.zeros_like(example)).sum().backward()
    ddp_model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers):
        buffer.copy_(before)
    return ddp_model
# --- end ---


# --- shared: stop signal ---
def orphaned():
    """Return whether torchrun was killed and has left this worker behind."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER


class StopSignal:
    """Remembers SIGTERM, SIGINT or SIGUSR1 until all workers leave together; a second one ends this worker at once.

    Repeats within 2 seconds are one signal: torchrun and mp.spawn deliver some twice. A thread reads them from
    a pipe, since a Python handler would not run while the main thread waits in a collective.
    """

    SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1

    def __init__(self):
        self.first = 0.0  # when the first signal came
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for signum in self.SIGNALS:
            signal.signal(signum, lambda *_: None)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def seen(self):
        """Return whether to leave: a signal came, or nobody will send one any more."""
        return self.first > 0 or orphaned()

    @classmethod
    def ignore(cls, *_):
        """As worker_init_fn of a DataLoader: torchrun signals its processes too, but the training still needs them."""
        for signum in cls.SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def _watch(self, reader):
        while True:
            signum = os.read(reader, 1)[0]
            if signum in self.SIGNALS:  # DataLoader's workers send SIGCHLD
                self.first = self.first or time.monotonic()
                if time.monotonic() - self.first > 2:
                    os._exit(128 + signum)


def farewell(args, step):
    """Return what rank 0 says when a signal has stopped the run."""
    command = "the same command without --fresh" if args.fresh else "the same command"
    kept = f"{command} goes on from {args.checkpoint}" if args.checkpoint else "nothing is kept without --checkpoint"
    return f"stopped by a signal after step {step}: {kept}"
# --- end ---


# --- shared: progress ---
class Progress:
    """Loss and hits of all workers, reduced about once a second: every step, it would cost half of a small one.

    The stop signal rides on that reduction, so that all workers obey it after the same step.
    """

    def __init__(self, args, stop, device, steps_per_epoch):
        self.args, self.stop, self.device, self.steps_per_epoch = args, stop, device, steps_per_epoch
        self.interval = 1  # steps between two reductions

    def start_epoch(self, step):
        """Forget what was added: an epoch begins, or goes on, after this step."""
        self.loss = self.hits = self.count = 0
        self.totals, self.step = [0.0, 0.0, 0.0], step
        self.start = self.time = time.perf_counter()

    def add(self, loss, hits, count):
        """Add a batch: its mean loss and its hits, tensors that nothing waits for yet, and its number of samples."""
        self.loss += loss.detach() * count
        self.hits += hits
        self.count += count

    def after(self, step):
        """Report and reduce, if it is time to; return whether a signal has reached any worker."""
        logs, steps = step % self.args.log_every == 0, step - self.step
        if step % self.steps_per_epoch and not logs and steps < self.interval:
            return False
        mine = [float(self.loss), float(self.hits), self.count, self.stop.seen()]  # waits for a GPU, before the clock is read
        seconds = time.perf_counter() - self.time
        mine = torch.tensor([*mine, seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine)
        *sums, stopped, worker_seconds = mine.tolist()
        if not math.isfinite(sums[0]):
            raise UserError(f"the loss is {sums[0]} at step {step}: lower --lr and start over with --fresh")
        self.totals = [total + new for total, new in zip(self.totals, sums)]
        steps_per_second = steps * dist.get_world_size() / worker_seconds
        self.interval = max(1, min(2 * self.interval, int(steps_per_second)))
        self.loss = self.hits = self.count = 0
        self.step, self.time = step, time.perf_counter()
        if logs and dist.get_rank() == 0:
            steps = self.args.epochs * self.steps_per_epoch
            left = timedelta(seconds=round((steps - step) / steps_per_second))
            print(f"step {step}/{steps}  loss {sums[0] / sums[2]:.4f}  {sums[2] / seconds:,.0f} samples/s  {left} left")
        return stopped > 0

    def epoch(self):
        """Return the epoch's mean loss, accuracy, seconds and samples per second."""
        loss, hits, count = self.totals
        seconds = time.perf_counter() - self.start
        return loss / count, hits / count, seconds, count / seconds
# --- end ---


# --- shared: snapshot ---
def write_whole(path, data, previous=None):
    """Replace the file at path in one step, so that a kill leaves the old or the new; keep the old one as previous."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(f"{path}.tmp", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if previous and os.path.exists(path):
            os.replace(path, previous)
        os.replace(f"{path}.tmp", path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(f"{path}.tmp")
        raise UserError(f"{path} cannot be written ({error.strerror}): make room there, make it writable, keep other runs away, "
                        "or choose another --checkpoint; then start again, the last good snapshot is whole") from error


def set_status(path, word):
    """Say in path.status whether the run is running, preempted or finished: torchrun hides its workers' exit status."""
    if path:
        write_whole(f"{path}.status", f"{word}\n".encode())


def save_is_due(args, step, steps_per_epoch):
    """Return whether --save-every, --save-every-steps or the end of the run asks for a snapshot after this step."""
    every = args.save_every * steps_per_epoch, args.save_every_steps or math.inf, args.epochs * steps_per_epoch
    return any(step % interval == 0 for interval in every)


def save_snapshot(path, step, run, parts):
    """Write the parts' state_dicts (model, optimizer, scheduler) after this step to path, and keep the snapshot before.

    UserError, with both files as they were, where the weights are not finite or the disk does not take them.
    """
    if path:
        data, state = io.BytesIO(), {name: part.state_dict() for name, part in parts.items()}
        if not all(tensor.isfinite().all() for tensor in state["model"].values()):  # which would be resumed for ever
            raise UserError(f"the weights are not finite after step {step}: lower --lr and start over with --fresh")
        torch.save({"step": step, "run": run, **state}, data)
        write_whole(path, data.getbuffer(), previous=f"{path}.previous")


def read_snapshot(path):
    """Return the state at path. Raises OSError, or whatever zipfile, pickle and torch make of a file that is not whole."""
    with open(path, "rb") as file:
        data = io.BytesIO(file.read())
    with zipfile.ZipFile(data) as archive:  # torch.load does not look at the checksums, and reads nothing that is marked a folder
        if archive.testzip() or any(entry.external_attr & 0x10 for entry in archive.infolist()):
            raise ValueError("wrong checksum")
    data.seek(0)
    state = torch.load(data, map_location="cpu", weights_only=True)  # executes nothing
    if set(state) != {"model", "optimizer", "scheduler", "step", "run"}:
        raise ValueError("not a snapshot")
    return state


def find_snapshot(path, run, fresh):
    """Return the newest whole snapshot of this run, or None. A damaged one is kept aside, never overwritten.

    UserError if there is none whole, if one cannot be read, or if it is another run's: `run` differs in more than
    how the global batch is split. A restart by torchrun or Slurm resumes in spite of `fresh`.
    """
    if path is not None and (not os.path.basename(path) or os.path.exists(path) and not os.path.isfile(path)):
        raise UserError(f"--checkpoint '{path}' is empty, a folder or a device: name a file")
    restarted = any(int(os.environ.get(f"{by}_RESTART_COUNT") or 0) for by in ("TORCHELASTIC", "SLURM"))
    damage = None
    for candidate in (path, f"{path}.previous") if path and (restarted or not fresh) else ():
        try:
            state = read_snapshot(candidate)
            differing = [key for key in run if state["run"].get(key) != run[key]]
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Exception as error:
            if isinstance(error, (OSError, MemoryError)) or "allocate memory" in str(error):  # the file may be whole
                raise UserError(f"{candidate} cannot be read ({one_line(error)}): start again when it can, or move it away") from error
            damage = damage or f"{candidate} is damaged ({one_line(error)})"
            continue
        if differing not in ([], ["batch_size"], ["global_batch"]):
            both = ", ".join(f"{key} is {state['run'].get(key)} there, {run[key]} here" for key in differing)
            raise UserError(f"{candidate} is of another run: {both}; give that run's flags, another --checkpoint, or --fresh")
        if damage:
            os.rename(path, f"{path}.damaged-{time.time_ns()}")
            print(f"warning: {damage}: moved aside, going on from {candidate}", file=sys.stderr)
        return state
    if damage:
        raise UserError(f"{damage} and no whole one is before it: move it away, or --fresh to start over")
    return None


def restore(snapshot, parts):
    """Load the snapshot's state_dicts into the parts (model, optimizer, scheduler)."""
    try:
        for name, part in parts.items():
            if name in snapshot:
                part.load_state_dict(snapshot[name])
        schedule = parts["scheduler"]  # --epochs may have changed, and with it the learning rate at this step
        for group, lr, factor in zip(parts["optimizer"].param_groups, schedule.base_lrs, schedule.lr_lambdas):
            group["lr"] = lr * factor(schedule.last_epoch)
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"the snapshot does not fit this model ({one_line(error)}): give another --checkpoint, "
                        "or --fresh to start over") from error
# --- end ---


# --- shared: resume ---
def load_snapshot(path, run, fresh):
    """Return this run's snapshot on every worker, or one of step 0, without a model, where there is none.

    Only rank 0 has a path and needs to see the file: the others may be on disks of their own.
    """
    found = [together(find_snapshot, path, run, fresh) or {"step": 0, "run": run}]
    dist.broadcast_object_list(found)
    return found[0]


def share(global_batch, world_size, samples):
    """Return the samples per worker of a global batch; UserError where it cannot be split or exceeds the data."""
    if global_batch > samples:
        raise UserError(f"a global batch of {global_batch} is more than the {samples} training samples: "
                        "lower --batch-size or start fewer workers")
    if global_batch % world_size:
        fitting = [str(n) for n in range(1, global_batch + 1) if global_batch % n == 0]
        raise UserError(f"this run's global batch of {global_batch} cannot be split over {world_size} workers: "
                        f"start {', '.join(fitting)}")
    return global_batch // world_size


def leave(checkpoint, args, step):
    """Say that a signal has stopped the run after this step, which is saved; return the exit status."""
    together(set_status, checkpoint, "preempted")  # nobody leaves before it is written
    if dist.get_rank() == 0:
        print(farewell(args, step))
    return 75
# --- end ---


# --- shared: data ---
class InMemory(TensorDataset):
    """Gives a whole batch for a list of indices. index_select copies whole images: on a CPU 10 times faster than [indices]."""

    def __getitem__(self, indices):
        indices = torch.as_tensor(indices).to(self.tensors[0].device, non_blocking=True)  # a GPU's queue is not waited for
        return tuple(tensor.index_select(0, indices) for tensor in self.tensors)


def load_images(args, train):
    """Return images (N, H, W, C) as uint8 and labels (N,) as int64: all in memory, or --fake-data.

    UserError names the folder and the files that torchvision expects there.
    """
    if args.fake_data:
        return fake_images(args.fake_data if train else args.fake_data // 4, args.seed, train)
    try:
        data = getattr(torchvision.datasets, DATASET)(args.data_dir, train=train)
        images, labels = torch.as_tensor(data.data).contiguous(), torch.as_tensor(data.targets)
        images = images.unsqueeze(3) if images.ndim == 3 else images
        if images.shape != (len(labels), *IMAGE_SHAPE) or not 0 <= labels.min() <= labels.max() < 10:
            raise ValueError("images and labels do not fit together")
    except Exception as error:  # whatever torchvision makes of missing and damaged files
        raise UserError(f"{DATASET} cannot be read from {args.data_dir} ({one_line(error)}): it needs {FILES} there; "
                        "--data-dir names another folder, --fake-data needs none") from error
    return images, labels


def fake_images(count, seed, train):
    """Return images like load_images, of ten classes that can be learned: 4 x 4 patches per class, mirrored, under noise."""
    height, width, channels = IMAGE_SHAPE
    patches = torch.randint(256, (10, 4, 2, channels), generator=torch.Generator().manual_seed(seed))
    patches = torch.cat([patches, patches.flip(2)], 2)  # a flip keeps the class
    patterns = patches.repeat_interleave(height // 4, dim=1).repeat_interleave(width // 4, dim=2)
    labels = torch.arange(count) % 10
    noise = torch.randint(256, (count, *IMAGE_SHAPE), generator=torch.Generator().manual_seed(2 * seed + 1 + train))
    return ((2 * patterns[labels] + noise) // 3).to(torch.uint8), labels


def download(args, is_my_task):
    """Fetch the data set, if it is not there and this is the worker to do so; UserError if it cannot be had.

    It goes into a folder of its own, then file by file into place, so that two runs at once do no harm.
    """
    if not is_my_task:
        return
    try:
        load_images(args, train=True)
        load_images(args, train=False)
        return
    except UserError as error:
        missing = error
    socket.setdefaulttimeout(30)  # a firewall that drops packets would hold this for minutes
    try:
        os.makedirs(args.data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.data_dir) as folder, contextlib.redirect_stdout(io.StringIO()):
            for archive in Path(args.data_dir, DATASET, "raw").glob("*-ubyte.gz"):  # that somebody put there
                unpacked = Path(folder, DATASET, "raw", archive.stem)
                unpacked.parent.mkdir(parents=True, exist_ok=True)
                unpacked.write_bytes(gzip.decompress(archive.read_bytes()))
            getattr(torchvision.datasets, DATASET)(folder, download=True)  # what is still missing
            for file in filter(Path.is_file, Path(folder).rglob("*")):
                target = args.data_dir / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
    except Exception as error:  # no network, a mirror that is down, a full disk
        raise UserError(f"{missing}; downloading failed too ({one_line(error)})") from error
# --- end ---


# --- shared: evaluation ---
@torch.no_grad()
def evaluate(model, prepare, images, labels, stop=None):
    """Return how many of the test images all workers together get right, and how many they have seen: each counts once.

    A sampler would pad to equal shares and count some twice. BatchNorm's statistics are rank 0's. A worker that `stop`
    (a StopSignal) tells to leave sees no more: torchrun kills what has not left after 30 s.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64, device=labels.device)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for x, y in zip(images[mine].split(100), labels[mine].split(100)):
        if stop and stop.seen():
            break
        counts[0] += (model(prepare(x)).argmax(1) == y).sum()
        counts[1] += len(y)
    model.train()
    dist.all_reduce(counts)
    return counts.tolist()
# --- end ---


if __name__ == "__main__":
    launch(main)

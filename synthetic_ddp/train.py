#!/usr/bin/env python3
"""Train a small MLP on synthetic data with DistributedDataParallel (DDP), or measure a cluster with --model.

    python train.py                          # one process, on a GPU or the CPU
    torchrun --nproc-per-node=2 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 python train.py
    torchrun --nproc-per-node=4 train.py --model resnet50 --batch-size 64

With --model NAME, nothing is trained or saved: it measures training steps of that torchvision classifier on random
images, with and without the exchange of gradients.

With --checkpoint FILE, the same command resumes a run that was stopped or killed. On SIGTERM or SIGINT, a run saves at
the next log line and exits with status 1; after SIGKILL, it resumes from its last checkpoint. On the CPU, with the same
number of processes and threads, it ends with exactly the weights of an uninterrupted run.

Follows the synthetic_data_example of "A complete tutorial to run a distributed training on multiple nodes with
Pytorch DDP".
"""
import argparse
import contextlib
import ctypes
import math
import os
import re
import resource
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
from torch.utils.data import DistributedSampler
from torchvision import models


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=positive(int), default=10, help="passes over the data")
    add("--batch-size", type=positive(int), default=32, help="samples per process and step")
    add("--lr", type=positive(float), default=0.01, help="initial learning rate of Adam, decays to 0")
    add("--seed", type=int, default=0, help="seed of data, weights and order")
    add("--bf16", action="store_true", help="train in bfloat16; slow on CPUs without AVX512-BF16 or AMX instructions")
    add("--samples", type=positive(int), default=2048, help="samples to generate, and a quarter as many to test")
    add("--model", choices=models.list_models(module=models), metavar="NAME",
        help="measure this classifier of torchvision.models instead, for example resnet50")
    add("--image-size", type=positive(int), default=224, help="with --model: height and width of the images")
    add("--steps", type=positive(int), default=20, help="with --model: steps to measure, after 5 warm-up steps")
    add("--checkpoint", metavar="FILE", help="file to save to and to resume from")
    add("--save-every", type=positive(int), default=1, metavar="EPOCHS", help="epochs between checkpoints")
    add("--log-every", type=positive(int), default=100, metavar="STEPS", help="steps between log lines and stop checks")
    add("--timeout", type=positive(int), default=600, metavar="SECONDS", help="how long to wait for other processes")
    return parser.parse_args()


def generate_data(samples, seed, train):
    """Return inputs (samples, 10) and labels (samples,): which of three random linear functions is the largest."""
    functions = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed))  # the same on every rank
    inputs = torch.randn(samples, 10, generator=torch.Generator().manual_seed(2 * seed + 1 + train))
    return inputs, F.linear(inputs, functions).argmax(1)


def measure(args, device):
    """Log images/s, step time with and without the exchange of gradients, and peak memory."""
    no_aux = {"aux_logits": False, "init_weights": True} if args.model in ("googlenet", "inception_v3") else {}
    model = models.get_model(args.model, weights=None, **no_aux).to(device, memory_format=torch.channels_last)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    ddp_model = wrap_ddp(model, images[:2])

    def time_step(network):
        """Return the seconds of one training step: DDP exchanges the gradients, the plain model does not."""
        dist.barrier()
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(5):
        time_step(ddp_model)
    seconds = torch.tensor([[time_step(ddp_model), time_step(model)] for _ in range(args.steps)], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # a step takes as long as that of the slowest rank
    step, step_alone = seconds.median(0).values.tolist()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    log(f"{args.model} | {dist.get_world_size()} processes on {device.type}, {torch.get_num_threads()} threads each | "
        f"torch {torch.__version__} | {args.batch_size} images of {args.image_size} pixels per process")
    log(f"{dist.get_world_size() * args.batch_size / step:,.1f} images/s  step {1000 * step:.1f} ms, "
        f"without exchange {1000 * step_alone:.1f} ms  scaling efficiency {step_alone / step:.3f}  "
        f"gradients {gradients / 1e6:.1f} MB  peak memory of rank 0 {peak / 1e6:,.0f} MB")


def train(args):
    rank, local_rank, world_size = setup_environment()
    # srun may show each process only its own GPU
    device = torch.device(f"cuda:{local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
    # Before the group is formed: if this fails, the launcher ends the other processes.
    checkpoint = [load_checkpoint(args.checkpoint) if rank == 0 else None]
    init_group(rank, world_size, device, args.timeout)
    if args.model:
        measure(args, device)
        dist.destroy_process_group()
        return
    dist.broadcast_object_list(checkpoint)
    checkpoint = checkpoint[0]
    inputs, labels = (tensor.to(device) for tensor in generate_data(args.samples, args.seed, train=True))
    test_data = generate_data(max(1, args.samples // 4), args.seed, train=False)
    test_inputs, test_labels = (tensor.to(device) for tensor in test_data)

    run = {"script": "synthetic_ddp", "samples": args.samples, "batch_size": args.batch_size, "lr": args.lr,
           "seed": args.seed, "bf16": args.bf16}
    global_batch = checkpoint.get("global_batch", args.batch_size * world_size)  # kept when the world size changes
    if global_batch % world_size:
        sys.exit(f"error: the checkpoint's global batch of {global_batch} cannot be split over {world_size} processes")
    steps_per_epoch = math.ceil(len(inputs) / global_batch)
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = restore(checkpoint, run, state)
    ddp_model = wrap_ddp(model, inputs[:2])
    log(f"{world_size} processes on {device.type}, {torch.get_num_threads()} threads each | torch {torch.__version__}"
        f" | global batch {global_batch} of {len(inputs)} samples | steps {step} to {total_steps}")

    signals = catch_signals()
    sampler = DistributedSampler(inputs, seed=args.seed)
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # evaluate a finished epoch again
        sampler.set_epoch(epoch)
        batches = torch.tensor(list(sampler), device=device).split(global_batch // world_size)
        batches = batches[step - epoch * steps_per_epoch:]
        first_step, start = step, time.perf_counter()
        totals, samples = torch.zeros(2, dtype=torch.float64, device=device), 0  # loss and correct, of this process
        # Larger than memory: for x, y in DataLoader(dataset, batch_sampler=[b.tolist() for b in batches]):
        for indices in batches:
            x, y = inputs[indices], labels[indices]
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = ddp_model(x)
                loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over all processes
            optimizer.step()
            scheduler.step()
            step += 1
            totals += torch.stack([loss.detach() * len(y), (logits.argmax(1) == y).sum()])  # no GPU synchronization
            samples += len(y)
            if step % args.log_every == 0 or step % steps_per_epoch == 0:
                loss_sum, correct, count, stop = all_reduce_sum(*totals, samples, len(signals), device=device)
                seconds = time.perf_counter() - start
                log(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  loss {loss_sum / count:.4f}  "
                    f"accuracy {correct / count:.4f}  {count / seconds:,.0f} samples/s  "
                    f"{timedelta(seconds=round((total_steps - step) * seconds / (step - first_step)))} left")
                if stop or step % (args.save_every * steps_per_epoch) == 0 or step == total_steps:
                    save_checkpoint(args.checkpoint, state, step=step, run=run, global_batch=global_batch)
                if stop and step < total_steps:
                    log(f"stopped by a signal after step {step}")
                    dist.destroy_process_group()
                    sys.exit(1)
        correct, count = evaluate(model, nn.Identity(), test_inputs, test_labels)
        log(f"epoch {epoch + 1}/{args.epochs}  test accuracy {correct / count:.4f} ({correct:.0f}/{count:.0f})")
    time.sleep(0.5)  # torch 2.6 can hang if the group is destroyed while a thread of gloo waits for the GIL
    dist.destroy_process_group()


# The shared blocks are identical in all scripts of this collection.
# --- shared: helpers ---
def positive(kind):
    def number(text):
        if not 0 < kind(text) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
        return kind(text)
    return number


def catch_signals():
    """Return a list to which SIGTERM, SIGINT and SIGUSR1 are appended."""
    signals = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, lambda signum, _: signals.append(signum))
    return signals


def configure_cpu(local_world_size):
    """Use this process's share of the CPU cores, unless OMP_NUM_THREADS is set, and keep freed memory."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or (threads == "1" and local_world_size > 1):  # 1 is torchrun's default
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:  # a container's quota
            quota, period = map(int, file.read().split())
            cores = min(cores, quota // period)
        torch.set_num_threads(max(1, cores // local_world_size))
    with contextlib.suppress(AttributeError):  # glibc: a fifth more images/s on a CPU
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return it to the system
        ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks up to 32 MB
# --- end ---


# --- shared: processes ---
def setup_environment():
    """Return rank, local rank and world size, from torchrun's variables or from srun's, which are translated."""
    env = os.environ
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])  # n07 of n[07-09]
        env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"], WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])
        env.setdefault("MASTER_ADDR", "".join(first_host.groups()))
        env.setdefault("MASTER_PORT", str(10000 + int(env["SLURM_JOB_ID"]) % 20000))
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def init_group(rank, world_size, device, timeout):
    """Initialize the process group: nccl for GPUs, gloo for CPUs."""
    configure_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=timeout), device_id=device if device.type == "cuda" else None)


def wrap_ddp(model, example):
    """Return model in DDP, after one forward and backward pass on example, which changes neither weights nor buffers.

    DDP rebuilds its gradient buckets after the first pass, which changes the order of summation. With this pass, a
    resumed run sums in the same order as an uninterrupted one.
    """
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ddp_model(example).sum().backward()
    model.load_state_dict(before)
    return ddp_model


def all_reduce_sum(*numbers, device):
    """Return the sum of each number over all ranks."""
    sums = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
    dist.all_reduce(sums)
    return sums.tolist()


def save_checkpoint(path, state, **values):
    """Save on rank 0. The other ranks wait: when a process exits, its launcher ends the others."""
    if path and dist.get_rank() == 0:
        write_checkpoint(path, state, **values)
    dist.barrier()


def log(message):
    if dist.get_rank() == 0:
        print(message, flush=True)
# --- end ---


# --- shared: checkpoints ---
def write_checkpoint(path, state, **values):
    """Replace the file at path atomically, and keep the previous one as path.previous."""
    checkpoint = values | {name: part.state_dict() for name, part in state.items()}
    if not all(tensor.isfinite().all() for tensor in checkpoint["model"].values()):
        sys.exit("error: the weights are not finite: start over with a lower --lr and another --checkpoint")
    try:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            os.replace(path, f"{path}.previous")
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: cannot save {path} ({error}); the last checkpoint is intact")


def load_checkpoint(path):
    """Return the newest intact checkpoint of path and path.previous, or {}. A damaged one is renamed."""
    if not path:
        return {}
    try:  # fail now, not at the first save
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        open(f"{path}.tmp", "wb").close()
    except OSError as error:
        sys.exit(f"error: cannot write --checkpoint {path} ({error})")
    for candidate in filter(os.path.exists, (path, f"{path}.previous")):
        try:
            with zipfile.ZipFile(candidate) as archive:  # torch.load verifies neither of these
                damage = archive.testzip() or any(entry.external_attr & 16 for entry in archive.infolist())
            if not damage:
                return torch.load(candidate, map_location="cpu", weights_only=True)
        except (IsADirectoryError, PermissionError) as error:
            sys.exit(f"error: cannot read --checkpoint {candidate} ({error})")
        except Exception as error:
            damage = error
        print(f"warning: {candidate} cannot be loaded ({damage}), renamed to {candidate}.damaged", file=sys.stderr)
        os.replace(candidate, f"{candidate}.damaged")
    return {}


def restore(checkpoint, run, state):
    """Load this run's checkpoint into model, optimizer and scheduler; return its step, or 0."""
    if not checkpoint:
        return 0
    if checkpoint.get("run") != run:
        sys.exit(f"error: the checkpoint belongs to another run: {checkpoint.get('run')}, this is {run}")
    for name, part in state.items():
        part.load_state_dict(checkpoint[name])
    return checkpoint["step"]
# --- end ---


# --- shared: evaluation ---
@torch.no_grad()
def evaluate(model, preprocess, inputs, labels):
    """Return how many inputs are classified correctly and how many there are. Each is seen by exactly one rank."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's running statistics, if any
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    batches = zip(inputs[mine].split(100), labels[mine].split(100))
    correct = sum((model(preprocess(x)).argmax(1) == y).sum() for x, y in batches)
    model.train()
    return all_reduce_sum(correct, len(labels[mine]), device=labels.device)
# --- end ---


if __name__ == "__main__":
    train(parse_args())

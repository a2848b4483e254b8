#!/usr/bin/env python3
"""Train a small CNN on Fashion-MNIST with DistributedDataParallel (DDP).

    python train.py                          # one process per GPU, or one on the CPU
    python train.py --nproc 2                # two processes, also on the CPU
    torchrun --nproc-per-node=2 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 python train.py

With --checkpoint FILE, the same command resumes a run that was stopped or killed. On SIGTERM or SIGINT, a run saves at
the next log line and exits with status 1; after SIGKILL, it resumes from its last checkpoint. On the CPU, with the same
number of processes and threads, it ends with exactly the weights of an uninterrupted run.

Follows the HPC.NRW guide "Distributed Data Parallel (DDP) with PyTorch on HPC".
"""
import argparse
import contextlib
import ctypes
import math
import os
import re
import signal
import socket
import sys
import time
import zipfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torchvision.datasets import FashionMNIST


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=positive(int), default=5, help="passes over the data")
    add("--batch-size", type=positive(int), default=64, help="images per process and step")
    add("--lr", type=positive(float), default=3e-3, help="peak learning rate of Adam")
    add("--seed", type=int, default=0, help="seed of weights, order, flips and dropout")
    add("--bf16", action="store_true", help="train in bfloat16; slow on CPUs without AVX512-BF16 or AMX instructions")
    add("--nproc", type=positive(int), help="processes that python starts; one per GPU if not given")
    add("--data-dir", default="data", help="folder of the data set, downloaded if missing")
    add("--fake-data", type=positive(int), nargs="?", const=512, metavar="N", help="train on N generated images")
    add("--checkpoint", metavar="FILE", help="file to save to and to resume from")
    add("--save-every", type=positive(int), default=1, metavar="EPOCHS", help="epochs between checkpoints")
    add("--log-every", type=positive(int), default=20, metavar="STEPS", help="steps between log lines and stop checks")
    add("--timeout", type=positive(int), default=600, metavar="SECONDS", help="how long to wait for other processes")
    return parser.parse_args()


class CNN(nn.Module):
    """The model of the guide: images (N, 1, 28, 28) to logits (N, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def load_data(args, train):
    """Return images (N, 1, 28, 28) as uint8 and labels (N,) as int64."""
    if args.fake_data:
        return fake_images(args.fake_data, (1, 28, 28), args.seed, train)
    data = FashionMNIST(args.data_dir, train)
    return data.data.unsqueeze(1), data.targets


def augment(images):
    """Flip each image left to right with probability 0.5."""
    flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flip, images.flip(3), images)


def preprocess(images):
    """Return uint8 images as floats in [0, 1]."""
    return images.float().div_(255).contiguous(memory_format=torch.channels_last)


def main():
    args = parse_args()
    setup_environment()  # sets RANK under srun
    nproc = args.nproc or max(1, torch.cuda.device_count())
    if nproc == 1 or "RANK" in os.environ:  # one process, or torchrun or srun has started several
        train(args)
    else:
        spawn(nproc, args)


def spawn(nproc, args):
    """Start nproc processes on this machine and forward signals to them."""
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])  # free at the moment
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(nproc))
    workers = mp.spawn(run_worker, (args,), nproc, join=False)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, lambda signum, _: [os.kill(p.pid, signum) for p in workers.processes if p.is_alive()])
    try:
        while not workers.join():
            pass
    except mp.ProcessExitedException:
        sys.exit(1)  # the process that failed has printed why


def run_worker(rank, args):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as KeyboardInterrupt, mp.spawn would take it for success
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    train(args)


def train(args):
    rank, local_rank, world_size = setup_environment()
    # srun may show each process only its own GPU
    device = torch.device(f"cuda:{local_rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
    if rank == 0:  # before the group is formed: if this fails, the launcher ends the other processes
        download(FashionMNIST, args)
    checkpoint = [load_checkpoint(args.checkpoint) if rank == 0 else None]
    init_group(rank, world_size, device, args.timeout)
    dist.broadcast_object_list(checkpoint)
    checkpoint = checkpoint[0]
    if local_rank == 0 and rank > 0:
        download(FashionMNIST, args)  # on nodes that do not share the disk of rank 0
    dist.barrier()
    images, labels = (tensor.to(device) for tensor in load_data(args, train=True))
    test_images, test_labels = (tensor.to(device) for tensor in load_data(args, train=False))

    run = {"script": "fashionmnist_ddp", "images": len(images), "batch_size": args.batch_size, "lr": args.lr,
           "seed": args.seed, "bf16": args.bf16}
    global_batch = checkpoint.get("global_batch", args.batch_size * world_size)  # kept when the world size changes
    if global_batch % world_size:
        sys.exit(f"error: the checkpoint's global batch of {global_batch} cannot be split over {world_size} processes")
    steps_per_epoch = math.ceil(len(images) / global_batch)
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model = CNN().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(  # linear warm-up over a fifth of the steps, then linear decay
        optimizer, lambda step: min(1, (step + 1) / total_steps / 0.2, (1 - step / total_steps) / 0.8))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = restore(checkpoint, run, state)
    ddp_model = wrap_ddp(model, preprocess(images[:2]))
    log(f"{world_size} processes on {device.type}, {torch.get_num_threads()} threads each | torch {torch.__version__}"
        f" | global batch {global_batch} of {len(images)} images | steps {step} to {total_steps}")

    signals = catch_signals()
    sampler = DistributedSampler(images, seed=args.seed)
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # evaluate a finished epoch again
        sampler.set_epoch(epoch)
        batches = torch.tensor(list(sampler), device=device).split(global_batch // world_size)
        batches = batches[step - epoch * steps_per_epoch:]
        first_step, start = step, time.perf_counter()
        totals, samples = torch.zeros(2, dtype=torch.float64, device=device), 0  # loss and correct, of this process
        # Larger than memory: for x, y in DataLoader(dataset, batch_sampler=[b.tolist() for b in batches]):
        for indices in batches:
            x, y = images[indices], labels[indices]
            torch.manual_seed(hash((args.seed, step, rank)))  # a resumed run repeats the flips and the dropout
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = ddp_model(preprocess(augment(x)))
                loss = F.cross_entropy(logits, y, label_smoothing=0.1)
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
                    f"accuracy {correct / count:.4f}  {count / seconds:,.0f} images/s  "
                    f"{timedelta(seconds=round((total_steps - step) * seconds / (step - first_step)))} left")
                if stop or step % (args.save_every * steps_per_epoch) == 0 or step == total_steps:
                    save_checkpoint(args.checkpoint, state, step=step, run=run, global_batch=global_batch)
                if stop and step < total_steps:
                    log(f"stopped by a signal after step {step}")
                    dist.destroy_process_group()
                    sys.exit(1)
        correct, count = evaluate(model, preprocess, test_images, test_labels)
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


# --- shared: images ---
def download(dataset, args):
    try:
        if not args.fake_data:
            dataset(args.data_dir, download=True)  # only if it is missing
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: cannot find {dataset.__name__} in {args.data_dir} or download it; --fake-data needs no data "
                 f"({' '.join(str(error).split())})")


def fake_images(count, shape, seed, train):
    """Return uint8 images (count, *shape) of ten learnable classes and their labels; a quarter as many to test."""
    generator = torch.Generator().manual_seed(seed)
    patterns = F.interpolate(torch.randint(256, (10, shape[0], 4, 4), generator=generator).float(), shape[1:])
    labels = torch.arange(count if train else max(1, count // 4)) % 10
    noise = torch.randint(256, (len(labels), *shape), generator=generator.manual_seed(2 * seed + 1 + train))
    return ((2 * patterns[labels] + noise) / 3).to(torch.uint8), labels
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
    main()

# SPDX-License-Identifier: MIT-0
"""Read this first: several processes train one model, with DistributedDataParallel (DDP).

    python train.py                                       # one process
    torchrun --standalone --nproc-per-node=2 train.py     # two processes of this machine
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py

Type the third command on each of two machines; HOST is the name of one of them. Each process runs
this whole file. All begin with the same weights, and each computes the gradient of its share of
every batch. backward() averages the gradients of all processes, so all make the same step, and
their weights stay equal. The number of a process, from 0, is its rank.

To the end of train(), comments with "DDP:" mark what a script for one process does not have. These
lines connect the processes, take a share of each batch, call the model through DDP, add up what is
logged, and save on one process. A step has --global-batch samples on any number of processes, and
the losses are equal up to rounding.

With --checkpoint FILE, the run saves after each epoch. However it ends, by Ctrl-C, a preemption or
a power cut, the same command continues after the last saved epoch, on any number of processes. If a
run hangs, each process prints shortly before --timeout which lines it executes.

This file trains on CPUs, to be easy to read. synthetic_ddp/train.py has the same parts for GPUs,
with a DataLoader and a validation set: copy that one. Follows "PyTorch DDP on CPU" (Slurm) and "Get
Started Training a Model using PyTorch DDP in 5 Minutes (CPU)" of awsome-distributed-training.
"""
import argparse
import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP


# ---- Flags, data, model, optimizer, loss, loop: what a script for one process has, too. ----
# train() has connected the processes before it calls load_data() and the functions below it.
def parse_args(flags=None):
    """Parse flags (a list of strings; None: the command line), and return the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50, help="passes over the data")
    parser.add_argument("--global-batch", type=int, default=64,
                        help="samples in a step, over all processes")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of SGD")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and order")
    parser.add_argument("--samples", type=int, default=2048, help="samples to generate")
    parser.add_argument("--checkpoint", type=os.path.realpath, metavar="FILE",
                        help="file to save and resume from")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


# Flags that may change when a run is resumed. The others may not, not even --epochs, since a
# schedule of the learning rate would depend on it
MAY_CHANGE = ("checkpoint", "timeout")


def load_data(args):
    """Return inputs (N, 20), and targets (N, 1): a linear function with noise of 0.1."""
    inputs = torch.randn(args.samples, 20)
    noise = 0.1 * torch.randn(args.samples, 1)
    return inputs, inputs @ torch.randn(20, 1) + noise


def build_model(args):
    """Return a linear model: inputs (N, 20) to outputs (N, 1)."""
    return nn.Linear(20, 1)


def build_optimizer(args, model):
    """Return the optimizer."""
    return torch.optim.SGD(model.parameters(), lr=args.lr)


def loss_of(args, model, inputs, targets):
    """Return the mean loss of the samples."""
    return F.mse_loss(model(inputs), targets)


def train_epoch(args, ddp_model, optimizer, inputs, targets, epoch):
    """Train on all samples, in an order of this epoch. Return the mean loss."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # DDP: the same order in all processes. (The hash of numbers is the same everywhere)
    shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
    order = torch.randperm(len(inputs), generator=shuffle)
    steps = len(inputs) // args.global_batch  # leaves out what does not fill a batch
    loss_sum = torch.zeros(())
    for batch in order.split(args.global_batch)[:steps]:
        share = batch[rank::world_size]  # DDP: rank 1 of 4 takes the samples 1, 5, 9, ...
        optimizer.zero_grad()
        loss = loss_of(args, ddp_model, inputs[share], targets[share])
        # DDP: 1 if all shares are equal. If two processes share 5 samples, it is 6/5 for the 3 and
        # 4/5 for the 2: the average of their gradients is then that of the mean of all 5
        weight = len(share) * world_size / len(batch)
        (weight * loss).backward()  # DDP: averages the gradients of all processes
        optimizer.step()
        loss_sum += len(share) * loss.detach()
        restart_alarm(args.timeout)  # this process does not hang
    dist.all_reduce(loss_sum)  # DDP: adds up the losses of all processes
    return loss_sum.item() / (steps * args.global_batch)


# ---- Training ----
# DDP: what exchanges data (train_epoch(), describe_run(), check_model(), close_group()) must run in
# all processes. Below "if rank == 0", it would wait for the others until --timeout.
@record  # torchrun then reports the exception of the process that fails first
def train(args):
    # DDP: connects the processes. All get the flags and the checkpoint of rank 0
    args, checkpoint = form_group(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # DDP: all processes draw the same data and weights
    inputs, targets = load_data(args)
    if not world_size <= args.global_batch <= len(inputs):  # DDP: each process needs a share
        sys.exit(f"error: --global-batch {args.global_batch} must be at least {world_size} "
                 f"(processes) and at most {len(inputs)} (samples)")
    model = build_model(args)
    optimizer = build_optimizer(args, model)
    # A checkpoint has the states of these objects, and this number
    saved = {"model": model, "optimizer": optimizer}
    progress = {"epoch": 0}
    # What a resumed run may not change. DDP: it must be equal in all processes
    run = describe_run(args, training_samples=len(inputs))
    resume(checkpoint, run, saved, progress)
    # DDP: calls the same model, and makes backward() average the gradients
    ddp_model = DDP(model) if world_size > 1 else model
    log(f"world size {world_size} | global batch {args.global_batch} "
        f"({world_size} x {args.global_batch / world_size:.4g}) of {len(inputs)} samples | "
        f"lr {args.lr:g} | {args.epochs} epochs"
        + (f", resumed after {progress['epoch']}" if progress["epoch"] else "")
        + ("" if args.checkpoint else " | without --checkpoint, nothing is saved"))

    for epoch in range(progress["epoch"], args.epochs):
        # DDP: other random numbers (of dropout) in each process. A resumed run draws the same
        torch.manual_seed(hash((args.seed, epoch, rank)))
        loss = train_epoch(args, ddp_model, optimizer, inputs, targets, epoch)
        check_model(model)  # DDP: they must be equal in all processes
        progress["epoch"] = epoch + 1
        if rank == 0 and args.checkpoint:  # DDP: all have the same weights, one process saves
            states = {name: item.state_dict() for name, item in saved.items()}
            save({**states, "progress": progress, "run": run}, args.checkpoint)
        log(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}")
    close_group()  # DDP: waits for all processes


# ---- You need not read the rest: it connects, saves and resumes. ----
def restart_alarm(timeout):
    """Let this process print which lines it executes, shortly before timeout seconds have passed.

    Each call starts the time anew, so only a process that hangs prints them; 0 cancels it. The
    process continues. kill -ALRM PID prints the lines at once (PID of this process: torchrun would
    end).
    """
    # Not on Windows, and not if Python code of yours handles the signal
    if hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
        # Not at the same moment in all processes: their lines would mix
        signal.setitimer(signal.ITIMER_REAL, timeout * (0.9 - os.getpid() % 64 / 1000))
        faulthandler.unregister(signal.SIGALRM)  # your code may have replaced its handler
        faulthandler.register(signal.SIGALRM, file=2)  # 2: stderr


def form_group(args):
    """Connect all processes. Return the flags and the checkpoint of rank 0."""
    restart_alarm(args.timeout)
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        sys.exit("error: srun has started several tasks without RANK: each would be a run of its "
                 "own. Start one task per node, with torchrun, or set RANK=0 for a single process")
    rank = int(os.environ.get("RANK", 0))  # set by torchrun. Otherwise, this is the only process
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # Before the group is formed: if this fails, the launcher ends the other processes
    checkpoint = load_checkpoint(args.checkpoint) if rank == 0 else {}
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store,
                            timeout=timedelta(seconds=args.timeout))  # to notice a lost process
    of_rank_0 = [args, checkpoint]  # other flags may be typed elsewhere, and FILE may be missing
    dist.broadcast_object_list(of_rank_0)
    args, checkpoint = of_rank_0
    restart_alarm(args.timeout)
    return args, checkpoint


def load_checkpoint(path):
    """Return the checkpoint at path, {} if there is none."""
    if not path:
        return {}
    try:
        open(f"{path}.tmp", "ab").close()  # fail now, not at the first save
    except OSError as error:
        sys.exit(f"error: --checkpoint {path}: its folder must exist and be writable ({error})")
    if not os.path.exists(path):
        return {}
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if "run" not in checkpoint:
        sys.exit(f"error: --checkpoint {path} is not a checkpoint of this script (does it hold "
                 "weights only, or come from an older version?)")
    return checkpoint


def describe_run(args, **data):
    """Return what a resumed run may not change, as text: flags, and these numbers of the data."""
    if not isinstance(args.seed, int):  # the hash of None or of a text differs by process
        sys.exit(f"error: --seed must be an integer, and is {args.seed!r}")
    run = {**vars(args), **data}
    run = {name: str(value) for name, value in run.items() if name not in MAY_CHANGE}
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, run)
    for name, value in run.items():
        if " at 0x" in value:
            sys.exit(f"error: args.{name} is {value}, which has another address in each process: "
                     "keep it out of args, or add its name to MAY_CHANGE")
        values = [other.get(name) for other in of_ranks]
        if values != [value] * len(values):  # for example, a file is missing on one machine
            sys.exit(f"error: {name} differs by process: {values!s:.500}. (If it may, add its name "
                     "to MAY_CHANGE)")
    return run


def resume(checkpoint, run, saved, progress):
    """Load the checkpoint, if there is one, into the items of saved and into progress."""
    if not checkpoint:
        return
    before = checkpoint["run"]
    # Values are texts. A new flag of the script, which the checkpoint lacks, may be "None"
    changes = [f"{name} was {before.get(name)}, is {run.get(name)}" for name in {**before, **run}
               if before.get(name, "None") != run.get(name, "None")]
    if changes:
        sys.exit(f"error: the checkpoint is of another run ({'; '.join(changes):.500}): use the "
                 "same flags and data, or another --checkpoint")
    for name, item in saved.items():
        item.load_state_dict(checkpoint.pop(name))  # pop: frees its memory
    progress.update(checkpoint["progress"])


def check_model(model):
    """Exit unless the trained weights are finite, and their norms equal in all processes."""
    norms = torch.stack([weight.detach().float().norm().double()
                         for weight in model.parameters() if weight.requires_grad])
    means = norms / dist.get_world_size()
    dist.all_reduce(means)  # over all processes: NaN of one is NaN in all
    if not means.isfinite().all():
        sys.exit("error: the weights contain NaN or infinity: lower --lr (with another "
                 "--checkpoint), or look for NaN and very large values in the data")
    if not torch.allclose(norms, means):
        sys.exit("error: the weights differ by rank: call ddp_model(...), and step() on all ranks")


def save(checkpoint, path):
    """Write the checkpoint to path: at any moment, it is the old file or the complete new one."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    # Other numbers than Python's and torch's, such as numpy's, are an error now, not at the resume
    torch.load(f"{path}.tmp", map_location="cpu", mmap=True, weights_only=True)
    os.replace(f"{path}.tmp", path)


def close_group():
    """Wait until rank 0 has saved: when one process ends, its launcher may end the others."""
    dist.barrier()
    restart_alarm(0)
    time.sleep(0.5)  # without it, 1 of 20 runs aborts in a thread of gloo (pytorch#154976)
    dist.destroy_process_group()


def log(message):
    """Print on rank 0, or in a program that only imports this file."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)


if __name__ == "__main__":
    train(parse_args())

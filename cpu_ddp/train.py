# SPDX-License-Identifier: MIT-0
"""Read this first: how several processes train one model, with DistributedDataParallel (DDP).

    python train.py                                       # one process
    torchrun --standalone --nproc-per-node=2 train.py     # two processes of this machine
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --kill-on-bad-exit=1 python train.py

Type the third command on each of the two machines. Each process runs this whole file. All begin
with the same weights, and each computes the gradient of its share of every batch. backward()
averages the gradients of all processes, so all make the same step, and their weights stay equal.
The lines that do this are marked with "DDP:". The number of a process, from 0, is its rank.

With --checkpoint FILE, the run saves at the end of each epoch, and the same command resumes it
there, on any number of processes. SIGTERM or Ctrl-C stop all processes at the end of the epoch,
with status 1, for slurm/cpu.sbatch to requeue the job.

The example is a linear model on CPUs. To train your own model on GPUs, copy synthetic_ddp/train.py:
it has the same parts, with a DataLoader and a test set.

Follows "PyTorch DDP on CPU" (Slurm) and "Get Started Training a Model using PyTorch DDP in 5
Minutes (CPU)" (Kubernetes) of awsome-distributed-training.
"""
import argparse
import contextlib
import os
import re
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


# ---- Flags, data, model, loss: edit these for your own training. ----
def parse_args(flags=None):
    """Return the settings of these flags (strings), or of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=32,
                        help="samples per process and step; a resume keeps the global batch")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of SGD")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and order")
    parser.add_argument("--samples", type=int, default=2048, help="samples to generate")
    parser.add_argument("--checkpoint", type=os.path.realpath, help="file to save and resume from")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


def load_data(args):
    """Return inputs (N, 20), and targets (N, 1): a linear function with noise of 0.1.

    All processes must return the same samples in the same order: sort what os.listdir() or a set
    returns, and seed numpy. (torch is seeded.)
    """
    inputs = torch.randn(args.samples, 20)
    noise = 0.1 * torch.randn(args.samples, 1)
    return inputs, inputs @ torch.randn(20, 1) + noise


def build_model(args):
    """Return a linear model: inputs (N, 20) to outputs (N, 1)."""
    return nn.Linear(20, 1)


def loss_of(args, model, inputs, targets):
    """Return the mean loss of the samples."""
    return F.mse_loss(model(inputs), targets)


# ---- Training ----
# DDP: all processes must make the same calls that exchange data: ddp_model(...), backward(),
# dist.all_reduce(...), check_model() and close_group(). Below "if rank == 0", such a call would
# wait for the other processes until --timeout.
@record  # torchrun then reports the exception of the process that fails first
def train(args):
    # DDP: connect the processes. All use the flags and the checkpoint of rank 0
    args, rank, world_size, checkpoint = form_group(args)

    torch.manual_seed(args.seed)  # DDP: all processes draw the same data
    x, y = load_data(args)
    model = build_model(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    run = {"lr": args.lr, "seed": args.seed, "samples": len(x)}  # a resume may not change these
    if checkpoint:
        if checkpoint.get("run") != run:
            sys.exit(f"error: the checkpoint is from a run with {checkpoint.get('run')}, this one "
                     f"has {run}: use the same flags, or another --checkpoint")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    epochs_done = checkpoint.get("epochs_done", 0)
    # DDP: a step has more samples on more processes. But a resumed run keeps its global batch: on
    # fewer processes, each has a larger share
    global_batch = checkpoint.get("global_batch", args.batch_size * world_size)
    if not world_size <= global_batch <= len(x):
        sys.exit(f"error: a step takes {global_batch} of {len(x)} samples, for {world_size} "
                 "processes: start fewer, or use a smaller --batch-size")
    used = len(x) // global_batch * global_batch  # an epoch leaves out the others, at random
    # DDP: ddp_model calls the same model. From here on, backward() averages the gradients of all
    # processes
    ddp_model = DDP(model) if world_size > 1 else model
    log(f"world size {world_size} | torch {torch.__version__} | global batch {global_batch} "
        f"({world_size} x {global_batch / world_size:g}) of {len(x)} samples | "
        f"learning rate {args.lr} | epochs {epochs_done} to {args.epochs}"
        + (", resumed" if checkpoint else "")
        + ("" if args.checkpoint else " | without --checkpoint, nothing is saved"))

    signals = collect_signals()
    for epoch in range(epochs_done, args.epochs):
        # Random numbers begin anew in each epoch, so that a resumed run has the same. (hash() of
        # numbers is the same in all processes)
        torch.manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(x))[:used]  # DDP: the same order in all processes
        torch.manual_seed(hash((args.seed, epoch, rank)))  # DDP: for dropout, each has others
        loss_sum = 0
        for batch in order.split(global_batch):
            share = batch[rank::world_size]  # DDP: rank 1 of 4 takes samples 1, 5, 9, ...
            optimizer.zero_grad()
            loss = loss_of(args, ddp_model, x[share], y[share])
            # DDP: the factor is 1 if the shares are equal. If two processes share 5 samples, it is
            # 3 * 2 / 5 and 2 * 2 / 5: each sample then has the same weight in the average
            (loss * (len(share) * world_size / global_batch)).backward()
            optimizer.step()
            loss_sum += len(share) * loss.item()

        # DDP: add up the losses, and the signals, of all processes. If one process stopped alone,
        # the others would wait for its gradients
        sums = torch.tensor([loss_sum, len(signals)], dtype=torch.float64)
        dist.all_reduce(sums)
        loss_sum, stop = sums.tolist()
        log(f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum / used:.4f}")
        check_model(model)
        if rank == 0 and args.checkpoint:
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": run,
                  "epochs_done": epoch + 1, "global_batch": global_batch}, args.checkpoint)
        if stop and epoch + 1 < args.epochs:
            close_group()
            sys.exit(f"stopped by a signal after epoch {epoch + 1}" if rank == 0 else 1)
    close_group()


# ---- You need not read the rest to use or edit this file: it connects, stops and saves. ----
def form_group(args):
    """Connect all processes. Return args, rank, world size, and checkpoint ({} if none).

    args and checkpoint come from rank 0: another machine may not have the file.
    """
    rank, _, world_size = setup_environment()
    # Before the group is formed: if this fails, the launcher ends the other processes
    checkpoint = load_checkpoint(args.checkpoint) if rank == 0 else {}
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store,
                            timeout=timedelta(seconds=args.timeout))  # to notice a lost process
    of_rank_0 = [args, checkpoint]
    dist.broadcast_object_list(of_rank_0)
    args, checkpoint = of_rank_0
    return args, rank, world_size, checkpoint


def setup_environment():
    """Return (rank, local rank, world size). Under srun, also set the variables of torchrun."""
    env = os.environ
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    other_launcher = "TORCHELASTIC_RUN_ID" in env or int(env.get("WORLD_SIZE", 1)) > tasks
    shell = "SLURM_PTY_PORT" in env and os.isatty(0)  # python is typed in srun --pty bash
    if tasks > 1 and not other_launcher and not shell:  # srun python train.py
        # The first host, n07 of n[07-09]. For other forms, r[1-2]n[1-4], set MASTER_ADDR
        first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])
        env.setdefault("MASTER_ADDR", "".join(first_host.groups()))
        # Another port for each job and step, because those of one node may run at the same time
        number = int(env["SLURM_JOB_ID"]) + 1009 * int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(10000 + number % 20000))
        env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"], WORLD_SIZE=str(tasks))
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def collect_signals():
    """Return a list to which each SIGTERM, Ctrl-C or closed terminal is added when it comes."""
    signals = []

    def handler(signum, frame):
        log("signal received: stopping at the end of this epoch")
        signals.append(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, handler)
    return signals


def check_model(model):
    """Exit unless the weights are finite, and their norms equal in all processes."""
    norms = torch.stack([weight.detach().norm() for weight in model.parameters()]).cpu()
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, norms)
    if not norms.isfinite().all():
        sys.exit("error: the weights contain NaN or infinity: lower --lr (with another "
                 "--checkpoint), or look for NaN and very large values in the data")
    if not all(torch.allclose(norms, others) for others in of_ranks):
        sys.exit("error: the weights differ by rank: call ddp_model(...), and step() on all ranks")


def save(checkpoint, path):
    """Write the checkpoint to path: at any moment, it is the old file or the complete new one."""
    with open(f"{path}.tmp", "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.tmp", path)


def load_checkpoint(path):
    """Return the checkpoint at path, {} if there is none."""
    if path and not os.access(os.path.dirname(path), os.W_OK):  # fail now, not at the first save
        sys.exit(f"error: --checkpoint {path}: its folder must exist and be writable")
    if not path or not os.path.exists(path):
        return {}
    return torch.load(path, map_location="cpu", weights_only=True)


def close_group():
    """Wait until rank 0 has saved: when one process ends, its launcher may end the others."""
    dist.barrier()
    time.sleep(0.5)  # without it, 1 of 20 runs aborts in a thread of gloo (pytorch#154976)
    dist.destroy_process_group()


def log(message):
    """Print on rank 0. A run does not end because it cannot print."""
    if os.environ.get("RANK", "0") == "0":
        # OSError: a closed pipe (| head). ValueError: an encoding. RuntimeError: a signal's print
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            print(message, flush=True)


if __name__ == "__main__":
    train(parse_args())

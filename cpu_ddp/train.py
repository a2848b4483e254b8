# SPDX-License-Identifier: MIT-0
"""Train a linear model on generated data with DistributedDataParallel (DDP) on CPUs.

    python train.py                          # one process
    torchrun --standalone --nproc-per-node=2 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --cpus-per-task=1 -K1 python train.py

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of
processes. SIGTERM, Ctrl-C or a closed terminal stop all processes after the same step, and save.

To train something else, edit the functions above train(). For GPUs, a test set or dropout, copy
fashionmnist_ddp.

Follows "PyTorch DDP on CPU" (Slurm) and "Get Started Training a Model using PyTorch DDP in 5
Minutes (CPU)" (Kubernetes) of awsome-distributed-training.
"""
import argparse
import contextlib
import ctypes
import json
import math
import os
import random
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


# ---- Flags, model, optimizer, learning rate, data, loss: edit these for your own training. ----
def parse_args(flags=None):
    """Return the settings of these flags (strings), or of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per process at once")
    parser.add_argument("--global-batch", type=int, help="samples per step of all processes")
    parser.add_argument("--lr", type=float, default=0.02, help="initial learning rate of SGD")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and order")
    parser.add_argument("--samples", type=int, default=2048, help="samples to generate")
    parser.add_argument("--checkpoint", type=os.path.realpath, help="file to save and resume from")
    parser.add_argument("--save-every", type=float, default=5, help="minutes between checkpoints")
    parser.add_argument("--log-every", type=float, default=5, help="seconds between log lines")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


# Signals stop the run after at most so many steps. Set it to 1 if a step may take seconds.
CHECK_EVERY = 8

# A run may be resumed with other values of these flags, but not of the others.
MAY_CHANGE = ("epochs", "batch_size", "checkpoint", "save_every", "log_every", "timeout")


def build_model(args):
    """Return a linear model of inputs (N, 20)."""
    return nn.Linear(20, 1)


def build_optimizer(args, model):
    """Return the optimizer. Its parameter groups have their peak learning rates."""
    return torch.optim.SGD(model.parameters(), lr=args.lr)


def learning_rate(step, total_steps):
    """Return the factor of the peak rates: linear decay to 0."""
    return 1 - step / total_steps


def load_data(args):
    """Return inputs (N, 20), and targets (N, 1): a linear function with noise of 0.1."""
    generator = torch.Generator().manual_seed(args.seed)  # the same data on every rank
    inputs = torch.randn(args.samples, 20, generator=generator)
    true_weight = torch.randn(1, 20, generator=generator)
    noise = 0.1 * torch.randn(args.samples, 1, generator=generator)
    return inputs, inputs @ true_weight.T + noise


def loss_of(model, inputs, targets):
    """Return the sum of the samples' losses."""
    return F.mse_loss(model(inputs), targets, reduction="sum")


# ---- Training ----
@record  # torchrun then reports the exception of the rank that fails first
def train(args):
    args, rank, world_size, checkpoint = form_group(args)
    torch.manual_seed(args.seed)  # in load_data, all ranks draw the same random numbers
    random.seed(args.seed)
    x, y = load_data(args)
    global_batch = choose_global_batch(args, checkpoint, len(x), world_size)
    steps_per_epoch = len(x) // global_batch  # samples that fill no batch are left out
    total_steps = args.epochs * steps_per_epoch
    # Each process computes its share of a batch in parts of at most --batch-size
    parts = len(range(rank, global_batch, world_size * args.batch_size))

    torch.manual_seed(args.seed)  # again: the weights do not depend on what load_data draws
    model = build_model(args)
    optimizer = build_optimizer(args, model)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    settings = run_settings(args, samples=len(x), global_batch=global_batch)
    saved = {"model": model, "optimizer": optimizer}  # in each checkpoint
    step = restore(checkpoint, settings, saved)
    del checkpoint  # a second copy of weights and optimizer
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    log(f"world size {world_size}, threads {torch.get_num_threads()} | torch {torch.__version__} | "
        f"global batch {global_batch} of {len(x)} samples | steps {step} to {total_steps}")
    signals = catch_signals()
    first_step = step + 1
    saved_step, save_time = step, time.perf_counter()
    for epoch in range(step // steps_per_epoch, args.epochs):
        # The order depends on seed and epoch only: a resumed run goes on where it stopped
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        batches = torch.randperm(len(x), generator=shuffle).split(global_batch)
        loss_sum = count = 0  # of this process in this epoch
        for batch in batches[max(0, step - epoch * steps_per_epoch):steps_per_epoch]:
            # Has any process received a signal? They exchange this while they compute the step
            check = step % CHECK_EVERY == 0
            stop = torch.tensor(len(signals) if check else 0)
            exchange = dist.all_reduce(stop, async_op=True) if check and world_size > 1 else None

            for group, peak_rate in zip(optimizer.param_groups, peak_rates):
                group["lr"] = peak_rate * learning_rate(step, total_steps)
            optimizer.zero_grad()
            for part in range(parts):
                indices = batch[rank + part * world_size::parts * world_size]
                # Exchange gradients with the last part only. (no_sync() sets this, too.)
                ddp_model.require_backward_grad_sync = part == parts - 1
                loss = loss_of(ddp_model, x[indices], y[indices])
                (loss * (world_size / global_batch)).backward()  # DDP divides by world_size
                loss_sum += loss.detach().double()
                count += len(indices)
            optimizer.step()
            step += 1

            now = time.perf_counter()
            if step == first_step:  # it takes longer than others
                start = log_time = now
            elif rank == 0 and now - log_time >= args.log_every:
                log_time = now
                rate = (step - first_step) / (now - start)
                log(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  "
                    f"loss {loss_sum / count:.4f}  "
                    f"{rate * global_batch:,.0f} samples/s  "
                    f"{timedelta(seconds=round((total_steps - step) / rate))} left")
            if exchange:
                exchange.wait()
            if step % steps_per_epoch == 0:
                check_finite(saved)
                check_weights(saved)
            due = now - save_time >= 60 * args.save_every
            if rank == 0 and args.checkpoint and (stop or due):
                saved_step, save_time = step, now
                save_checkpoint(args.checkpoint, saved, settings, step)
            if stop and step < total_steps:
                close_group()
                sys.exit(f"stopped by a signal after step {step}" if rank == 0 else 1)
        sums = torch.tensor([loss_sum, count], dtype=torch.float64)
        dist.all_reduce(sums)  # of all processes
        log(f"epoch {epoch + 1}/{args.epochs}  loss {sums[0] / sums[1]:.4f}")
    if rank == 0 and args.checkpoint and step > saved_step:
        save_checkpoint(args.checkpoint, saved, settings, step)
    close_group()


def form_group(args):
    """Form the process group. Return rank 0's args, rank, world size, and rank 0's checkpoint."""
    rank, _, world_size = setup_environment()
    # Before the group is formed: if rank 0 fails, the launcher ends the others
    checkpoint = load_checkpoint(args.checkpoint) if rank == 0 else {}
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store,
                            timeout=timedelta(seconds=args.timeout))  # to notice a lost process
    of_rank_0 = [args, checkpoint]
    dist.broadcast_object_list(of_rank_0, device=torch.device("cpu"))
    args, checkpoint = of_rank_0  # on all ranks
    return args, rank, world_size, checkpoint


# ---- Below, functions of the same name are equal in all scripts: read one, skip the others. ----
def setup_environment():
    """Return rank, local rank and world size. Set torchrun's variables in a step of srun."""
    env = os.environ
    torchrun = "TORCHELASTIC_RUN_ID" in env
    if torchrun and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when torchrun is killed
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    launched = torchrun or int(env.get("WORLD_SIZE", 1)) > tasks  # by another launcher
    shell = "SLURM_PTY_PORT" in env and os.isatty(0)  # python is typed in srun --pty bash
    if tasks > 1 and not launched and not shell:  # srun python train.py
        first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])  # n07 of n[07-09]
        env.setdefault("MASTER_ADDR", "".join(first_host.groups()))
        number = int(env["SLURM_JOB_ID"]) + 1009 * int(env["SLURM_STEP_ID"])  # steps may overlap
        env.setdefault("MASTER_PORT", str(10000 + number % 20000))
        env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"], WORLD_SIZE=str(tasks),
                   LOCAL_WORLD_SIZE="1")  # srun gives each task its own cores
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def choose_global_batch(args, checkpoint, samples, world_size):
    """Return the samples of a step. A run keeps those of its first start on any world size."""
    default = checkpoint["settings"]["global_batch"] if checkpoint else args.batch_size * world_size
    global_batch = min(args.global_batch or default, samples)
    if global_batch < world_size:
        sys.exit(f"error: more processes than samples in a step ({global_batch}): start fewer")
    return global_batch


def close_group():
    """Wait until rank 0 has saved: when one process ends, its launcher may end the others."""
    dist.barrier()
    time.sleep(0.5)  # gloo's threads may still work (pytorch#154976): a hang or an abort without it
    dist.destroy_process_group()


def catch_signals():
    """Return a list to which each SIGTERM, Ctrl-C or closed terminal is added when it comes."""
    signals = []

    def handler(signum, frame):
        log("signal received: stopping within a few steps, or after this evaluation")
        signals.append(signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, handler)
    return signals


def tensors_of(saved):
    """Return the weights and BatchNorm's running statistics of all models in saved, by name."""
    return {f"{key}.{name}": tensor
            for key, model in saved.items() if isinstance(model, nn.Module)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if isinstance(tensor, nn.Parameter) or "running" in name}


def check_finite(saved):
    """Exit unless the weights and running statistics of all models are finite."""
    for name, tensor in tensors_of(saved).items():
        if not tensor.isfinite().all():
            sys.exit(f"error: {name} is not finite: use a lower --lr (and another --checkpoint), "
                     "or data without NaN and huge values")


def check_weights(saved):
    """Exit unless all models have the same weights on all ranks, as averaged gradients leave them.

    Only their norms are compared: weights that are kept at norm 1 may differ without an error.
    """
    norms = {name: tensor.detach().double().norm().item()
             for name, tensor in tensors_of(saved).items() if isinstance(tensor, nn.Parameter)}
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, norms)
    norm_of_all = math.hypot(*norms.values())
    for name in norms:
        of_this = [other[name] for other in of_ranks if name in other]
        rounding = 1e-5 * max(*of_this, 1e-3 * norm_of_all)
        if max(of_this) - min(of_this) > rounding:
            sys.exit(f"error: {name} differs between the ranks: call ddp_model(...), and in the "
                     "loss model(...), no method of it; each model needs its DDP; set "
                     "requires_grad in build_model; update averages on all ranks")


def different(settings, others):
    """Return the names of the settings that have another value. A missing one is None."""
    return [name for name in {**settings, **others}
            if settings.get(name) != others.get(name)
            and str(settings.get(name)) != str(others.get(name))]  # nan is not equal to itself


def run_settings(args, **more):
    """Return what defines the run: the flags but for MAY_CHANGE, and more. Exit if ranks differ."""
    settings = {**vars(args), **more}
    settings = {name: value for name, value in settings.items() if name not in MAY_CHANGE}
    settings = json.loads(json.dumps(settings))  # plain values: torch.load reads no others
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, settings)
    names = sorted({name for others in of_ranks for name in different(settings, others)})
    if names:
        sys.exit(f"error: the ranks have different data ({', '.join(names)}): sort what comes from "
                 "a set or a folder, and seed what is random (or name them in MAY_CHANGE)")
    return settings


def save_checkpoint(path, saved, settings, step):
    """Replace the file at path: at any moment, it is the old one or the new one."""
    check_finite(saved)
    states = {name: item.state_dict() for name, item in saved.items()}
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"  # another run may write to the same path
    with open(temporary, "wb") as file:
        torch.save({**states, "settings": settings, "step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    log(f"saved step {step} in {path}")


def load_checkpoint(path):
    """Return the checkpoint at path, {} if there is none."""
    if path and not os.access(os.path.dirname(path), os.W_OK):  # fail now, not at the first save
        sys.exit(f"error: --checkpoint {path}: its folder must exist and be writable")
    if not path or not os.path.exists(path):
        return {}
    return torch.load(path, map_location="cpu", weights_only=True)


def restore(checkpoint, settings, saved):
    """Load the checkpoint, if any, into the items of saved. Return its step, or 0."""
    if not checkpoint:
        return 0
    before = checkpoint["settings"]
    changes = [f"{name} {before.get(name)}, not {settings.get(name)}"
               for name in different(before, settings)]
    if changes:
        sys.exit(f"error: the checkpoint is of another run ({'; '.join(changes):.500}): "
                 "name another --checkpoint")
    for name, item in saved.items():
        item.load_state_dict(checkpoint[name])
    return checkpoint["step"]


def log(message):
    """Print on rank 0. A run does not end because it cannot print."""
    if os.environ.get("RANK", "0") == "0":
        # OSError: a closed pipe. ValueError: an encoding. RuntimeError: a signal's in another print
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            print(message, flush=True)


if __name__ == "__main__":
    train(parse_args())

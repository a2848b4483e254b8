# SPDX-License-Identifier: MIT-0
"""The script to copy first: train a model with DistributedDataParallel (DDP), a process per GPU.

    python train.py                                       # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=4 train.py     # four GPUs of this machine, or CPU cores
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 -c8 --kill-on-bad-exit=1 python train.py

Type the third command on each of the two machines. Each process runs this whole file. All begin
with the same weights, and each computes the gradient of its share of every batch. backward()
averages the gradients of all processes, so all make the same step, and their weights stay equal.
The lines that do this are marked with "DDP:". The number of a process, from 0, is its rank.

With --checkpoint FILE, the run saves at the end of each epoch, and the same command resumes it
there. FILE.best has the weights with the lowest test loss: for a result to publish, test them on a
third set. SIGTERM or Ctrl-C stop all processes at the end of the epoch, with status 1, for
slurm/synthetic.sbatch to requeue the job. A run that is killed loses its current epoch: if your
jobs are preempted in mid-epoch (after 30 to 120 s, Slurm, Kubernetes and torchrun kill a process),
copy cifar10_ddp, which stops after any step.

Follows the synthetic_data_example of "A complete tutorial to run a distributed training on multiple
nodes with Pytorch DDP".
"""
import argparse
import contextlib
import math
import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


# ---- Flags, data, model, optimizer, loss: edit these for your own training. ----
def parse_args(flags=None):
    """Return the settings of these flags (strings), or of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10,
                        help="passes over the data; a resume may not change them")
    parser.add_argument("--batch-size", type=int, default=32,
                        help="samples per process and step; a resume keeps the global batch")
    parser.add_argument("--lr", type=float, default=0.01, help="initial learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and order")
    parser.add_argument("--samples", type=int, default=2048, help="samples to generate")
    parser.add_argument("--workers", type=int, default=2, help="loader processes of each process")
    parser.add_argument("--bf16", action="store_true", help="bfloat16; slow on many CPUs")
    parser.add_argument("--checkpoint", type=os.path.realpath, help="file to save and resume from")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


def load_data(args):
    """Return the training set and the test set: any data sets of pairs (input (10,), label).

    The label says which of three linear functions of the input is the largest.

    All processes must return the same samples in the same order: sort what os.listdir() or a set
    returns, and seed numpy. (torch is seeded.) Download files before: all processes call this.
    """
    tests = max(1, args.samples // 4)
    inputs = torch.randn(args.samples + tests, 10)
    labels = F.linear(inputs, torch.randn(3, 10)).argmax(1)
    return (TensorDataset(inputs[tests:], labels[tests:]),
            TensorDataset(inputs[:tests], labels[:tests]))


def build_model(args):
    """Return an MLP: inputs (N, 10) to logits (N, 3)."""
    return nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3))


def build_optimizer(args, model):
    """Return the optimizer, and its scheduler, which makes a step after each epoch.

    For a scheduler that makes a step after each batch, pass len(loader), too, and move its step().
    --lr is used as it is. With N processes, a step has N times as many samples, and an epoch has N
    times fewer steps, so a higher --lr is usual: up to N times with SGD, less with Adam.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)


def loss_and_counts(args, model, inputs, labels):
    """Return the mean loss of the samples, and how many are classified correctly, as tensors.

    The loss is a mean over the samples (not over weights or tokens). The counts may have any shape:
    they are added up over all batches and processes, for metrics().
    """
    logits = model(inputs)
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()


def metrics(counts, samples):
    """Return what the log shows beside the loss, by name. The counts are sums over the samples."""
    return {"accuracy": counts / samples}


def build_loader(args, data, device, batch_size, **options):
    """Return a DataLoader. Its processes start anew, and newly seeded, in each epoch."""
    # With "spawn" or "forkserver", they would import PyTorch first
    context = "fork" if args.workers and sys.platform == "linux" else None
    return Loader(data, batch_size, num_workers=args.workers, multiprocessing_context=context,
                  timeout=args.timeout if args.workers else 0, pin_memory=device.type == "cuda",
                  **options)


# ---- Training ----
# DDP: all processes must make the same calls that exchange data: ddp_model(...), backward(),
# evaluate(), results_of(), dist.all_reduce(...), check_model() and close_group(). Below
# "if rank == 0", such a call would wait for the other processes until --timeout.
@record  # torchrun then reports the exception of the process that fails first
def train(args):
    # DDP: connect the processes. All use the flags and the checkpoint of rank 0
    args, rank, world_size, device, checkpoint = form_group(args)

    torch.manual_seed(args.seed)  # DDP: all processes draw the same data
    train_set, test_set = load_data(args)
    # DDP: a step has more samples on more processes. But a resumed run keeps its global batch: on
    # fewer processes, each has a larger share
    global_batch = checkpoint.get("global_batch", args.batch_size * world_size)
    if global_batch % world_size or global_batch > len(train_set):
        sys.exit(f"error: a step takes {global_batch} of {len(train_set)} samples, in equal shares "
                 f"for {world_size} processes: start fewer, or use a smaller --batch-size (in a "
                 "new run: a resumed run keeps its steps)")
    # DDP: the samples are shuffled, and rank 1 of 4 takes the samples 1, 5, 9, ... of their order,
    # which seed + epoch determines (times 1000, so that each --seed has other orders)
    sampler = DistributedSampler(train_set, world_size, rank, seed=1000 * args.seed, drop_last=True)
    loader = build_loader(args, train_set, device, global_batch // world_size, sampler=sampler,
                          drop_last=True)  # each epoch leaves out some samples, different ones
    # DDP: each test sample once. DistributedSampler would repeat some, to make shares equal
    test_share = Subset(test_set, range(rank, len(test_set), world_size))
    test_loader = build_loader(args, test_share, device, args.batch_size)

    model = build_model(args).to(device)
    optimizer, scheduler = build_optimizer(args, model)
    # In each checkpoint. Add what else a resumed run needs, for example an average of the weights
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    # A resume may not change these: optimizer and scheduler keep their rates and number of epochs
    run = {"epochs": args.epochs, "lr": args.lr, "seed": args.seed, "samples": len(train_set)}
    if checkpoint:
        if checkpoint.get("run") != run:
            sys.exit(f"error: the checkpoint is from a run with {checkpoint.get('run')}, this one "
                     f"has {run}: use the same flags, or another --checkpoint")
        for name, item in saved.items():
            item.load_state_dict(checkpoint[name])
    epochs_done = checkpoint.get("epochs_done", 0)
    best_loss = checkpoint.get("best_loss", math.inf)
    # DDP: ddp_model calls the same model. From here on, backward() averages the gradients of all
    # processes. (device_ids is not needed for a model on one GPU)
    ddp_model = DDP(model) if world_size > 1 else model
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    log(f"world size {world_size} on {device.type} | torch {torch.__version__} | "
        f"global batch {global_batch} ({world_size} x {global_batch // world_size}) of "
        f"{len(train_set)} samples | learning rate {optimizer.param_groups[0]['lr']:.3g} | "
        f"epochs {epochs_done} to {args.epochs}" + (", resumed" if checkpoint else "")
        + ("" if args.checkpoint else " | without --checkpoint, nothing is saved"))

    signals = collect_signals()
    for epoch in range(epochs_done, args.epochs):
        start = time.perf_counter()
        sampler.set_epoch(epoch)  # DDP: another order in each epoch, the same in all processes
        # DDP: each process has other random numbers (for dropout). They begin anew in each epoch,
        # so that a resumed run has the same. (hash() of numbers is the same in all processes)
        torch.manual_seed(hash((args.seed, epoch, rank)))
        model.train()
        loss_sum = counts = samples = 0  # of this process
        for batch in loader:
            batch = [tensor.to(device, non_blocking=True) for tensor in batch]
            optimizer.zero_grad()
            with autocast:
                loss, batch_counts = loss_and_counts(args, ddp_model, *batch)
            loss.backward()  # DDP: averages the gradients of all processes
            optimizer.step()
            loss_sum += len(batch[0]) * loss.detach().double()  # tensors: no waiting for the GPU
            counts += batch_counts.detach().double()
            samples += len(batch[0])
        results = results_of(loss_sum, counts, samples)
        seconds = time.perf_counter() - start
        with autocast:  # model, not ddp_model: nothing is averaged, and shares may be unequal
            test_results = evaluate(args, model, test_loader, device)
        scheduler.step()
        log(f"epoch {epoch + 1}/{args.epochs}  {show(results)}  test {show(test_results)}  "
            f"{len(loader) * global_batch / seconds:,.0f} samples/s")

        check_model(model)
        # DDP: if one process that has received a signal stopped alone, the others would wait for it
        stop = torch.tensor(len(signals))
        dist.all_reduce(stop)
        if rank == 0 and args.checkpoint:
            test_loss = (test_results or results)["loss"]  # the training loss, without a test set
            is_best = test_loss < best_loss
            best_loss = min(best_loss, test_loss)
            states = {name: item.state_dict() for name, item in saved.items()}
            states.update(run=run, epochs_done=epoch + 1, best_loss=best_loss,
                          global_batch=global_batch)
            if is_best:
                save(states, f"{args.checkpoint}.best")
            save(states, args.checkpoint)
        if stop and epoch + 1 < args.epochs:
            close_group()
            sys.exit(f"stopped by a signal after epoch {epoch + 1}" if rank == 0 else 1)
    close_group()


def evaluate(args, model, batches, device):
    """Return the loss and the metrics of all processes' samples. batches: those of this process."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # DDP: all use rank 0's averages of BatchNorm
    model.eval()
    loss_sum = counts = samples = 0
    with torch.no_grad():
        for batch in batches:
            batch = [tensor.to(device, non_blocking=True) for tensor in batch]
            loss, batch_counts = loss_and_counts(args, model, *batch)
            loss_sum += len(batch[0]) * loss.double()
            counts += batch_counts.double()
            samples += len(batch[0])
    return results_of(loss_sum, counts, samples)


def results_of(loss_sum, counts, samples):
    """Return the mean loss and the metrics of all processes' samples, by name ({} if none)."""
    sums = loss_sum, counts, samples
    sums = [torch.as_tensor(value, dtype=torch.float64).cpu() for value in sums]
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, sums)  # not all_reduce: a rank without samples has no counts
    loss_sum, counts, samples = (sum(values) for values in zip(*of_ranks))
    if not samples:
        return {}
    means = {"loss": loss_sum / samples, **metrics(counts, samples)}
    return {name: float(value) for name, value in means.items()}


def show(results):
    """Return results as text, for the log."""
    return "  ".join(f"{name} {value:.4f}" for name, value in results.items()) or "no samples"


# ---- You need not read the rest to use or edit this file: it connects, stops and saves. ----
def form_group(args):
    """Connect all processes. Return args, rank, world size, device, checkpoint ({} if none).

    args and checkpoint come from rank 0: another machine may not have the file.
    """
    rank, local_rank, world_size = setup_environment()
    device = torch.device("cpu")
    cuda = torch.cuda.is_available()
    if cuda:  # srun may show each process only its own GPU
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # Before the group is formed: if this fails, the launcher ends the other processes
    checkpoint = load_checkpoint(args.checkpoint) if rank == 0 else {}
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, store=store,
                            device_id=device if cuda else None, world_size=world_size,
                            timeout=timedelta(seconds=args.timeout))  # to notice a lost process
    of_rank_0 = [args, checkpoint]
    dist.broadcast_object_list(of_rank_0, device=torch.device("cpu"))
    args, checkpoint = of_rank_0
    return args, rank, world_size, device, checkpoint


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


class Loader(DataLoader):
    """A DataLoader whose processes ignore signals, which Slurm and Ctrl-C send to all processes.

    Training needs their samples until it has saved.
    """

    def __iter__(self):
        time.sleep(0.1)  # fork() may hang while gloo's threads work (seen with Python 3.11)
        signals = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # also in processes that start now
        iterator = super().__iter__()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return iterator


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


def main():
    try:
        train(parse_args())
    finally:  # after an exception, Python would wait for the loader's processes for ever
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
        for process in mp.active_children():
            process.kill()


if __name__ == "__main__":
    main()

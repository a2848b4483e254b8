# SPDX-License-Identifier: MIT-0
r"""The script to copy first: train a model with DistributedDataParallel (DDP), a process per GPU.

    python train.py                                       # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=4 train.py     # four GPUs of this machine, or CPU cores
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py

Type the third command on each of two machines; HOST is the name of one of them. Each process runs
this whole file. All begin with the same weights, and each computes the gradient of its share of
every batch. backward() averages the gradients of all processes, so all make the same step, and
their weights stay equal. The number of a process, from 0, is its rank. To the end of train(),
comments with "DDP:" mark what a script for one process does not have.

A step has --global-batch samples on any number of processes, so --lr need not change. To keep many
GPUs busy, raise --global-batch, and then --lr, too (with Adam, by less than the batch).

With --checkpoint FILE (on several machines, on a disk that they share), the run saves after each
epoch. However it ends, by Ctrl-C, a preemption or a power cut, the same command continues after the
last saved epoch, on any number of processes that divides the global batch. FILE.best has the
weights of the epoch with the best validation result. If an epoch takes long, copy
cifar10_ddp/train.py, which saves within epochs, too.

If a run hangs, each process prints shortly before --timeout which lines it executes.

A job script (not for an array). After its time limit, a preemption or the loss of a node, the job
continues:

#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=32 --mem=64G
#SBATCH --time=1:00:00 --signal=TERM@60 --requeue --open-mode=append --output=%x-%j.out
source .venv/bin/activate    # your environment
file=run.pt                  # on a disk that all nodes share
saved() { stat -Lc %y "$file" 2>&1; }     # when it was saved, or the error that there is no file
before=$(saved)
port=$((10000 + SLURM_JOB_ID % 20000))    # jobs that share a node need different ones
srun --cpus-per-task=32 --kill-on-bad-exit=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 \
    --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$(hostname):$port \
    train.py --checkpoint "$file" && exit
# Slurm ends the processes a minute or two before the time limit (TERM@60), or when it preempts the
# job. Requeue it if it has saved since it started, or was preempted (PreemptTime is not N/A)
if [ "$(saved)" != "$before" ] || squeue -ahj $SLURM_JOB_ID -O PreemptTime | grep -qv N/A; then
    scontrol requeue $SLURM_JOB_ID
else
    echo "the job has saved nothing since it started: it is not requeued, since it would fail again"
fi
exit 1

Follows the synthetic_data_example of "A complete tutorial to run a distributed training on multiple
nodes with Pytorch DDP".
"""
import argparse
import faulthandler
import math
import os
import random
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
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


# ---- Flags, data, model, optimizer, loss, loops: edit these for your own training. ----
# train() has connected the processes before it calls load_data() and the functions below it.
def parse_args(flags=None):
    """Parse flags (a list of strings; None: the command line), and return the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data")
    parser.add_argument("--global-batch", type=int, default=96,
                        help="samples in a step, over all processes: a multiple of their number")
    parser.add_argument("--lr", type=float, default=0.01, help="initial learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and order")
    parser.add_argument("--samples", type=int, default=2048, help="samples to generate")
    parser.add_argument("--bf16", action="store_true", help="use bfloat16 (slow on many CPUs)")
    parser.add_argument("--workers", type=int, default=0,
                        help="loader processes of each process: more, if the log's wait is high")
    parser.add_argument("--checkpoint", type=os.path.realpath, metavar="FILE",
                        help="file to save and resume from")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


# Flags that may change when a run is resumed. The others may not, not even --epochs, since the
# learning rates depend on it. To train longer, start a new run from the best weights: see
# build_model()
MAY_CHANGE = ("bf16", "workers", "checkpoint", "timeout")


def prepare_data(args):
    """Download what is missing. One process of each machine calls this."""


def load_data(args):
    """Return the training set and the validation set: data sets of pairs (input (10,), label).

    The label says which of three linear functions of the input is the largest.

    DDP: all processes must return the same samples in the same order. torch is seeded: also seed
    numpy and random, if you use them, and sort what os.listdir() or a set returns.
    """
    inputs = torch.randn(args.samples, 10)
    labels = F.linear(inputs, torch.randn(3, 10)).argmax(1)
    data = TensorDataset(inputs, labels)
    split = args.samples // 4  # these samples are in a random order: shuffle others before a split
    return Subset(data, range(split, args.samples)), Subset(data, range(split))


def build_loaders(args, train_set, val_set):
    """Return DataLoaders of this process's shares of the training set and the validation set."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if not world_size <= args.global_batch <= len(train_set) or args.global_batch % world_size:
        sys.exit(f"error: --global-batch {args.global_batch} must be a multiple of {world_size} "
                 f"(processes), and at most {len(train_set)} (training samples)")
    options = {"batch_size": args.global_batch // world_size, "num_workers": args.workers,
               "pin_memory": torch.cuda.is_available()}
    if args.workers:
        options["timeout"] = args.timeout  # a sample that does not come is an error
    if args.workers and sys.platform == "linux":
        options["multiprocessing_context"] = "fork"  # other methods import PyTorch in each process
    # DDP: shuffles the samples. Of their order, rank 1 of 4 takes the samples 1, 5, 9, ... (The
    # hash of numbers is the same in all processes, and keeps the orders of two seeds apart)
    sampler = DistributedSampler(train_set, seed=hash((args.seed, 0)), drop_last=True)
    # DDP: each validation sample once. DistributedSampler would repeat some, to make shares equal
    val_share = Subset(val_set, range(rank, len(val_set), world_size))
    return (DataLoader(train_set, sampler=sampler, drop_last=True, **options),
            DataLoader(val_share, **options))


def build_model(args):
    """Return an MLP: inputs (N, 10) to logits (N, 3)."""
    model = nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3))
    # A new run that starts from the best weights of another one:
    # model.load_state_dict(torch.load("FILE.best", map_location="cpu"))
    # DDP: BatchNorm averages over the share of its process. On GPUs, over the whole batch:
    # model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def build_optimizer(args, model, steps):
    """Return the optimizer, and a scheduler of the learning rate for this number of steps.

    After an edit here, start a new run: a resumed one has base rates, weight decay, ... of FILE.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def loss_and_counts(args, model, inputs, labels):
    """Return the mean loss of the samples, and how many are classified correctly, as tensors.

    The loss must be a mean over the samples: with class weights, use reduction="none" and .mean().
    The counts may have any shape: they are added up over all batches and processes, for metrics().
    """
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=args.bf16):
        logits = model(inputs)
        loss = F.cross_entropy(logits, labels)
    return loss, (logits.argmax(1) == labels).sum()


def metrics(counts, samples):
    """Return what the log shows beside the loss, by name. The counts are sums over the samples."""
    return {"accuracy": counts / samples}


def score(results):
    """Return how good these validation results are: FILE.best has the weights of the highest."""
    return results["val_accuracy"]  # for a loss: -results["val_loss"]


def log_results(args, epoch, results):
    """Print the results of an epoch, numbers by name. Add a file, TensorBoard or W&B here.

    DDP: rank 0 alone calls this, as the last thing in an epoch, after it has saved.
    """
    formats = {"lr": ".3g", "seconds": ".1f", "samples/s": ",.0f", "wait": ".0%", "GPU GB": ".1f"}
    texts = [f"{name} {format(value, formats.get(name, '.4f'))}" for name, value in results.items()]
    log(f"epoch {epoch + 1}/{args.epochs}  {'  '.join(texts)}")


def train_epoch(args, ddp_model, optimizer, scheduler, batches):
    """Train on the batches of this process. Return the results of all processes, by name."""
    ddp_model.train()  # to freeze BatchNorm: call eval() of these layers after it
    sums = Sums(args)
    for batch in batches:
        optimizer.zero_grad()
        # DDP: call ddp_model, never the model in it: otherwise no gradients are averaged
        loss, counts = loss_and_counts(args, ddp_model, *batch)
        loss.backward()  # DDP: averages the gradients of all processes
        optimizer.step()  # to clip gradients: before it. To update an average of weights: after it
        scheduler.step()
        sums.add(loss, counts, len(batch[0]))
        sums.log_progress()
    return sums.results()


@torch.no_grad()
def evaluate(args, model, batches):
    """Return the results of all processes' validation batches, by name ({} without samples)."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # DDP: all use rank 0's running averages of BatchNorm
    modes = {module: module.training for module in model.modules()}
    model.eval()
    sums = Sums(args)
    for batch in batches:
        loss, counts = loss_and_counts(args, model, *batch)
        sums.add(loss, counts, len(batch[0]))
    for module, training in modes.items():  # as before, also for a call within an epoch
        module.train(training)
    return sums.results("val_")


# ---- Training ----
# DDP: what exchanges data (train_epoch(), evaluate(), speed_of(), describe_run(), check_model(),
# close_group()) must run in all processes. Below "if rank == 0", it would wait for the others
# until --timeout.
@record  # torchrun then reports the exception of the process that fails first
def train(args):
    # DDP: connects the processes. All get the flags and the checkpoint of rank 0
    args, device, checkpoint = form_group(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # DDP: all processes draw the same data and weights
    train_set, val_set = load_data(args)
    train_loader, val_loader = build_loaders(args, train_set, val_set)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # finds the fastest convolutions
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    model = build_model(args).to(device)
    optimizer, scheduler = build_optimizer(args, model, args.epochs * len(train_loader))
    # A checkpoint has the states of these objects, and these numbers. Add what else a resumed run
    # needs, for example an average of the weights
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    progress = {"epoch": 0, "best_score": -math.inf}
    # What a resumed run may not change. DDP: it must be equal in all processes
    run = describe_run(args, training_samples=len(train_set), validation_samples=len(val_set))
    resume(checkpoint, run, saved, progress)
    # DDP: calls the same model, and makes backward() average the gradients
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    log_start(args, device, len(train_set), len(val_set), progress["epoch"])

    for epoch in range(progress["epoch"], args.epochs):
        train_loader.sampler.set_epoch(epoch)  # DDP: a new order, the same in all processes
        # DDP: other random numbers (of dropout) in each process. A resumed run draws the same
        seed_all(args.seed, epoch, rank)
        lr, start = optimizer.param_groups[0]["lr"], time.perf_counter()
        batches = OnDevice(train_loader, device)
        results = train_epoch(args, ddp_model, optimizer, scheduler, batches)
        seconds = time.perf_counter() - start
        val_results = evaluate(args, model, OnDevice(val_loader, device))
        speed = speed_of(len(train_loader) * args.global_batch, seconds, batches.wait)
        results.update(val_results, lr=lr, **speed)

        check_model(model)  # DDP: they must be equal in all processes
        progress["epoch"] = epoch + 1
        is_best = bool(val_results) and score(val_results) > progress["best_score"]
        if is_best:
            progress["best_score"] = score(val_results)
        if rank == 0 and args.checkpoint:  # DDP: all have the same weights, one process saves
            if is_best:
                save(model.state_dict(), f"{args.checkpoint}.best")
            states = {name: item.state_dict() for name, item in saved.items()}
            save({**states, "progress": progress, "run": run}, args.checkpoint)
        if rank == 0:
            log_results(args, epoch, results)
    close_group()  # DDP: waits for all processes


# ---- You need not read the rest to use or edit this file: it adds up, connects and saves. ----
class OnDevice:
    """Iterates over the batches (lists of tensors) of a DataLoader, on the device."""

    def __init__(self, batches, device):
        self.batches, self.device = iter(batches), device
        self.wait = 0.0  # seconds in which this process has waited for batches

    def __iter__(self):
        return self

    def __next__(self):
        start = time.perf_counter()
        batch = next(self.batches)
        self.wait += time.perf_counter() - start
        return [tensor.to(self.device, non_blocking=True) for tensor in batch]


class Sums:
    """Adds up losses and counts on the GPU: only results() and a line of progress wait for it."""

    def __init__(self, args):
        self.args = args
        self.loss = self.counts = self.samples = self.batches = 0
        self.log_time = time.monotonic()

    def add(self, loss, counts, samples):
        """Add the mean loss, and the counts, of a batch of this number of samples."""
        self.loss += samples * loss.detach().double()
        self.counts += counts.detach().double()
        self.samples += samples
        self.batches += 1
        restart_alarm(self.args.timeout)  # this process does not hang

    def log_progress(self, seconds=10):
        """Print the number of batches and rank 0's mean loss, if these seconds have passed."""
        if time.monotonic() - self.log_time > seconds:
            log(f"  step {self.batches} of this epoch  loss {self.loss / self.samples:.4f}")
            self.log_time = time.monotonic()

    def results(self, prefix=""):
        """Return mean loss and metrics of all processes' samples, by name ({} without samples)."""
        values = [torch.as_tensor(value).cpu() for value in (self.loss, self.counts, self.samples)]
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, values)  # not all_reduce: a rank may have no samples
        loss, counts, samples = (sum(values) for values in zip(*of_ranks))
        if not samples:
            return {}
        means = {"loss": loss / samples, **metrics(counts, samples)}
        return {prefix + name: float(value) for name, value in means.items()}


def speed_of(samples, seconds, wait=0.0):
    """Return the speed of an epoch, by name. All processes call this.

    wait, and the GPUs' memory, are the largest of all processes. Numbers that are 0 are left out.
    """
    of_this = [wait / seconds, torch.cuda.max_memory_allocated() / 1e9]
    largest = torch.tensor(of_this, dtype=torch.double)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    wait, memory = largest.tolist()
    speed = {"seconds": seconds, "samples/s": samples / seconds, "wait": wait, "GPU GB": memory}
    return {name: value for name, value in speed.items() if value}


def log_start(args, device, samples, val_samples, epoch):
    """Print the settings of this run: rank 0 does."""
    world_size = dist.get_world_size()
    log(f"world size {world_size} on {device.type} | global batch {args.global_batch} "
        f"({world_size} x {args.global_batch // world_size}) of {samples} samples | "
        f"lr {args.lr:g} | {args.epochs} epochs"
        + (f", resumed after {epoch}" if epoch else "")
        + ("" if val_samples else " | no validation samples: no best weights")
        + ("" if args.checkpoint else " | without --checkpoint, nothing is saved"))


def seed_all(*numbers):
    """Seed the random numbers of torch, Python and numpy in this process by these integers."""
    seed = hash(numbers)  # of integers, the same in all processes
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would take 0.1 ms
    if torch.cuda.is_initialized():  # not in a loader process
        torch.cuda.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


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
    """Connect all processes. Return rank 0's flags, this process's device, rank 0's checkpoint."""
    restart_alarm(args.timeout)
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        sys.exit("error: srun has started several tasks without RANK: each would be a run of its "
                 "own. Start one task per node, with torchrun, or set RANK=0 for a single process")
    rank = int(os.environ.get("RANK", 0))  # set by torchrun. Otherwise, this is the only process
    local_rank = int(os.environ.get("LOCAL_RANK", 0))  # the number on this machine
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device, backend = torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()  # of the driver, which may be too old for this PyTorch
    if gpus and (not torch.cuda.is_available() or local_rank >= gpus):
        sys.exit(f"error: process {local_rank} of this machine cannot use a GPU of its own (torch "
                 f"{torch.__version__}, {gpus} GPUs): start one process per GPU, update the "
                 "driver, or set CUDA_VISIBLE_DEVICES= to train on CPUs")
    if gpus:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # gradients are exchanged by nccl, flags and sums by gloo
    checkpoint = {}
    if rank == 0:  # before the group is formed: if this fails, the launcher ends the others
        prepare_data(args)
        checkpoint = load_checkpoint(args.checkpoint)
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group(backend, rank=rank, world_size=world_size, store=store,
                            device_id=device if gpus else None,
                            timeout=timedelta(seconds=args.timeout))  # to notice a lost process
    of_rank_0 = [args, checkpoint]  # other flags may be typed elsewhere, and FILE may be missing
    dist.broadcast_object_list(of_rank_0, device=torch.device("cpu"))
    args, checkpoint = of_rank_0
    if local_rank == 0 and rank > 0:
        prepare_data(args)  # on machines that do not share the disk of rank 0
    dist.barrier()  # now each machine has the data
    restart_alarm(args.timeout)
    return args, device, checkpoint


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

# SPDX-License-Identifier: MIT-0
r"""Train a CNN on Fashion-MNIST with DistributedDataParallel (DDP): the images stay on the GPUs.

    python train.py                          # on all GPUs of this machine, or on the CPU
    python train.py --nproc 2                # in two processes
    torchrun --standalone --nproc-per-node=4 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py

Type the last command on each of two machines; HOST is the name of one of them. Each process runs
this whole file. All begin with the same weights, and each computes the gradient of its share of
every batch. backward() averages the gradients of all processes, so all make the same step, and
their weights stay equal. The number of a process, from 0, is its rank. To the end of train(),
comments with "DDP:" mark what a script for one process does not have.

A step has --global-batch images on any number of processes, so --lr need not change. To keep many
GPUs busy, raise --global-batch, and then --lr, too (with Adam, by less than the batch).

With --checkpoint FILE (on several machines, on a disk that they share), the run saves after each
epoch. However it ends, by Ctrl-C, a preemption or a power cut, the same command continues after the
last saved epoch, on any number of processes. FILE.best has the weights of the epoch with the best
validation result. If an epoch takes long, copy cifar10_ddp/train.py, which saves within epochs,
too.

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

Follows "Distributed Data Parallel (DDP) with PyTorch on HPC" of HPC.NRW.
"""
import argparse
import faulthandler
import math
import os
import signal
import socket
import sys
import time
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision.datasets import FashionMNIST


# ---- Flags, data, model, optimizer, loss, loops: edit these for your own training. ----
# train() has connected the processes before it calls load_data() and the functions below it.
def parse_args(flags=None):
    """Parse flags (a list of strings; None: the command line), and return the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data")
    parser.add_argument("--global-batch", type=int, default=128,
                        help="images in a step, over all processes")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and dropout")
    parser.add_argument("--bf16", action="store_true", help="bfloat16: faster on GPUs and AMX CPUs")
    parser.add_argument("--nproc", type=int, help="processes to start; None: one per GPU")
    parser.add_argument("--data-dir", default="data", help="folder of the data set")
    parser.add_argument("--fake-data", type=int, nargs="?", const=512, metavar="N",
                        help="train on N generated images (512 without a number)")
    parser.add_argument("--checkpoint", type=os.path.realpath, metavar="FILE",
                        help="file to save and resume from")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


# Flags that may change when a run is resumed. The others may not, not even --epochs, since the
# learning rates depend on it. To train longer, start a new run from the best weights: see
# build_model()
MAY_CHANGE = ("bf16", "nproc", "data_dir", "checkpoint", "timeout")


def prepare_data(args):
    """Download the data set if it is missing. One process of each machine calls this."""
    if not args.fake_data:
        socket.setdefaulttimeout(60)  # a server may not answer
        FashionMNIST(args.data_dir, download=True)


def load_data(args):
    """Return the training set and the validation set: images (N, 1, 28, 28) uint8, labels (N,).

    They may be any tensors of N samples each, and must fit into the memory of each GPU.

    The data set has no validation set, so its test set is taken: its best epoch is a bit too good.

    DDP: all processes must return the same samples in the same order. torch is seeded: also seed
    numpy and random, if you use them, and sort what os.listdir() or a set returns.
    """
    if args.fake_data:
        return fake_images(args.fake_data, (1, 28, 28), args.seed)
    train_set = FashionMNIST(args.data_dir, train=True)
    val_set = FashionMNIST(args.data_dir, train=False)
    return ((train_set.data.unsqueeze(1), train_set.targets),
            (val_set.data.unsqueeze(1), val_set.targets))


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
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def build_model(args):
    """Return the model to train, on the CPU."""
    model = CNN()
    # A new run that starts from the best weights of another one:
    # model.load_state_dict(torch.load("FILE.best", map_location="cpu"))
    # DDP: BatchNorm averages over the share of its process. On GPUs, over the whole batch:
    # model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(memory_format=torch.channels_last)


def build_optimizer(args, model, steps):
    """Return the optimizer, and a scheduler of the learning rate for this number of steps.

    After an edit here, start a new run: a resumed one has base rates, weight decay, ... of FILE.
    """
    def factor(step):  # warm-up over a fifth of the steps, then decay to 0
        return min(1, (step + 1) / (0.2 * steps), (steps - step) / (0.8 * steps))

    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def scale(images, labels):
    """Return a batch as the model takes it: images of values from 0 to 1, and the labels."""
    if images.dtype != torch.uint8:
        sys.exit(f"error: images are {images.dtype}, not uint8 (0 to 255), which scale() takes: "
                 "delete ToTensor, Normalize, ... from load_data(), or edit scale()")
    return images.div(255).to(memory_format=torch.channels_last), labels


def augment(args, images, labels):
    """Return a training batch: each image is flipped left to right with probability 0.5."""
    flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flip, images.flip(3), images), labels


def loss_and_counts(args, model, images, labels):
    """Return the mean loss of the images, and how many are classified correctly, as tensors.

    The loss must be a mean over the samples: with class weights, use reduction="none" and .mean().
    The counts may have any shape: they are added up over all batches and processes, for metrics().
    """
    smoothing = 0.1 if model.training else 0.0  # so the training loss is the higher one
    with torch.autocast(images.device.type, torch.bfloat16, enabled=args.bf16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
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


def own_batches(args, tensors, epoch=None):
    """Yield this process's share of each batch: shuffled for an epoch, or (None) in their order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = torch.arange(len(tensors[0]))
    # An evaluation needs less memory than a step, so a process may take more than its share
    size = max(args.global_batch, world_size * min(args.global_batch, 1024))
    if epoch is not None:
        # DDP: the same order in all processes. (The hash of numbers is the same everywhere)
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(order), generator=shuffle)
        size = args.global_batch
        # Full batches only: train_epoch() divides by --global-batch, and each process must make
        # the same number of steps
        order = order[:len(order) // size * size]
    for batch in order.to(tensors[0].device).split(size):
        share = batch[rank::world_size]  # DDP: rank 1 of 4 takes the samples 1, 5, 9, ...
        if len(share):
            yield [tensor[share] for tensor in tensors]


def train_epoch(args, ddp_model, optimizer, scheduler, batches):
    """Train on the batches of this process. Return the results of all processes, by name."""
    ddp_model.train()  # to freeze BatchNorm: call eval() of these layers after it
    sums = Sums(args)
    for batch in batches:
        batch = augment(args, *scale(*batch))
        optimizer.zero_grad()
        # DDP: call ddp_model, never the model in it: otherwise no gradients are averaged
        loss, counts = loss_and_counts(args, ddp_model, *batch)
        # DDP: 1 if all shares are equal. If two processes share 5 samples, it is 6/5 for the 3 and
        # 4/5 for the 2: the average of their gradients is then that of the mean of all 5
        weight = len(batch[0]) * dist.get_world_size() / args.global_batch
        (weight * loss).backward()  # DDP: averages the gradients of all processes
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
        batch = scale(*batch)
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
    samples = len(train_set[0])
    if not world_size <= args.global_batch <= samples:  # DDP: each process needs a share
        sys.exit(f"error: --global-batch {args.global_batch} must be at least {world_size} "
                 f"(processes) and at most {samples} (training samples)")
    train_set = [tensor.to(device) for tensor in train_set]  # all samples, on each GPU
    val_set = [tensor.to(device) for tensor in val_set]
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # finds the fastest convolutions
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    steps_per_epoch = samples // args.global_batch
    model = build_model(args).to(device)
    optimizer, scheduler = build_optimizer(args, model, args.epochs * steps_per_epoch)
    # A checkpoint has the states of these objects, and these numbers. Add what else a resumed run
    # needs, for example an average of the weights
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    progress = {"epoch": 0, "best_score": -math.inf}
    # What a resumed run may not change. DDP: it must be equal in all processes
    run = describe_run(args, training_samples=samples, validation_samples=len(val_set[0]),
                       labels_checksum=checksum(train_set[-1]))
    resume(checkpoint, run, saved, progress)
    # DDP: calls the same model, and makes backward() average the gradients
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    log_start(args, device, samples, len(val_set[0]), progress["epoch"])

    for epoch in range(progress["epoch"], args.epochs):
        # DDP: other random numbers (of dropout) in each process. A resumed run draws the same
        torch.manual_seed(hash((args.seed, epoch, rank)))
        lr, start = optimizer.param_groups[0]["lr"], time.perf_counter()
        results = train_epoch(args, ddp_model, optimizer, scheduler,
                              own_batches(args, train_set, epoch))
        seconds = time.perf_counter() - start
        val_results = evaluate(args, model, own_batches(args, val_set))
        speed = speed_of(steps_per_epoch * args.global_batch, seconds)
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


# ---- You need not read the rest to use or edit this file: it starts, connects and saves. ----
def main():
    """Train in this process if torchrun has started it. Otherwise, start one process per GPU."""
    args = parse_args()
    nproc = args.nproc or max(1, torch.cuda.device_count())
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))  # several are an error in form_group()
    if "RANK" in os.environ or tasks > 1 or nproc == 1:
        train(args)
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))  # 0: any port that is free
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), WORLD_SIZE=str(nproc))
    # Without it, each process would use all cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // nproc)))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process, and so the others
    try:
        mp.spawn(run_worker, (args,), nproc)
    except mp.ProcessExitedException as error:  # the process has printed why
        sys.exit(f"error: {error}")


def run_worker(rank, args):
    """Train as one of the processes that main() starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # mp.spawn takes KeyboardInterrupt for success
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    train(args)


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


def checksum(tensor):
    """Return a number that another order of the samples changes."""
    return zlib.crc32(tensor.cpu().contiguous().view(torch.uint8).numpy())


def log_start(args, device, samples, val_samples, epoch):
    """Print the settings of this run: rank 0 does."""
    world_size = dist.get_world_size()
    log(f"world size {world_size} on {device.type} | global batch {args.global_batch} "
        f"({world_size} x {args.global_batch / world_size:.4g}) of {samples} images, passed "
        f"through augment() | lr {args.lr:g} | {args.epochs} epochs"
        + (f", resumed after {epoch}" if epoch else "")
        + ("" if val_samples else " | no validation samples: no best weights")
        + ("" if args.checkpoint else " | without --checkpoint, nothing is saved"))


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


def fake_images(count, shape, seed):
    """Return a training set of ten classes that can be learned, and a quarter as many to validate.

    Each is a pair: images (N, *shape) as uint8, labels (N,).
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(256, (10, shape[0], 4, 4), generator=generator).float()
    patterns = F.interpolate(patterns, shape[1:])
    labels = torch.arange(count + max(1, count // 4)) % 10
    noise = torch.randint(256, (len(labels), *shape), generator=generator, dtype=torch.uint8)
    images = ((2 * patterns[labels] + noise) / 3).to(torch.uint8)
    return (images[:count], labels[:count]), (images[count:], labels[count:])


if __name__ == "__main__":
    main()

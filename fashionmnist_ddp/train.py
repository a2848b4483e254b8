# SPDX-License-Identifier: MIT-0
"""Train a CNN on Fashion-MNIST with DistributedDataParallel (DDP): one process per GPU.

    python train.py                          # on all GPUs of this machine, or on the CPU
    python train.py --nproc 2                # in two processes
    torchrun --standalone --nproc-per-node=4 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 -c8 --kill-on-bad-exit=1 python train.py

(Type the fourth command on each of the two machines.) Each process runs this whole file. All begin
with the same weights, and each computes the gradients of its share of every batch. backward()
averages the gradients of all processes, so all make the same step, and their weights stay equal.
The lines that do this are marked with # DDP.

--batch-size is for each process: on four GPUs, a step has four times as many images as on one, at
the same --lr. With --global-batch N, a step has N images on any number of GPUs.

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of
processes. Several machines need FILE on a shared disk. SIGTERM, Ctrl-C or a closed terminal stop
all processes after the same step: they save, and exit with status 1. In Slurm, --signal=TERM@120
sends SIGTERM; then call scontrol requeue if FILE is new (as slurm/fashionmnist.sbatch does).

To train something else, edit the functions above train(). You need not read the last part. The
repository of this file also has code for best weights, F1, clipping and more, and a check of your
copy.

Follows "Distributed Data Parallel (DDP) with PyTorch on HPC" of HPC.NRW.
"""
import argparse
import contextlib
import json
import math
import os
import random
import re
import signal
import socket
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
from torchvision.datasets import FashionMNIST


# ---- Flags, model, optimizer, learning rate, data, loss: edit these for your own training. ----
def parse_args(flags=None):
    """Return the settings that flags (a list of strings, or the command line) give."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process at a time")
    parser.add_argument("--global-batch", type=int,
                        help="images per step, over all processes; None: batch size x processes")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--bf16", action="store_true", help="bfloat16: faster on GPUs")
    parser.add_argument("--nproc", type=int, help="processes to start; None: one per GPU")
    parser.add_argument("--data-dir", default="data", help="folder of the data set")
    parser.add_argument("--fake-data", type=int, nargs="?", const=512, metavar="N",
                        help="train on N generated images (512 without a number)")
    parser.add_argument("--checkpoint", type=os.path.realpath, help="file to save and resume from")
    parser.add_argument("--save-every", type=float, default=5,
                        help="minutes between checkpoints; one more is saved after each epoch")
    parser.add_argument("--log-every", type=float, default=5, help="seconds between log lines")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


# The processes ask each other every CHECK_EVERY steps whether one of them has received a signal to
# stop. Use 1 if a step may take seconds.
CHECK_EVERY = 8

# Flags that may differ when a run is resumed. (With other --epochs, the learning rates change.)
MAY_CHANGE = ("epochs", "batch_size", "bf16", "nproc", "data_dir", "checkpoint", "save_every",
              "log_every", "timeout")


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
    return CNN()


def build_optimizer(args, model):
    """Return the optimizer. The lr of each parameter group is its peak learning rate."""
    return torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)


def learning_rate(args, step, total_steps):
    """Return the factor of the peak rates: linear warm-up over a fifth of the steps, then decay."""
    return min(1, (step + 1) / total_steps / 0.2, (1 - step / total_steps) / 0.8)


def prepare_data(args):
    """Download the data set if it is missing. The first process of each machine calls this."""
    if not args.fake_data:
        socket.setdefaulttimeout(60)  # a server may not answer
        FashionMNIST(args.data_dir, download=True)


def load_data(args):
    """Return the training set and the test set: images (N, 1, 28, 28) as uint8, labels (N,).

    All processes must return the same samples in the same order. torch and random are seeded; seed
    numpy, and sort file names and what comes from a set.
    """
    if args.fake_data:
        return fake_images(args.fake_data, (1, 28, 28), args.seed)
    train_set = FashionMNIST(args.data_dir, train=True)
    test_set = FashionMNIST(args.data_dir, train=False)
    return ((train_set.data.unsqueeze(1), train_set.targets),
            (test_set.data.unsqueeze(1), test_set.targets))


def normalize(images):
    """Return uint8 images as floats from 0 to 1."""
    if images.dtype != torch.uint8:
        raise TypeError("normalize expects images of uint8: edit it for other inputs")
    return images.div(255).to(memory_format=torch.channels_last)


def augment(images):
    """Flip each image left to right with probability 0.5."""
    flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flip, images.flip(3), images)


def loss_and_counts(args, model, images, labels):
    """Return the mean loss of the images, and how many are classified correctly, as tensors.

    The loss is a mean over the samples (not over weights or tokens). The counts may have any shape:
    they are added up over all batches and processes, for metrics().
    """
    smoothing = 0.0
    if model.training:
        smoothing = 0.1  # so the training loss is higher than the test loss
        images = augment(images)
    logits = model(normalize(images))
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    return loss, (logits.argmax(1) == labels).sum()


def metrics(counts, samples):
    """Return what the log shows beside the loss, by name. The counts are sums over the samples."""
    return {"accuracy": counts / samples}


# ---- Training ----
@record  # torchrun then reports the exception of the process that fails first
def train(args):
    # DDP: the number of this process, how many there are, its GPU; args and checkpoint of rank 0
    args, rank, world_size, device, checkpoint = form_group(args)

    torch.manual_seed(args.seed)  # DDP: what load_data draws is the same in all processes
    random.seed(args.seed)
    (x, y), test_set = load_data(args)
    assert len(x) == len(y), "each input needs a label"
    x, y = x.to(device), y.to(device)  # all samples, on each GPU: they must fit its memory
    # DDP: each process tests every world_size-th sample, so each sample once. It may have none
    test_x, test_y = (tensor[rank::world_size].split(args.batch_size) for tensor in test_set)
    test_batches = [batch for batch in zip(test_x, test_y) if len(batch[0])]
    global_batch = choose_global_batch(args, checkpoint, len(x), world_size)
    steps_per_epoch = len(x) // global_batch  # samples that fill no batch are left out
    total_steps = args.epochs * steps_per_epoch
    # DDP and gradient accumulation: a batch is divided into parts of at most --batch-size samples.
    # Of 8 parts on 2 processes, rank 0 computes the parts 0, 2, 4 and 6, and rank 1 the others
    parts = world_size * math.ceil(global_batch / (world_size * args.batch_size))
    own_parts = range(rank, min(parts, global_batch), world_size)

    torch.manual_seed(args.seed)  # so that the first weights do not depend on load_data
    model = build_model(args).to(device, memory_format=torch.channels_last)
    if not model.training:  # from_pretrained() of Hugging Face returns it in evaluation mode
        model.train()
    optimizer = build_optimizer(args, model)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    settings = run_settings(args, images=len(x), global_batch=global_batch, label_digest=digest(y))
    # In each checkpoint. Add what else a resumed run needs, for example an average of the weights
    saved = {"model": model, "optimizer": optimizer}
    step = restore(checkpoint, settings, saved)
    del checkpoint  # free the memory of its copy of the weights
    # DDP: sends the weights of rank 0 to all. From here on, backward() averages the gradients of
    # all processes. ddp_model calls the same model
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    no_sync = ddp_model.no_sync if world_size > 1 else contextlib.nullcontext
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    log(f"world size {world_size} on {device.type}, threads {torch.get_num_threads()} | "
        f"torch {torch.__version__} | global batch {global_batch} "
        f"({world_size} x {global_batch / world_size:g}) of {len(x)} images | "
        f"learning rate {peak_rates[0]:g} | steps {step} to {total_steps}"
        + (", resumed" if step else "")
        + ("" if args.checkpoint else " | without --checkpoint, nothing is saved"))

    signals = catch_signals()
    first_step = step + 1
    saved_step, save_time = step, time.perf_counter()
    # A run that is resumed at the end of an epoch begins with the evaluation of that epoch
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):
        # DDP: the order depends on seed and epoch alone, so it is the same in all processes.
        # (hash() of numbers is the same everywhere)
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(x), generator=shuffle).to(device)
        loss_sum = counts = samples = 0  # of this process in this epoch (since a resume)
        epoch_time = time.perf_counter()
        first_batch = max(0, step - epoch * steps_per_epoch)
        for batch in order.split(global_batch)[first_batch:steps_per_epoch]:
            for group, peak_rate in zip(optimizer.param_groups, peak_rates):
                group["lr"] = peak_rate * learning_rate(args, step, total_steps)
            optimizer.zero_grad()
            for part in own_parts:
                indices = batch[part::parts]  # DDP: part 1 of 4 has the samples 1, 5, 9, ...
                # DDP: each part has other random numbers (of torch), the same ones after a resume
                torch.manual_seed(hash((args.seed, step, part)))
                # DDP: exchange gradients once, after the last part
                with contextlib.nullcontext() if part == own_parts[-1] else no_sync():
                    with autocast:
                        loss, part_counts = loss_and_counts(args, ddp_model, x[indices], y[indices])
                    # DDP divides the sum of all gradients by world_size. The factor makes of it the
                    # gradient of the mean loss of the global batch, also if parts differ in length
                    (loss * (len(indices) * world_size / global_batch)).backward()
                loss_sum += len(indices) * loss.detach().double()  # on the GPU: no waiting for it
                counts += part_counts.detach().double()
                samples += len(indices)
            optimizer.step()
            step += 1

            now = time.perf_counter()
            if step == first_step:  # not timed: the first step is slower
                start = log_time = now
            elif rank == 0 and now - log_time >= args.log_every:
                log_time = now
                rate = (step - first_step) / (now - start)
                # The loss of rank 0 in this epoch; the speed since the first step, with evaluations
                log(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  "
                    f"loss {loss_sum / samples:.4f}  "
                    f"{rate * global_batch:,.0f} images/s  "
                    f"{timedelta(seconds=round((total_steps - step) / rate))} left")
            end_of_epoch = step % steps_per_epoch == 0
            # DDP: if one process stopped alone, the others would wait for its gradients
            stop = (end_of_epoch or step % CHECK_EVERY == 0) and any_rank_has(signals)
            if end_of_epoch:
                check_weights(saved)
            due = end_of_epoch or now - save_time >= 60 * args.save_every
            if rank == 0 and args.checkpoint and (stop or due):
                saved_step, save_time = step, now
                save_checkpoint(args.checkpoint, saved, settings, step)
            if stop and step < total_steps:
                close_group()
                sys.exit(f"stopped by a signal after step {step}" if rank == 0 else 1)
        if samples:  # otherwise, the run was resumed at the end of this epoch
            results = results_of(loss_sum, counts, samples)
            log(f"epoch {epoch + 1}/{args.epochs}  {show(results)}")
        with autocast:
            test = evaluate(args, model, test_batches, device)
        log(f"epoch {epoch + 1}/{args.epochs}  test {show(test)}  "
            f"{time.perf_counter() - epoch_time:.1f} s")
    if rank == 0 and args.checkpoint and step > saved_step:  # if you end the loop early
        save_checkpoint(args.checkpoint, saved, settings, step)
    close_group()


def evaluate(args, model, batches, device):
    """Return the loss and the metrics of all processes' samples. batches: those of this process."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # DDP: BatchNorm's statistics are of a process's own samples
    modes = {module: module.training for module in model.modules()}
    model.eval()
    loss_sum = counts = samples = 0
    with torch.no_grad():
        for batch in batches:
            batch = [tensor.to(device) for tensor in batch]
            loss, batch_counts = loss_and_counts(args, model, *batch)
            loss_sum += len(batch[0]) * loss.double()
            counts += batch_counts.double()
            samples += len(batch[0])
    for module, training in modes.items():  # as before: some may be frozen
        module.train(training)
    return results_of(loss_sum, counts, samples)


# ---- The last part starts, connects, saves and stops the processes. You need not read it. ----
def form_group(args):
    """Connect all processes. Return args, rank, world size, device, and checkpoint ({} if none).

    args and checkpoint come from rank 0: another machine may not have the file.
    """
    rank, local_rank, world_size = setup_environment()
    device = pick_device(local_rank)
    if rank == 0:  # before the group is formed: if this fails, the launcher ends the others
        prepare_data(args)
    checkpoint = load_checkpoint(args.checkpoint) if rank == 0 else {}
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, store=store,
                            device_id=device if cuda else None, world_size=world_size,
                            timeout=timedelta(seconds=args.timeout))  # to notice a lost process
    of_rank_0 = [args, checkpoint]
    dist.broadcast_object_list(of_rank_0, device=torch.device("cpu"))
    args, checkpoint = of_rank_0  # on all ranks
    if local_rank == 0 and rank > 0:
        prepare_data(args)  # on machines that do not share the disk of rank 0
    dist.barrier()  # now each machine has the data
    return args, rank, world_size, device, checkpoint


def main():
    """Train in this process if a launcher has started it. Otherwise, start one process per GPU."""
    args = parse_args()
    *_, world_size = setup_environment()
    nproc = args.nproc or max(1, torch.cuda.device_count())
    launched = world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ  # by torchrun or srun
    if launched or nproc == 1:
        train(args)
    else:
        spawn(nproc, args)


def spawn(nproc, args):
    """Start nproc processes on this machine, and forward signals to them."""
    # As torchrun does: this process has a free port, and rank 0 connects to it as all others.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), WORLD_SIZE=str(nproc),
                      SLURM_STEP_NUM_TASKS="1",
                      TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    # Without it, each process would use all cores. (torchrun sets it to 1)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // nproc)))
    pick_device(0)  # its errors once, not in every process
    workers = mp.spawn(run_worker, (args,), nproc, join=False)

    def forward(signum, frame):
        for worker in mp.active_children():
            os.kill(worker.pid, signum)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, forward)
    try:
        while not workers.join():
            pass
    except mp.ProcessExitedException as error:  # the process has printed why, unless killed
        sys.exit(1 if error.exit_code > 0 else f"error: {error}")


def run_worker(rank, args):
    """Train as one of the processes of spawn()."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # mp.spawn takes KeyboardInterrupt for success
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    train(args)


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


def pick_device(local_rank):
    """Return this process's GPU, or the CPU if there is no GPU."""
    gpus = torch.cuda.device_count()  # by the driver, which may be too old for this PyTorch
    if gpus and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} cannot use these GPUs: is the driver too old? "
                 "To use the CPU, set CUDA_VISIBLE_DEVICES=")
    # srun may show a process only its own GPU. NCCL refuses two processes on one GPU
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


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


def choose_global_batch(args, checkpoint, samples, world_size):
    """Return the global batch size. A resumed run keeps it on any number of processes."""
    default = checkpoint["settings"]["global_batch"] if checkpoint else args.batch_size * world_size
    global_batch = min(args.global_batch or default, samples)
    if global_batch < world_size:
        sys.exit(f"error: {world_size} processes, but {global_batch} samples in a step: start "
                 "fewer processes, or use more samples")
    return global_batch


def close_group():
    """Wait until rank 0 has saved: when one process ends, its launcher may end the others."""
    dist.barrier()
    time.sleep(0.5)  # without it, 1 of 20 runs aborts in a thread of gloo (pytorch#154976)
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


def any_rank_has(signals):
    """Return whether any process has received a signal. All processes call this together."""
    count = torch.tensor(len(signals))
    dist.all_reduce(count)
    return count.item() > 0


def norms_of(saved):
    """Return the norms of all weights in saved. Exit if a weight is not finite."""
    norms = torch.stack([weight.detach().norm().cpu() for item in saved.values()
                         if isinstance(item, nn.Module) for weight in item.parameters()])
    if not norms.isfinite().all():
        sys.exit("error: the weights contain NaN or infinity: lower --lr (with another "
                 "--checkpoint), or look for NaN and very large values in the data")
    return norms


def check_weights(saved):
    """Exit if the norms of weights differ by process: then no gradients were averaged."""
    norms = norms_of(saved)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, norms)
    if not all(torch.allclose(norms, others) for others in of_ranks):
        sys.exit("error: the weights differ by rank: call ddp_model(...), and step() on all ranks")


def digest(labels):
    """Return a number that changes if a process, or a resumed run, has other labels or an order."""
    labels = labels[::1 + labels.numel() // 10**6].flatten()  # a copy, if windows overlap
    labels = labels[::1 + len(labels) // 1000]  # enough of them
    if labels.is_floating_point():  # those computed on another machine differ in the last digits
        labels = labels.double()
        labels = labels > labels.nanmean()  # missing ones may be nan
    return hash(tuple(labels.tolist()))


def different(settings, others):
    """Return the names of settings whose values differ. A missing setting counts as None."""
    return [name for name in {**settings, **others}
            if str(settings.get(name)) != str(others.get(name))]  # nan is not equal to itself


def run_settings(args, **more):
    """Return what defines the run: all flags except MAY_CHANGE, and more. Exit if ranks differ."""
    settings = {**vars(args), **more}
    settings = {name: value for name, value in settings.items() if name not in MAY_CHANGE}
    settings = json.loads(json.dumps(settings))  # plain values: torch.load reads no others
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, settings)
    names = sorted({name for others in of_ranks for name in different(settings, others)})
    if names:
        sys.exit(f"error: the processes have different data or settings ({', '.join(names)}): sort "
                 "what comes from a set or a folder, and seed what is random")
    return settings


def save_checkpoint(path, saved, settings, step):
    """Write a checkpoint. At any moment, the file at path is the old or the complete new one."""
    norms_of(saved)  # exits if weights are not finite
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
        sys.exit(f"error: the checkpoint has other settings ({'; '.join(changes):.500}): use the "
                 "same flags and data, or another --checkpoint. If a flag of your own may differ, "
                 "add it to MAY_CHANGE")
    for name, item in saved.items():
        item.load_state_dict(checkpoint[name])
    return checkpoint["step"]


def log(message):
    """Print on rank 0. A run does not end because it cannot print."""
    if os.environ.get("RANK", "0") == "0":
        # OSError: a closed pipe (| head). ValueError: an encoding. RuntimeError: a signal's print
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            print(message, flush=True)


def fake_images(count, shape, seed):
    """Return a training set of ten classes that can be learned, and a test set a quarter as large.

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

# SPDX-License-Identifier: MIT-0
"""Train a CNN on Fashion-MNIST with DistributedDataParallel (DDP), started by plain python.

    python train.py                          # one process per GPU of this machine, or on the CPU
    python train.py --nproc 2                # two processes
    torchrun --standalone --nproc-per-node=4 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8 -K1 python train.py

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of
processes. SIGTERM, Ctrl-C or a closed terminal stop all processes after the same step, and save.

To train something else, edit the functions above train(). Then tests/check_copy.py says whether
your copy trains alike on one and two processes, and after a stop.

Follows "Distributed Data Parallel (DDP) with PyTorch on HPC" of HPC.NRW.
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
from torch.utils.data import TensorDataset
from torchvision.datasets import FashionMNIST


# ---- Flags, model, optimizer, learning rate, data, loss: edit these for your own training. ----
def parse_args(flags=None):
    """Return the settings of these flags (strings), or of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=64, help="images per process at once")
    parser.add_argument("--global-batch", type=int, help="images per step of all processes")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--bf16", action="store_true", help="bfloat16; slow on many CPUs")
    parser.add_argument("--nproc", type=int, help="processes to start; None: one per GPU")
    parser.add_argument("--data-dir", default="data", help="folder of the data set")
    parser.add_argument("--fake-data", type=int, nargs="?", const=512, help="images to generate")
    parser.add_argument("--checkpoint", type=os.path.realpath, help="file to save and resume from")
    parser.add_argument("--save-every", type=float, default=5, help="minutes between checkpoints")
    parser.add_argument("--log-every", type=float, default=5, help="seconds between log lines")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


# Signals stop the run after at most so many steps. Set it to 1 if a step may take seconds.
CHECK_EVERY = 8

# A run may be resumed with other values of these flags, but not of the others.
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
    """Return the optimizer. Its parameter groups have their peak learning rates."""
    return torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)


def learning_rate(step, total_steps):
    """Return the factor of the peak rates: linear warm-up over a fifth of the steps, then decay."""
    return min(1, (step + 1) / total_steps / 0.2, (1 - step / total_steps) / 0.8)


def prepare_data(args):
    """Download the data unless it is there. The first process of each machine calls this."""
    if not args.fake_data:
        socket.setdefaulttimeout(60)  # a server may not answer
        FashionMNIST(args.data_dir, download=True)


def load_data(args):
    """Return the training set and the test set: images (N, 1, 28, 28) as uint8, labels (N,).

    All ranks call it with the same random numbers of torch and Python.
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
        raise TypeError("normalize takes uint8: for images that are floats, leave out its division")
    return images.div(255).to(memory_format=torch.channels_last)


def augment(images):
    """Flip each image left to right with probability 0.5."""
    flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flip, images.flip(3), images)


def loss_and_correct(model, images, labels):
    """Return the sum of the images' losses, and how many are classified correctly, as tensors."""
    smoothing = 0.1 if model.training else 0.0
    if model.training:
        images = augment(images)
    logits = model(normalize(images))
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    return loss, (logits.argmax(1) == labels).sum()


# ---- Training ----
@record  # torchrun then reports the exception of the rank that fails first
def train(args):
    args, rank, world_size, device, checkpoint = form_group(args)
    torch.manual_seed(args.seed)  # in load_data, all ranks draw the same random numbers
    random.seed(args.seed)
    train_set, test_set = (TensorDataset(*tensors) for tensors in load_data(args))  # equal lengths
    x, y = (tensor.to(device) for tensor in train_set.tensors)
    test_x, test_y = (tensor[rank::world_size].split(args.batch_size)
                      for tensor in test_set.tensors)
    global_batch = choose_global_batch(args, checkpoint, len(x), world_size)
    steps_per_epoch = len(x) // global_batch  # samples that fill no batch are left out
    total_steps = args.epochs * steps_per_epoch
    # Each process computes its share of a batch in parts of at most --batch-size
    parts = len(range(rank, global_batch, world_size * args.batch_size))

    torch.manual_seed(args.seed)  # again: the weights do not depend on what load_data draws
    model = build_model(args).to(device, memory_format=torch.channels_last)
    if not model.training:  # as from_pretrained() returns it. Other models may have frozen layers
        model.train()
    optimizer = build_optimizer(args, model)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    settings = run_settings(args, images=len(x), global_batch=global_batch,
                            label_digest=digest(y))
    saved = {"model": model, "optimizer": optimizer}  # in each checkpoint
    step = restore(checkpoint, settings, saved)
    del checkpoint  # a second copy of weights and optimizer
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    log(f"world size {world_size} on {device.type}, threads {torch.get_num_threads()} | "
        f"torch {torch.__version__} | global batch {global_batch} of {len(x)} images | "
        f"steps {step} to {total_steps}")

    signals = catch_signals()
    first_step = step + 1
    saved_step, save_time = step, time.perf_counter()
    # At the end of an epoch, a resumed run repeats the evaluation, which may have been missed
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):
        # The order depends on seed and epoch only: a resumed run goes on where it stopped
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(x), generator=shuffle).to(device)
        loss_sum = correct_sum = count = 0  # of this process in this epoch
        epoch_time = time.perf_counter()
        first_batch = max(0, step - epoch * steps_per_epoch)
        for batch in order.split(global_batch)[first_batch:steps_per_epoch]:
            # Has any process received a signal? They exchange this while they compute the step
            check = step % CHECK_EVERY == 0
            stop = torch.tensor(len(signals) if check else 0)
            exchange = dist.all_reduce(stop, async_op=True) if check and world_size > 1 else None

            for group, peak_rate in zip(optimizer.param_groups, peak_rates):
                group["lr"] = peak_rate * learning_rate(step, total_steps)
            optimizer.zero_grad()
            for part in range(parts):
                first = rank + part * world_size
                indices = batch[first::parts * world_size]
                seed_step(hash((args.seed, step, first)), device)  # of random flips and dropout
                # Exchange gradients with the last part only. (no_sync() sets this, too.)
                ddp_model.require_backward_grad_sync = part == parts - 1
                with autocast:
                    loss, correct = loss_and_correct(ddp_model, x[indices], y[indices])
                (loss * (world_size / global_batch)).backward()  # DDP divides by world_size
                loss_sum += loss.detach().double()  # a tensor: the CPU does not wait for the GPU
                correct_sum += correct.detach().double()
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
                    f"loss {loss_sum / count:.4f}  accuracy {correct_sum / count:.4f}  "
                    f"{rate * global_batch:,.0f} images/s  "
                    f"{timedelta(seconds=round((total_steps - step) / rate))} left")
            if exchange:
                exchange.wait()
            end_of_epoch = step % steps_per_epoch == 0
            if end_of_epoch:
                check_finite(saved)
                check_weights(saved)
            due = end_of_epoch or now - save_time >= 60 * args.save_every
            if rank == 0 and args.checkpoint and (stop or due):
                saved_step, save_time = step, now
                save_checkpoint(args.checkpoint, saved, settings, step)
            if stop and step < total_steps:
                close_group()
                sys.exit(f"stopped by a signal after step {step}" if rank == 0 else 1)
        if count:  # a run that is resumed at the end of an epoch only evaluates
            loss, accuracy = mean_of_all_ranks([loss_sum, correct_sum], count, device)
            log(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}")
        with autocast:
            test_loss, test_accuracy = evaluate(model, zip(test_x, test_y), device)
        log(f"epoch {epoch + 1}/{args.epochs}  test loss {test_loss:.4f}  "
            f"accuracy {test_accuracy:.4f}  {time.perf_counter() - epoch_time:.1f} s")
    if rank == 0 and args.checkpoint and step > saved_step:  # an edited loop has ended early
        save_checkpoint(args.checkpoint, saved, settings, step)
    close_group()


def evaluate(model, batches, device):
    """Return the mean loss and accuracy over all ranks' samples. batches: those of this rank."""
    if dist.get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # BatchNorm's running statistics, if any
    frozen = [module for module in model.modules() if not module.training]
    model.eval()
    loss_sum = correct_sum = count = 0
    with torch.no_grad():
        for batch in batches:
            # Copies: a loss function may change its batch, and these are used in each epoch
            batch = [tensor.to(device, copy=True) for tensor in batch]
            loss, correct = loss_and_correct(model, *batch)
            loss_sum += loss.double()
            correct_sum += correct.double()
            count += len(batch[0])
    model.train()  # some layers (LoRA) undo in it what they did in eval(). It wakes frozen ones
    for module in frozen:
        module.training = False
    return mean_of_all_ranks([loss_sum, correct_sum], count, device)


def digest(labels):
    """Return a number by which ranks, and a resume, notice other labels or another order."""
    labels = labels[::1 + labels.numel() // 10**6].flatten()  # it copies overlapping windows
    labels = labels[::1 + len(labels) // 1000]  # enough of them
    if labels.is_floating_point():  # those computed on another machine differ in the last digits
        labels = labels.double()
        labels = labels > labels.nanmean()  # missing ones may be nan
    return hash(tuple(labels.tolist()))


# ---- Processes ----
def form_group(args):
    """Form the process group, and download the data.

    Return rank 0's args, this process's rank, the world size, this process's device, and rank 0's
    checkpoint, {} if there is none.
    """
    rank, local_rank, world_size = setup_environment()
    device = pick_device(local_rank)
    if rank == 0:  # before the group is formed: if this fails, the launcher ends the others
        prepare_data(args)
    checkpoint = load_checkpoint(args.checkpoint) if rank == 0 else {}
    configure(device)
    set_threads()
    cuda = device.type == "cuda"
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
                      LOCAL_WORLD_SIZE=str(nproc), SLURM_STEP_NUM_TASKS="1",
                      TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    pick_device(0)  # its errors once, not in every process
    workers = mp.spawn(run_worker, (os.getpid(), args), nproc, join=False)

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


def run_worker(rank, parent, args):
    if os.getppid() != parent:  # it was killed before PyTorch asked for a signal at its death
        sys.exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # mp.spawn takes KeyboardInterrupt for success
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    train(args)


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


def pick_device(local_rank):
    """Return this process's GPU, or the CPU if there is no GPU."""
    gpus = torch.cuda.device_count()  # by the driver, which may be too old for this PyTorch
    if gpus and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} cannot use these GPUs; "
                 "CUDA_VISIBLE_DEVICES= uses the CPU")
    # srun may show a process only its own GPU. NCCL refuses two processes on one GPU
    return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")


def configure(device):
    """Use this GPU, or the CPU, at its fastest."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    with contextlib.suppress(AttributeError):  # only glibc has it: a fifth more images/s on a CPU
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return memory to the system
        ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks up to 32 MB


def cores_per_process():
    """Return this process's share of the cores of its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def set_threads():
    """Use a thread for each core of this process: torchrun sets OMP_NUM_THREADS=1."""
    several = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1
    if several and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(cores_per_process())


def mean_of_all_ranks(sums, count, device):
    """Return each sum of all ranks, divided by their count."""
    totals = torch.tensor([*sums, count], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return (totals[:-1] / totals[-1]).tolist()


def seed_step(seed, device):
    """Seed this process's random numbers: torch.manual_seed, for all kinds of devices, is slow."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


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


def fake_images(count, shape, seed):
    """Return a training set of ten classes that can be learned, and a test set a quarter as large.

    Each is a pair: images (N, *shape) as uint8, labels (N,).
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(256, (10, shape[0], 4, 4), generator=generator).float()
    patterns = F.interpolate(patterns, shape[1:])
    sets = []
    for samples, set_seed in ((count, 2 * seed + 2), (max(1, count // 4), 2 * seed + 1)):
        labels = torch.arange(samples) % 10
        generator.manual_seed(set_seed)
        noise = torch.randint(256, (samples, *shape), generator=generator, dtype=torch.uint8)
        sets.append((((2 * patterns[labels] + noise) / 3).to(torch.uint8), labels))
    return sets


if __name__ == "__main__":
    main()

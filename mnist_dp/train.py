#!/usr/bin/env python3
"""Train a small CNN on MNIST with nn.DataParallel: one process, all GPUs of one machine.

    python train.py                          # all visible GPUs, or the CPU
    python train.py --device-ids 0,1         # these two GPUs
    srun --nodes=1 --gpus-per-node=4 python train.py

With --checkpoint FILE, the same command resumes a run that was stopped or killed. On SIGTERM,
Ctrl-C or a closed terminal, it saves after the current step and exits with status 1. On CPUs, with
the same PyTorch and the same number of threads, the final weights are bitwise those of an
uninterrupted run.

To train something else, edit the functions above train().

Follows the nn.DataParallel part of the OpenACC notebook "Distributed Data Parallelism".
DistributedDataParallel is faster, and runs on several machines: see cifar10_ddp.
"""
import argparse
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
import zipfile
from datetime import timedelta

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.datasets import MNIST


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=5, help="passes over the data")
    add("--batch-size", type=at_least(1), default=128, help="images per step, over all GPUs")
    add("--lr", type=at_least(0.0), default=1e-3, help="initial learning rate of Adam")
    add("--seed", type=at_least(0), default=0, help="seed of weights, order and dropout")
    add("--bf16", action="store_true", help="bfloat16; slow on GPUs before A100 and many CPUs")
    add("--device-ids", type=gpu_numbers, metavar="0,1", help="GPUs; None: all")
    add("--data-dir", default="data", help="folder of the data set, downloaded if missing")
    add("--fake-data", type=at_least(1), nargs="?", const=512, metavar="N",
        help="train on N generated images")
    add("--checkpoint", type=os.path.realpath, metavar="FILE", help="to save to and resume from")
    add("--save-every", type=at_least(1), default=1, metavar="EPOCHS", help="between checkpoints")
    add("--log-every", type=at_least(0.0), default=5, metavar="SECONDS", help="0: every step")
    return parser.parse_args()


def gpu_numbers(text):
    """Return the numbers in text, as in 0,1: each once."""
    if not all(number.isdecimal() for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"requires the numbers of GPUs, such as 0,1, not {text}")
    return [int(number) for number in dict.fromkeys(text.split(","))]


# ---- A copy edits the code from here to train(): names, model, optimizer, data, loss. ----
RUN = "mnist_dp"     # in the checkpoint: it is only resumed under the same name
SAMPLES = "images"   # in log lines and in the checkpoint: what is counted
METRIC = "accuracy"  # in log lines: the mean of what loss_and_correct returns second


class CNN(nn.Module):
    """The CNN of fashionmnist_ddp: images (N, 1, 28, 28) to logits (N, 10)."""

    def __init__(self, bf16):
        super().__init__()
        self.bf16 = bf16
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        # Autocast is entered here because it is local to a thread, and DataParallel starts threads
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            x = torch.flatten(self.dropout1(x), 1)
            return self.fc2(self.dropout2(F.relu(self.fc1(x)))).float()


def build_model(args, device):
    """Return the model and its optimizer. Each parameter group has its own peak learning rate."""
    model = CNN(args.bf16).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    # To clip gradients, after they are averaged:
    # def clip(*_):
    #     nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # optimizer.register_step_pre_hook(clip)
    return model, optimizer


def learning_rate(step, total_steps):
    """Return the factor of the peak rates: linear decay to 0."""
    return 1 - step / total_steps


def prepare_data(args):
    """Download the data unless it is there."""
    download(MNIST, args)


def load_data(args, train_set):
    """Return images (N, 1, 28, 28) as uint8 and labels (N,) as int64."""
    if args.fake_data:
        return fake_images(args.fake_data, (1, 28, 28), args.seed, train_set)
    data = MNIST(args.data_dir, train_set)
    return data.data.unsqueeze(1), data.targets


def loss_and_correct(model, images, labels):
    """Return the sum of the images' losses, and how many are classified correctly, as tensors."""
    logits = model(images.div(255).to(memory_format=torch.channels_last))
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss, (logits.argmax(1) == labels).sum()


# ---- A copy needs no edits below. A new flag that changes the weights belongs in settings. ----
def train(args):
    device, device_ids = pick_devices(args.device_ids)
    configure_cpu(1)
    prepare_data(args)
    checkpoint = load_checkpoint(args.checkpoint)
    x, y = (tensor.to(device) for tensor in load_data(args, train_set=True))
    test_x, test_y = (tensor.to(device) for tensor in load_data(args, train_set=False))
    batch_size = min(args.batch_size, len(x))
    steps_per_epoch = len(x) // batch_size
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model, optimizer = build_model(args, device)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    state = {"model": model, "optimizer": optimizer}
    settings = {"script": RUN, SAMPLES: len(x), "fake_data": args.fake_data,
                "batch_size": args.batch_size, "lr": args.lr, "seed": args.seed, "bf16": args.bf16}
    step = restore(checkpoint, settings, state, total_steps)
    del checkpoint  # a second copy of weights and optimizer
    parallel_model = nn.DataParallel(model, device_ids) if len(device_ids) > 1 else model
    log(f"GPUs {device_ids or 'none'}, threads {torch.get_num_threads()} | "
        f"torch {torch.__version__} | batch {batch_size} of {len(x)} {SAMPLES} | "
        f"steps {step} to {total_steps}")

    generators = [torch.default_generator]
    if device_ids:
        generators = [torch.cuda.default_generators[number] for number in device_ids]
    signals = []
    handle_signals(lambda signum, frame: signals.append(signum))
    # At the end of an epoch, a resumed run repeats the evaluation, which may have been missed
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):
        # The order and dropout depend on seed, epoch and step: a resume repeats them
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(len(x), generator=shuffle).to(device)
        batches = order.split(batch_size)[:steps_per_epoch]  # what fills no batch is dropped
        loss_sum = correct_sum = count = 0  # in this epoch
        log_step = step
        log_time = epoch_time = time.perf_counter()
        for indices in batches[step - epoch * steps_per_epoch:]:
            for group, peak_rate in zip(optimizer.param_groups, peak_rates):
                group["lr"] = peak_rate * learning_rate(step, total_steps)
            for generator in generators:
                generator.manual_seed(hash((args.seed, step)))
            optimizer.zero_grad()
            # DataParallel splits the images over the GPUs, and gathers the logits on the first one
            loss, correct = loss_and_correct(parallel_model, x[indices], y[indices])
            (loss / batch_size).backward()  # sums the gradients of all GPUs on the first one
            optimizer.step()
            step += 1
            loss_sum += loss.detach()  # tensors: the CPU does not wait for the GPU
            correct_sum += correct
            count += len(indices)
            at_end = step % steps_per_epoch == 0
            if at_end or time.perf_counter() - log_time >= args.log_every:
                means = loss_sum.item() / count, correct_sum.item() / count  # waits for the GPU
                steps_per_second = (step - log_step) / (time.perf_counter() - log_time)
                log_step = step
                log_time = time.perf_counter()
                log_line(args, epoch, step, total_steps, means, steps_per_second, batch_size)
                check_finite(model)
            at_save = step % (args.save_every * steps_per_epoch) == 0 or step == total_steps
            if args.checkpoint and (at_save or signals):
                save_checkpoint(args.checkpoint, state, step, settings, args.batch_size)
            if signals and step < total_steps:
                sys.exit(f"stopped by a signal after step {step}")
        loss, metric = evaluate(model, test_x, test_y, batch_size)
        log(f"epoch {epoch + 1}/{args.epochs}  test loss {loss:.4f}  {METRIC} {metric:.4f}  "
            f"{time.perf_counter() - epoch_time:.1f} s")


def log_line(args, epoch, step, total_steps, means, steps_per_second, batch_size):
    """Log the mean loss and metric of the epoch so far, the speed and the time left."""
    loss, metric = means
    seconds_left = round((total_steps - step) / steps_per_second)
    log(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  loss {loss:.4f}  "
        f"{METRIC} {metric:.4f}  {steps_per_second * batch_size:,.0f} {SAMPLES}/s  "
        f"{timedelta(seconds=seconds_left)} left")


def pick_devices(device_ids):
    """Return the first device and the numbers of all GPUs to use: none on the CPU."""
    if int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        sys.exit("error: nn.DataParallel runs in one process: "
                 "start one with python, or use cifar10_ddp for several")
    gpus = list(range(torch.cuda.device_count()))  # by the driver, which may be too old for torch
    if device_ids is None:
        device_ids = gpus
    if not set(device_ids) <= set(gpus):
        sys.exit(f"error: --device-ids {device_ids}: the visible GPUs are {gpus}")
    if gpus and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} cannot use these GPUs; "
                 "CUDA_VISIBLE_DEVICES= trains on the CPU")
    if not gpus:
        return torch.device("cpu"), []
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    return torch.device("cuda", device_ids[0]), device_ids


@torch.no_grad()
def evaluate(model, images, labels, batch_size):
    """Return the mean loss and the mean metric of the images."""
    model.eval()
    loss_sum = metric_sum = 0
    for x, y in zip(images.split(batch_size), labels.split(batch_size)):
        loss, metric = loss_and_correct(model, x, y)
        loss_sum += loss.double()
        metric_sum += metric.double()
    model.train()
    return loss_sum.item() / len(labels), metric_sum.item() / len(labels)


# The shared blocks are identical in all scripts of this collection.
# --- shared: helpers ---
def at_least(minimum):
    """Return a type for argparse: numbers of minimum's type, from minimum on."""
    def number(text):
        value = type(minimum)(text)
        if not minimum <= value < 2**62:  # not true for nan either
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {minimum}")
        return value
    return number


def available_cores():
    """Return how many cores this process may use. Hyperthreads share a core."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count()
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as file:
                cores.add(file.read())
        except OSError:
            cores.add(cpu)
    cores = min(len(cores), int(os.environ.get("SLURM_CPUS_ON_NODE", len(cores))))
    with contextlib.suppress(OSError, ValueError):  # the quota of a container, if any
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        cores = min(cores, int(quota) // int(period))
    return cores


def configure_cpu(local_world_size):
    """Use this process's share of the cores, unless OMP_NUM_THREADS is set; keep freed memory."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or (threads == "1" and local_world_size > 1):  # 1 is torchrun's default
        torch.set_num_threads(max(1, available_cores() // local_world_size))
    with contextlib.suppress(AttributeError):  # glibc: a fifth more images/s on a CPU
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return it to the system
        ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks up to 32 MB


def handle_signals(handler):
    """Call handler on SIGTERM, Ctrl-C and a closed terminal."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, handler)


def save_checkpoint(path, state, step, settings, global_batch):
    """Replace the file at path atomically, and keep the previous one as path.previous."""
    checkpoint = {"step": step, "settings": settings, "global_batch": global_batch}
    for name, part in state.items():
        checkpoint[name] = part.state_dict()
    try:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            os.replace(path, f"{path}.previous")
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: cannot save {path} ({error}): disk full, or another run? "
                 "An older one is intact, if any")
    log(f"saved step {step} in {path}")


def load_checkpoint(path):
    """Return the checkpoint at path, or at path.previous if that cannot be loaded.

    Without a path or without files it is {}. If no file can be loaded, the process exits.
    """
    if path is None:
        return {}
    try:  # fail now, not at the first save
        open(path if os.path.isdir(path) else f"{path}.tmp", "ab").close()
    except OSError as error:
        sys.exit(f"error: cannot write --checkpoint {path} ({error.strerror}): "
                 "name a file; mkdir -p makes its folder")
    files = [file for file in (path, f"{path}.previous") if os.path.exists(file)]
    for file in files:
        try:
            damaged = zipfile.ZipFile(file).testzip()  # torch.load does not verify checksums
            if damaged:
                raise RuntimeError(f"wrong checksum of {damaged}")
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
            return {**checkpoint, "file": file}
        except Exception as error:
            print(f"warning: cannot load {file} ({error})", file=sys.stderr)
    if files:
        sys.exit(f"error: cannot load --checkpoint {' or '.join(files)}: "
                 "name another one to start over")
    return {}


def restore(checkpoint, settings, state, total_steps):
    """Load the checkpoint into model and optimizer. Return its step, or 0 without a checkpoint."""
    if not checkpoint:
        return 0
    file = checkpoint["file"]
    saved = checkpoint.get("settings", {})
    different = [f"{name} {saved.get(name)}, not {value}" for name, value in settings.items()
                 if saved.get(name) != value]
    if different:
        sys.exit(f"error: {file} belongs to another run ({', '.join(different)}): "
                 "name another --checkpoint")
    if checkpoint["step"] > total_steps:
        sys.exit(f"error: {file} is of step {checkpoint['step']} of {total_steps}: "
                 "increase --epochs")
    try:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
    except (KeyError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {file} is of another model: name another --checkpoint ({error!r:.300})")
    return checkpoint["step"]


def check_finite(model):
    """Exit if a weight is infinite or not a number: on all ranks, whose weights are equal."""
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        sys.exit("error: the weights are not finite: "
                 "start over with a lower --lr and another --checkpoint")


def log(message):
    """Print on rank 0. If the terminal or pipe is closed, the run goes on, and saves."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(message, flush=True)
# --- end ---


# --- shared: images ---
def download(dataset, args):
    """Download a data set of torchvision to --data-dir unless it is there, or exit."""
    if args.fake_data:
        return
    try:
        with socket_timeout(60):
            dataset(args.data_dir, download=True)
        dataset(args.data_dir, train=False)
    except Exception as error:
        sys.exit(f"error: no {dataset.__name__} in {args.data_dir} ({error!r}): "
                 "delete it if damaged; or --fake-data")


@contextlib.contextmanager
def socket_timeout(seconds):
    """Fail if a server does not answer for so long."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def fake_images(count, shape, seed, train_set):
    """Return uint8 images (count, *shape) of ten learnable classes, and their labels (count,).

    The test set has a quarter as many.
    """
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randint(256, (10, shape[0], 4, 4), generator=generator).float()
    labels = torch.arange(count if train_set else max(1, count // 4)) % 10
    generator.manual_seed(2 * seed + 1 + train_set)
    noise = torch.randint(256, (len(labels), *shape), generator=generator)
    images = (2 * F.interpolate(patterns, shape[1:])[labels] + noise) / 3
    return images.to(torch.uint8), labels
# --- end ---


if __name__ == "__main__":
    train(parse_args())

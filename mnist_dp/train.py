#!/usr/bin/env python3
"""Train a small CNN on MNIST with nn.DataParallel: one process, all GPUs of one machine.

    python train.py                          # all visible GPUs, or the CPU
    python train.py --device-ids 0,1         # these two GPUs
    srun --gpus=4 python train.py

With --checkpoint FILE, the same command resumes a run that was stopped or killed. On SIGTERM or SIGINT, a run saves at
the next log line and exits with status 1; after SIGKILL, it resumes from its last checkpoint. On the CPU, with the same
number of threads, it ends with exactly the weights of an uninterrupted run.

Follows the nn.DataParallel part of the OpenACC notebook "Distributed Data Parallelism". DistributedDataParallel is
faster and runs on several machines: see cifar10_ddp.
"""
import argparse
import contextlib
import ctypes
import math
import os
import signal
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
    add("--epochs", type=positive(int), default=5, help="passes over the data")
    add("--batch-size", type=positive(int), default=128, help="images per step, split over the GPUs")
    add("--lr", type=positive(float), default=1e-3, help="initial learning rate of Adam, decays to 0")
    add("--seed", type=int, default=0, help="seed of weights, order and dropout")
    add("--bf16", action="store_true", help="train in bfloat16; slow on CPUs without AVX512-BF16 or AMX instructions")
    add("--device-ids", type=lambda text: [int(i) for i in text.split(",")], metavar="0,1", help="GPUs (default: all)")
    add("--data-dir", default="data", help="folder of the data set, downloaded if missing")
    add("--fake-data", type=positive(int), nargs="?", const=512, metavar="N", help="train on N generated images")
    add("--checkpoint", metavar="FILE", help="file to save to and to resume from")
    add("--save-every", type=positive(int), default=1, metavar="EPOCHS", help="epochs between checkpoints")
    add("--log-every", type=positive(int), default=50, metavar="STEPS", help="steps between log lines")
    return parser.parse_args()


class CNN(nn.Module):
    """The model of the notebook: images (N, 1, 28, 28) to logits (N, 10)."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):  # DataParallel's threads do not inherit the type, only the state
            torch.set_autocast_dtype(x.device.type, torch.bfloat16)
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def load_data(args, train):
    """Return images (N, 1, 28, 28) as uint8 and labels (N,) as int64."""
    if args.fake_data:
        return fake_images(args.fake_data, (1, 28, 28), args.seed, train)
    data = MNIST(args.data_dir, train)
    return data.data.unsqueeze(1), data.targets


def preprocess(images):
    """Return uint8 images as floats in [0, 1]."""
    return images.float().div_(255).contiguous(memory_format=torch.channels_last)


def train(args):
    if int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        sys.exit("error: nn.DataParallel runs in one process: start one with python, or use cifar10_ddp for several")
    download(MNIST, args)
    checkpoint = load_checkpoint(args.checkpoint)
    configure_cpu(1)
    gpus = list(range(torch.cuda.device_count()))
    device_ids = gpus if args.device_ids is None else args.device_ids
    if not set(device_ids) <= set(gpus):
        sys.exit(f"error: --device-ids {device_ids}: the visible GPUs are {gpus}")
    device = torch.device("cuda", device_ids[0]) if device_ids else torch.device("cpu")
    images, labels = (tensor.to(device) for tensor in load_data(args, train=True))
    test_images, test_labels = (tensor.to(device) for tensor in load_data(args, train=False))
    run = {"script": "mnist_dp", "images": len(images), "batch_size": args.batch_size, "lr": args.lr,
           "seed": args.seed, "bf16": args.bf16}
    steps_per_epoch = math.ceil(len(images) / args.batch_size)
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model = CNN().to(device, memory_format=torch.channels_last)
    parallel_model = nn.DataParallel(model, device_ids) if len(device_ids) > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = restore(checkpoint, run, state)
    place = f"GPUs {device_ids}" if device_ids else f"CPU, {torch.get_num_threads()} threads"
    print(f"{place} | torch {torch.__version__} | batch {args.batch_size} of {len(images)} images | "
          f"steps {step} to {total_steps}", flush=True)

    signals = catch_signals()
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # evaluate a finished epoch again
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(hash((args.seed, epoch))))
        batches = order.to(device).split(args.batch_size)[step - epoch * steps_per_epoch:]
        first_step, start = step, time.perf_counter()
        totals, samples = torch.zeros(2, dtype=torch.float64, device=device), 0  # loss and correct
        # Larger than memory: for x, y in DataLoader(dataset, batch_sampler=[b.tolist() for b in batches]):
        for indices in batches:
            x, y = images[indices], labels[indices]
            torch.manual_seed(hash((args.seed, step)))  # a resumed run repeats the dropout
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = parallel_model(preprocess(x))  # DataParallel splits x over the GPUs and gathers the logits
                loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()  # sums the gradients of all GPUs on the first one
            optimizer.step()
            scheduler.step()
            step += 1
            totals += torch.stack([loss.detach() * len(y), (logits.argmax(1) == y).sum()])  # no GPU synchronization
            samples += len(y)
            if step % args.log_every == 0 or step % steps_per_epoch == 0:
                loss, correct = (totals / samples).tolist()
                seconds = time.perf_counter() - start
                print(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  loss {loss:.4f}  "
                      f"accuracy {correct:.4f}  {samples / seconds:,.0f} images/s  "
                      f"{timedelta(seconds=round((total_steps - step) * seconds / (step - first_step)))} left",
                      flush=True)
            if signals or step % (args.save_every * steps_per_epoch) == 0 or step == total_steps:
                if args.checkpoint:
                    write_checkpoint(args.checkpoint, state, step=step, run=run, global_batch=args.batch_size)
                if signals and step < total_steps:
                    sys.exit(f"stopped by a signal after step {step}")
        correct = evaluate(model, test_images, test_labels)
        print(f"epoch {epoch + 1}/{args.epochs}  test accuracy {correct / len(test_labels):.4f} "
              f"({correct}/{len(test_labels)})", flush=True)


@torch.no_grad()
def evaluate(model, images, labels):
    """Return how many images are classified correctly."""
    model.eval()
    batches = zip(images.split(100), labels.split(100))
    correct = sum((model(preprocess(x)).argmax(1) == y).sum().item() for x, y in batches)
    model.train()
    return correct


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


if __name__ == "__main__":
    train(parse_args())

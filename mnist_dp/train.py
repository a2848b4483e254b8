#!/usr/bin/env python3
"""Train a small CNN on MNIST with nn.DataParallel: one process, all GPUs of one machine.

    python train.py                          # all visible GPUs, or the CPU
    python train.py --device-ids 0,1         # these two GPUs
    srun --nodes=1 --gpus-per-node=4 python train.py

With --checkpoint FILE, the same command resumes a run that was stopped or killed. With the same CPU, torch and threads,
it ends with exactly the weights of an uninterrupted run. On SIGTERM, SIGINT or SIGHUP, it saves after the current step
and exits with status 1.

Follows the nn.DataParallel part of the OpenACC notebook "Distributed Data Parallelism". DistributedDataParallel is
faster and runs on several machines: see cifar10_ddp.
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=5, help="passes over the data (default %(default)s)")
    add("--batch-size", type=at_least(1), default=128, help="images per step, over all GPUs (default %(default)s)")
    add("--lr", type=at_least(0.0), default=1e-3, help="initial learning rate of Adam (default %(default)s)")
    add("--seed", type=at_least(0), default=0, help="seed of weights, order and dropout (default %(default)s)")
    add("--bf16", action="store_true", help="bfloat16; slow on GPUs before A100 and on many CPUs")
    add("--device-ids", type=gpu_numbers, metavar="0,1", help="GPUs (default: all)")
    add("--data-dir", default="data", help="folder of the data set, downloaded if missing (default %(default)s)")
    add("--fake-data", type=at_least(1), nargs="?", const=512, metavar="N", help="train on N generated images")
    add("--checkpoint", type=os.path.realpath, metavar="FILE", help="to save to and resume from (default: none)")
    add("--save-every", type=at_least(1), default=1, metavar="EPOCHS", help="between checkpoints (default %(default)s)")
    add("--log-every", type=at_least(0.0), default=5, metavar="SECONDS", help="0: log every step (default %(default)s)")
    return parser.parse_args()


def gpu_numbers(text):
    if not all(number.isdecimal() for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"requires the numbers of GPUs, such as 0,1, not {text}")
    return [int(number) for number in dict.fromkeys(text.split(","))]  # each once


class CNN(nn.Module):
    """The model of the notebook: images (N, 1, 28, 28) to logits (N, 10)."""

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
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):  # here: it is local to a thread
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
            x = torch.flatten(self.dropout1(x), 1)
            return self.fc2(self.dropout2(F.relu(self.fc1(x)))).float()


def load_data(args, train_set):
    """Return images (N, 1, 28, 28) as uint8 and labels (N,) as int64."""
    if args.fake_data:
        return fake_images(args.fake_data, (1, 28, 28), args.seed, train_set)
    data = MNIST(args.data_dir, train_set)
    return data.data.unsqueeze(1), data.targets


def preprocess(images):
    """Return uint8 images as floats in [0, 1]."""
    return images.div(255).to(memory_format=torch.channels_last)


def train(args):
    if int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
        sys.exit("error: nn.DataParallel runs in one process: start one with python, or use cifar10_ddp for several")
    gpus = list(range(torch.cuda.device_count()))  # by the driver, which may be too old for this PyTorch
    device_ids = gpus if args.device_ids is None else args.device_ids
    if not set(device_ids) <= set(gpus):
        sys.exit(f"error: --device-ids {device_ids}: the visible GPUs are {gpus}")
    if gpus and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} cannot use these GPUs; CUDA_VISIBLE_DEVICES= trains on the CPU")
    if gpus:
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    configure_cpu(1)
    device = torch.device("cuda", device_ids[0]) if gpus else torch.device("cpu")
    download(MNIST, args)
    images, labels = (tensor.to(device) for tensor in load_data(args, train_set=True))
    test_images, test_labels = (tensor.to(device) for tensor in load_data(args, train_set=False))
    settings = {"script": "mnist_dp", "images": len(images), "fake_data": args.fake_data,
                "batch_size": args.batch_size, "lr": args.lr, "seed": args.seed, "bf16": args.bf16}
    steps_per_epoch = max(1, len(images) // args.batch_size)
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model = CNN(args.bf16).to(device, memory_format=torch.channels_last)
    parallel_model = nn.DataParallel(model, device_ids) if len(device_ids) > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    step = restore(load_checkpoint(args.checkpoint) if args.checkpoint else {}, settings, state, total_steps)
    print(f"GPUs {device_ids or 'none'}, threads {torch.get_num_threads()} | torch {torch.__version__} | "
          f"batch {args.batch_size} of {len(images)} images | steps {step} to {total_steps}", flush=True)

    generators = [torch.cuda.default_generators[i] for i in device_ids] or [torch.default_generator]
    signals = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup python ignores SIGHUP
            signal.signal(signum, lambda signum, _: signals.append(signum))
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # resumed at an epoch's end: evaluate again
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(hash((args.seed, epoch))))
        batches = order.to(device).split(args.batch_size)[:steps_per_epoch]  # what fills no batch is dropped
        loss_sum = correct = count = 0  # in this epoch
        log_step, log_time = step, time.perf_counter()
        for indices in batches[step - epoch * steps_per_epoch:]:
            x, y = images[indices], labels[indices]
            optimizer.param_groups[0]["lr"] = args.lr * (1 - step / total_steps)  # linear decay to 0
            for generator in generators:  # a resumed run repeats the dropout
                generator.manual_seed(hash((args.seed, step)))
            logits = parallel_model(preprocess(x))  # DataParallel splits x over the GPUs and gathers the logits
            loss = F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()  # sums the gradients of all GPUs on the first one
            optimizer.step()
            step += 1
            loss_sum += loss.detach() * len(y)  # tensors: the CPU does not wait for the GPU
            correct += (logits.argmax(1) == y).sum()
            count += len(y)
            if not signals and (time.perf_counter() - log_time >= args.log_every or step % steps_per_epoch == 0):
                mean_loss, accuracy = loss_sum.item() / count, correct.item() / count  # item() waits for the GPU
                steps_per_second = (step - log_step) / (time.perf_counter() - log_time)
                log_step, log_time = step, time.perf_counter()
                print(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  loss {mean_loss:.4f}  "
                      f"accuracy {accuracy:.4f}  {steps_per_second * len(y):,.0f} images/s  "
                      f"{timedelta(seconds=round((total_steps - step) / steps_per_second))} left", flush=True)
                if not all(parameter.isfinite().all() for parameter in model.parameters()):
                    sys.exit("error: the weights are not finite: start over with a lower --lr and another --checkpoint")
            if args.checkpoint and (signals or step % (args.save_every * steps_per_epoch) == 0 or step == total_steps):
                save_checkpoint(args.checkpoint, state, step=step, settings=settings, global_batch=args.batch_size)
            if signals and step < total_steps:
                sys.exit(f"stopped by a signal after step {step}")
        right, total = evaluate(model, test_images, test_labels, args.batch_size)
        print(f"epoch {epoch + 1}/{args.epochs}  test accuracy {right / total:.4f} ({right}/{total})", flush=True)


@torch.no_grad()
def evaluate(model, images, labels, batch_size):
    """Return how many images are classified correctly and how many there are."""
    model.eval()
    batches = zip(images.split(batch_size), labels.split(batch_size))
    correct = sum((model(preprocess(x)).argmax(1) == y).sum() for x, y in batches)
    model.train()
    return correct.item(), len(labels)


# The shared blocks are identical in all scripts of this collection.
# --- shared: helpers ---
def at_least(minimum):
    def number(text):
        if not minimum <= type(minimum)(text) < 2**62:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {minimum}, or is too large")
        return type(minimum)(text)
    return number


def configure_cpu(local_world_size):
    """Use this process's share of the CPU cores, unless OMP_NUM_THREADS is set, and keep freed memory."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or (threads == "1" and local_world_size > 1):  # 1 is torchrun's default
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as file:  # a container's quota
            quota, period = map(int, file.read().split())
            cores = min(cores, quota // period)
        cores = min(cores, int(os.environ.get("SLURM_CPUS_ON_NODE", cores)))
        torch.set_num_threads(max(1, cores // local_world_size))
    with contextlib.suppress(AttributeError):  # glibc: a fifth more images/s on a CPU
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return it to the system
        ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks up to 32 MB


def save_checkpoint(path, state, **numbers):
    """Replace the file at path atomically, and keep the previous one as path.previous."""
    checkpoint = {name: part.state_dict() for name, part in state.items()} | numbers
    try:
        with open(f"{path}.tmp", "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            os.replace(path, f"{path}.previous")
        os.replace(f"{path}.tmp", path)
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: cannot save {path} ({error}): disk full, or another run? An older one is intact, if any")


def load_checkpoint(path):
    """Return the checkpoint at path, or at path.previous if that cannot be loaded, or {} if there are no files."""
    try:  # fail now, not at the first save
        open(path if os.path.isdir(path) else f"{path}.tmp", "ab").close()
    except OSError as error:
        sys.exit(f"error: cannot write --checkpoint {path} ({error.strerror}): name a file; mkdir -p makes its folder")
    files = [file for file in (path, f"{path}.previous") if os.path.exists(file)]
    for file in files:
        try:
            if damaged := zipfile.ZipFile(file).testzip():  # torch.load does not verify the checksums
                raise RuntimeError(f"wrong checksum of {damaged}")
            return {**torch.load(file, map_location="cpu", weights_only=True), "file": file}
        except Exception as error:
            print(f"warning: cannot load {file} ({error})", file=sys.stderr)
    if files:
        sys.exit(f"error: cannot load --checkpoint {' or '.join(files)}: name another one to start over")
    return {}


def restore(checkpoint, settings, state, total_steps):
    """Load the checkpoint into model and optimizer; return its step, or 0."""
    if not checkpoint:
        return 0
    saved = checkpoint.get("settings", {})
    if different := ", ".join(f"{key} {saved.get(key)}, not {settings[key]}" for key in settings
                              if saved.get(key) != settings[key]):
        sys.exit(f"error: {checkpoint['file']} belongs to another run ({different}): name another --checkpoint")
    if checkpoint["step"] > total_steps:
        sys.exit(f"error: {checkpoint['file']} is of step {checkpoint['step']} of {total_steps}: increase --epochs")
    try:
        for name, part in state.items():
            part.load_state_dict(checkpoint[name])
    except (KeyError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {checkpoint['file']} is of another model: name another --checkpoint ({error!r:.300})")
    return checkpoint["step"]
# --- end ---


# --- shared: images ---
def download(dataset, args):
    socket.setdefaulttimeout(60)  # seconds: for a server that does not answer
    try:
        if not args.fake_data:
            dataset(args.data_dir, download=True)
            dataset(args.data_dir, train=False)
    except Exception as error:
        sys.exit(f"error: no {dataset.__name__} in {args.data_dir} ({error!r}): delete it if damaged; or --fake-data")


def fake_images(count, shape, seed, train_set):
    """Return uint8 images (count, *shape) of ten learnable classes and their labels; a quarter as many to test."""
    generator = torch.Generator().manual_seed(seed)
    patterns = F.interpolate(torch.randint(256, (10, shape[0], 4, 4), generator=generator).float(), shape[1:])
    labels = torch.arange(count if train_set else max(1, count // 4)) % 10
    noise = torch.randint(256, (len(labels), *shape), generator=generator.manual_seed(2 * seed + 1 + train_set))
    return ((2 * patterns[labels] + noise) / 3).to(torch.uint8), labels
# --- end ---


if __name__ == "__main__":
    train(parse_args())

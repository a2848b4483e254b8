#!/usr/bin/env python3
"""Train an image classifier on CIFAR-10 or your own images with DistributedDataParallel (DDP).

    python train.py                          # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=4 train.py     # one process per GPU of this machine
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --kill-on-bad-exit=1 python train.py
    torchrun --standalone --nproc-per-node=4 train.py --model swin_v2_b --batch-size 32
    torchrun --standalone --nproc-per-node=4 train.py --image-folder DIR --pretrained --lr 0.02

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of
processes. On CPUs, with the same PyTorch and the same number of processes and threads, the final
weights are bitwise those of an uninterrupted run, whatever --workers is. (Not with Swin
transformers: their weights differ slightly.)

Each process uses its share of the cores, unless OMP_NUM_THREADS is set. Under torchrun,
OMP_NUM_THREADS=1 is ignored: torchrun sets it itself.

To train something else, edit the functions above train().

Follows the DDP part of the OpenACC notebook "Distributed Data Parallelism", and the cifar10_example
of "A complete tutorial to run a distributed training on multiple nodes with Pytorch DDP".
"""
import argparse
import contextlib
import ctypes
import itertools
import math
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import zipfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate
from torchvision import models
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2


def parse_args(flags=None):
    """Return the settings of these flags (strings), or of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=30, help="passes over the data")
    add("--batch-size", type=at_least(1), default=128,
        help="images per forward pass; a larger share of a step accumulates gradients")
    add("--global-batch", type=at_least(1), metavar="N",
        help="images per step of all processes; None: batch size times processes")
    add("--model", default="resnet18", choices=models.list_models(module=models), metavar="NAME",
        help="a classifier of torchvision.models; the recipe is tuned for resnet18")
    add("--pretrained", action="store_true", help="start from torchvision's weights")
    add("--image-size", type=at_least(1), metavar="PIXELS",
        help="height and width; None: 224, and 32 for resnet18 on CIFAR-10")
    add("--workers", type=at_least(0), default=2, help="processes that load images, per process")
    add("--lr", type=at_least(0.0), default=0.2, help="peak learning rate of SGD per 256 images")
    add("--seed", type=at_least(0), default=0, help="seed of all random numbers")
    add("--bf16", action="store_true", help="bfloat16; slow on GPUs before A100 and many CPUs")
    add("--data-dir", default="data", help="folder of CIFAR-10, downloaded if missing")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--image-folder", type=os.path.realpath, metavar="DIR",
                      help="train on DIR/train/CLASS/*, test on DIR/val/CLASS/*")
    data.add_argument("--fake-data", type=at_least(1), nargs="?", const=512, metavar="N",
                      help="train on N generated images")
    add("--checkpoint", type=os.path.realpath, metavar="FILE", help="to save to and resume from")
    add("--save-every", type=at_least(1), default=1, metavar="EPOCHS", help="between checkpoints")
    add("--log-every", type=at_least(0.0), default=5, metavar="SECONDS",
        help="to the next log line, where a signal stops the run; 0: every step")
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS",
        help="to wait for other processes, also while rank 0 downloads")
    return parser.parse_args(flags)


# ---- A copy edits the code from here to train(): names, model, optimizer, data, loss. ----
RUN = "cifar10_ddp"  # in the checkpoint: it is only resumed under the same name
SAMPLES = "images"   # in log lines and in the checkpoint: what is counted
METRIC = "accuracy"  # in log lines: the mean of what loss_and_correct returns second


def build_model(args, classes, global_batch, device):
    """Return the model and its optimizer. Each parameter group has its own peak learning rate.

    The model maps images (N, 3, size, size) to logits (N, classes).
    """
    options = {}
    if args.model in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": True}
    if args.model.startswith("vit_"):  # vision transformers are built for one size
        options = {"image_size": image_size(args)}
    model = models.get_model(args.model, num_classes=classes, **options)
    if is_small_resnet(args):  # the usual stem for small images: 3 x 3, without stride and pooling
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    model.to(device, memory_format=torch.channels_last)
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 5e-4}, {"params": others}]  # biases, norms
    optimizer = torch.optim.SGD(groups, lr=args.lr * global_batch / 256, momentum=0.9,
                                nesterov=True, fused=True)
    # To clip gradients, after they are averaged:
    # def clip(*_):
    #     nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # optimizer.register_step_pre_hook(clip)
    return model, optimizer


def is_small_resnet(args):
    return args.model == "resnet18" and not args.image_folder


def image_size(args):
    """Return the height and width of the model's input."""
    if args.image_size:
        return args.image_size
    return 32 if is_small_resnet(args) else 224


def pretrained_weights(args):
    """Return torchvision's weights by name, downloaded unless they are there, or exit."""
    try:
        with socket_timeout(60):
            return models.get_model(args.model, weights="DEFAULT", progress=False).state_dict()
    except Exception as error:
        url = models.get_model_weights(args.model).DEFAULT.url
        folder = os.path.join(torch.hub.get_dir(), "checkpoints")
        sys.exit(f"error: cannot download the weights of --pretrained ({error!r}): "
                 f"put {url} into {folder}")


def load_same_shapes(model, weights):
    """Load the weights whose name and shape are those of the model, and keep its others."""
    state = model.state_dict()
    fitting = {name: tensor for name, tensor in weights.items()
               if name in state and state[name].shape == tensor.shape}
    model.load_state_dict({**state, **fitting})
    log(f"pretrained: {len(fitting)} of {len(state)} tensors")


def learning_rate(step, total_steps):
    """Return the factor of the peak rates: linear warm-up over a fifth of the steps, then decay."""
    return min(1, (step + 1) / total_steps / 0.2, (1 - step / total_steps) / 0.8)


def prepare_data(args):
    """Check the folders, or download CIFAR-10. The first process of each machine calls this."""
    if args.image_folder:
        check_image_folder(args.image_folder)
    else:
        download(CIFAR10, args)


def check_image_folder(folder):
    """Exit unless the folder has images to train and to test of the same classes."""
    try:
        train_classes = ImageFolder(os.path.join(folder, "train")).classes
        val_classes = ImageFolder(os.path.join(folder, "val")).classes
    except OSError as error:
        sys.exit(f"error: --image-folder {folder} requires images in train/CLASS and val/CLASS "
                 f"({error})")
    different = sorted(set(train_classes) ^ set(val_classes))
    if different:
        sys.exit(f"error: --image-folder {folder}: train and val have different classes: "
                 f"{', '.join(different)}")


def load_data(args, train_set):
    """Return a data set of pairs (image, label): a PIL image or uint8 (3, H, W), and an integer.

    Its attribute classes has the names of the classes. Without it, there are 10.
    """
    if args.image_folder:
        part = "train" if train_set else "val"
        return ImageFolder(os.path.join(args.image_folder, part), loader=read_image)
    if args.fake_data:
        return TensorDataset(*fake_images(args.fake_data, (3, 32, 32), args.seed, train_set))
    return CIFAR10(args.data_dir, train_set)


def read_image(path):
    """Return the image in a file, or raise an error that names the file."""
    try:
        return default_loader(path)
    except Exception as error:
        raise RuntimeError(f"cannot read the image {path}: {error}") from error


def transforms(args, train_set):
    """Return what turns an image into uint8 (3, size, size), at random for training."""
    size = image_size(args)
    if args.image_folder and train_set:
        steps = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    elif args.image_folder:
        steps = [v2.Resize(size * 8 // 7), v2.CenterCrop(size)]  # 256 and 224
    elif train_set:
        crop = v2.RandomCrop(32, padding=4, padding_mode="reflect")
        steps = [crop, v2.RandomHorizontalFlip(), v2.Resize(size)]
    else:
        steps = [v2.Resize(size)]
    return v2.Compose([v2.ToImage(), *steps])


def normalize(images):
    """Return uint8 images as floats, of about mean 0 and deviation 1 for photographs."""
    return images.sub(115.0).div_(57.0).to(memory_format=torch.channels_last)


def loss_and_correct(model, images, labels):
    """Return the sum of the images' losses, and how many are classified correctly, as tensors."""
    smoothing = 0.1 if model.training else 0.0
    logits = model(normalize(images))
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    return loss, (logits.argmax(1) == labels).sum()


# ---- A copy needs no edits below. A new flag that changes the weights belongs in settings. ----
def train(args):
    rank, local_rank, world_size = setup_environment()
    device = pick_device(local_rank)
    checkpoint = {}
    weights = {}
    if rank == 0:  # before the group is formed: if this fails, the launcher ends the others
        prepare_data(args)
        checkpoint = load_checkpoint(args.checkpoint)
        if args.pretrained and not checkpoint:
            weights = pretrained_weights(args)
    init_process(rank, world_size, device, args.timeout)
    checkpoint = broadcast(checkpoint)
    if local_rank == 0 and rank > 0:
        prepare_data(args)  # on machines that do not share the disk of rank 0
    dist.barrier()  # now each machine has the data
    data = SeededData(args)

    # A run is defined by its global batch and batch size, not by its number of processes
    global_batch = choose_global_batch(args, checkpoint, data.count(True), world_size)
    steps_per_epoch = data.count(True) // global_batch
    total_steps = args.epochs * steps_per_epoch
    share = len(range(rank, global_batch, world_size))  # of this process in each step
    parts = math.ceil(share / args.batch_size)  # several: gradients are accumulated
    test_share = len(range(rank, data.count(False), world_size))
    test_batches = math.ceil(test_share / args.batch_size)

    torch.manual_seed(args.seed)
    classes = data.classes()
    model, optimizer = build_model(args, len(classes or range(10)), global_batch, device)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    state = {"model": model, "optimizer": optimizer}
    settings = {"script": RUN, "model": args.model, "pretrained": args.pretrained,
                SAMPLES: data.count(True), "classes": classes, "image_size": image_size(args),
                "fake_data": args.fake_data, "batch_size": args.batch_size, "lr": args.lr,
                "seed": args.seed, "bf16": args.bf16}
    step = restore(checkpoint, settings, state, total_steps)
    del checkpoint  # a second copy of weights and optimizer
    if weights:  # only on rank 0: DDP copies its model to the others
        load_same_shapes(model, weights)

    keys = batch_keys(args, data, global_batch, step, parts, rank, world_size)
    loader = start_loader(args, data, keys, device)
    example = default_collate(2 * [data[args.seed, 0, False, 0]])
    images, labels = (tensor.to(device) for tensor in example)
    ddp_model = wrap_ddp(model, lambda model: loss_and_correct(model, images, labels)[0])
    log(f"world size {world_size} on {device.type}, threads {torch.get_num_threads()} | "
        f"torch {torch.__version__} | {args.model} | global batch {global_batch} of "
        f"{data.count(True)} {SAMPLES}{f', {parts} parts per process' if parts > 1 else ''} | "
        f"steps {step} to {total_steps}")

    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    progress = Progress(args, state, settings, global_batch, step, total_steps, device)
    # At the end of an epoch, a resumed run repeats the evaluation, which may have been missed
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):
        progress.start_epoch(epoch, step)
        loss_sum = correct_sum = count = 0  # of this process in this epoch
        while step < (epoch + 1) * steps_per_epoch:
            for group, peak_rate in zip(optimizer.param_groups, peak_rates):
                group["lr"] = peak_rate * learning_rate(step, total_steps)
            optimizer.zero_grad()
            for part in range(parts):
                x, y = (tensor.to(device, non_blocking=True) for tensor in next(loader))
                # Dropout depends on seed, step and part: a resumed run repeats it
                generator.manual_seed(hash((args.seed, step, rank + part * world_size)))
                ddp_model.require_backward_grad_sync = part == parts - 1  # exchange gradients once
                with autocast:
                    loss, correct = loss_and_correct(ddp_model, x, y)
                (loss * (world_size / global_batch)).backward()  # DDP divides by world_size
                loss_sum += loss.detach()  # tensors: the CPU does not wait for the GPU
                correct_sum += correct
                count += len(y)
            optimizer.step()
            step += 1
            if progress.is_due(step):
                progress.log_and_save(step, {"loss": loss_sum, METRIC: correct_sum}, count)
        loss, metric = evaluate(model, itertools.islice(loader, test_batches), device, args)
        log(f"epoch {epoch + 1}/{args.epochs}  test loss {loss:.4f}  {METRIC} {metric:.4f}  "
            f"{progress.seconds_of_epoch():.1f} s")
    close_group()


class SeededData(Dataset):
    """Pairs (image, label) by (seed, epoch, train_set, index), which seeds the random transforms.

    A resumed run repeats them, and they do not depend on the number of processes.
    """

    def __init__(self, args):
        self.sets = {train_set: load_data(args, train_set) for train_set in (True, False)}
        self.transforms = {train_set: transforms(args, train_set) for train_set in (True, False)}

    def __getitem__(self, key):
        _, _, train_set, index = key
        torch.default_generator.manual_seed(hash(key))
        random.seed(hash(key))
        image, label = self.sets[train_set][index]
        return self.transforms[train_set](image), label

    def count(self, train_set):
        return len(self.sets[train_set])

    def classes(self):
        """Return the names of the classes, or None."""
        return getattr(self.sets[True], "classes", None)


def batch_keys(args, data, global_batch, step, parts, rank, world_size):
    """Yield what this rank reads from step on, as lists of keys of SeededData.

    In each epoch, it reads the parts of its share of each step, and then its share of the test set.
    """
    steps_per_epoch = data.count(True) // global_batch
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(data.count(True), generator=shuffle)
        batches = order.split(global_batch)[:steps_per_epoch]  # what fills no batch is dropped
        for batch in batches[max(0, step - epoch * steps_per_epoch):]:
            for part in range(parts):
                indices = batch[rank + part * world_size::parts * world_size]
                yield [(args.seed, epoch, True, index) for index in indices.tolist()]
        test_share = torch.arange(rank, data.count(False), world_size)
        for indices in test_share.split(args.batch_size):
            yield [(args.seed, epoch, False, index) for index in indices.tolist()]


def start_loader(args, data, keys, device):
    """Return an iterator of batches (images, labels). Its processes work until the run ends.

    They inherit blocked signals: Slurm, Ctrl-C and a closed terminal signal all processes, but the
    training process still needs images until it stops.
    """
    mp.Lock()  # starts the resource tracker now: its start unblocks signals (Python 3.11)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    loader = iter(DataLoader(data, batch_sampler=keys, num_workers=args.workers,
                             pin_memory=device.type == "cuda", worker_init_fn=init_worker))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return loader


def init_worker(worker):
    """In a loader process: end when the training process has ended, for whatever reason."""
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent():
    mp.parent_process().join()
    os._exit(1)


def main():
    try:
        train(parse_args())
    finally:  # multiprocessing would wait for the loader's processes, which block SIGTERM
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
        for process in mp.active_children():
            process.kill()


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


# --- shared: processes ---
def setup_environment():
    """Return rank, local rank and world size. Set torchrun's variables in a step of srun."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when torchrun is killed
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 and "RANK" not in env and "SLURM_PTY_PORT" not in env:
        first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])  # n07 of n[07-09]
        env["RANK"] = env["SLURM_PROCID"]
        env["LOCAL_RANK"] = env["SLURM_LOCALID"]
        env["WORLD_SIZE"] = str(tasks)
        env.setdefault("MASTER_ADDR", "".join(first_host.groups()))
        env.setdefault("MASTER_PORT", str(10000 + int(env["SLURM_JOB_ID"]) % 20000))
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def init_process(rank, world_size, device, timeout):
    """Set up this process and the process group: nccl for tensors on GPUs, gloo for the others.

    A lost process is noticed after timeout seconds at the latest.
    """
    configure_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    options = {"rank": rank, "world_size": world_size, "store": store,
               "timeout": timedelta(seconds=timeout)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)


def broadcast(value):
    """Return rank 0's value on all ranks. It passes through the memory of the CPU."""
    values = [value]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]


def choose_global_batch(args, checkpoint, samples, world_size):
    """Return how many samples a step uses: as many as at the run's first start."""
    global_batch = args.batch_size * world_size
    if args.global_batch:
        global_batch = args.global_batch
    global_batch = min(checkpoint.get("global_batch", global_batch), samples)
    if args.global_batch and min(args.global_batch, samples) != global_batch:
        sys.exit(f"error: {checkpoint['file']} belongs to another run (global batch "
                 f"{global_batch}, not {args.global_batch}): name another --checkpoint")
    if global_batch < world_size:
        sys.exit(f"error: more processes than samples in a step ({global_batch}): start fewer")
    return global_batch


def close_group():
    """Leave the process group, when rank 0 has saved: then the launcher may end the others."""
    dist.barrier()
    # Up to PyTorch 2.8 at least, freeing DDP holds the GIL and waits for the threads of gloo, which
    # need it to free their tensors (pytorch#154976): a hang, unless they are done
    time.sleep(0.5)
    dist.destroy_process_group()


def wrap_ddp(model, loss_of):
    """Return model in DDP, after one backward pass in evaluation mode, which changes no state.

    DDP rebuilds its buckets in its first pass, and then sums gradients in another order. A resumed
    run would do so at another step than an uninterrupted one, and its weights would differ.
    """
    if dist.get_world_size() == 1:
        return model  # nothing to exchange
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False  # evaluate() does; the argument is deprecated since 2.13
    loss_of(ddp_model.eval()).backward()
    ddp_model.zero_grad()
    return ddp_model.train()


def all_reduce_sum(numbers, device):
    """Return the sum of each number over all ranks, as floats."""
    sums = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device)
                        for number in numbers])
    dist.all_reduce(sums)
    return sums.tolist()


class Progress:
    """Logs, saves and stops, at the same steps on all ranks."""

    def __init__(self, args, state, settings, global_batch, step, total_steps, device):
        self.args = args
        self.state = state
        self.settings = settings
        self.global_batch = global_batch
        self.total_steps = total_steps
        self.steps_per_epoch = total_steps // args.epochs
        self.device = device
        self.interval = 1  # steps to the next log line
        self.next_step = step + 1
        self.signals = []
        handle_signals(lambda signum, frame: self.signals.append(signum))

    def start_epoch(self, epoch, step):
        self.epoch = epoch
        self.last_step = step
        self.last_time = self.epoch_time = time.perf_counter()

    def seconds_of_epoch(self):
        return time.perf_counter() - self.epoch_time

    def is_due(self, step):
        return step == self.next_step or step % self.steps_per_epoch == 0

    def log_and_save(self, step, sums, count):
        """Log the means of sums (name: sum over count samples) of all ranks; save if it is time.

        If any rank has received a signal, save and exit. At the end, there is nothing to stop.
        """
        stop = self.log(step, sums, count)
        check_finite(self.state["model"])
        at_save = step % (self.args.save_every * self.steps_per_epoch) == 0
        if self.args.checkpoint and dist.get_rank() == 0:
            if at_save or stop or step == self.total_steps:
                save_checkpoint(self.args.checkpoint, self.state, step, self.settings,
                                self.global_batch)
        if stop and step < self.total_steps:
            close_group()
            log(f"stopped by a signal after step {step}")
            sys.exit(1)
        self.last_step = step
        self.last_time = time.perf_counter()

    def log(self, step, sums, count):
        """Log and schedule the next log line. Return whether any rank has received a signal."""
        numbers = [float(number) for number in sums.values()]  # waits for the GPU
        seconds = time.perf_counter() - self.last_time
        *totals, count, seconds, signals = all_reduce_sum(
            [*numbers, count, seconds, len(self.signals)], self.device)
        # The mean time of all ranks, so that the next line is due at the same step on all ranks
        steps_per_second = (step - self.last_step) * dist.get_world_size() / seconds
        # At most twice as many steps as before: the first ones may be faster than those to come
        self.interval = max(1, min(int(self.args.log_every * steps_per_second), 2 * self.interval))
        self.next_step = step + self.interval
        means = "  ".join(f"{name} {total / count:.4f}" for name, total in zip(sums, totals))
        seconds_left = round((self.total_steps - step) / steps_per_second)
        log(f"epoch {self.epoch + 1}/{self.args.epochs}  step {step}/{self.total_steps}  {means}  "
            f"{steps_per_second * self.global_batch:,.0f} {SAMPLES}/s  "
            f"{timedelta(seconds=seconds_left)} left")
        return signals > 0
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


# --- shared: GPUs and evaluation ---
def pick_device(local_rank):
    """Return this process's GPU, or the CPU if there is no GPU."""
    gpus = torch.cuda.device_count()  # by the driver, which may be too old for this PyTorch
    if gpus and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} cannot use these GPUs; "
                 "CUDA_VISIBLE_DEVICES= trains on the CPU")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus > 0 or local_rank >= gpus > 1:
        sys.exit(f"error: more processes than GPUs ({gpus}); "
                 "CUDA_VISIBLE_DEVICES= trains on the CPU")
    if not gpus:
        return torch.device("cpu")
    return torch.device("cuda", local_rank % gpus)  # srun may show a process only its own GPU


def evaluate(model, batches, device, args):
    """Return the mean loss and the mean metric of all ranks' samples. batches: this rank's."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's running statistics, if any
    model.eval()
    loss_sum = metric_sum = count = 0
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
        for x, y in batches:
            loss, metric = loss_and_correct(model, x.to(device), y.to(device))
            loss_sum += loss.double()
            metric_sum += metric.double()
            count += len(y)
    model.train()
    loss_sum, metric_sum, count = all_reduce_sum([loss_sum, metric_sum, count], device)
    return loss_sum / count, metric_sum / count
# --- end ---


if __name__ == "__main__":
    main()

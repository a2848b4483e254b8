#!/usr/bin/env python3
"""Train ResNet-18, or any torchvision classifier, on CIFAR-10 with DistributedDataParallel (DDP).

    python train.py                          # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=4 train.py     # one process per GPU of this machine
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --kill-on-bad-exit=1 python train.py
    torchrun --standalone --nproc-per-node=4 train.py --model swin_v2_b --batch-size 32

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of processes, with the
weights of an uninterrupted run (Swin: nearly) on equal CPUs, torch, processes and threads. Signals stop and save it.

Follows the DDP part of the OpenACC notebook "Distributed Data Parallelism", and the cifar10_example of "A complete
tutorial to run a distributed training on multiple nodes with Pytorch DDP".
"""
import argparse
import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import time
import zipfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision import models
from torchvision.datasets import CIFAR10


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=30, help="passes over the data (default %(default)s)")
    add("--batch-size", type=at_least(1), default=128, help="images per process and step (default %(default)s)")
    add("--model", default="resnet18", choices=models.list_models(module=models), metavar="NAME",
        help="a classifier of torchvision.models (default %(default)s, for which the recipe is tuned)")
    add("--lr", type=at_least(0.0), default=0.1, help="peak learning rate of SGD per 256 images (default %(default)s)")
    add("--seed", type=at_least(0), default=0, help="seed of all random numbers (default %(default)s)")
    add("--bf16", action="store_true", help="bfloat16; slow on GPUs before A100 and on many CPUs")
    add("--data-dir", default="data", help="folder of the data set, downloaded if missing (default %(default)s)")
    add("--fake-data", type=at_least(1), nargs="?", const=512, metavar="N", help="train on N generated images")
    add("--checkpoint", type=os.path.realpath, metavar="FILE", help="to save to and resume from (default: none)")
    add("--save-every", type=at_least(1), default=1, metavar="EPOCHS", help="between checkpoints (default %(default)s)")
    add("--log-every", type=at_least(0.0), default=5, metavar="SECONDS", help="0: log every step (default %(default)s)")
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS", help="to wait for others (default %(default)s)")
    return parser.parse_args()


def build_model(name):
    """Return a model from images (N, 3, size, size) to logits (N, 10), and the size."""
    no_aux = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model = models.get_model(name, weights=None, num_classes=10, **no_aux)
    if name == "resnet18":  # the usual stem for small images: 3 x 3, without stride and pooling
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
        return model, 32
    size = models.get_model_weights(name).DEFAULT.transforms.keywords["crop_size"]
    return model, getattr(model, "image_size", size)  # a vision transformer is built for one size


def load_data(args, train_set):
    """Return images (N, 3, 32, 32) as uint8 and labels (N,) as int64."""
    if args.fake_data:
        return fake_images(args.fake_data, (3, 32, 32), args.seed, train_set)
    data = CIFAR10(args.data_dir, train_set)
    return torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(data.targets)


def augment(images):
    """Flip each image with probability 0.5, and crop it at random after padding it by 4 pixels."""
    n, _, height, width = images.shape
    flip = torch.rand(n, 1, 1, 1, device=images.device) < 0.5
    padded = F.pad(torch.where(flip, images.flip(3), images), (4, 4, 4, 4))
    crops = padded.unfold(2, height, 1).unfold(3, width, 1)  # all 9 x 9 of each image, as a view
    top, left = torch.randint(9, (2, n), device=images.device)
    return crops[torch.arange(n, device=images.device), :, top, left]


def preprocess(images, size):
    """Return uint8 images as floats in [-1, 1], upsampled to size x size pixels."""
    images = images.div(127.5).sub_(1).to(memory_format=torch.channels_last)
    return images if size == 32 else F.interpolate(images, (size, size), mode="bilinear")


def train(args):
    rank, local_rank, world_size = setup_environment()
    device = pick_device(local_rank)
    if rank == 0:  # before the group is formed: if this fails, the launcher ends the other processes
        download(CIFAR10, args)
    checkpoint = [load_checkpoint(args.checkpoint) if args.checkpoint and rank == 0 else {}]
    init_group(rank, world_size, device, args.timeout)
    dist.broadcast_object_list(checkpoint)
    checkpoint = checkpoint[0]
    if local_rank == 0 and rank > 0:
        download(CIFAR10, args)  # on nodes that do not share the disk of rank 0
    dist.barrier()  # now each node has the data
    images, labels = (tensor.to(device) for tensor in load_data(args, train_set=True))
    test_images, test_labels = (tensor.to(device) for tensor in load_data(args, train_set=False))
    settings = {"script": "cifar10_ddp", "model": args.model, "images": len(images), "fake_data": args.fake_data,
                "batch_size": args.batch_size, "lr": args.lr, "seed": args.seed, "bf16": args.bf16}
    global_batch = checkpoint.get("global_batch", args.batch_size * world_size)  # kept when the world size changes
    steps_per_epoch = max(1, len(images) // global_batch)
    total_steps = args.epochs * steps_per_epoch

    def learning_rate(step):  # linear warm-up over a fifth of the steps, then linear decay to 0
        return args.lr * global_batch / 256 * min(1, (step + 1) / total_steps / 0.2, (1 - step / total_steps) / 0.8)
    torch.manual_seed(args.seed)
    model, size = build_model(args.model)
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    state = {"model": model, "optimizer": optimizer}
    step = restore(checkpoint, settings, state, total_steps)
    if min(global_batch, len(images)) < world_size:
        sys.exit(f"error: more processes than images in a batch ({min(global_batch, len(images))}): start fewer")
    ddp_model = wrap_ddp(model, preprocess(images[:2], size))
    log(f"world size {world_size} on {device.type}, threads {torch.get_num_threads()} | torch {torch.__version__} | "
        f"{args.model} | global batch {global_batch} of {len(images)} images | steps {step} to {total_steps}")
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    signals, next_log = [], step + 1
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup python ignores SIGHUP
            signal.signal(signum, lambda signum, _: signals.append(signum))
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # resumed at an epoch's end: evaluate again
        # Order, learning rate, crops and flips depend on seed, epoch, step and rank alone: a resumed run repeats them
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(hash((args.seed, epoch))))
        batches = order.to(device).split(global_batch)[:steps_per_epoch]
        loss_sum = correct = count = 0  # of this process in this epoch
        log_step, log_time = step, time.perf_counter()
        for batch in batches[step - epoch * steps_per_epoch:]:
            indices = batch[rank::world_size]
            x, y = images[indices], labels[indices]
            generator.manual_seed(hash((args.seed, step, rank)))  # cheaper than torch.manual_seed
            optimizer.param_groups[0]["lr"] = learning_rate(step)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = ddp_model(preprocess(augment(x), size))
                loss = F.cross_entropy(logits, y, reduction="sum")
            optimizer.zero_grad()
            (loss * (world_size / len(batch))).backward()  # DDP divides by world_size: the mean over the batch
            optimizer.step()
            step += 1
            loss_sum += loss.detach()  # tensors: the CPU does not wait for the GPU
            correct += (logits.argmax(1) == y).sum()
            count += len(y)
            if step == next_log or step % steps_per_epoch == 0:
                total_loss, total_correct, total_count, seconds, stop = all_reduce_sum(  # item() waits for the GPU
                    loss_sum.item(), correct.item(), count, time.perf_counter() - log_time, len(signals), device=device)
                steps_per_second = (step - log_step) / (seconds / world_size)  # the same number on all ranks
                next_log = step + max(1, int(args.log_every * steps_per_second))
                log(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  loss {total_loss / total_count:.4f}  "
                    f"accuracy {total_correct / total_count:.4f}  {steps_per_second * len(batch):,.0f} images/s  "
                    f"{timedelta(seconds=round((total_steps - step) / steps_per_second))} left")
                if not all(parameter.isfinite().all() for parameter in model.parameters()):  # alike on all ranks
                    sys.exit("error: the weights are not finite: start over with a lower --lr and another --checkpoint")
                if stop or step % (args.save_every * steps_per_epoch) == 0 or step == total_steps:
                    if args.checkpoint and rank == 0:
                        save_checkpoint(args.checkpoint, state, step=step, settings=settings, global_batch=global_batch)
                if stop and step < total_steps:
                    close_group()
                    sys.exit(f"stopped by a signal after step {step}" if rank == 0 else 1)
                log_step, log_time = step, time.perf_counter()
        right, total = evaluate(model, lambda x: preprocess(x, size), test_images, test_labels, args)
        log(f"epoch {epoch + 1}/{args.epochs}  test accuracy {right / total:.4f} ({right:.0f}/{total:.0f})")
    close_group()


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


# --- shared: processes ---
def setup_environment():
    """Return rank, local rank and world size, from torchrun's variables or from srun's, which are translated."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: stop when torchrun has been killed
    if "RANK" not in env and "SLURM_PTY_PORT" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])  # n07 of n[07-09]
        env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"], WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"])
        env.setdefault("MASTER_ADDR", "".join(first_host.groups()))
        env.setdefault("MASTER_PORT", str(10000 + int(env["SLURM_JOB_ID"]) % 20000))
    return int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1))


def init_group(rank, world_size, device, timeout):
    """Initialize the process group: gloo for CPUs; nccl for GPUs, which notices a lost process after the timeout."""
    configure_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=timeout), device_id=device if device.type == "cuda" else None)


def close_group():
    dist.barrier()  # when a process exits, its launcher ends the others: not before rank 0 has saved
    time.sleep(0.5)  # gloo's threads need the GIL to free their tensors; the next call waits for them holding it
    dist.destroy_process_group()


def wrap_ddp(model, example):
    """Return model in DDP, after a backward pass in evaluation mode, which changes no weights and no buffers."""
    if dist.get_world_size() == 1:
        return model  # nothing to exchange
    # DDP's first pass rebuilds its buckets: on 3 or more processes, it sums in another order than those that follow.
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp_model.broadcast_buffers = False  # evaluate() does it; the argument is deprecated in PyTorch 2.13
    ddp_model.eval()(example).sum().backward()
    ddp_model.zero_grad()
    return ddp_model.train()


def all_reduce_sum(*numbers, device):
    """Return the sum of each number over all ranks."""
    sums = torch.stack([torch.as_tensor(number, dtype=torch.float64, device=device) for number in numbers])
    dist.all_reduce(sums)
    return sums.tolist()


def log(message):
    if dist.get_rank() == 0:
        with contextlib.suppress(OSError):  # a closed terminal or pipe: the run goes on, and saves
            print(message, flush=True)
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


# --- shared: GPUs and evaluation ---
def pick_device(local_rank):
    """Return this process's GPU, or the CPU if there is no GPU."""
    gpus = torch.cuda.device_count()  # by the driver, which may be too old for this PyTorch
    if gpus and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} cannot use these GPUs; CUDA_VISIBLE_DEVICES= trains on the CPU")
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus > 0 or local_rank >= gpus > 1:
        sys.exit(f"error: more processes than GPUs ({gpus}); CUDA_VISIBLE_DEVICES= trains on the CPU")
    if not gpus:
        return torch.device("cpu")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    return torch.device("cuda", local_rank % gpus)  # srun may show each process only its own GPU


def evaluate(model, preprocess, inputs, labels, args):
    """Return how many inputs are classified correctly and how many there are. Each is seen by exactly one rank."""
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)  # BatchNorm's running statistics, if any
    model.eval()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    batches = zip(inputs[mine].split(args.batch_size), labels[mine].split(args.batch_size))
    with torch.no_grad(), torch.autocast(labels.device.type, torch.bfloat16, enabled=args.bf16):
        correct = sum((model(preprocess(x)).argmax(1) == y).sum() for x, y in batches)
    model.train()
    return all_reduce_sum(correct, len(labels[mine]), device=labels.device)
# --- end ---


if __name__ == "__main__":
    train(parse_args())

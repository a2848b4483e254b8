# SPDX-License-Identifier: MIT-0
r"""Train an image classifier on CIFAR-10 or your own images with DistributedDataParallel (DDP).

    python train.py                                           # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=4 train.py --global-batch 2048 --batch-size 512 --bf16
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    torchrun --standalone --nproc-per-node=4 train.py --global-batch 512 --bf16 \
        --image-folder DIR --model resnet50 --pretrained --checkpoint run.pt

Type the third command on each of two machines; HOST is the name of one of them. Each process runs
this whole file. All begin with the same weights, and each computes the gradient of its share of
every batch. backward() averages the gradients of all processes, so all make the same step, and
their weights stay equal. The number of a process, from 0, is its rank. To the end of train(),
comments with "DDP:" mark what a script for one process does not have.

A step has --global-batch images on any number of processes. A process computes at most --batch-size
of them at once: for larger shares, it adds up gradients. To keep GPUs busy, give each 512 images of
32 pixels (with --batch-size 512), or 128 of 224 pixels. A large batch may need more epochs.

With --checkpoint FILE (on several machines, on a disk that they share), the same command resumes a
run that was stopped or killed, at the same step and with the same random numbers. (With another
number of processes, or another --batch-size, crops and dropout may differ.) SIGTERM, Ctrl-C or a
closed terminal stop all processes after the same step: they save, and exit with status 1. FILE.best
has the weights of the epoch with the best validation result.

If a run hangs, each process prints shortly before --timeout which lines it executes.

A job script (not for an array). After its time limit, a preemption or the loss of a node, the job
continues:

#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=32 --mem=128G
#SBATCH --time=1:00:00 --signal=TERM@120 --requeue --open-mode=append --output=%x-%j.out
source .venv/bin/activate    # your environment
file=run.pt                  # on a disk that all nodes share
saved() { stat -Lc %y "$file" 2>&1; }     # when it was saved, or the error that there is no file
before=$(saved)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110 # seconds to save after SIGTERM: before torch 2.13, 30
port=$((10000 + SLURM_JOB_ID % 20000))    # jobs that share a node need different ones
srun --cpus-per-task=32 --kill-on-bad-exit=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 \
    --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$(hostname):$port \
    train.py --image-folder DIR --model resnet50 --bf16 --global-batch 1024 --workers 7 \
    --checkpoint "$file" && exit
# Slurm sends SIGTERM two to three minutes before the time limit (TERM@120), or when it preempts the
# job. Requeue it if it has saved since it started, or was preempted (PreemptTime is not N/A)
if [ "$(saved)" != "$before" ] || squeue -ahj $SLURM_JOB_ID -O PreemptTime | grep -qv N/A; then
    scontrol requeue $SLURM_JOB_ID
else
    echo "the job has saved nothing since it started: it is not requeued, since it would fail again"
fi
exit 1

Follows the DDP part of the OpenACC notebook "Distributed Data Parallelism", and the cifar10_example
of "A complete tutorial to run a distributed training on multiple nodes with Pytorch DDP".
"""
import argparse
import contextlib
import faulthandler
import functools
import math
import os
import random
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
from PIL import Image, ImageOps
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate, get_worker_info
from torchvision import models
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2


# ---- Flags, data, model, optimizer, loss, step, evaluation: edit these for your own training. ----
# train() has connected the processes before it calls load_data() and the functions below it.
def parse_args(flags=None):
    """Parse flags (a list of strings; None: the command line), and return the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training images")
    parser.add_argument("--global-batch", type=int, default=256,
                        help="images in a step, over all processes")
    parser.add_argument("--batch-size", type=int, default=128,
                        help="images that a process computes at once, as its memory allows")
    parser.add_argument("--lr", type=float,
                        help="peak learning rate of SGD; None: 0.2 (0.02 with --pretrained), which "
                        "suits ResNets, for 256 images in a step, and in proportion for others")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--model", default="resnet18", choices=models.list_models(module=models),
                        metavar="NAME", help="classifier of torchvision.models")
    parser.add_argument("--pretrained", action="store_true", help="start from ImageNet's weights")
    parser.add_argument("--image-size", type=int, metavar="PIXELS",
                        help="height and width; None: 32 for resnet18 on CIFAR-10, otherwise 224")
    parser.add_argument("--bf16", action="store_true", help="bfloat16: faster on GPUs and AMX CPUs")
    parser.add_argument("--compile", action="store_true", help="compile the model: faster on GPUs")
    parser.add_argument("--data-dir", default="data", help="folder of CIFAR-10")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--image-folder", metavar="DIR",
                      help="train on the images in DIR/train/CLASS, validate on DIR/val/CLASS")
    data.add_argument("--fake-data", type=int, nargs="?", const=512, metavar="N",
                      help="train on N generated images (512 without a number)")
    parser.add_argument("--workers", type=int, default=min(4, os.cpu_count()),
                        help="loader processes of each process, and as many for validation: more, "
                        "if the log's wait is high")
    parser.add_argument("--checkpoint", type=os.path.realpath, metavar="FILE",
                        help="file to save and resume from")
    parser.add_argument("--save-every", type=float, default=5,
                        help="minutes between checkpoints; one more is saved after each epoch")
    parser.add_argument("--log-every", type=float, default=5, help="seconds between log lines")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    args = parser.parse_args(flags)
    if args.lr is None:
        args.lr = (0.02 if args.pretrained else 0.2) * args.global_batch / 256
    if args.image_size is None:
        small = args.model == "resnet18" and not args.image_folder and not args.pretrained
        args.image_size = 32 if small else 224
    return args


# Flags that may change when a run is resumed. The others may not, not even --epochs, since the
# learning rates depend on it. To train longer, start a new run from the best weights: see
# build_model()
MAY_CHANGE = ("batch_size", "bf16", "compile", "data_dir", "image_folder", "workers", "checkpoint",
              "save_every", "log_every", "timeout")


def prepare_data(args):
    """Download what is missing. One process of each machine calls this."""
    socket.setdefaulttimeout(60)  # a server may not answer
    if not args.image_folder and not args.fake_data:
        CIFAR10(args.data_dir, download=True)
    if args.pretrained:
        models.get_model(args.model, weights="DEFAULT")


def load_data(args):
    """Return the training set and the validation set. Set args.classes to the names of classes.

    They are data sets of pairs (uint8 image (3, height, width), label). CIFAR-10 has no validation
    set, so its test set is taken: its best epoch is a bit too good.

    DDP: all processes must return the same samples in the same order. torch, random and numpy are
    seeded. Sort what os.listdir() or a set returns.
    """
    if args.image_folder:
        size = args.image_size
        read = functools.partial(read_image, size=size)
        crop = v2.Compose([v2.RandomResizedCrop(size), v2.PILToTensor()])
        center = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), v2.PILToTensor()])
        train_set = ImageFolder(os.path.join(args.image_folder, "train"), crop, loader=read)
        val_set = ImageFolder(os.path.join(args.image_folder, "val"), center, loader=read)
        args.classes = train_set.classes
        if val_set.classes != args.classes:
            sys.exit("error: train and val have different classes: "
                     f"{set(args.classes) ^ set(val_set.classes)}")
        return train_set, val_set
    if args.fake_data:
        args.classes = list("0123456789")
        sets = fake_images(args.fake_data, (3, 32, 32), args.seed)
        return [TensorDataset(images, labels) for images, labels in sets]
    train_set, val_set = CIFAR10(args.data_dir, train=True), CIFAR10(args.data_dir, train=False)
    args.classes = train_set.classes
    return [TensorDataset(torch.from_numpy(cifar10.data).permute(0, 3, 1, 2).contiguous(),
                          torch.tensor(cifar10.targets)) for cifar10 in (train_set, val_set)]


def read_image(path, size):
    """Return the image at path in RGB, upright, and on gray if it is transparent."""
    try:
        with Image.open(path) as image:
            image.draft(None, (4 * size, 4 * size))  # decodes large JPEGs smaller, which is faster
            with contextlib.suppress(Exception):  # damaged EXIF data: viewers show the image, too
                ImageOps.exif_transpose(image, in_place=True)
            if image.has_transparency_data:  # not on white or black: it would hide such drawings
                gray = Image.new("RGBA", image.size, "gray")
                image = Image.alpha_composite(gray, image.convert("RGBA"))
            return image.convert("RGB")
    except Exception as error:
        raise RuntimeError(f"cannot read the image {path}") from error


# Mean and deviation of red, green and blue, which pretrained weights expect
IMAGENET = torch.tensor([[123.7, 116.3, 103.5], [58.4, 57.1, 57.4]]).view(2, 3, 1, 1)


def scale(images, labels):
    """Return a batch with images of mean 0 and deviation 1, and the labels."""
    if images.dtype != torch.uint8:
        sys.exit(f"error: images are {images.dtype}, not uint8 (0 to 255), which scale() takes: "
                 "delete ToTensor, Normalize, ... from load_data(), or edit scale()")
    mean, deviation = IMAGENET.to(images.device, non_blocking=True)
    return images.sub(mean).div_(deviation), labels


def augment(args, images, labels):
    """Return a training batch: each image is shifted by up to 4 pixels, and mirrored, or not."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    shifts = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, 3, 9, 9, height, width), a view
    down, right = torch.randint(9, (2, count), device=images.device)
    shifted = shifts[torch.arange(count, device=images.device), :, down, right]
    mirrored = torch.rand(count, 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirrored, shifted.flip(3), shifted), labels


def resize(args, images):
    """Return the images in --image-size: CIFAR-10's are smaller than what most models take."""
    if images.shape[-1] != args.image_size:
        images = F.interpolate(images, size=2 * [args.image_size], mode="bilinear")
    return images.contiguous(memory_format=torch.channels_last)


def build_model(args):
    """Return a model of images (N, 3, size, size) to logits (N, classes)."""
    model = models.get_model(args.model, num_classes=len(args.classes))
    if args.model == "resnet18" and args.image_size <= 32 and not args.pretrained:
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # usual for small images
        model.maxpool = nn.Identity()
    if args.pretrained:  # all weights but those of other shapes: the last layer's
        state = model.state_dict()
        weights = models.get_model(args.model, weights="DEFAULT").state_dict()
        fitting = {name: tensor for name, tensor in weights.items()
                   if name in state and state[name].shape == tensor.shape}
        state.update(fitting)
        model.load_state_dict(state)
        log(f"not pretrained: {', '.join(sorted(state.keys() - fitting)) or 'nothing'}")
    # A new run that starts from the best weights of another one:
    # model.load_state_dict(torch.load("FILE.best", map_location="cpu"))
    # DDP: BatchNorm averages over a part of --batch-size images or fewer. On GPUs, over the parts
    # of all processes: model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(memory_format=torch.channels_last)


def build_optimizer(args, model, steps):
    """Return the optimizer, and a scheduler of the learning rate for this number of steps.

    After an edit here, start a new run: a resumed one has base rates, weight decay, ... of FILE.
    """
    def factor(step):  # warm-up over a fifth of the steps, then decay to 0
        return min(1, (step + 1) / (0.2 * steps), (steps - step) / (0.8 * steps))

    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 5e-4}, {"params": others}]  # biases, norms
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=0.9, nesterov=True, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def loss_and_counts(args, model, images, labels):
    """Return the mean loss of the images, and how many are classified correctly, as tensors.

    The loss must be a mean over the samples: with class weights, use reduction="none" and .mean().
    The counts may have any shape: they are added up over all batches and processes, for metrics().
    """
    smoothing = 0.1 if model.training else 0.0  # so the training loss is the higher one
    with torch.autocast(images.device.type, torch.bfloat16, enabled=args.bf16):
        logits = model(resize(args, images))
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

    DDP: rank 0 alone calls this, as the last thing in an epoch, after it has saved. A run that is
    resumed at the end of an epoch has only its validation results.
    """
    formats = {"lr": ".3g", "seconds": ".1f", "samples/s": ",.0f", "wait": ".0%", "GPU GB": ".1f"}
    texts = [f"{name} {format(value, formats.get(name, '.4f'))}" for name, value in results.items()]
    log(f"epoch {epoch + 1}/{args.epochs}  {'  '.join(texts)}")


def train_step(args, step, parts, ddp_model, optimizer, scheduler, batches, sums):
    """Make one step, with the gradient of the mean loss of a global batch.

    A global batch has this number of parts, of at most --batch-size images. Of 8 parts on 2
    processes, rank 0 computes the parts 0, 2, 4 and 6: this is gradient accumulation.
    """
    world_size = dist.get_world_size()
    optimizer.zero_grad()
    for part in range(dist.get_rank(), parts, world_size):  # DDP: the parts of this process
        batch = next(batches)
        # DDP: other random numbers for each part. A resumed run draws the same
        seed_all(args.seed, step, part)
        batch = augment(args, *scale(*batch))
        # DDP: as no_sync() does: exchange gradients once, in the backward() of the last part
        ddp_model.require_backward_grad_sync = part + world_size >= parts
        # DDP: call ddp_model, never the model in it: otherwise no gradients are averaged
        loss, counts = loss_and_counts(args, ddp_model, *batch)
        # DDP averages the sums of all processes. If 256 images are 2 parts on each of 2 processes,
        # each part has 64, and the weight is 1/2: the average is the gradient of the mean of 256
        weight = len(batch[0]) * world_size / args.global_batch
        (weight * loss).backward()  # DDP: averages the gradients of all processes
        sums.add(loss, counts, len(batch[0]))
    optimizer.step()  # to clip gradients: before it. To update an average of weights: after it
    scheduler.step()


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
# DDP: what exchanges data (train_step(), exchange, results(), evaluate(), speed_of(),
# describe_run(), check_model(), close_group()) must run in all processes. Below "if rank == 0", it
# would wait for the others until --timeout.
@record  # torchrun then reports the exception of the process that fails first
def train(args):
    # DDP: connects the processes. All get the flags and the checkpoint of rank 0
    args, device, checkpoint = form_group(args)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_all(args.seed)  # DDP: all processes draw the same data and weights
    train_set, val_set = load_data(args)
    parts = count_parts(args, len(train_set))  # DDP: each process computes as many parts of a batch
    steps_per_epoch = len(train_set) // args.global_batch  # leaves out what does not fill a batch
    steps = args.epochs * steps_per_epoch
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # finds the fastest convolutions
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    model = build_model(args).to(device)
    model.train()  # to freeze BatchNorm: call eval() of these layers after it
    if args.compile:
        model.compile()
    optimizer, scheduler = build_optimizer(args, model, steps)
    # A checkpoint has the states of these objects, and these numbers. Add what else a resumed run
    # needs, for example an average of the weights
    saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    progress = {"step": 0, "best_score": -math.inf}
    # What a resumed run may not change. DDP: it must be equal in all processes
    run = describe_run(args, training_samples=len(train_set), validation_samples=len(val_set))
    resume(checkpoint, run, saved, progress)
    # DDP: calls the same model, and makes backward() average the gradients
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    log_start(args, device, len(train_set), len(val_set), progress["step"])

    exchange = Exchange(args)  # before loader processes start: a signal could end them in between
    train_parts, val_loader = build_loaders(args, parts, train_set, val_set, progress["step"])
    # A run that is resumed at the end of an epoch begins with the evaluation of that epoch
    for epoch in range(max(0, progress["step"] - 1) // steps_per_epoch, args.epochs):
        first_step, end_of_epoch = progress["step"], (epoch + 1) * steps_per_epoch
        lr, start = optimizer.param_groups[0]["lr"], time.perf_counter()
        batches, sums, timer = OnDevice(train_parts, device), Sums(args), Timer(args, epoch, steps)
        for step in range(first_step, end_of_epoch):
            # DDP: all must save, or stop, after the same step. So they tell each other, beside it
            exchange.begin(batches.wait, save=step + 1 == end_of_epoch)
            train_step(args, step, parts, ddp_model, optimizer, scheduler, batches, sums)
            progress["step"] = step + 1
            save_now, stop = exchange.end()
            if save_now:
                check_model(model)  # DDP: they must be equal in all processes
                if rank == 0 and args.checkpoint:  # DDP: all have the same weights, one saves
                    states = {name: item.state_dict() for name, item in saved.items()}
                    states.update(progress=progress, run=run, classes=args.classes)
                    save(states, args.checkpoint)
                    log(f"saved after step {step + 1}")
            if stop and step + 1 < steps:
                close_group()
                sys.exit(f"stopped by a signal after step {step + 1}" if rank == 0 else 1)
            if rank == 0:
                timer.log(step + 1, sums, exchange.longest_wait)

        results = sums.results()  # {} if resumed at the end of the epoch
        seconds = time.perf_counter() - start
        # For an evaluation that draws random numbers. DDP: others in each process. A run that is
        # resumed here draws the same
        seed_all(args.seed, epoch, progress["step"], rank)
        val_results = evaluate(args, model, OnDevice(val_loader, device))
        speed = speed_of((end_of_epoch - first_step) * args.global_batch, seconds, batches.wait)
        results.update(val_results, lr=lr, **speed)
        if val_results and score(val_results) > progress["best_score"]:
            progress["best_score"] = score(val_results)  # in the next checkpoint
            if rank == 0 and args.checkpoint:
                save(model.state_dict(), f"{args.checkpoint}.best")
        if rank == 0:
            log_results(args, epoch, results)
    close_group()  # DDP: waits for all processes


# ---- You need not read the rest to use or edit this file: it loads, connects and saves. ----
def count_parts(args, images):
    """Return the number of parts of a global batch: as many in each process."""
    world_size = dist.get_world_size()
    if not world_size <= args.global_batch <= images or args.batch_size < 1:
        sys.exit(f"error: --global-batch {args.global_batch} must be at least {world_size} "
                 f"(processes) and at most {images} (training images), and --batch-size "
                 f"{args.batch_size} at least 1")
    parts = world_size * math.ceil(args.global_batch / (world_size * args.batch_size))
    return min(parts, args.global_batch)


def build_loaders(args, parts, train_set, val_set, step):
    """Return an iterator over the parts of this process, from step on, and a validation loader.

    The way of a part: own_parts() yields the indices of its images, SeededBatches reads them in a
    loader process, and OnDevice copies them to the GPU.
    """
    # generator: iter() draws a number from it, and not from the one that seed_all() seeds
    options = {"batch_size": None, "generator": torch.Generator(), "num_workers": args.workers,
               "pin_memory": torch.cuda.is_available()}
    if args.workers:
        options.update(persistent_workers=True, worker_init_fn=ignore_signals,
                       timeout=args.timeout)  # a sample that does not come is an error
    if args.workers and sys.platform == "linux":
        options["multiprocessing_context"] = "fork"  # other methods import PyTorch in each process
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = range(rank, len(val_set), world_size)  # each validation image once
    val_parts = [(args.seed, first, rank, share[first:first + args.batch_size])
                 for first in range(0, len(share), args.batch_size)]
    train_loader = DataLoader(SeededBatches(args, train_set), **options,
                              sampler=own_parts(args, parts, len(train_set), step))
    val_loader = DataLoader(SeededBatches(args, val_set), **options, sampler=val_parts)
    # iter() forks the loader processes, here and not beside a step: a thread of gloo, which works
    # then, could hold a lock, for which the new process would wait for ever
    return iter(train_loader), val_loader


def own_parts(args, parts, images, step):
    """Yield the parts of this process, from step on: (seed, step, part, indices of its images)."""
    steps_per_epoch = images // args.global_batch
    for epoch in range(step // steps_per_epoch, args.epochs):
        # The same order in all processes. (The hash of numbers is the same everywhere)
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(images, generator=shuffle).tolist()
        while step < (epoch + 1) * steps_per_epoch:
            first = step % steps_per_epoch * args.global_batch
            batch = order[first:first + args.global_batch]
            for part in range(dist.get_rank(), parts, dist.get_world_size()):
                # Part 1 of 4 has the images 1, 5, 9, ... of the batch
                yield args.seed, step, part, batch[part::parts]
            step += 1


class SeededBatches(Dataset):
    """Item (a, b, c, indices) is the batch of these samples of data, seeded by numbers a, b, c."""

    def __init__(self, args, data):
        self.args, self.data = args, data

    def __getitem__(self, part):
        *numbers, indices = part
        seed_all(*numbers)  # other random crops for each part. A resumed run draws the same
        if type(self.data) is TensorDataset:  # all samples at once, which is faster
            return [tensor.index_select(0, torch.tensor(indices)) for tensor in self.data.tensors]
        restart_alarm(self.args.timeout)
        batch = default_collate([self.data[index] for index in indices])
        if get_worker_info():
            restart_alarm(0)  # a loader process without work does not hang
        return batch


def seed_all(*numbers):
    """Seed the random numbers of torch, Python and numpy in this process by these integers."""
    seed = hash(numbers)  # of integers, the same in all processes
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would take 0.1 ms
    if torch.cuda.is_initialized():  # not in a loader process
        torch.cuda.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


# Of a scheduler, of Ctrl-C, of a closed terminal (which Windows does not have)
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP")
                if hasattr(signal, name)]


def ignore_signals(worker):
    """Slurm and Ctrl-C signal loader processes, too, but training needs their images."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


class Exchange:
    """Tells all processes, beside a step, what one of them knows. All processes call this.

    longest_wait: the seconds of this epoch in which the slowest process has waited for images.
    """

    def __init__(self, args):
        self.args, self.rank, self.signals, self.longest_wait = args, dist.get_rank(), [], 0.0
        self.save_time = time.monotonic() + 60 * args.save_every
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(signum, self.receive)

    def receive(self, signum, frame):
        """Note that SIGTERM, Ctrl-C or a closed terminal has come, and then say so."""
        self.signals.append(signum)
        if self.rank == 0 and len(self.signals) == 1:
            with contextlib.suppress(OSError):  # the terminal may be closed
                # Not print(), which may be what the signal has interrupted
                os.write(2, b"a signal has come: the run stops after its next step, if there is "
                            b"one\n")

    def begin(self, wait, save):
        """Send whether a signal has come, whether to save, and the seconds of waiting."""
        values = [save or time.monotonic() > self.save_time, len(self.signals), wait]
        self.largest = torch.tensor(values, dtype=torch.double)
        self.work = None
        if dist.get_world_size() > 1:
            self.work = dist.all_reduce(self.largest, dist.ReduceOp.MAX, async_op=True)

    def end(self):
        """Return whether all processes save after this step, and whether they stop."""
        if self.work:
            self.work.wait()
        save, stop, self.longest_wait = self.largest.tolist()
        if save or stop:
            self.save_time = time.monotonic() + 60 * self.args.save_every
        return bool(save or stop), bool(stop)


class Timer:
    """Prints the loss, the speed and the time left, every --log-every seconds of an epoch."""

    def __init__(self, args, epoch, steps):
        self.args, self.epoch, self.steps = args, epoch, steps
        self.first_step, self.start_of_epoch = None, time.monotonic()

    def log(self, step, sums, wait):
        """Print rank 0's loss in this epoch, and the speed since the epoch's first step."""
        now = time.monotonic()
        if self.first_step is None:  # it is slower, and not timed
            self.first_step = step
            self.start = self.last = now
        elif now - self.last >= self.args.log_every:
            self.last = now
            seconds = now - self.start
            rate = (step - self.first_step) / seconds
            log(f"epoch {self.epoch + 1}/{self.args.epochs}  step {step}/{self.steps}  "
                f"loss {sums.loss / sums.samples:.4f}  "
                f"{rate * self.args.global_batch:,.0f} samples/s  "
                f"wait {wait / (now - self.start_of_epoch):.0%}  "
                f"{timedelta(seconds=round((self.steps - step) / rate))} left")


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
    """Adds up losses and counts on the GPU: only results() waits for it."""

    def __init__(self, args):
        self.args = args
        self.loss = self.counts = self.samples = 0

    def add(self, loss, counts, samples):
        """Add the mean loss, and the counts, of a batch of this number of samples."""
        self.loss += samples * loss.detach().double()
        self.counts += counts.detach().double()
        self.samples += samples
        restart_alarm(self.args.timeout)  # this process does not hang

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


def log_start(args, device, samples, val_samples, step):
    """Print the settings of this run: rank 0 does."""
    world_size = dist.get_world_size()
    steps = args.epochs * (samples // args.global_batch)
    log(f"world size {world_size} on {device.type} | {args.model} | global batch "
        f"{args.global_batch} ({world_size} x {args.global_batch / world_size:.4g}) of {samples} "
        f"images in {len(args.classes)} classes, passed through augment() | "
        f"lr {args.lr:g} | {args.epochs} epochs, {steps} steps"
        + (f", resumed after step {step}" if step else "")
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
        with contextlib.suppress(OSError):  # without a reader of the log, the run continues
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


def main():
    try:
        train(parse_args())
    finally:  # after an exception, Python would wait for the loader's processes for ever
        if hasattr(signal, "SIGCHLD"):  # DataLoader's handler would raise an error
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in mp.active_children():
            process.kill()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT-0
r"""Train an image classifier on CIFAR-10 or your own images with DistributedDataParallel (DDP).

    python train.py                          # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=4 train.py     # one process per GPU of this machine
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 -c8 --kill-on-bad-exit=1 python train.py
    torchrun --standalone --nproc-per-node=4 train.py --image-folder DIR --model resnet50 \
        --pretrained --lr 0.02 --checkpoint run.pt

(Type the third command on each of the two machines.) Each process runs this whole file. All begin
with the same weights, and each computes the gradients of its share of every batch. backward()
averages the gradients of all processes, so all make the same step, and their weights stay equal.
The lines that do this are marked with # DDP.

--batch-size is for each process: on four GPUs, a step has four times as many images as on one. --lr
is for steps of 256 images, and is multiplied to suit. With --global-batch N, a step has N images on
any number of GPUs.

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of
processes. Several machines need FILE on a shared disk. SIGTERM, Ctrl-C or a closed terminal stop
all processes after the same step: they save, and exit with status 1. In Slurm, --signal=TERM@120
sends SIGTERM; then call scontrol requeue if FILE is new (as slurm/cifar10.sbatch does).

To train something else, edit the functions above train(). You need not read the last part. The
repository of this file also has code for best weights, F1, clipping and more, and a check of your
copy.

Follows the DDP part of the OpenACC notebook "Distributed Data Parallelism", and the cifar10_example
of "A complete tutorial to run a distributed training on multiple nodes with Pytorch DDP".
"""
import argparse
import contextlib
import functools
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
from PIL import Image, ImageOps
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import models
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2


# ---- Flags, model, optimizer, learning rate, data, loss: edit these for your own training. ----
def parse_args(flags=None):
    """Return the settings that flags (a list of strings, or the command line) give."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=128, help="images per process at a time")
    parser.add_argument("--global-batch", type=int,
                        help="images per step, over all processes; None: batch size x processes")
    parser.add_argument("--model", default="resnet18", choices=models.list_models(module=models),
                        metavar="NAME",
                        help="classifier of torchvision.models; the default --lr suits resnet18")
    parser.add_argument("--pretrained", action="store_true",
                        help="start from torchvision's pretrained weights")
    parser.add_argument("--image-size", type=int, metavar="PIXELS",
                        help="height and width; None: 32 for resnet18 on CIFAR-10, otherwise 224")
    parser.add_argument("--workers", type=int,
                        help="loader processes per process; None: one per core, up to 8")
    parser.add_argument("--lr", type=float, default=0.2,
                        help="peak learning rate of SGD for 256 images per step")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--bf16", action="store_true", help="bfloat16: faster on GPUs")
    parser.add_argument("--data-dir", default="data", help="folder of CIFAR-10")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--image-folder", type=os.path.realpath, metavar="DIR",
                      help="train on the images in DIR/train/CLASS, test on DIR/val/CLASS")
    data.add_argument("--fake-data", type=int, nargs="?", const=512, metavar="N",
                      help="train on N generated images (512 without a number)")
    parser.add_argument("--checkpoint", type=os.path.realpath, help="file to save and resume from")
    parser.add_argument("--save-every", type=float, default=5,
                        help="minutes between checkpoints; one more is saved after each epoch")
    parser.add_argument("--log-every", type=float, default=5, help="seconds between log lines")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    args = parser.parse_args(flags)
    if args.image_size is None:
        small = args.model == "resnet18" and not args.image_folder and not args.pretrained
        args.image_size = 32 if small else 224
    return args


# Flags that may differ when a run is resumed. (With other --epochs, the learning rates change.)
MAY_CHANGE = ("epochs", "batch_size", "bf16", "workers", "data_dir", "checkpoint", "save_every",
              "log_every", "timeout")


def build_model(args, classes):
    """Return a model that maps images (N, 3, size, size) to logits (N, classes)."""
    model = models.get_model(args.model, num_classes=classes)
    if args.model == "resnet18" and args.image_size <= 32 and not args.pretrained:
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # usual for small images
        model.maxpool = nn.Identity()
    return model


def build_optimizer(args, model, global_batch):
    """Return the optimizer. The lr of each parameter group is its peak learning rate."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 5e-4}, {"params": others}]  # biases, norms
    return torch.optim.SGD(groups, lr=args.lr * global_batch / 256, momentum=0.9, nesterov=True,
                           fused=True)


def load_pretrained(args, model):
    """Load torchvision's weights, except those of other shapes, such as the last layer's."""
    weights = models.get_model(args.model, weights="DEFAULT").state_dict()
    state = model.state_dict()
    fitting = {name: tensor for name, tensor in weights.items()
               if name in state and state[name].shape == tensor.shape}
    state.update(fitting)  # state has the versions of the layers, which weights lacks
    model.load_state_dict(state)
    new = sorted(state.keys() - fitting)
    log(f"pretrained: loaded {len(fitting)} of {len(state)} tensors; initialized at random: "
        f"{', '.join(new) or 'none'}")


def learning_rate(args, step, total_steps):
    """Return the factor of the peak rates: linear warm-up over a fifth of the steps, then decay."""
    return min(1, (step + 1) / total_steps / 0.2, (1 - step / total_steps) / 0.8)


def prepare_data(args):
    """Download what is missing. The first process of each machine calls this."""
    socket.setdefaulttimeout(60)  # a server may not answer
    if not args.image_folder and not args.fake_data:
        CIFAR10(args.data_dir, download=True)
    if args.pretrained:
        models.get_model(args.model, weights="DEFAULT")  # downloads them


def load_data(args):
    """Return the training set and the test set, each with the names of its classes in .classes.

    They are data sets of pairs (image, label): images are uint8 (3, 32, 32), with --image-folder
    PIL images; labels are integers. All processes must return the same samples in the same order:
    torch and random are seeded; seed numpy, and sort file names and what comes from a set.
    """
    if args.image_folder:
        read = functools.partial(read_image, size=args.image_size)
        return [ImageFolder(os.path.join(args.image_folder, folder), loader=read)
                for folder in ("train", "val")]
    if args.fake_data:
        sets = fake_images(args.fake_data, (3, 32, 32), args.seed)
        classes = list("0123456789")
    else:
        cifar10 = [CIFAR10(args.data_dir, train=True), CIFAR10(args.data_dir, train=False)]
        sets = [(torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(),
                 torch.tensor(data.targets)) for data in cifar10]
        classes = cifar10[0].classes
    sets = [TensorDataset(images, labels) for images, labels in sets]
    for data in sets:
        data.classes = classes
    return sets


def transforms(args, train_set):
    """Return the transform of (image, label): images to uint8 (3, size, size), random to train."""
    size = args.image_size
    if args.image_folder and train_set:
        steps = [v2.ToImage(), v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    elif args.image_folder:
        steps = [v2.ToImage(), v2.Resize(size * 8 // 7), v2.CenterCrop(size)]  # 256 and 224
    else:
        crop = v2.RandomCrop(32, padding=4, padding_mode="reflect")  # shifts by up to 4 pixels
        steps = [crop, v2.RandomHorizontalFlip()] if train_set else [v2.ToImage()]
        if size != 32 or not train_set:  # CIFAR-10's images have 32 pixels
            steps.append(v2.Resize(size))
    return v2.Compose(steps)


def normalize(images):
    """Return uint8 images as floats, of about mean 0 and deviation 1 for photographs."""
    if images.dtype != torch.uint8:
        raise TypeError("normalize expects uint8: remove ToDtype and Normalize from transforms")
    return images.sub(115.0).div_(57.0).to(memory_format=torch.channels_last)


def loss_and_counts(args, model, images, labels):
    """Return the mean loss of the images, and how many are classified correctly, as tensors.

    The loss is a mean over the samples (not over weights or tokens). The counts may have any shape:
    they are added up over all batches and processes, for metrics().
    """
    smoothing = 0.1 if model.training else 0.0  # so the training loss is higher than the test loss
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
    train_set, test_set = load_data(args)
    images, classes = len(train_set), list(train_set.classes)
    if classes != list(test_set.classes):
        unlike = set(classes) ^ set(test_set.classes) or classes  # or in another order
        sys.exit(f"error: training set and test set have different classes: {unlike}")
    global_batch = choose_global_batch(args, checkpoint, images, world_size)
    steps_per_epoch = images // global_batch  # samples that fill no batch are left out
    total_steps = args.epochs * steps_per_epoch
    # DDP and gradient accumulation: a batch is divided into parts of at most --batch-size samples.
    # Of 8 parts on 2 processes, rank 0 computes the parts 0, 2, 4 and 6, and rank 1 the others
    parts = world_size * math.ceil(global_batch / (world_size * args.batch_size))
    own_parts = range(rank, min(parts, global_batch), world_size)

    torch.manual_seed(args.seed)  # so that the first weights do not depend on load_data
    model = build_model(args, len(classes)).to(device, memory_format=torch.channels_last)
    if not model.training:  # from_pretrained() of Hugging Face returns it in evaluation mode
        model.train()
    if args.pretrained:  # also if resumed: an average of the weights begins with them
        load_pretrained(args, model)
    optimizer = build_optimizer(args, model, global_batch)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    settings = run_settings(args, images=images, classes=classes, global_batch=global_batch,
                            image_folder=bool(args.image_folder))  # wherever it is
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
        f"torch {torch.__version__} | {args.model} | global batch {global_batch} "
        f"({world_size} x {global_batch / world_size:g}) of {images} images in {len(classes)} "
        f"classes | learning rate {peak_rates[0]:g} | steps {step} to {total_steps}"
        + (", resumed" if step else "")
        + ("" if args.checkpoint else " | without --checkpoint, nothing is saved"))

    # One iterator for all epochs: its processes start once, and read ahead during evaluations
    keys = batch_keys(args, images, global_batch, step, own_parts, parts)
    loader = iter(build_loader(args, train_set, transforms(args, True), device,
                               batch_sampler=keys))
    test_indices = range(rank, len(test_set), world_size)  # DDP: each test image once
    test_keys = [(args.seed, -1, index, index) for index in test_indices]  # equal in all epochs
    test_loader = build_loader(args, test_set, transforms(args, False), device, sampler=test_keys,
                               batch_size=args.batch_size)

    signals = catch_signals()
    first_step = step + 1
    wait_seconds = 0.0  # for images
    saved_step, save_time = step, time.perf_counter()
    # A run that is resumed at the end of an epoch begins with the evaluation of that epoch
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):
        loss_sum = counts = samples = 0  # of this process in this epoch (since a resume)
        epoch_time = time.perf_counter()
        while step < (epoch + 1) * steps_per_epoch:
            # DDP: if one process stopped alone, the others would wait for its gradients. So all
            # exchange whether one has received a signal, while they compute this step
            stop = torch.tensor(len(signals))
            exchange = dist.all_reduce(stop, async_op=True) if world_size > 1 else None

            for group, peak_rate in zip(optimizer.param_groups, peak_rates):
                group["lr"] = peak_rate * learning_rate(args, step, total_steps)
            optimizer.zero_grad()
            for part in own_parts:
                before = time.perf_counter()
                batch = next(loader)
                wait_seconds += time.perf_counter() - before
                batch = [tensor.to(device, non_blocking=True) for tensor in batch]
                # DDP: each part has other random numbers (dropout), the same ones after a resume.
                # (hash() of numbers is the same everywhere)
                torch.manual_seed(hash((args.seed, step, part)))
                # DDP: exchange gradients once, after the last part
                with contextlib.nullcontext() if part == own_parts[-1] else no_sync():
                    with autocast:
                        loss, part_counts = loss_and_counts(args, ddp_model, *batch)
                    # DDP divides the sum of all gradients by world_size. The factor makes of it the
                    # gradient of the mean loss of the global batch, also if parts differ in length
                    (loss * (len(batch[0]) * world_size / global_batch)).backward()
                loss_sum += len(batch[0]) * loss.detach().double()  # on the GPU: no waiting for it
                counts += part_counts.detach().double()
                samples += len(batch[0])
            optimizer.step()
            step += 1

            now = time.perf_counter()
            if step == first_step:  # not timed: the first step is slower
                start = log_time = now
                wait_seconds = 0.0
            elif rank == 0 and now - log_time >= args.log_every:
                log_time = now
                rate = (step - first_step) / (now - start)
                # The loss of rank 0 in this epoch; the speed since the first step, with evaluations
                log(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  "
                    f"loss {loss_sum / samples:.4f}  "
                    f"{rate * global_batch:,.0f} images/s  "
                    f"wait {100 * wait_seconds / (now - start):.0f} %  "
                    f"{timedelta(seconds=round((total_steps - step) / rate))} left")
            if exchange:
                exchange.wait()
            end_of_epoch = step % steps_per_epoch == 0
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
            test = evaluate(args, model, test_loader, device)
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


# ---- Data: from files to batches ----
def read_image(path, size):
    """Return the image at path as a PIL image in RGB, upright, on gray if it is transparent."""
    try:
        with Image.open(path) as image:
            if image.mode == "F" or image.mode == "I" and image.format not in ("PNG", "PPM"):
                raise ValueError(f"its mode {image.mode} has no range of 8 or 16 bits: convert it")
            image.draft(None, (4 * size, 4 * size))  # large JPEGs: smaller, but enough for crops
            image.load()
            with contextlib.suppress(Exception):  # damaged EXIF data: viewers show the image, too
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I"):  # to 8 bits; convert() alone makes it white
                image = image.convert("I").point(lambda level: level / 257).convert("L")
            elif image.has_transparency_data:
                image = image.convert("RGBA")
                # Not white or black, which would hide drawings in that color
                image = Image.alpha_composite(Image.new("RGBA", image.size, "gray"), image)
            return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:
        raise RuntimeError(f"cannot read the image {path}: {error}. Replace it: a run can only be "
                           "resumed with the same number of images") from error


class SeededData(Dataset):
    """Samples, transformed with random numbers of their key alone: a resumed run repeats them.

    A key is a tuple (seed, epoch, place in the epoch, index in data).
    """

    def __init__(self, data, transform):
        self.data = data
        self.transform = transform

    def __getitem__(self, key):
        *_, index = key
        torch.default_generator.manual_seed(hash(key))  # torch.manual_seed takes 80 us
        random.seed(hash(key))
        return self.transform(*self.data[index])


def batch_keys(args, images, global_batch, step, own_parts, parts):
    """Yield the keys of the samples of this process, from step on: a list for each of its parts."""
    steps_per_epoch = images // global_batch
    for epoch in range(step // steps_per_epoch, args.epochs):
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(images, generator=shuffle)
        samples = torch.stack([torch.arange(len(order)), order], 1)  # place in the epoch, index
        batches = samples.split(global_batch)[:steps_per_epoch]  # what fills no batch is dropped
        for batch in batches[max(0, step - epoch * steps_per_epoch):]:
            for part in own_parts:  # DDP: part 1 of 4 has the samples 1, 5, 9, ... of the batch
                yield [(args.seed, epoch, *sample) for sample in batch[part::parts].tolist()]


def build_loader(args, data, transform, device, **batches):
    """Return a DataLoader of transformed samples. batches: its options for keys and batch size."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this machine
    workers = args.workers if args.workers is not None else max(1, min(8, cores // processes))
    # With other start methods, loader processes import PyTorch first, and a signal then ends them.
    # Python 3.14's forkserver also keeps them alive at the end
    context = "fork" if workers and sys.platform == "linux" else None
    return DataLoader(SeededData(data, transform), num_workers=workers,
                      persistent_workers=workers > 0, pin_memory=device.type == "cuda",
                      worker_init_fn=ignore_signals, timeout=args.timeout if workers else 0,
                      multiprocessing_context=context, **batches)


def ignore_signals(worker):
    """Slurm and Ctrl-C signal all processes, but training needs images until it has saved."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


# ---- The last part starts, connects, saves and stops the processes. You need not read it. ----
def main():
    try:
        train(parse_args())
    finally:  # after an exception, Python would wait for the loader's processes for ever
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
        for process in mp.active_children():
            process.kill()


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

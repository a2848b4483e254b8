# SPDX-License-Identifier: MIT-0
"""Train an image classifier on CIFAR-10 or your own images with DistributedDataParallel (DDP).

    python train.py                          # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=4 train.py     # one process per GPU of this machine
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8 -K1 python train.py
    torchrun --standalone --nproc-per-node=4 train.py --image-folder DIR --model resnet50 --lr 0.1

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of
processes. SIGTERM, Ctrl-C or a closed terminal stop all processes after the same step, and save.
To train something else, edit the functions above train().

Follows the DDP part of the OpenACC notebook "Distributed Data Parallelism", and the cifar10_example
of "A complete tutorial to run a distributed training on multiple nodes with Pytorch DDP".
"""
import argparse
import contextlib
import ctypes
import functools
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from typing import NamedTuple

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
    """Return the settings of these flags (strings), or of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=128, help="images per process at once")
    parser.add_argument("--global-batch", type=int, help="images per step of all processes")
    parser.add_argument("--model", default="resnet18", choices=models.list_models(module=models),
                        metavar="NAME", help="of torchvision.models; --lr suits resnet18")
    parser.add_argument("--pretrained", action="store_true", help="torchvision's weights")
    parser.add_argument("--image-size", type=int, help="pixels; None: 32 or 224, by model and data")
    parser.add_argument("--workers", type=int, help="loader processes; None: one per core, up to 8")
    parser.add_argument("--lr", type=float, default=0.2, help="peak rate of SGD per 256 images")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--bf16", action="store_true", help="bfloat16; slow on many CPUs")
    parser.add_argument("--data-dir", default="data", help="folder of CIFAR-10")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--image-folder", type=os.path.realpath, help="with train/CLASS, val/CLASS")
    data.add_argument("--fake-data", type=int, nargs="?", const=512, help="images to generate")
    parser.add_argument("--checkpoint", type=os.path.realpath, help="file to save and resume from")
    parser.add_argument("--save-every", type=float, default=5, help="minutes between checkpoints")
    parser.add_argument("--log-every", type=float, default=5, help="seconds between log lines")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    args = parser.parse_args(flags)
    numbers = (args.epochs, args.batch_size, args.global_batch, args.fake_data, args.image_size,
               args.timeout)
    if any(number is not None and number < 1 for number in numbers):
        parser.error("epochs, batch sizes and other numbers must be at least 1")
    numbers = (args.lr, args.save_every, args.log_every, args.workers or 0)
    if not all(number >= 0 for number in numbers):  # nan is not
        parser.error("--lr, --save-every, --log-every and --workers must be at least 0")
    if args.image_size is None:
        small = args.model == "resnet18" and not args.image_folder and not args.pretrained
        args.image_size = 32 if small else 224
    if args.model.startswith(("maxvit_", "vit_")) and args.image_size != 224:
        parser.error(f"{args.model} takes images of 224 pixels")
    return args


# A run may be resumed with other values of these flags, but not of the others.
MAY_CHANGE = ("epochs", "batch_size", "bf16", "workers", "data_dir", "checkpoint", "save_every",
              "log_every", "timeout")


def build_model(args, classes):
    """Return a model that maps images (N, 3, size, size) to logits (N, classes)."""
    auxiliary = args.model in ("googlenet", "inception_v3")
    options = {"aux_logits": False, "init_weights": True} if auxiliary else {}
    model = models.get_model(args.model, num_classes=classes, **options)
    if args.model == "resnet18" and args.image_size <= 32 and not args.pretrained:
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)  # usual for small images
        model.maxpool = nn.Identity()
    return model


def build_optimizer(args, model, global_batch):
    """Return the optimizer. Its parameter groups have their peak learning rates."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": weights, "weight_decay": 5e-4}, {"params": others}]  # biases, norms
    return torch.optim.SGD(groups, lr=args.lr * global_batch / 256, momentum=0.9, nesterov=True,
                           fused=True)


def pretrained_weights(args):
    """Return torchvision's weights by name, downloaded unless they are there, or exit."""
    try:
        return models.get_model(args.model, weights="DEFAULT").state_dict()
    except Exception as error:
        url = models.get_model_weights(args.model).DEFAULT.url
        sys.exit(f"error: no weights ({error!r}): put {url} into {torch.hub.get_dir()}/checkpoints")


def load_pretrained(model, weights):
    """Load the weights whose name and shape are those of the model, and log which it keeps."""
    state = model.state_dict()
    fitting = {name: tensor for name, tensor in weights.items()
               if name in state and state[name].shape == tensor.shape}
    if not fitting:
        sys.exit(f"error: no weight fits: they are {list(weights)[:3]}, not {list(state)[:3]}")
    state.update(fitting)
    model.load_state_dict(state)
    log(f"pretrained, but for {', '.join(sorted(state.keys() - fitting)) or 'nothing'}")


def learning_rate(step, total_steps):
    """Return the factor of the peak rates: linear warm-up over a fifth of the steps, then decay."""
    return min(1, (step + 1) / total_steps / 0.2, (1 - step / total_steps) / 0.8)


def prepare_data(args):
    """Download CIFAR-10 unless it is there. The first process of each machine calls this."""
    if not args.image_folder and not args.fake_data:
        download(CIFAR10, args)


def load_data(args):
    """Return the training set and the test set, each with the names of its classes in .classes.

    They are data sets of pairs (image, label): images are uint8 (3, 32, 32), with --image-folder
    PIL images; labels are integers. All ranks call this with the same random numbers of torch and
    Python, but with --image-folder only rank 0: compute what depends on the data in train().
    """
    if args.image_folder:
        return [image_folder(os.path.join(args.image_folder, part), args.image_size)
                for part in ("train", "val")]
    if args.fake_data:
        sets = fake_images(args.fake_data, (3, 32, 32), args.seed)
        classes = list("0123456789")
    else:
        cifar10 = [CIFAR10(args.data_dir, train) for train in (True, False)]
        sets = [(torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous(),
                 torch.tensor(data.targets)) for data in cifar10]
        classes = cifar10[0].classes
    sets = [TensorDataset(images, labels) for images, labels in sets]
    for data in sets:
        data.classes = classes
    return sets


def transforms(args, train_set):
    """Return what turns an image into uint8 (3, size, size), at random for training."""
    size = args.image_size
    steps = [v2.ToImage(), v2.Resize(size * 8 // 7), v2.CenterCrop(size)]  # 256 and 224
    if args.image_folder and train_set:
        steps = [v2.ToImage(), v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
    elif not args.image_folder:
        steps = [shift_and_flip if train_set else v2.ToImage(), Resize(size)]
    return v2.Compose(steps)


class Resize(v2.Resize):
    """v2.Resize, which is slow for an image that has the size already."""

    def forward(self, *inputs):
        image = inputs[0]
        if [*image.shape[-2:]] != 2 * self.size:
            return super().forward(*inputs)
        return inputs if len(inputs) > 1 else image


def shift_and_flip(image, label):
    """Shift an image (C, H, W) by up to 4 pixels, and flip it, at random: faster than v2."""
    _, height, width = image.shape
    padded = F.pad(image.float(), (4, 4, 4, 4), "reflect")
    top, left = random.randrange(9), random.randrange(9)
    image = padded[:, top:top + height, left:left + width].to(image.dtype)
    return (image.flip(2) if random.random() < 0.5 else image), label


def normalize(images):
    """Return uint8 images as floats, of about mean 0 and deviation 1 for photographs."""
    if images.dtype != torch.uint8:
        raise TypeError("normalize takes uint8: leave ToDtype and Normalize out of transforms")
    return images.sub(115.0).div_(57.0).to(memory_format=torch.channels_last)


def loss_and_correct(model, images, labels):
    """Return the sum of the images' losses, and how many are classified correctly, as tensors."""
    smoothing = 0.1 if model.training else 0.0
    logits = model(normalize(images))
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    return loss, (logits.argmax(1) == labels).sum()


# ---- Training ----
@record  # torchrun then reports the exception of the rank that fails first
def train(args):
    args, rank, world_size, device, (train_set, test_set), checkpoint = form_group(args)
    images, classes = len(train_set), list(train_set.classes)
    global_batch = choose_global_batch(args, checkpoint, images, world_size)
    steps_per_epoch = images // global_batch  # samples that fill no batch are left out
    total_steps = args.epochs * steps_per_epoch
    # Each process computes its share of a batch in parts of at most --batch-size
    parts = len(range(rank, global_batch, world_size * args.batch_size))

    torch.manual_seed(args.seed)
    model = build_model(args, len(classes)).to(device, memory_format=torch.channels_last)
    if not model.training:  # as from_pretrained() returns it. Other models may have frozen layers
        model.train()
    optimizer = build_optimizer(args, model, global_batch)
    peak_rates = [group["lr"] for group in optimizer.param_groups]
    settings = run_settings(args, images=images, classes=classes, global_batch=global_batch,
                            image_folder=bool(args.image_folder))  # wherever it is
    saved = {"model": model, "optimizer": optimizer}  # in each checkpoint
    step = restore(checkpoint, settings, saved, total_steps)
    if args.pretrained and not checkpoint and rank == 0:  # DDP copies its model to the others
        load_pretrained(model, pretrained_weights(args))
    del checkpoint  # a second copy of weights and optimizer
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    log(f"world size {world_size} on {device.type}, threads {torch.get_num_threads()} | "
        f"torch {torch.__version__} | {args.model} | global batch {global_batch} of "
        f"{images} images in {len(classes)} classes | steps {step} to {total_steps}")

    # One iterator for all epochs: its processes start once, and read ahead during evaluations
    keys = batch_keys(args, images, global_batch, step, parts, rank, world_size)
    loader = iter(build_loader(args, train_set, transforms(args, True), device,
                               batch_sampler=keys))
    test_indices = range(rank, len(test_set), world_size)
    test_keys = [Key(args.seed, 0, False, index) for index in test_indices]
    test_loader = build_loader(args, test_set, transforms(args, False), device, sampler=test_keys,
                               batch_size=args.batch_size)

    signals = catch_signals()
    first_step = step + 1
    wait_seconds = 0.0  # for images
    saved_step, save_time = step, time.perf_counter()
    # At the end of an epoch, a resumed run repeats the evaluation, which may have been missed
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):
        loss_sum = correct_sum = count = 0  # of this process in this epoch
        epoch_time = time.perf_counter()
        while step < (epoch + 1) * steps_per_epoch:
            # Has any process received a signal? They exchange this while they compute the step
            stop = torch.tensor(len(signals))
            exchange = dist.all_reduce(stop, async_op=True) if world_size > 1 else None

            for group, peak_rate in zip(optimizer.param_groups, peak_rates):
                group["lr"] = peak_rate * learning_rate(step, total_steps)
            optimizer.zero_grad()
            for part in range(parts):
                before = time.perf_counter()
                batch = next(loader)
                wait_seconds += time.perf_counter() - before
                batch = [tensor.to(device, non_blocking=True) for tensor in batch]
                seed_step(hash((args.seed, step, rank + part * world_size)), device)  # of dropout
                # Exchange gradients with the last part only. (no_sync() sets this, too.)
                ddp_model.require_backward_grad_sync = part == parts - 1
                with autocast:
                    loss, correct = loss_and_correct(ddp_model, *batch)
                (loss * (world_size / global_batch)).backward()  # DDP divides by world_size
                loss_sum += loss.detach().double()  # a tensor: the CPU does not wait for the GPU
                correct_sum += correct.detach().double()
                count += len(batch[0])
            optimizer.step()
            step += 1

            now = time.perf_counter()
            if step == first_step:  # it takes longer than others
                start = log_time = now
                wait_seconds = 0.0
            elif rank == 0 and now - log_time >= args.log_every:
                log_time = now
                rate = (step - first_step) / (now - start)
                log(f"epoch {epoch + 1}/{args.epochs}  step {step}/{total_steps}  "
                    f"loss {loss_sum / count:.4f}  accuracy {correct_sum / count:.4f}  "
                    f"{rate * global_batch:,.0f} images/s  "
                    f"wait {100 * wait_seconds / (now - start):.0f} %  "
                    f"{timedelta(seconds=round((total_steps - step) / rate))} left")
            if exchange:
                exchange.wait()
            end_of_epoch = step % steps_per_epoch == 0
            if end_of_epoch:
                check_weights(model)
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
            test_loss, test_accuracy = evaluate(model, test_loader, device)
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
    training = [module for module in model.modules() if module.training]  # some may be frozen
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
    for module in training:
        module.training = True
    return mean_of_all_ranks([loss_sum, correct_sum], count, device)


# ---- Process group ----
def form_group(args):
    """Form the process group, and load the data.

    Return rank 0's args, this process's rank, the world size, this process's device, the training
    and the test set, and rank 0's checkpoint, {} if there is none.
    """
    rank, local_rank, world_size = setup_environment()
    device = pick_device(local_rank)
    sets, checkpoint = None, {}
    if rank == 0:  # before the group is formed: if this fails, the launcher ends the others
        prepare_data(args)
        sets = load_sets(args)
        checkpoint = load_checkpoint(args.checkpoint)
        if args.pretrained and not checkpoint:
            pretrained_weights(args)  # downloads them
    cores = configure(device)
    cuda = device.type == "cuda"
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, store=store,
                            device_id=device if cuda else None, world_size=world_size,
                            timeout=timedelta(seconds=args.timeout))  # to notice a lost process
    of_rank_0 = [args, checkpoint, sets if args.image_folder else None]  # lists of files are small
    dist.broadcast_object_list(of_rank_0, device=torch.device("cpu"))
    args, checkpoint, lists = of_rank_0  # on all ranks
    if local_rank == 0 and rank > 0:
        prepare_data(args)  # on machines that do not share the disk of rank 0
    dist.barrier()  # now each machine has the data
    sets = sets or lists or load_sets(args)
    if args.workers is None:
        args.workers = min(8, cores)  # of this process
    return args, rank, world_size, device, sets, checkpoint


# ---- Data: from files to batches ----
def load_sets(args):
    """Return the training set and the test set of load_data, or exit if their classes differ."""
    torch.manual_seed(args.seed)  # in load_data, all ranks draw the same random numbers
    random.seed(args.seed)
    sets = load_data(args)
    classes, test_classes = (list(getattr(data, "classes", [])) for data in sets)
    if not classes or classes != test_classes:
        different = ascii(sorted(set(classes) ^ set(test_classes)) or [classes, test_classes])
        sys.exit("error: training and test set need the same classes (folders, or an attribute "
                 f"classes), not these in one of them: {different:.300}")
    return sets


def image_folder(folder, size):
    """Return torchvision's data set of the images in FOLDER/CLASS/ and below, or exit."""
    try:
        data = ImageFolder(folder, loader=functools.partial(read_image, size=size))
    except OSError as error:
        refuse(error)
    files = [len(names) for *_, names in os.walk(folder, onerror=refuse, followlinks=True)]
    hidden = [path for path, _ in data.samples if re.search("/[.@]", path[len(folder):])]
    if hidden:
        refuse(f"delete or rename files that look hidden, such as {hidden[0]}")
    if len(data.classes) == 1:
        refuse(f"the only class in {folder} is {data.classes[0]}")
    if sum(files) > len(data):
        log(f"{folder}: not used are {files[0]} files beside the folders of classes, and "
            f"{sum(files[1:]) - len(data)} in them whose names are not those of images")
    return data


def refuse(problem):
    sys.exit(f"error: --image-folder requires DIR/train/CLASS/*, DIR/val/CLASS/*: {problem}")


def read_image(path, size):
    """Return the image at path as a PIL image in RGB, upright, on gray if it is transparent."""
    try:
        with Image.open(path) as image:
            deep = image.mode == "I" and image.format not in ("PNG", "PPM")  # those have 16 bits
            if deep or image.mode == "F" or "I;12" in str(image.tile):  # 12 bits, in a TIFF
                raise ValueError(f"its mode {image.mode} has no range of 8 or 16 bits: convert it")
            if image.format == "TIFF" and has_pages(image):
                raise ValueError("it has several pages: save each as a file of its own")
            image.draft(None, (4 * size, 4 * size))  # large JPEGs: smaller, but enough for crops
            image.load()
            with contextlib.suppress(Exception):  # damaged EXIF data: viewers show the image, too
                ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I"):  # to 8 bits; convert() alone makes it white
                image = image.convert("I").point(lambda level: level / 257).convert("L")
            elif "transparency" in image.info or image.mode in ("RGBA", "RGBa", "LA", "PA"):
                image = image.convert("RGBA")
                # Not white or black, which would hide drawings in that color
                image = Image.alpha_composite(Image.new("RGBA", image.size, "gray"), image)
            return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as error:
        raise RuntimeError(f"cannot read the image {path}: {error}") from error


def has_pages(image):
    """Return whether a TIFF has more than its first page and smaller copies of that."""
    width, height = image.size
    others = []
    for page in range(1, image.n_frames):
        image.seek(page)
        others.append(image.size)
    image.seek(0)
    return any(2 * w > width + 1 or abs(w * height - width * h) > max(width, height)
               for w, h in others)  # of more than half the size, or of other proportions


class Key(NamedTuple):
    """A sample in an epoch. Its random numbers are seeded by the hash of these numbers."""
    seed: int
    epoch: int
    training: bool
    index: int


class SeededData(Dataset):
    """Samples, transformed with random numbers of their key alone: a resumed run repeats them."""

    def __init__(self, data, transform):
        self.data = data
        self.transform = transform

    def __getitem__(self, key):
        torch.default_generator.manual_seed(hash(key))  # torch.manual_seed takes 80 us
        random.seed(hash(key))
        return self.transform(*self.data[key.index])


def batch_keys(args, images, global_batch, step, parts, rank, world_size):
    """Yield the keys of SeededData that this rank reads from step on: a list for each part."""
    steps_per_epoch = images // global_batch
    for epoch in range(step // steps_per_epoch, args.epochs):
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))
        order = torch.randperm(images, generator=shuffle)
        batches = order.split(global_batch)[:steps_per_epoch]  # what fills no batch is dropped
        for batch in batches[max(0, step - epoch * steps_per_epoch):]:
            for part in range(parts):
                indices = batch[rank + part * world_size::parts * world_size]
                yield [Key(args.seed, epoch, True, index) for index in indices.tolist()]


def build_loader(args, data, transform, device, **batches):
    """Return a DataLoader of transformed samples. batches: its options for keys and batch size."""
    return DataLoader(SeededData(data, transform), num_workers=args.workers,
                      persistent_workers=args.workers > 0, pin_memory=device.type == "cuda",
                      worker_init_fn=ignore_signals, timeout=args.timeout if args.workers else 0,
                      **batches)


def ignore_signals(worker):
    """Slurm and Ctrl-C signal all processes, but training needs images until it has saved."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def main():
    # With other start methods, loader processes import PyTorch first, and a signal then ends them.
    # Python 3.14's forkserver also keeps them alive at the end
    if sys.platform == "linux":
        mp.set_start_method("fork", force=True)
    try:
        train(parse_args())
    finally:  # multiprocessing would wait for the loader's processes, which ignore SIGTERM
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's handler would raise an error
        for process in mp.active_children():
            process.kill()


# ---- Below, functions of the same name are equal in all scripts: read one, skip the others. ----
def setup_environment():
    """Return rank, local rank and world size. Set torchrun's variables in a step of srun."""
    env = os.environ
    torchrun = "TORCHELASTIC_RUN_ID" in env
    if torchrun and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when torchrun is killed
    tasks = int(env.get("SLURM_STEP_NUM_TASKS", 1))
    launched = torchrun or int(env.get("WORLD_SIZE", 1)) > tasks  # not left by a notebook
    mpi_tasks = int(env.get("OMPI_COMM_WORLD_SIZE", env.get("PMI_SIZE", 1)))
    pmix = "PMIX_RANK" in env and "SLURM_STEP_ID" not in env
    if not launched and (mpi_tasks > tasks or pmix):
        sys.exit("error: mpirun is not supported: use torchrun, or srun python")
    # python is typed in srun --pty bash: it has its terminal or, as in nohup, only its session
    shell = "SLURM_PTY_PORT" in env and (
        os.isatty(0) or str(os.getsid(0)) == env.get("SLURM_TASK_PID"))
    if tasks > 1 and not launched and not shell:  # srun python train.py
        first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])  # n07 of n[07-09]
        if env.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1"):  # on each node itself
            env["MASTER_ADDR"] = "".join(first_host.groups())
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
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    own_gpu = gpus == 1 and local_world_size == 1  # srun may show a process only its own
    if gpus and not own_gpu and max(local_world_size, local_rank + 1) > gpus:
        sys.exit(f"error: more processes than GPUs ({gpus}); CUDA_VISIBLE_DEVICES= uses the CPU")
    if not gpus:
        return torch.device("cpu")
    return torch.device("cuda", 0 if own_gpu else local_rank)


def configure(device):
    """Use this GPU, or the CPU, at its fastest. Return this process's share of the cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = max(1, cpus // local_world_size)
    if local_world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun's default
        torch.set_num_threads(cores)
    with contextlib.suppress(AttributeError):  # only glibc has it: a fifth more images/s on a CPU
        ctypes.CDLL(None).mallopt(-1, -1)  # M_TRIM_THRESHOLD: never return memory to the system
        ctypes.CDLL(None).mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks up to 32 MB
    return cores


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
    if samples == 0:
        sys.exit("error: the training set is empty")
    if global_batch < world_size:
        sys.exit(f"error: more processes than samples in a step ({global_batch}): start fewer")
    return global_batch


def close_group():
    """Wait until rank 0 has saved: when one process ends, its launcher may end the others."""
    dist.barrier()
    time.sleep(0.5)  # gloo's threads may still work (pytorch#154976): a hang or an abort without it
    dist.destroy_process_group()


def handle_signals(handler):
    """Call handler on SIGTERM, Ctrl-C and a closed terminal."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(signum, handler)


def catch_signals():
    """Return a list to which each SIGTERM, Ctrl-C or closed terminal is added when it comes."""
    signals = []

    def handler(signum, frame):
        if not signals:
            log("signal received: stopping within a few steps, or after this evaluation")
        signals.append(signum)

    handle_signals(handler)
    return signals


def check_statistics(model):
    """Exit unless BatchNorm's running statistics are finite."""
    for name, buffer in model.named_buffers():
        if "running" in name and not buffer.isfinite().all():
            sys.exit(f"error: {name} is not finite: are there huge values in the data?")


def check_weights(model):
    """Exit unless weights are finite and, as averaged gradients leave them, equal on all ranks."""
    check_statistics(model)
    for name, parameter in model.named_parameters():
        weights = parameter.detach().flatten().float().nan_to_num(torch.inf, torch.inf, -torch.inf)
        extremes = torch.stack([weights, -weights])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if not extremes.isfinite().all():
            sys.exit("error: weights are not finite: use a lower --lr (and another "
                     "--checkpoint), or data without NaN")
        if extremes.sum(0).norm() > 1e-4 * extremes[0].norm():  # largest minus smallest
            sys.exit(f"error: gradients of {name} are not exchanged: call model(...), not "
                     "model.module or a method of it; set requires_grad in build_model")


def run_settings(args, **more):
    """Return what defines the run: the flags but for MAY_CHANGE, and more.

    Exit unless these are plain values, and equal on all ranks.
    """
    settings = {**vars(args), **more}
    settings = {name: value for name, value in settings.items() if name not in MAY_CHANGE}
    for name, value in json.loads(json.dumps(settings, default=str)).items():
        if (value == settings[name]) is not True:  # a resume could not compare it
            sys.exit(f"error: make setting {name} a number, text or list: {settings[name]!r:.80}")
        settings[name] = value  # a list for a tuple, a plain string for a kind of string
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, settings)
    different = [name for name in settings if any(other[name] != settings[name]
                                                  for other in of_ranks)]
    if different:
        sys.exit(f"error: the ranks have different data ({', '.join(different)}): sort what comes "
                 "from a set or a folder, and seed what is random")
    return settings


def save_checkpoint(path, saved, settings, step):
    """Replace the file at path: at any moment, it is the old one or the new one."""
    if not all(parameter.isfinite().all() for parameter in saved["model"].parameters()):
        sys.exit("error: weights are not finite: use a lower --lr (and another "
                 "--checkpoint), or data without NaN")
    check_statistics(saved["model"])
    states = {name: part.state_dict() for name, part in saved.items()}
    temporary = f"{path}.{os.urandom(4).hex()}.tmp"  # another run may write to the same path
    try:
        with open(temporary, "wb") as file:
            torch.save({**states, "settings": settings, "step": step}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        sys.exit(f"error: cannot save {path} ({error}): is the disk full, or the file another "
                 "user's?")
    log(f"saved step {step} in {path}")


def load_checkpoint(path):
    """Return the checkpoint at path, {} if there is none, or exit."""
    if not path:
        return {}
    try:
        folder, name = os.path.split(path)  # fail now, not at the first save
        tempfile.NamedTemporaryFile(dir=folder, prefix=f"{name}.", suffix=".tmp").close()
        if not os.path.exists(path):
            return {}
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if "global_batch" not in checkpoint["settings"]:
            raise ValueError("it is of another program")
        return checkpoint
    except Exception as error:
        sys.exit(f"error: cannot use --checkpoint {path} ({error!r}): its folder must exist and be "
                 "writable; to start over, name another file")


def check_optimizers(saved):
    """Exit if an optimizer has weights that are in no model, so neither exchanged nor saved."""
    models = [part for part in saved.values() if isinstance(part, nn.Module)]
    known = {id(weight) for model in models for weight in model.parameters()}
    for part in saved.values():
        for group in getattr(part, "param_groups", []):
            if any(id(weight) not in known for weight in group["params"]):
                sys.exit("error: the optimizer has weights that are not in the model: make them "
                         "its parameters (or put a second model into saved)")


def restore(checkpoint, settings, saved, total_steps):
    """Load the checkpoint, if any, into the parts of saved. Return its step, or 0."""
    check_optimizers(saved)
    if not checkpoint:
        return 0
    before = checkpoint["settings"]
    different = [f"{name} {before.get(name)}, not {settings.get(name)}"
                 for name in {**before, **settings} if before.get(name) != settings.get(name)]
    different += [f"no {name}" for name in saved if name not in checkpoint]
    different += [f"{name}, which is not in saved before restore()" for name in checkpoint
                  if name not in {*saved, "settings", "step"}]
    if different:
        sys.exit(f"error: the checkpoint is of another run ({'; '.join(different):.500}): "
                 "name another --checkpoint")
    if checkpoint["step"] > total_steps:
        sys.exit(f"error: {checkpoint['step']} of {total_steps} steps are done: raise --epochs")
    for name, part in saved.items():
        part.load_state_dict(checkpoint[name])
    return checkpoint["step"]


def log(message):
    """Print on rank 0. A run does not end because it cannot print."""
    if os.environ.get("RANK", "0") == "0":
        # OSError: a closed pipe. ValueError: an encoding. RuntimeError: a signal's in another print
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            print(message, flush=True)


def download(dataset, args):
    """Download a data set of torchvision to --data-dir unless it is there, or exit."""
    try:
        socket.setdefaulttimeout(60)  # a server may not answer
        dataset(args.data_dir, download=True)
        socket.setdefaulttimeout(None)
    except Exception as error:
        sys.exit(f"error: no {dataset.__name__} in {args.data_dir} ({error!r}): "
                 "delete it if damaged; or --fake-data")


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

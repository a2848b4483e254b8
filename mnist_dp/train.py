# SPDX-License-Identifier: MIT-0
"""Train a small CNN on MNIST with nn.DataParallel: one process, all GPUs of one machine.

    python train.py                          # all visible GPUs, or the CPU
    python train.py --device-ids 0,1         # these two GPUs

It is here for comparison. DistributedDataParallel is faster and runs on several machines: see
fashionmnist_ddp, which trains the same CNN, and whose runs can be stopped and resumed.

Follows the nn.DataParallel part of the OpenACC notebook "Distributed Data Parallelism".
"""
import argparse
import os
import socket
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision.datasets import MNIST


def parse_args(flags=None):
    """Parse flags (a list of strings; None: the command line), and return the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the data")
    parser.add_argument("--global-batch", type=int, default=128,
                        help="images in a step, over all GPUs")
    parser.add_argument("--lr", type=float, default=1e-3, help="initial learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and dropout")
    parser.add_argument("--bf16", action="store_true", help="use bfloat16 (slow on many CPUs)")
    parser.add_argument("--device-ids", type=gpu_numbers, metavar="0,1",
                        help="GPUs to use; without it, all")
    parser.add_argument("--data-dir", default="data", help="folder of the data set")
    parser.add_argument("--fake-data", type=int, nargs="?", const=512, metavar="N",
                        help="train on N generated images")
    return parser.parse_args(flags)


def gpu_numbers(text):
    """Return the numbers of GPUs in a text such as 0,1."""
    return [int(number) for number in text.split(",")]


# ---- Model and data ----
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


def load_data(args):
    """Return the training set and the validation set: images (N, 1, 28, 28) uint8, labels (N,)."""
    if args.fake_data:
        return fake_images(args.fake_data, (1, 28, 28), args.seed)
    train_set = MNIST(args.data_dir, train=True)
    val_set = MNIST(args.data_dir, train=False)
    return ((train_set.data.unsqueeze(1), train_set.targets),
            (val_set.data.unsqueeze(1), val_set.targets))


def loss_and_counts(args, model, images, labels):
    """Return the mean loss of the images, and how many are classified correctly, as tensors."""
    images = images.div(255).to(memory_format=torch.channels_last)
    logits = model(images)
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).sum()


# ---- Training ----
def train(args):
    device, device_ids = pick_devices(args.device_ids)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True  # finds the fastest convolutions
        torch.set_float32_matmul_precision("high")  # TensorFloat-32, as in convolutions
    if not args.fake_data:
        socket.setdefaulttimeout(60)  # a server may not answer
        MNIST(args.data_dir, download=True)
    train_set, val_set = load_data(args)
    x, y = (tensor.to(device) for tensor in train_set)
    val_x, val_y = (tensor.to(device) for tensor in val_set)

    torch.manual_seed(args.seed)
    model = CNN(args.bf16).to(device, memory_format=torch.channels_last)
    parallel_model = nn.DataParallel(model, device_ids) if len(device_ids) > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.epochs)
    print(f"GPUs {device_ids or 'none'}, threads {torch.get_num_threads()} | "
          f"torch {torch.__version__} | batch {args.global_batch} of {len(x)} images", flush=True)

    for epoch in range(args.epochs):
        start = time.perf_counter()
        loss_sum = correct_sum = 0
        for indices in torch.randperm(len(x), device=device).split(args.global_batch):
            optimizer.zero_grad()
            # DataParallel splits the images over the GPUs, and gathers the logits on the first one
            loss, correct = loss_and_counts(args, parallel_model, x[indices], y[indices])
            loss.backward()  # adds up the gradients of all GPUs on the first one
            optimizer.step()
            loss_sum += len(indices) * loss.detach()  # tensors: the CPU does not wait for the GPU
            correct_sum += correct
        schedule.step()
        loss = loss_sum.item() / len(x)  # waits for the GPU
        seconds = time.perf_counter() - start
        val_loss, val_accuracy = evaluate(args, model, val_x, val_y)
        print(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  "
              f"accuracy {correct_sum.item() / len(x):.4f}  val_loss {val_loss:.4f}  "
              f"val_accuracy {val_accuracy:.4f}  {len(x) / seconds:,.0f} samples/s", flush=True)


def pick_devices(device_ids):
    """Return the first device and the numbers of all GPUs to use: none on the CPU."""
    env = os.environ
    shell = "SLURM_PTY_PORT" in env and os.isatty(0)  # python is typed in srun --pty bash
    tasks = 1 if shell else int(env.get("SLURM_STEP_NUM_TASKS", 1))
    if max(tasks, int(env.get("WORLD_SIZE", 1))) > 1:
        sys.exit("error: nn.DataParallel runs in one process: "
                 "start one with python, or use cifar10_ddp for several")
    gpus = torch.cuda.device_count()  # by the driver, which may be too old for this PyTorch
    if gpus and not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} cannot use these GPUs: is the "
                 "driver too old? To use the CPU, set CUDA_VISIBLE_DEVICES=")
    if not gpus:
        return torch.device("cpu"), []
    device_ids = device_ids or list(range(gpus))
    return torch.device("cuda", device_ids[0]), device_ids


@torch.no_grad()
def evaluate(args, model, images, labels):
    """Return the mean loss and the mean accuracy of the images."""
    model.eval()
    loss_sum = correct_sum = 0
    for x, y in zip(images.split(args.global_batch), labels.split(args.global_batch)):
        loss, correct = loss_and_counts(args, model, x, y)
        loss_sum += len(x) * loss
        correct_sum += correct
    model.train()
    return loss_sum.item() / len(labels), correct_sum.item() / len(labels)


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


if __name__ == "__main__":
    train(parse_args())

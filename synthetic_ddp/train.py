# SPDX-License-Identifier: MIT-0
"""Train a small MLP on synthetic data with DistributedDataParallel (DDP), or measure a cluster.

    python train.py                          # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=2 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=8 -K1 python train.py
    torchrun --standalone --nproc-per-node=4 train.py --model resnet50 --batch-size 64

With --model NAME, nothing is trained: it measures training steps of that classifier of torchvision
on random images. The communication overhead is the part of a step's time that is saved when the
gradients are not exchanged.

Nothing is saved. To train your own model, start from fashionmnist_ddp or cifar10_ddp, whose runs
can be stopped and resumed.

Follows the synthetic_data_example of "A complete tutorial to run a distributed training on multiple
nodes with Pytorch DDP".
"""
import argparse
import contextlib
import ctypes
import os
import re
import resource
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torchvision import models


def parse_args(flags=None):
    """Return the settings of these flags (strings), or of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="passes over the data")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per process and step")
    parser.add_argument("--lr", type=float, default=0.01, help="initial learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of data, weights and order")
    parser.add_argument("--bf16", action="store_true", help="bfloat16; slow on many CPUs")
    parser.add_argument("--samples", type=int, default=2048, help="samples to generate")
    parser.add_argument("--model", choices=models.list_models(module=models), metavar="NAME",
                        help="measure this classifier of torchvision.models, such as resnet50")
    parser.add_argument("--image-size", type=int, default=224, metavar="PIXELS",
                        help="with --model: height and width")
    parser.add_argument("--steps", type=int, default=20, help="with --model: after 5 to warm up")
    parser.add_argument("--timeout", type=int, default=600, help="seconds to wait for a process")
    return parser.parse_args(flags)


# ---- Model and data ----
def build_model():
    """Return an MLP: inputs (N, 10) to logits (N, 3)."""
    return nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3))


def load_data(args):
    """Return the training set and the test set: inputs (N, 10), labels (N,).

    The label says which of three linear functions of the inputs is the largest.
    """
    generator = torch.Generator().manual_seed(args.seed)  # the same data on every rank
    functions = torch.randn(3, 10, generator=generator)
    sets = []
    for samples, seed in ((args.samples, 2 * args.seed + 2),
                          (max(1, args.samples // 4), 2 * args.seed + 1)):
        generator.manual_seed(seed)
        inputs = torch.randn(samples, 10, generator=generator)
        sets.append((inputs, F.linear(inputs, functions).argmax(1)))
    return sets


def loss_and_correct(model, inputs, labels):
    """Return the sum of the samples' losses, and how many are classified correctly, as tensors."""
    logits = model(inputs)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss, (logits.argmax(1) == labels).sum()


# ---- Process group ----
def form_group(args):
    """Form the process group. Return rank 0's args, and this process's rank, world size, device."""
    rank, local_rank, world_size = setup_environment()
    device = pick_device(local_rank)
    configure(device)
    set_threads()
    cuda = device.type == "cuda"
    store = dist.HashStore() if world_size == 1 else None  # a single process needs no port
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, store=store,
                            device_id=device if cuda else None, world_size=world_size,
                            timeout=timedelta(seconds=args.timeout))  # to notice a lost process
    of_rank_0 = [args]
    dist.broadcast_object_list(of_rank_0, device=torch.device("cpu"))
    return of_rank_0[0], rank, world_size, device


# ---- Training ----
@record  # torchrun then reports the exception of the rank that fails first
def train(args):
    args, rank, world_size, device = form_group(args)
    train_set, test_set = load_data(args)
    x, y = (tensor.to(device) for tensor in train_set)
    test_x, test_y = (tensor[rank::world_size].split(args.batch_size) for tensor in test_set)
    global_batch = args.batch_size * world_size
    steps_per_epoch = len(x) // global_batch  # samples that fill no batch are left out
    total_steps = args.epochs * steps_per_epoch
    if total_steps == 0:
        sys.exit(f"error: {len(x)} samples do not fill a step of {global_batch}: raise --samples")

    torch.manual_seed(args.seed)
    model = build_model().to(device)
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    log(f"world size {world_size} on {device.type}, threads {torch.get_num_threads()} | "
        f"torch {torch.__version__} | global batch {global_batch} of {len(x)} samples")

    for epoch in range(args.epochs):
        start = time.perf_counter()
        loss_sum = correct_sum = 0  # of this process
        shuffle = torch.Generator().manual_seed(hash((args.seed, epoch)))  # equal on all ranks
        order = torch.randperm(len(x), generator=shuffle).to(device)
        for batch in order.split(global_batch)[:steps_per_epoch]:
            indices = batch[rank::world_size]  # the share of this process
            optimizer.zero_grad()
            with autocast:
                loss, correct = loss_and_correct(ddp_model, x[indices], y[indices])
            (loss / args.batch_size).backward()  # DDP averages the gradients of all processes
            optimizer.step()
            schedule.step()
            loss_sum += loss.detach()  # tensors: the CPU does not wait for the GPU
            correct_sum += correct.detach()
        count = steps_per_epoch * args.batch_size
        loss, accuracy = mean_of_all_ranks([loss_sum, correct_sum], count, device)
        seconds = time.perf_counter() - start
        with autocast:
            test_loss, test_accuracy = evaluate(model, zip(test_x, test_y), device)
        log(f"epoch {epoch + 1}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}  "
            f"test loss {test_loss:.4f}  accuracy {test_accuracy:.4f}  "
            f"{steps_per_epoch * global_batch / seconds:,.0f} samples/s")
    close_group()


# ---- Measurement ----
@record
def measure(args):
    """Log images/s, step time, the part of it that the exchange of gradients takes, and memory."""
    args, _, world_size, device = form_group(args)
    model = models.get_model(args.model)
    model.to(device, memory_format=torch.channels_last)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    images = images.to(device, memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    ddp_model = DDP(model, gradient_as_bucket_view=True) if world_size > 1 else model

    def time_step(network):
        """Return the seconds of a training step. Only ddp_model exchanges gradients."""
        dist.barrier()
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(5):
        time_step(ddp_model)
    seconds = [[time_step(ddp_model), time_step(model)] for _ in range(args.steps)]
    seconds = torch.tensor(seconds, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # a step takes as long as that of the slowest rank
    step, step_alone = seconds.median(0).values.tolist()
    log(f"{args.model} | world size {world_size} on {device.type}, "
        f"threads {torch.get_num_threads()} | torch {torch.__version__} | "
        f"{args.batch_size} images of {args.image_size} pixels per process")
    log(f"{world_size * args.batch_size / step:,.1f} images/s  step {1000 * step:.1f} ms, "
        f"without exchange {1000 * step_alone:.1f} ms  "
        f"communication overhead {100 * (1 - step_alone / step):.1f} %  "
        f"gradients {sum(parameter.nbytes for parameter in model.parameters()) / 1e6:.1f} MB  "
        f"peak memory of rank 0 {peak_memory(device) / 1e6:,.0f} MB")
    close_group()


def peak_memory(device):
    """Return the most bytes that tensors have used on this GPU, or this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # elsewhere in KiB


def main():
    args = parse_args()
    if args.model:
        measure(args)
    else:
        train(args)


# ---- Below, functions of the same name are equal in all scripts: read one, skip the others. ----
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


def close_group():
    """Wait until rank 0 has saved: when one process ends, its launcher may end the others."""
    dist.barrier()
    time.sleep(0.5)  # gloo's threads may still work (pytorch#154976): a hang or an abort without it
    dist.destroy_process_group()


def log(message):
    """Print on rank 0. A run does not end because it cannot print."""
    if os.environ.get("RANK", "0") == "0":
        # OSError: a closed pipe. ValueError: an encoding. RuntimeError: a signal's in another print
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            print(message, flush=True)


if __name__ == "__main__":
    main()

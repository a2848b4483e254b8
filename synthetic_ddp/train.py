#!/usr/bin/env python3
"""Train a small MLP on synthetic data with DistributedDataParallel (DDP), or measure a cluster with --model.

    python train.py                          # one process, on a GPU or the CPU
    torchrun --standalone --nproc-per-node=2 train.py
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --kill-on-bad-exit=1 python train.py
    torchrun --standalone --nproc-per-node=4 train.py --model resnet50 --batch-size 64

With --model NAME, nothing is trained or saved: it measures training steps of that torchvision classifier on random
images. The communication overhead is the part of a step that it takes longer than one without exchange of gradients.

With --checkpoint FILE, the same command resumes a run that was stopped or killed, on any number of processes, with the
weights of an uninterrupted run if CPUs, torch, processes and threads are the same. A signal stops it at a log line.

Follows the synthetic_data_example of "A complete tutorial to run a distributed training on multiple nodes with
Pytorch DDP".
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
import zipfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torchvision import models


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=10, help="passes over the data (default %(default)s)")
    add("--batch-size", type=at_least(1), default=32, help="samples per process and step (default %(default)s)")
    add("--lr", type=at_least(0.0), default=0.01, help="initial learning rate of Adam (default %(default)s)")
    add("--seed", type=at_least(0), default=0, help="seed of data, weights and order (default %(default)s)")
    add("--bf16", action="store_true", help="bfloat16; slow on GPUs before A100 and on many CPUs")
    add("--samples", type=at_least(1), default=2048, help="samples to generate (default %(default)s)")
    add("--model", choices=models.list_models(module=models), metavar="NAME",
        help="measure this classifier of torchvision.models instead, for example resnet50")
    add("--image-size", type=at_least(1), default=224, help="with --model: height and width (default %(default)s)")
    add("--steps", type=at_least(1), default=20, help="with --model: after 5 warm-up steps (default %(default)s)")
    add("--checkpoint", type=os.path.realpath, metavar="FILE", help="to save to and resume from (default: none)")
    add("--save-every", type=at_least(1), default=1, metavar="EPOCHS", help="between checkpoints (default %(default)s)")
    add("--log-every", type=at_least(0.0), default=5, metavar="SECONDS", help="0: log every step (default %(default)s)")
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS", help="to wait for others (default %(default)s)")
    return parser.parse_args()


def generate_data(samples, seed, train_set):
    """Return inputs (N, 10) and labels (N,): which of three random linear functions is the largest."""
    functions = torch.randn(3, 10, generator=torch.Generator().manual_seed(seed))  # the same on every rank
    generator = torch.Generator().manual_seed(2 * seed + 1 + train_set)
    inputs = torch.randn(samples if train_set else max(1, samples // 4), 10, generator=generator)
    return inputs, F.linear(inputs, functions).argmax(1)


def measure(args, device):
    """Log images/s, step time, the share of it that the exchange of gradients takes, and peak memory."""
    no_aux = {"aux_logits": False, "init_weights": True} if args.model in ("googlenet", "inception_v3") else {}
    model = models.get_model(args.model, weights=None, **no_aux).to(device, memory_format=torch.channels_last)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    images = images.to(device, memory_format=torch.channels_last)
    labels = torch.randint(1000, (args.batch_size,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    ddp_model = wrap_ddp(model, images[:2])

    def time_step(network):
        """Return the seconds of one training step: DDP exchanges the gradients, the plain model does not."""
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
    seconds = torch.tensor([[time_step(ddp_model), time_step(model)] for _ in range(args.steps)], device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)  # a step takes as long as that of the slowest rank
    step, step_alone = seconds.median(0).values.tolist()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    log(f"{args.model} | world size {dist.get_world_size()} on {device.type}, threads {torch.get_num_threads()} | "
        f"torch {torch.__version__} | {args.batch_size} images of {args.image_size} pixels per process")
    log(f"{dist.get_world_size() * args.batch_size / step:,.1f} images/s  step {1000 * step:.1f} ms, "
        f"without exchange {1000 * step_alone:.1f} ms  communication overhead {100 * (1 - step_alone / step):.1f} %  "
        f"gradients {gradients / 1e6:.1f} MB  peak memory of rank 0 {peak / 1e6:,.0f} MB")
    close_group()


def train(args):
    rank, local_rank, world_size = setup_environment()
    device = pick_device(local_rank)
    if args.model:
        init_group(rank, world_size, device, args.timeout)
        measure(args, device)
        return
    checkpoint = [load_checkpoint(args.checkpoint) if args.checkpoint and rank == 0 else {}]  # before others wait
    init_group(rank, world_size, device, args.timeout)
    dist.broadcast_object_list(checkpoint)
    checkpoint = checkpoint[0]
    inputs, labels = (tensor.to(device) for tensor in generate_data(args.samples, args.seed, train_set=True))
    test_inputs, test_labels = (tensor.to(device) for tensor in generate_data(args.samples, args.seed, train_set=False))
    settings = {"script": "synthetic_ddp", "samples": args.samples, "batch_size": args.batch_size, "lr": args.lr,
                "seed": args.seed, "bf16": args.bf16}
    global_batch = checkpoint.get("global_batch", args.batch_size * world_size)  # kept when the world size changes
    steps_per_epoch = max(1, len(inputs) // global_batch)
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    step = restore(checkpoint, settings, state, total_steps)
    if min(global_batch, len(inputs)) < world_size:
        sys.exit(f"error: more processes than samples in a batch ({min(global_batch, len(inputs))}): start fewer")
    ddp_model = wrap_ddp(model, inputs[:2])
    log(f"world size {world_size} on {device.type}, threads {torch.get_num_threads()} | torch {torch.__version__} | "
        f"global batch {global_batch} of {len(inputs)} samples | steps {step} to {total_steps}")

    signals, next_log = [], step + 1
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signum) != signal.SIG_IGN:  # nohup python ignores SIGHUP
            signal.signal(signum, lambda signum, _: signals.append(signum))
    for epoch in range(max(0, step - 1) // steps_per_epoch, args.epochs):  # resumed at an epoch's end: evaluate again
        # The order depends on seed and epoch alone, and a resumed run repeats it. What fills no batch is dropped.
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(hash((args.seed, epoch))))
        batches = order.to(device).split(global_batch)[:steps_per_epoch]
        loss_sum = correct = count = 0  # of this process in this epoch
        log_step, log_time = step, time.perf_counter()
        for batch in batches[step - epoch * steps_per_epoch:]:
            indices = batch[rank::world_size]
            x, y = inputs[indices], labels[indices]
            optimizer.param_groups[0]["lr"] = args.lr * (1 - step / total_steps)  # linear decay to 0
            # A model with dropout requires torch.manual_seed(hash((args.seed, step, rank))) here, to resume exactly.
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = ddp_model(x)
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
                    f"accuracy {total_correct / total_count:.4f}  {steps_per_second * len(batch):,.0f} samples/s  "
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
        right, total = evaluate(model, nn.Identity(), test_inputs, test_labels, args)
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

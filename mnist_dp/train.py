#!/usr/bin/env python3
"""Train a small CNN on MNIST with nn.DataParallel: one process, all GPUs of one machine.

Mirrors the nn.DataParallel part of OpenACC's "Distributed Data Parallelism" notebook (its dp/main.py).
DistributedDataParallel is faster, and the only one for several machines: see ../fashionmnist_ddp.

    python train.py                                   # all visible GPUs, or the CPU
    python train.py --device-ids 0,1                  # these two GPUs
    srun --gpus=4 python train.py

To train on your own images: return them from load_images, and your model from CNN.

With --checkpoint FILE the run may be killed at any moment and started again, and ends with the same
bits (on GPUs with --deterministic). FILE.previous is the snapshot before; FILE.status says running,
preempted or finished. A run that cannot save stops at once: better than hours that nothing keeps.
Exit status: 0 finished, 75 stopped by a signal (start it again), 1 failed.
"""
import argparse
import contextlib
import ctypes
import gzip
import io
import math
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

LAUNCHER = os.getppid()  # asked before the imports that take seconds, since it may die meanwhile
if __name__ in ("__main__", "__mp_main__"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends even imports and waits in C++

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

DATASET, IMAGE_SHAPE = "MNIST", (28, 28, 1)  # of torchvision.datasets
FILES = "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte"


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                            formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=5, help="passes over the data")
    add("--batch-size", type=at_least(1), default=128, help="images per step, over all GPUs")
    add("--lr", type=at_least(1e-9, float), default=1e-3, help="learning rate of Adam")
    add("--seed", type=at_least(0), default=0, help="of the weights, the order and the dropout")
    add("--device-ids", type=lambda text: [int(number) for number in text.split(",")], metavar="0,1", help="GPUs to use")
    add("--data-dir", default="data", help="folder of the data set, which is downloaded if it is not there")
    add("--fake-data", type=at_least(10), nargs="?", const=512, metavar="N", help="train on N generated images")
    add("--checkpoint", metavar="FILE", help="snapshot to save and to resume from")
    add("--save-every", type=at_least(1), default=1, metavar="EPOCHS", help="snapshot interval")
    add("--save-every-steps", type=at_least(1), metavar="STEPS", help="snapshot interval within long epochs")
    add("--fresh", action="store_true", help="start over though there is a snapshot")
    add("--log-every", type=at_least(1), default=100, metavar="STEPS", help="interval of progress lines")
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS", help="for the other scripts' sake: one process waits for none")
    add("--bf16", action="store_true", help="compute in bfloat16 where autocast finds it safe")
    add("--deterministic", action="store_true", help="the same bits in every run on a GPU, more slowly")
    return parser.parse_args()


class CNN(nn.Module):
    """The tutorial's model: (N, 1, 28, 28) to (N, 10), 1.2 million parameters; fc1's inputs are in the order H, W, C."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):  # DataParallel's threads know that, but would take float16
            torch.set_autocast_dtype(x.device.type, torch.bfloat16)
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x).movedim(1, 3), 1)  # in the order of channels_last: nothing is copied
        return self.fc2(self.dropout2(F.relu(self.fc1(x))))


def prepare(images):
    """Return uint8 images (N, 28, 28, 1) as floats from 0 to 1 (N, 1, 28, 28)."""
    return images.movedim(3, 1).float().div_(255).contiguous(memory_format=torch.channels_last)


def pick_devices(device_ids, deterministic):
    """Return the GPUs to use, all visible ones where device_ids is None; none means the CPU."""
    gpus = torch.cuda.device_count()
    wrong = [index for index in device_ids or () if not 0 <= index < gpus]
    if wrong or len(set(device_ids or ())) != len(device_ids or ()):
        raise UserError(f"--device-ids {','.join(map(str, device_ids))}: this machine shows {gpus} GPUs, each may be named once, "
                        "the first is 0")
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device_ids = list(range(gpus)) if device_ids is None else device_ids
    try:
        for index in reversed(device_ids):  # the first stays the current one
            torch.cuda.set_device(index)
            torch.ones(1, device="cuda").item()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:  # an old driver, a lost GPU or somebody else's, for example
        raise UserError(f"GPU {index} cannot be used ({one_line(error)}): see nvidia-smi for its driver and its users, name others "
                        "by --device-ids, or set CUDA_VISIBLE_DEVICES= to use the CPU") from error
    return device_ids


@torch.no_grad()
def evaluate(model, images, labels, stop=None):
    """Return how many of the test images the model gets right, and how many it has seen: not all, if `stop` (a StopSignal) came."""
    model.eval()
    hits, tested = torch.zeros((), dtype=torch.int64, device=labels.device), 0
    for x, y in zip(images.split(100), labels.split(100)):
        if stop and stop.seen():
            break
        hits += (model(prepare(x)).argmax(1) == y).sum()
        tested += len(y)
    model.train()
    return hits.item(), tested


def leave(args, step):
    """Say that a signal has stopped the run after this step, which is saved; return the exit status."""
    set_status(args.checkpoint, "preempted")
    print(farewell(args, step))
    return 75


def main():
    worker = find_worker()
    args = parse_arguments()
    if worker.world_size > 1:
        raise UserError("nn.DataParallel is one process for all GPUs: start it with `python train.py` (srun --ntasks=1), "
                        "or take fashionmnist_ddp or cifar10_ddp, which do DistributedDataParallel")
    set_threads(worker)
    keep_memory()
    gpus = pick_devices(args.device_ids, args.deterministic)
    device = torch.device("cuda", gpus[0]) if gpus else torch.device("cpu")
    if not args.fake_data:
        download(args, True)
    images, labels = [tensor.to(device) for tensor in load_images(args, True)]
    test_images, test_labels = [tensor.to(device) for tensor in load_images(args, False)]
    dataset = InMemory(images, labels)
    if args.batch_size > len(dataset):
        raise UserError(f"a batch of {args.batch_size} is more than the {len(dataset)} training images: lower --batch-size")
    steps_per_epoch = math.ceil(len(dataset) / args.batch_size)
    total_steps = args.epochs * steps_per_epoch

    torch.manual_seed(args.seed)
    model = CNN().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
    parallel_model = nn.DataParallel(model, gpus) if len(gpus) > 1 else model
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run = {"script": "mnist_dp", "seed": args.seed, "lr": args.lr, "bf16": args.bf16,
           "data": args.fake_data or DATASET, "batch_size": args.batch_size, "global_batch": args.batch_size}
    snapshot = find_snapshot(args.checkpoint, run, args.fresh) or {"step": 0, "run": run}
    step = snapshot["step"]
    restore(snapshot, parts)
    place = f"{len(gpus)} GPUs" if gpus else f"the CPU, {torch.get_num_threads()} threads"
    print(f"mnist_dp: 1 worker on {socket.gethostname()} | {place} | torch {torch.__version__} | batch {args.batch_size} "
          f"of {len(dataset)} images, {len(test_labels)} to test | steps {step} to {total_steps}")
    if step == 0:
        save_snapshot(args.checkpoint, step, run, parts)  # with --fresh: a restart shall not find the old run
    set_status(args.checkpoint, "running")
    stop = StopSignal()
    if step >= total_steps:
        right, tested = evaluate(parallel_model, test_images, test_labels, stop)
        if tested < len(test_labels):  # a signal has cut it short
            return leave(args, step)
        print(f"already finished, test accuracy {right / tested:.4f} ({right}/{tested}): more --epochs go on "
              f"from {args.checkpoint}, --fresh starts over")
        set_status(args.checkpoint, "finished")
        return 0

    while step < total_steps:
        epoch, first_batch = divmod(step, steps_per_epoch)
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(hash((args.seed, epoch)))).tolist()
        batches = list(BatchSampler(order, args.batch_size, drop_last=False))[first_batch:]
        sums, count, start = torch.zeros(2, device=device), 0, time.perf_counter()
        for x, y in DataLoader(dataset, sampler=batches, batch_size=None):  # indexes a whole batch at once
            x, y = x.to(device), y.to(device)  # there already, but for a data set of your own
            torch.manual_seed(hash((args.seed, step)))  # on all GPUs: the step is the only state, for dropout too
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                logits = parallel_model(prepare(x))
                loss = F.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            sums += torch.stack([loss.detach() * len(y), (logits.argmax(1) == y).sum()])
            count += len(y)
            if step % args.log_every == 0:
                loss_now = loss.item()  # waits for a GPU, before the clock is read
                speed = count / (time.perf_counter() - start)
                left = timedelta(seconds=round((total_steps - step) * args.batch_size / speed))
                print(f"step {step}/{total_steps}  loss {loss_now:.4f}  {speed:,.0f} images/s  {left} left")
            stopped = stop.seen()
            if stopped or save_is_due(args, step, steps_per_epoch):
                if not loss.isfinite():
                    raise UserError(f"the loss is {loss.item()} at step {step}: lower --lr and start over with --fresh")
                save_snapshot(args.checkpoint, step, run, parts)
            if stopped and step < total_steps:
                return leave(args, step)
        (loss, hits), seconds = (sums / count).tolist(), time.perf_counter() - start
        right, tested = evaluate(parallel_model, test_images, test_labels, stop)
        if tested < len(test_labels):  # a signal has cut it short
            save_snapshot(args.checkpoint, step, run, parts)
            return leave(args, step)
        print(f"epoch {epoch + 1}/{args.epochs}  train loss {loss:.4f} accuracy {hits:.4f}  test accuracy "
              f"{right / tested:.4f} ({right}/{tested})  {seconds:.1f} s  {count / seconds:,.0f} images/s")
    set_status(args.checkpoint, "finished")
    return 0


# The blocks below are the same in all scripts of this collection: they keep a run going, whatever it trains.

# --- shared: errors ---
class UserError(Exception):
    """A mistake that one line explains. Rank 0 prints it, unless `speaks` says whether this worker does."""

    def __init__(self, message, speaks=None):
        super().__init__(message)
        self.speaks = os.environ.get("RANK", "0") == "0" if speaks is None else speaks


class ArgumentParser(argparse.ArgumentParser):
    """One that raises UserError: one line, not a page from every worker."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def at_least(minimum, kind=int):
    """Return an argparse type for numbers from minimum on."""
    def number(text):
        if not minimum <= kind(text) < 2**31:  # nor nan or inf
            raise argparse.ArgumentTypeError(f"{text} is not a number from {minimum} to {2**31 - 1}")
        return kind(text)
    return number


def one_line(error):
    """Return what an exception says, on one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def launch(main):
    """Exit with main()'s status; a mistake, or the loss of the other workers, is one line and status 1."""
    sys.stdout.reconfigure(line_buffering=True)  # a log is read while it grows
    status, problem = 1, None
    try:
        status = main()
        if dist.is_initialized() and dist.get_backend() == "nccl":  # gloo's can wait for ever for a peer that has left
            dist.destroy_process_group()
    except OSError as error:  # the output is a closed pipe or a full disk, for example
        problem = one_line(error)
    except UserError as error:
        if not error.speaks:
            time.sleep(5)  # one that speaks leaves first, and its launcher then ends this one
        problem = str(error) if error.speaks or not dist.is_initialized() else None
    except RuntimeError as error:
        if re.search(r"out of memory|can't allocate memory|ALLOC\w*_FAILED", str(error)):
            problem = "out of memory: lower --batch-size or start more workers"
        elif found := re.search("[^\n:]* does not have a deterministic implementation", str(error)):
            problem = f"{found[0].strip()}: leave out --deterministic, or take another model"
        elif isinstance(error, dist.DistError) or re.search("(?i)gloo|nccl|socket|connection|timed out", str(error)):
            problem = (f"lost the other workers ({one_line(error)}): see whether they run and reach "
                       f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}, whether that port is free, and "
                       "whether host names mean 127.* (then export GLOO_SOCKET_IFNAME=<interface>, for GPUs NCCL_SOCKET_IFNAME)")
        else:
            raise
        rank = int(os.environ.get("RANK", 0))
        problem += f" [rank {rank} on {socket.gethostname()}]"
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_DFL)
        time.sleep(min(0.3 * rank, 3))  # the lowest rank speaks; its launcher then ends the others
    with contextlib.suppress(OSError):
        if problem:
            print(f"error: {problem}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(status)  # Python's own teardown can hang in a process group whose peer is gone
# --- end ---


# --- shared: worker ---
class Worker(NamedTuple):
    """Who this process is, among all workers and among those of its machine."""
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    cpus: int = 0  # that a Slurm step grants to each task, where it says so


def find_worker():
    """Return who this process is, from torchrun's variables, else from a Slurm step's, else alone.

    A Slurm step's are translated into torchrun's, which init_process_group reads. The leftovers of
    an allocation, or the shell of `srun --pty`, are no step. UserError names what is missing or wrong.
    """
    env, cpus, names = os.environ, 0, ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    in_pty = "SLURM_PTY_PORT" in env and env.get("SLURM_TASK_PID") != str(os.getpid())
    try:
        if not any(name in env for name in names[:3]):
            if "SLURM_STEP_NUM_TASKS" not in env or in_pty:
                return Worker(0, 0, 1, 1)
            tasks, nodes = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_STEP_NUM_NODES"])
            job, restarts = int(env["SLURM_JOB_ID"]), int(env.get("SLURM_RESTART_COUNT") or 0)
            run_number = 100 * job + 10 * int(env["SLURM_STEP_ID"]) + restarts
            first_host = re.match(r"([^\[,]*)\[?(\d*)", env["SLURM_STEP_NODELIST"])  # n[07-09],m1 begins with n07
            env.setdefault("MASTER_ADDR", "".join(first_host.groups()))
            env.setdefault("MASTER_PORT", str(10000 + run_number % 20000))  # below the ephemeral ports
            env.update(RANK=env["SLURM_PROCID"], LOCAL_RANK=env["SLURM_LOCALID"], WORLD_SIZE=str(tasks),
                       LOCAL_WORLD_SIZE=str(-(-tasks // max(1, nodes))))
            cpus = int(env.get("SLURM_CPUS_PER_TASK") or 0)
        env.setdefault("LOCAL_WORLD_SIZE", "1")  # who starts workers by hand need not say it
        rank, local_rank, world_size, local_world_size, port = [int(env[name]) for name in names[:5]]
        if not (0 <= local_rank <= rank < world_size and 0 < local_world_size and 0 < port < 2**16 and env["MASTER_ADDR"]):
            raise ValueError(" ".join(f"{name}={env[name]}" for name in names) + " do not fit together")
        return Worker(rank, local_rank, world_size, local_world_size, cpus)
    except KeyError as error:
        problem = f"{error.args[0]} is missing from the environment"
    except ValueError as error:
        problem = f"wrong environment: {error}"
    raise UserError(f"{problem}; start with torchrun or srun, or unset {', '.join(names[:3])} for one worker")


def set_threads(worker):
    """Give this worker its share of the cores it may run on, unless the user has set OMP_NUM_THREADS."""
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    by_torchrun = chosen == "1" and worker.local_world_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ
    if chosen and not by_torchrun:  # which sets 1 for several workers: nobody's choice
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as limit:  # a container's
        quota, period = map(int, limit.read().split())
        cores = min(cores, max(1, quota // period))
    torch.set_num_threads(worker.cpus or max(1, cores // worker.local_world_size))


def keep_memory():
    """Let the C library keep what a step frees, in blocks below 32 MB: else Linux clears it again for each, up to a fifth of a step."""
    with contextlib.suppress(AttributeError):  # a C library that is not glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: larger blocks go back, else holes could eat the memory
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: no limit to what is kept
# --- end ---


# --- shared: stop signal ---
def orphaned():
    """Return whether torchrun was killed and has left this worker behind."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != LAUNCHER


class StopSignal:
    """Remembers SIGTERM, SIGINT or SIGUSR1 until all workers leave together; a second one ends this worker at once.

    Repeats within 2 seconds are one signal: torchrun and mp.spawn deliver some twice. A thread reads them from
    a pipe, since a Python handler would not run while the main thread waits in a collective.
    """

    SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1

    def __init__(self):
        self.first = 0.0  # when the first signal came
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        for signum in self.SIGNALS:
            signal.signal(signum, lambda *_: None)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def seen(self):
        """Return whether to leave: a signal came, or nobody will send one any more."""
        return self.first > 0 or orphaned()

    @classmethod
    def ignore(cls, *_):
        """As worker_init_fn of a DataLoader: torchrun signals its processes too, but the training still needs them."""
        for signum in cls.SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def _watch(self, reader):
        while True:
            signum = os.read(reader, 1)[0]
            if signum in self.SIGNALS:  # DataLoader's workers send SIGCHLD
                self.first = self.first or time.monotonic()
                if time.monotonic() - self.first > 2:
                    os._exit(128 + signum)


def farewell(args, step):
    """Return what rank 0 says when a signal has stopped the run."""
    command = "the same command without --fresh" if args.fresh else "the same command"
    kept = f"{command} goes on from {args.checkpoint}" if args.checkpoint else "nothing is kept without --checkpoint"
    return f"stopped by a signal after step {step}: {kept}"
# --- end ---


# --- shared: snapshot ---
def write_whole(path, data, previous=None):
    """Replace the file at path in one step, so that a kill leaves the old or the new; keep the old one as previous."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(f"{path}.tmp", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if previous and os.path.exists(path):
            os.replace(path, previous)
        os.replace(f"{path}.tmp", path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(f"{path}.tmp")
        raise UserError(f"{path} cannot be written ({error.strerror}): make room there, make it writable, keep other runs away, "
                        "or choose another --checkpoint; then start again, the last good snapshot is whole") from error


def set_status(path, word):
    """Say in path.status whether the run is running, preempted or finished: torchrun hides its workers' exit status."""
    if path:
        write_whole(f"{path}.status", f"{word}\n".encode())


def save_is_due(args, step, steps_per_epoch):
    """Return whether --save-every, --save-every-steps or the end of the run asks for a snapshot after this step."""
    every = args.save_every * steps_per_epoch, args.save_every_steps or math.inf, args.epochs * steps_per_epoch
    return any(step % interval == 0 for interval in every)


def save_snapshot(path, step, run, parts):
    """Write the parts' state_dicts (model, optimizer, scheduler) after this step to path, and keep the snapshot before.

    UserError, with both files as they were, where the weights are not finite or the disk does not take them.
    """
    if path:
        data, state = io.BytesIO(), {name: part.state_dict() for name, part in parts.items()}
        if not all(tensor.isfinite().all() for tensor in state["model"].values()):  # which would be resumed for ever
            raise UserError(f"the weights are not finite after step {step}: lower --lr and start over with --fresh")
        torch.save({"step": step, "run": run, **state}, data)
        write_whole(path, data.getbuffer(), previous=f"{path}.previous")


def read_snapshot(path):
    """Return the state at path. Raises OSError, or whatever zipfile, pickle and torch make of a file that is not whole."""
    with open(path, "rb") as file:
        data = io.BytesIO(file.read())
    with zipfile.ZipFile(data) as archive:  # torch.load does not look at the checksums, and reads nothing that is marked a folder
        if archive.testzip() or any(entry.external_attr & 0x10 for entry in archive.infolist()):
            raise ValueError("wrong checksum")
    data.seek(0)
    state = torch.load(data, map_location="cpu", weights_only=True)  # executes nothing
    if set(state) != {"model", "optimizer", "scheduler", "step", "run"}:
        raise ValueError("not a snapshot")
    return state


def find_snapshot(path, run, fresh):
    """Return the newest whole snapshot of this run, or None. A damaged one is kept aside, never overwritten.

    UserError if there is none whole, if one cannot be read, or if it is another run's: `run` differs in more than
    how the global batch is split. A restart by torchrun or Slurm resumes in spite of `fresh`.
    """
    if path is not None and (not os.path.basename(path) or os.path.exists(path) and not os.path.isfile(path)):
        raise UserError(f"--checkpoint '{path}' is empty, a folder or a device: name a file")
    restarted = any(int(os.environ.get(f"{by}_RESTART_COUNT") or 0) for by in ("TORCHELASTIC", "SLURM"))
    damage = None
    for candidate in (path, f"{path}.previous") if path and (restarted or not fresh) else ():
        try:
            state = read_snapshot(candidate)
            differing = [key for key in run if state["run"].get(key) != run[key]]
        except (FileNotFoundError, NotADirectoryError):
            continue
        except Exception as error:
            if isinstance(error, (OSError, MemoryError)) or "allocate memory" in str(error):  # the file may be whole
                raise UserError(f"{candidate} cannot be read ({one_line(error)}): start again when it can, or move it away") from error
            damage = damage or f"{candidate} is damaged ({one_line(error)})"
            continue
        if differing not in ([], ["batch_size"], ["global_batch"]):
            both = ", ".join(f"{key} is {state['run'].get(key)} there, {run[key]} here" for key in differing)
            raise UserError(f"{candidate} is of another run: {both}; give that run's flags, another --checkpoint, or --fresh")
        if damage:
            os.rename(path, f"{path}.damaged-{time.time_ns()}")
            print(f"warning: {damage}: moved aside, going on from {candidate}", file=sys.stderr)
        return state
    if damage:
        raise UserError(f"{damage} and no whole one is before it: move it away, or --fresh to start over")
    return None


def restore(snapshot, parts):
    """Load the snapshot's state_dicts into the parts (model, optimizer, scheduler)."""
    try:
        for name, part in parts.items():
            if name in snapshot:
                part.load_state_dict(snapshot[name])
        schedule = parts["scheduler"]  # --epochs may have changed, and with it the learning rate at this step
        for group, lr, factor in zip(parts["optimizer"].param_groups, schedule.base_lrs, schedule.lr_lambdas):
            group["lr"] = lr * factor(schedule.last_epoch)
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(f"the snapshot does not fit this model ({one_line(error)}): give another --checkpoint, "
                        "or --fresh to start over") from error
# --- end ---


# --- shared: data ---
class InMemory(TensorDataset):
    """Gives a whole batch for a list of indices. index_select copies whole images: on a CPU 10 times faster than [indices]."""

    def __getitem__(self, indices):
        indices = torch.as_tensor(indices).to(self.tensors[0].device, non_blocking=True)  # a GPU's queue is not waited for
        return tuple(tensor.index_select(0, indices) for tensor in self.tensors)


def load_images(args, train):
    """Return images (N, H, W, C) as uint8 and labels (N,) as int64: all in memory, or --fake-data.

    UserError names the folder and the files that torchvision expects there.
    """
    if args.fake_data:
        return fake_images(args.fake_data if train else args.fake_data // 4, args.seed, train)
    try:
        data = getattr(torchvision.datasets, DATASET)(args.data_dir, train=train)
        images, labels = torch.as_tensor(data.data).contiguous(), torch.as_tensor(data.targets)
        images = images.unsqueeze(3) if images.ndim == 3 else images
        if images.shape != (len(labels), *IMAGE_SHAPE) or not 0 <= labels.min() <= labels.max() < 10:
            raise ValueError("images and labels do not fit together")
    except Exception as error:  # whatever torchvision makes of missing and damaged files
        raise UserError(f"{DATASET} cannot be read from {args.data_dir} ({one_line(error)}): it needs {FILES} there; "
                        "--data-dir names another folder, --fake-data needs none") from error
    return images, labels


def fake_images(count, seed, train):
    """Return images like load_images, of ten classes that can be learned: 4 x 4 patches per class, mirrored, under noise."""
    height, width, channels = IMAGE_SHAPE
    patches = torch.randint(256, (10, 4, 2, channels), generator=torch.Generator().manual_seed(seed))
    patches = torch.cat([patches, patches.flip(2)], 2)  # a flip keeps the class
    patterns = patches.repeat_interleave(height // 4, dim=1).repeat_interleave(width // 4, dim=2)
    labels = torch.arange(count) % 10
    noise = torch.randint(256, (count, *IMAGE_SHAPE), generator=torch.Generator().manual_seed(2 * seed + 1 + train))
    return ((2 * patterns[labels] + noise) // 3).to(torch.uint8), labels


def download(args, is_my_task):
    """Fetch the data set, if it is not there and this is the worker to do so; UserError if it cannot be had.

    It goes into a folder of its own, then file by file into place, so that two runs at once do no harm.
    """
    if not is_my_task:
        return
    try:
        load_images(args, train=True)
        load_images(args, train=False)
        return
    except UserError as error:
        missing = error
    socket.setdefaulttimeout(30)  # a firewall that drops packets would hold this for minutes
    try:
        os.makedirs(args.data_dir, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.data_dir) as folder, contextlib.redirect_stdout(io.StringIO()):
            for archive in Path(args.data_dir, DATASET, "raw").glob("*-ubyte.gz"):  # that somebody put there
                unpacked = Path(folder, DATASET, "raw", archive.stem)
                unpacked.parent.mkdir(parents=True, exist_ok=True)
                unpacked.write_bytes(gzip.decompress(archive.read_bytes()))
            getattr(torchvision.datasets, DATASET)(folder, download=True)  # what is still missing
            for file in filter(Path.is_file, Path(folder).rglob("*")):
                target = args.data_dir / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
    except Exception as error:  # no network, a mirror that is down, a full disk
        raise UserError(f"{missing}; downloading failed too ({one_line(error)})") from error
# --- end ---


if __name__ == "__main__":
    launch(main)

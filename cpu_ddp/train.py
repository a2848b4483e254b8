#!/usr/bin/env python3
"""Train a linear model with DistributedDataParallel on CPUs, over gloo.

2048 samples of 20 inputs and 1 output are drawn from known weights plus noise; the run ends by
telling how far the learned weights are from the true ones. Mirrors the "PyTorch DDP on CPU"
tutorials of AWS's awsome-distributed-training (HyperPod Slurm and HyperPod EKS).

    python train.py                                   # one worker
    torchrun --nproc-per-node=2 train.py              # two workers on this machine
    torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py
    srun --nodes=2 --ntasks-per-node=4 python train.py

Elastic, on one or two machines as they come and go, with the same global batch (the variable lets an agent join
a run under way, on torch 2.15; not with --fresh, since a run that an agent joins looks like a first start):

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:2 --nproc-per-node=4 --max-restarts=100 \
        --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py --checkpoint /shared/FILE

With --checkpoint FILE the run may be killed at any moment and started again, and ends with the same
bits. FILE.previous is the snapshot before; FILE.status says running, preempted or finished. A run
that cannot save stops at once: better than hours of work that nothing keeps.
Exit status: 0 finished, 75 stopped by a signal (start it again), 1 failed.
"""
import argparse
import contextlib
import ctypes
import io
import math
import os
import re
import signal
import socket
import sys
import threading
import time
import zipfile
from datetime import timedelta
from typing import NamedTuple

LAUNCHER = os.getppid()  # asked before the imports that take seconds, since it may die meanwhile
if __name__ in ("__main__", "__mp_main__"):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until training starts, Ctrl-C ends even imports and waits in C++

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

INPUTS = 20
NOISE = 0.1  # standard deviation of the targets' noise: the loss can fall to NOISE ** 2, not below


def parse_arguments():
    parser = ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                            formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--epochs", type=at_least(1), default=50, help="passes over the data")
    add("--batch-size", type=at_least(1), default=32, help="samples per worker and step")
    add("--lr", type=at_least(1e-9, float), default=0.02, help="learning rate of SGD, falling to 0 over the epochs")
    add("--seed", type=at_least(0), default=0, help="of the data, the weights and the order")
    add("--samples", type=at_least(1), default=2048, help="samples to generate")
    add("--checkpoint", metavar="FILE", help="snapshot to save and to resume from")
    add("--save-every", type=at_least(1), default=10, metavar="EPOCHS", help="snapshot interval")
    add("--save-every-steps", type=at_least(1), metavar="STEPS", help="snapshot interval within long epochs")
    add("--fresh", action="store_true", help="start over though there is a snapshot")
    add("--log-every", type=at_least(1), default=100, metavar="STEPS", help="interval of progress lines")
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS", help="how long to wait for a silent worker")
    add("--bf16", action="store_true", help="compute in bfloat16 where autocast finds it safe")
    add("--compress", action="store_true", help="exchange gradients in bfloat16: half the bytes, for a slow network")
    return parser.parse_args()


def generate_data(samples, seed):
    """Return inputs (samples, 20), targets (samples, 1) and the true weight (1, 20) and bias (1): equal on every worker."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(1, INPUTS, generator=generator), torch.randn(1, generator=generator)
    inputs = torch.randn(samples, INPUTS, generator=generator)
    noise = NOISE * torch.randn(samples, 1, generator=generator)
    return inputs, F.linear(inputs, weight, bias) + noise, weight, bias


def main():
    worker = find_worker()
    args = parse_arguments()
    set_threads(worker)
    keep_memory()
    join_group(worker, "gloo", args.timeout)
    log = print if worker.rank == 0 else lambda *_: None
    inputs, targets, true_weight, true_bias = generate_data(args.samples, args.seed)

    checkpoint = args.checkpoint if worker.rank == 0 else None  # rank 0 alone reads and writes
    run = {"script": "cpu_ddp", "seed": args.seed, "lr": args.lr, "samples": args.samples, "bf16": args.bf16,
           "compress": args.compress, "batch_size": args.batch_size, "global_batch": args.batch_size * worker.world_size}
    snapshot = load_snapshot(checkpoint, run, args.fresh)
    step, run = snapshot["step"], snapshot["run"]
    global_batch = run["global_batch"]  # a resumed run keeps its own when the number of workers changes
    batch_size = share(global_batch, worker.world_size, len(inputs))
    steps_per_epoch = math.ceil(len(inputs) / global_batch)
    total_steps = args.epochs * steps_per_epoch
    log(f"cpu_ddp: {describe_group()} | global batch {global_batch} of {len(inputs)} samples | steps {step} to {total_steps}")
    if step >= total_steps:
        log(f"already finished: more --epochs go on from {args.checkpoint}, --fresh starts over")

    torch.manual_seed(args.seed)
    model = torch.nn.Linear(INPUTS, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / args.epochs)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    restore(snapshot, parts)
    if step == 0:
        together(save_snapshot, checkpoint, step, run, parts)  # a group that re-forms smaller keeps the global batch
    together(set_status, checkpoint, "running")
    ddp_model = wrap(model, inputs[:2], args.compress)
    sampler = DistributedSampler(inputs, worker.world_size, worker.rank, seed=args.seed)
    progress = Progress(args, StopSignal(), torch.device("cpu"), steps_per_epoch)
    while step < total_steps:
        epoch, first_batch = divmod(step, steps_per_epoch)
        sampler.set_epoch(epoch)
        order = list(sampler)
        batches = zip(inputs[order].split(batch_size), targets[order].split(batch_size))
        progress.start_epoch(step)
        for x, y in list(batches)[first_batch:]:
            torch.default_generator.manual_seed(hash((args.seed, step, worker.rank)))  # for a model with dropout
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                loss = F.mse_loss(ddp_model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step % steps_per_epoch == 0:
                scheduler.step()
            progress.add(loss, 0, len(y))
            stopped = progress.after(step)
            if stopped or save_is_due(args, step, steps_per_epoch):
                together(save_snapshot, checkpoint, step, run, parts)
            if stopped and step < total_steps:
                return leave(checkpoint, args, step)
        loss, _, seconds, speed = progress.epoch()
        log(f"epoch {epoch + 1}/{args.epochs}  train loss {loss:.5f}  {seconds:.2f} s  {speed:,.0f} samples/s")

    set_status(checkpoint, "finished")
    error = torch.cat([(model.weight - true_weight).flatten(), model.bias - true_bias]).abs().max()
    log(f"the learned weights are within {error:.4f} of the true ones; the noise alone moves them by about "
        f"{NOISE / math.sqrt(len(inputs)):.4f}, and keeps the loss from falling below {NOISE ** 2:.5f}")
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


# --- shared: group ---
def fresh_store(worker, timeout):
    """Return a part of the workers' common store that no earlier start has used.

    torchrun keeps one store through all its restarts, with the addresses of workers that have died. So rank 0 names
    a new part to each worker that greets it, until all have confirmed; an old greeting does no harm.
    """
    store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    if orphaned():
        raise UserError("torchrun was killed: this worker leaves that port to its next start")
    token, deadline = os.urandom(8).hex(), time.monotonic() + timeout
    if worker.rank:
        store.set(f"hello {worker.rank}", token)
        part = store.get(f"answer {token}").decode()  # waits for it
        store.set(f"{part} {worker.rank}", "here")
        return dist.PrefixStore(part, store)
    for rank in range(1, worker.world_size):
        while not store.check([f"{token} {rank}"]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out waiting for rank {rank}")
            if store.check([f"hello {rank}"]):
                store.set(f"answer {store.get(f'hello {rank}').decode()}", token)
            time.sleep(0.001)
    return dist.PrefixStore(token, store)


def join_group(worker, backend, timeout, device=None):
    """Form the process group. A worker that does not come or answer within timeout seconds ends the run."""
    def give_up():
        with contextlib.suppress(OSError):
            print("error: the other workers do not answer: see whether they run, or another program has the port "
                  f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(timeout + 10 + min(0.3 * worker.rank, 3), give_up)  # the lowest rank speaks
    timer.daemon = True
    timer.start()
    store = fresh_store(worker, timeout) if worker.world_size > 1 else dist.HashStore()  # alone: needs no port
    dist.init_process_group(backend, store=store, rank=worker.rank, world_size=worker.world_size,
                            timeout=timedelta(seconds=timeout), device_id=device if backend == "nccl" else None)
    timer.cancel()


def together(action, *arguments):
    """Return action(*arguments), run on every worker; if it fails on any, the lowest one says why and all stop."""
    result = problem = None
    try:
        result = action(*arguments)
    except (UserError, OSError) as error:
        problem = f"{error} [rank {dist.get_rank()} on {socket.gethostname()}]"
    problems = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, problem in enumerate(problems):
        if problem:
            raise UserError(problem, speaks=rank == dist.get_rank())
    return result


def describe_group():
    """Return the number of workers, their hosts, backend, threads and torch version, for the first line of the log."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return (f"{len(hosts)} worker{'s' * (len(hosts) > 1)} on {', '.join(dict.fromkeys(hosts))} | {dist.get_backend()}, "
            f"{torch.get_num_threads()} threads each | torch {torch.__version__}")


def average_at_once(state, bucket):
    """Average a small bucket over the workers, as a hook of DDP: each sends its own to all of them.

    That is one round of messages, where gloo's ring takes 2 * (world_size - 1), and a small exchange is all waiting for
    threads to wake up. Beyond about 256 KB for all the copies, the more bytes weigh more than the fewer rounds.
    """
    mine, world_size = bucket.buffer(), dist.get_world_size()
    if mine.is_sparse:
        return allreduce_hook(None, bucket)
    of_all = mine.new_empty(world_size, len(mine))
    dist.all_to_all_single(of_all, mine.div_(world_size).repeat(world_size, 1))  # float16's sum could overflow
    done = torch.futures.Future()
    done.set_result(mine.copy_(sum(of_all)))  # rank by rank: the same bits on any kind of CPU
    return done


def wrap(model, example, compress=False):
    """Return model in DistributedDataParallel, its gradient buckets in their final order.

    DDP reorders them after the first backward pass, and with them the order of summation. Done here, on
    zeros like `example`, a resumed run sums as the undisturbed one. Two samples will do: BatchNorm needs more than one.
    Its buffers are not broadcast every step: nobody reads them before the evaluation. On CPUs small buckets start the
    exchange sooner; on GPUs DDP's default stays. With compress, gradients travel in bfloat16: half the bytes. On CPUs a
    small model's are averaged in one round.
    """
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=None if example.is_cuda else 1)
    ddp_model.broadcast_buffers = False
    if compress:  # in a lambda, since DDP refuses the hook by its name where there is no NCCL
        ddp_model.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    elif not example.is_cuda and 1 < dist.get_world_size() <= 2**18 / sum(part.nbytes for part in model.parameters()):
        ddp_model.register_comm_hook(None, average_at_once)
    buffers = [buffer.clone() for buffer in model.buffers()]
    for _ in range(2):
        ddp_model(torch.zeros_like(example)).sum().backward()
    ddp_model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers):
        buffer.copy_(before)
    return ddp_model
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


# --- shared: progress ---
class Progress:
    """Loss and hits of all workers, reduced about once a second: every step, it would cost half of a small one.

    The stop signal rides on that reduction, so that all workers obey it after the same step.
    """

    def __init__(self, args, stop, device, steps_per_epoch):
        self.args, self.stop, self.device, self.steps_per_epoch = args, stop, device, steps_per_epoch
        self.interval = 1  # steps between two reductions

    def start_epoch(self, step):
        """Forget what was added: an epoch begins, or goes on, after this step."""
        self.loss = self.hits = self.count = 0
        self.totals, self.step = [0.0, 0.0, 0.0], step
        self.start = self.time = time.perf_counter()

    def add(self, loss, hits, count):
        """Add a batch: its mean loss and its hits, tensors that nothing waits for yet, and its number of samples."""
        self.loss += loss.detach() * count
        self.hits += hits
        self.count += count

    def after(self, step):
        """Report and reduce, if it is time to; return whether a signal has reached any worker."""
        logs, steps = step % self.args.log_every == 0, step - self.step
        if step % self.steps_per_epoch and not logs and steps < self.interval:
            return False
        mine = [float(self.loss), float(self.hits), self.count, self.stop.seen()]  # waits for a GPU, before the clock is read
        seconds = time.perf_counter() - self.time
        mine = torch.tensor([*mine, seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine)
        *sums, stopped, worker_seconds = mine.tolist()
        if not math.isfinite(sums[0]):
            raise UserError(f"the loss is {sums[0]} at step {step}: lower --lr and start over with --fresh")
        self.totals = [total + new for total, new in zip(self.totals, sums)]
        steps_per_second = steps * dist.get_world_size() / worker_seconds
        self.interval = max(1, min(2 * self.interval, int(steps_per_second)))
        self.loss = self.hits = self.count = 0
        self.step, self.time = step, time.perf_counter()
        if logs and dist.get_rank() == 0:
            steps = self.args.epochs * self.steps_per_epoch
            left = timedelta(seconds=round((steps - step) / steps_per_second))
            print(f"step {step}/{steps}  loss {sums[0] / sums[2]:.4f}  {sums[2] / seconds:,.0f} samples/s  {left} left")
        return stopped > 0

    def epoch(self):
        """Return the epoch's mean loss, accuracy, seconds and samples per second."""
        loss, hits, count = self.totals
        seconds = time.perf_counter() - self.start
        return loss / count, hits / count, seconds, count / seconds
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


# --- shared: resume ---
def load_snapshot(path, run, fresh):
    """Return this run's snapshot on every worker, or one of step 0, without a model, where there is none.

    Only rank 0 has a path and needs to see the file: the others may be on disks of their own.
    """
    found = [together(find_snapshot, path, run, fresh) or {"step": 0, "run": run}]
    dist.broadcast_object_list(found)
    return found[0]


def share(global_batch, world_size, samples):
    """Return the samples per worker of a global batch; UserError where it cannot be split or exceeds the data."""
    if global_batch > samples:
        raise UserError(f"a global batch of {global_batch} is more than the {samples} training samples: "
                        "lower --batch-size or start fewer workers")
    if global_batch % world_size:
        fitting = [str(n) for n in range(1, global_batch + 1) if global_batch % n == 0]
        raise UserError(f"this run's global batch of {global_batch} cannot be split over {world_size} workers: "
                        f"start {', '.join(fitting)}")
    return global_batch // world_size


def leave(checkpoint, args, step):
    """Say that a signal has stopped the run after this step, which is saved; return the exit status."""
    together(set_status, checkpoint, "preempted")  # nobody leaves before it is written
    if dist.get_rank() == 0:
        print(farewell(args, step))
    return 75
# --- end ---


if __name__ == "__main__":
    launch(main)

"""Train with a script in forked processes, on the tests' own problem: data, model and loss.

The problem takes the place of the functions above train(), as in a user's copy. So a test knows
each sample by its number, and sees each batch in a loss that it has written itself.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch._dynamo  # as the first optimizer does: once, before processes are forked
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
import torchvision  # noqa: F401  once, too
from image_folder import write_images
from launchers import clean_environment, free_port
from scripts import SCRIPTS, load_script
from torch.utils.data import Subset, TensorDataset

# Samples of the problem: no multiple of 2 or 3. The first number of a sample is its own number
TRAIN, VAL = 59, 19
EPOCHS, STEPS = 3, 4


def flags_of(script):
    """Return flags for 3 epochs of 4 steps. 13 samples have unequal shares."""
    size = 12 if script == "synthetic_ddp" else 13  # which requires equal shares
    parts = ("--batch-size", 4) if script == "cifar10_ddp" else ()  # gradient accumulation
    return ("--global-batch", size, "--epochs", EPOCHS, "--lr", 0.1, *parts)


def own_flags(script, folder=None):
    """Return flags to train on generated samples, or on images in a folder, which are written."""
    flags = [*flags_of(script), *SCRIPTS[script].own, "--lr", 0.01, "--epochs", 2]
    if folder:
        place = flags.index("--fake-data")
        flags[place:place + 2] = ["--image-folder", write_images(folder, 60, 5)]
    return flags


class RandomSet(TensorDataset):
    """Adds noise to all numbers of a sample but its own, from each library's random numbers."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        noise = torch.rand(1) + random.random() + sys.modules["numpy"].random.rand()
        return torch.cat([x[:1], x[1:] + noise.float()]), y


class Dropout(nn.Module):
    """Draws random numbers in evaluations, too."""

    def forward(self, x):
        return F.dropout(x, 0.2)


def give_problem(module, script, seen, noisy):
    """Replace what stands above train(). A noisy problem draws random numbers wherever it can."""
    def load_data(args):
        args.classes = ["no", "yes"]
        x = torch.randn(TRAIN + VAL, 4, generator=torch.Generator().manual_seed(0))
        y = (x[:, 1] > 0).long()
        x[:, 0] = torch.arange(TRAIN + VAL)
        sets = [(x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])]
        if SCRIPTS[script].data == "data sets":
            return [(RandomSet if noisy else TensorDataset)(*tensors) for tensors in sets]
        return sets[0] if script == "cpu_ddp" else sets

    def build_model(args):
        layers = [nn.BatchNorm1d(8), Dropout()] if noisy else [nn.Tanh()]
        return nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 2))

    def build_optimizer(args, model, steps=None):
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        seen.append(("start", weights_of(model)))
        optimizer.register_step_post_hook(lambda *_: seen.append(("step", weights_of(model))))
        if not steps:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        return optimizer, schedule

    def augment(args, x, y):
        noise = torch.rand(len(x), 4) * torch.tensor([0, 1, 1, 1]) * noisy
        return x + noise, y

    def loss_and_counts(args, model, x, y):
        kind = "train" if model.training else "val"
        assert torch.is_grad_enabled() == model.training, "an evaluation records for backward()"
        seen.append((kind, x[:, 0].int().tolist(), torch.initial_seed()))
        logits = model(x[:, 1:])
        return F.cross_entropy(logits, y), (logits.argmax(1) == y).sum()

    def loss_of(args, model, x, y):
        return module.loss_and_counts(args, model, x, y)[0]

    def log_results(plain, *arguments):
        seen.append(("results",))
        plain(*arguments)

    for function in (load_data, build_model, build_optimizer, augment, loss_and_counts, loss_of):
        setattr(module, function.__name__, function)
    if hasattr(module, "log_results"):
        wrap(module, "log_results", log_results)
    module.prepare_data = lambda args: None
    module.scale = lambda x, y: (x, y)


def end_at_once():
    """Let close_group() leave the group as it is. To destroy it, it waits for half a second."""
    wrap(time, "sleep", lambda plain, seconds: None if seconds == 0.5 else plain(seconds))
    torch.distributed.destroy_process_group = lambda: None


def weights_of(model):
    """Return the trained weights as one vector."""
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


class Rank(NamedTuple):
    """How a process has ended."""
    code: int  # its exit code; negative: the signal that has killed it
    text: str  # what it has printed, with its error
    seen: list  # ("train" or "val", numbers of a batch, seed), ("start" or "step", weights)


def run(script, *flags, nproc=2, problem="plain", change=lambda module, rank, seen: None):
    """Run main() in forked processes, as torchrun starts them. Return the Rank of each.

    problem: "plain"; "noisy"; "own": the script's own data, model, optimizer and loss. In each
    process, change(module, rank, seen) may replace functions first. If one is killed, so are all.
    """
    port = free_port()
    module = load_script(script)

    def work(rank):
        os.setpgid(0, 0)
        sys.stdout = sys.stderr = open(f"{folder}/{rank}.log", "w", buffering=1)
        os.dup2(sys.stdout.fileno(), 2)
        os.environ.clear()
        os.environ.update(clean_environment(OMP_NUM_THREADS=1))
        if nproc > 1:  # otherwise as python starts it
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc),
                              MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)  # OpenMP's threads are not forked
        torch.seed()  # another state in each process
        random.seed()
        for signum in (signal.SIGINT, signal.SIGHUP):  # which nohup and a shell's & ignore
            signal.signal(signum, signal.SIG_DFL)
        sys.argv = ["train.py", *map(str, flags)]
        seen = []
        if problem != "own":
            end_at_once()
            give_problem(module, script, seen, problem == "noisy")
            if SCRIPTS[script].data == "data sets":
                sys.argv[1:1] = ["--workers", "0"]
        change(module, rank, seen)
        try:
            getattr(module, "main", lambda: module.train(module.parse_args()))()
        finally:
            torch.save(seen, f"{folder}/{rank}.seen")

    def read(rank):
        code, text = processes[rank].exitcode, Path(f"{folder}/{rank}.log").read_text()
        return Rank(code, text, [] if code < 0 else torch.load(f"{folder}/{rank}.seen"))

    with tempfile.TemporaryDirectory() as folder:
        processes = [mp.get_context("fork").Process(target=work, args=(rank,))
                     for rank in range(nproc)]
        for process in processes:
            process.start()
        end = time.monotonic() + 300  # of a hang
        try:
            while any(process.is_alive() for process in processes):
                killed = any((process.exitcode or 0) < 0 for process in processes)
                if killed or time.monotonic() > end:
                    for process in processes:
                        process.kill()
                time.sleep(0.01)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    # A loader process that has just begun would not notice it, and wait for ever
                    os.killpg(process.pid, signal.SIGKILL)
        return [read(rank) for rank in range(nproc)]


def run_to_end(script, *flags, nproc=2, **options):
    """Run a script as run() does. It must end well."""
    ranks = run(script, *flags, nproc=nproc, **options)
    assert [rank.code for rank in ranks] == nproc * [0], (
        f"{script} {flags} must end well on {nproc} processes:\n{text_of(ranks)}")
    return ranks


def text_of(ranks):
    return "\n".join(f"---- rank {number} ends with {rank.code}:\n{rank.text}"
                     for number, rank in enumerate(ranks))


def wrap(place, name, function):
    """Let a call of place.name call function(plain, ...): plain is what place.name was before."""
    plain = getattr(place, name)
    setattr(place, name, lambda *arguments, **options: function(plain, *arguments, **options))


def keep_samples(module, script, part, numbers):
    """Let load_data() return these samples alone of those to train (part 0) or to validate (1)."""
    def load_data(plain, args):
        sets = [plain(args)] if script == "cpu_ddp" else list(plain(args))
        if SCRIPTS[script].data == "data sets":
            sets[part] = Subset(sets[part], numbers)
        else:
            sets[part] = [tensor[torch.tensor(numbers).long()] for tensor in sets[part]]
        return sets[0] if script == "cpu_ddp" else sets

    wrap(module, "load_data", load_data)


def kill_at(place, name, number, signum=signal.SIGKILL):
    """Let this process get a signal at the number-th call of a function of place."""
    def counted(plain, *arguments, **options):
        calls.append(True)
        if len(calls) == number:
            os.kill(os.getpid(), signum)
        return plain(*arguments, **options)

    calls = []
    wrap(place, name, counted)


def kill_in_step(number, signum=signal.SIGKILL):
    """Let this process get a signal when it begins its number-th step."""
    kill_at(torch.optim.Optimizer, "zero_grad", number, signum)


def unequal(one, other, place=""):
    """Return the places at which two checkpoints (paths, or parts of them) differ by a bit."""
    if isinstance(one, Path):
        one, other = (torch.load(path, weights_only=True) for path in (one, other))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in unequal(one[key], other[key], f"{place}/{key}")]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [f"{place}: {one} and {other}"]

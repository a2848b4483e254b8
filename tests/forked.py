"""Train with a script in forked processes, which start at once.

They are as torchrun's, on CPUs. Before main() is called, setup(module, rank) may replace what it
likes in its process: functions of the script's module, those of PyTorch and the system, sys.argv,
os.environ. What it returns is returned for each rank.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from launchers import clean_environment, free_port
from scripts import load_script
from torch.multiprocessing.spawn import ProcessException
from torch.optim.optimizer import register_optimizer_step_post_hook


def fork(nproc, function):
    """Call function(rank) in nproc processes, and return what they return.

    Several have torchrun's variables; one has none, as if python had started it. They hang if none
    of them has computed anything for 30 seconds.
    """
    import torch._dynamo  # noqa: F401  once: each process would import it with its first optimizer
    port = free_port()

    def call(rank):
        torch.set_num_threads(1)  # OpenMP's threads are not forked
        torch.seed()  # another state in each process
        torch.multiprocessing.set_start_method(None, force=True)  # as in a new interpreter
        for signum in (signal.SIGINT, signal.SIGHUP):  # nohup and a shell's & ignore them
            signal.signal(signum, signal.SIG_DFL)
        env = clean_environment(OMP_NUM_THREADS=1)
        if nproc > 1:
            env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.clear()
        os.environ.update(env)
        torch.save(function(rank), f"{folder}/{rank}")

    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(call, nprocs=nproc, join=False,
                                                        start_method="fork")
        computed, last_change = 0, time.monotonic()
        try:
            while not context.join(1):  # raises what one has raised
                before, computed = computed, sum(map(seconds_computed, context.pids()))
                if computed > before + 0.03:
                    last_change = time.monotonic()
                assert time.monotonic() < last_change + 30, "they hang"
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(nproc)]


def seconds_computed(pid):
    """Return the seconds of CPU time that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class End(NamedTuple):
    """The end of each rank."""
    results: list  # what setup has returned; none if a rank was killed, has raised an error, hangs
    statuses: list  # the argument of sys.exit, or 0; then, one: what has happened
    text: str  # what all ranks have printed, and the error


def train_forked(script, *flags, nproc=1, setup=lambda module, rank: None):
    """Run a script's main() in forked processes, after setup(module, rank). Return their End."""
    module = load_script(script)
    main = getattr(module, "main", lambda: module.train(module.parse_args()))

    def call(rank):
        sys.argv = ["train.py", *map(str, flags)]
        sys.stdout = sys.stderr = open(log.name, "a", buffering=1)
        os.dup2(sys.stdout.fileno(), 2)
        result = setup(module, rank)
        status = 0
        try:
            main()
        except SystemExit as end:
            status = end.code
        return result, status

    with tempfile.NamedTemporaryFile("r") as log:
        try:
            ranks, error = fork(nproc, call), ""
        except (AssertionError, ProcessException) as failure:
            ranks, error = [], str(failure)
        results, statuses = [[rank[field] for rank in ranks] for field in range(2)]
        return End(results, statuses or [error.strip().splitlines()[-1]], log.read() + error)


def train_to_end(script, *flags, nproc=1, **options):
    """Run a script's main(), as train_forked() does. It must end well."""
    end = train_forked(script, *flags, nproc=nproc, **options)
    assert end.statuses == nproc * [0], (
        f"{script} must end well, not with {end.statuses}, on {nproc} processes with {flags}\n"
        f"{end.text}")
    return end


def train_and_kill(script, *flags, setup, **options):
    """Run a script's main() until setup's replacements kill it: it may not end by itself."""
    end = train_forked(script, *flags, setup=setup, **options)
    assert "SIGKILL" in str(end.statuses), (
        f"{script} with {flags} must have been killed, and ends with {end.statuses}\n{end.text}")
    return end


def kill_after(number, signum=signal.SIGKILL):
    """Let this process get a signal when it has computed so many steps: at least 1."""
    at_step(lambda count: count == number and os.kill(os.getpid(), signum))


def kill_at_call(place, name, number):
    """Let this process be killed when it calls a function of an object for the number-th time."""
    calls = []

    def count(*_):
        calls.append(True)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    watch(place, name, count)


def at_step(function):
    """Call function(count) after each step of an optimizer in this process."""
    steps = []

    def after_step(*_):
        steps.append(True)
        function(len(steps))

    register_optimizer_step_post_hook(after_step)


def watch(place, name, see):
    """Replace a function of an object by one that calls see(*arguments) before it."""
    function = getattr(place, name)

    def watched(*arguments, **options):
        see(*arguments)
        return function(*arguments, **options)

    setattr(place, name, watched)

"""Train in forked processes, to the end or until a signal stops the run after a step."""

import os
import signal

from checkpoints import load_checkpoint
from functions import no_setup, train
from torch.optim.optimizer import register_optimizer_step_post_hook


def finish(script, *flags, nproc, setup=no_setup):
    """Train to the end, and return for each rank what setup has returned."""
    results = train(script, *flags, nproc=nproc, setup=setup)
    statuses = [status for _, status, _ in results]
    assert statuses == [0] * nproc, f"the run did not end well: {statuses} of {script} {flags}"
    return [result for result, _, _ in results]


def stop(script, *flags, nproc, after, setup=no_setup):
    """Train until a signal stops the run after this step. The last flag is the checkpoint."""
    def setup_and_stop(module, rank):
        setup(module, rank)
        module.CHECK_EVERY = 1
        if rank == 0:
            signal_after(after - 1)

    train(script, *flags, nproc=nproc, setup=setup_and_stop)
    step = load_checkpoint(flags[-1])["step"]
    assert step == after, f"a signal before step {after} has stopped the run after step {step}"


def signal_after(number, signum=signal.SIGTERM):
    """Let this process get a signal when it has computed so many steps: at least 1."""
    steps = []

    def after_step(*_):
        steps.append(number)
        if len(steps) == number:
            os.kill(os.getpid(), signum)

    register_optimizer_step_post_hook(after_step)

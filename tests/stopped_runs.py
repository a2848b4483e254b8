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
        stop_after(after, rank)

    train(script, *flags, nproc=nproc, setup=setup_and_stop)
    step = load_checkpoint(flags[-1])["step"]
    assert step == after, f"a signal in step {after} has stopped the run after step {step}"


def stop_after(number, rank):
    """Let rank 0 get SIGTERM at the end of step `number`."""
    steps = []

    def after_step(*_):
        steps.append(rank)
        if rank == 0 and len(steps) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(after_step)

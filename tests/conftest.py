"""Markers, options, and what may be skipped."""

import os
import random
import re

import launchers  # noqa: F401  finds the GPUs before they are hidden
import pytest
import torch

MARKERS = {
    "slow": "takes long: kills at random moments, launchers, real data",
    "slurm": "starts a Slurm of several nodes on this machine, or several machines",
    "pods": "runs the pods of a Kubernetes manifest",
    "images": "builds an image or starts it",
    "gpu": "requires a GPU",
}
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all but test_gpu.py runs on the CPU
torch.set_num_threads(1)  # two threads that wait for each other are slow on a busy machine


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=4, metavar="N",
                     help="kills at random moments, in all")
    parser.addoption("--kill-seed", type=int, default=random.randrange(10**6), metavar="N",
                     help="seed of their choices")


def pytest_configure(config):
    """Declare the markers. A word of -m that is none of them is an error."""
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    unknown = set(re.findall(r"\w+", config.option.markexpr)) - {"and", "or", "not", *MARKERS}
    if unknown:
        raise pytest.UsageError(f"unknown markers {sorted(unknown)}: they are {sorted(MARKERS)}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """With NO_SKIPS=1 (.ci/run), a skipped test has failed, unless it requires a GPU."""
    report = (yield).get_result()
    if os.environ.get("NO_SKIPS") and report.skipped and "GPU" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"may not be skipped here: {report.longrepr}"

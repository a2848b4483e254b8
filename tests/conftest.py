"""Options of the kill tests, and what may be skipped."""

import os
import random

import launchers  # noqa: F401  finds the GPUs before they are hidden
import pytest
import torch

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all but test_gpu.py runs on the CPU
torch.set_num_threads(1)  # two threads that wait for each other are slow on a busy machine


def pytest_addoption(parser):
    parser.addoption("--chaos-kills", type=int, default=12, metavar="N",
                     help="kills of the kill tests, in all")
    parser.addoption("--chaos-seed", type=int, default=random.randrange(10**6), metavar="N",
                     help="seed of their choices")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """With NO_SKIPS=1 (.ci/run), a skipped test has failed, unless it requires a GPU."""
    report = (yield).get_result()
    if os.environ.get("NO_SKIPS") and report.skipped and "GPU" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"may not be skipped here: {report.longrepr}"

"""Options of the chaos test, and what may be skipped."""

import os
import random

import pytest
import processes  # noqa: F401  finds the GPUs before they are hidden

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all but test_gpu.py runs on the CPU


def pytest_addoption(parser):
    parser.addoption("--chaos-kills", type=int, default=12, metavar="N", help="kills of the chaos test, in all")
    parser.addoption("--chaos-seed", type=int, default=random.randrange(10**6), metavar="N", help="of its choices")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """With NO_SKIPS=1 (.ci/run), a test that is skipped has failed, unless it needs a GPU."""
    report = (yield).get_result()
    if os.environ.get("NO_SKIPS") and report.skipped and "GPU" not in str(report.longrepr):
        report.outcome, report.longrepr = "failed", f"may not be skipped here: {report.longrepr}"

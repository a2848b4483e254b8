"""Options of the chaos test, a time limit for each test, and what may be skipped."""

import os
import random
import signal

import pytest
import helpers  # noqa: F401  finds the GPUs before they are hidden

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all but test_gpu.py runs on the CPU


def pytest_addoption(parser):
    parser.addoption("--chaos-kills", type=int, default=12, metavar="N", help="kills of the chaos test, in all")
    parser.addoption("--chaos-seed", type=int, default=random.randrange(10**6), metavar="N", help="of its choices")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """A test that takes longer than 15 minutes, or than a minute for each kill, fails where it waits."""
    def give_up(*_):
        raise TimeoutError("the test has taken too long")
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(max(900, 60 * item.config.getoption("--chaos-kills")))
    yield
    signal.alarm(0)


pytest_runtest_setup = pytest_runtest_call


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    """With NO_SKIPS=1 (.ci/run), a test that is skipped has failed, unless it needs a GPU."""
    report = (yield).get_result()
    if os.environ.get("NO_SKIPS") and report.skipped and "GPU" not in str(report.longrepr):
        report.outcome, report.longrepr = "failed", f"may not be skipped here: {report.longrepr}"

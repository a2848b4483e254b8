"""What the tests share."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from slurm_lab import slurm_lab  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parent.parent


# --- NO_SKIPS=1 (.ci/run): a test that is skipped has failed, unless it needs a GPU ---
def fail_if_skipped(report):
    if os.environ.get("NO_SKIPS") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "GPU" not in reason:
            report.outcome, report.longrepr = "failed", f"may not be skipped here: {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport():
    fail_if_skipped((yield).get_result())


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report():
    fail_if_skipped((yield).get_result())


def tracked(*patterns):
    """The files under git that match one of the patterns (`*` matches any path); none outside a clone."""
    if not shutil.which("git"):
        return []
    git = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


# --- tests/test_chaos.py ---
def pytest_addoption(parser):
    parser.addoption("--chaos-kills", type=int, default=20, metavar="N", help="kills of the chaos test, over all scripts (20)")
    parser.addoption("--chaos-seed", type=int, metavar="N", help="repeat a chaos test that failed: it prints its seed")


@pytest.fixture
def chaos_seed(request):
    given = request.config.getoption("--chaos-seed")
    seed = random.randrange(10**6) if given is None else given
    print(f"--chaos-seed {seed}")
    return seed

"""tests/benchmark.py runs and prints its table. How fast this machine is, is not tested."""

import re
import sys

from processes import Job, clean_environment
from scripts import ROOT


def test_the_table_has_a_speed_and_a_ratio_for_each_program():
    """A tiny run of mnist_dp, beside this checkout itself."""
    command = [sys.executable, ROOT / "tests/benchmark.py", "--only", "mnist_dp", "--rounds", 1,
               "--size", 0.1, "--other", ROOT]
    with Job([command], [clean_environment()]) as job:
        text = job.finish(300).text
    cells = r"(\| [\d,.]+ \([\d,.]+ to [\d,.]+\) ){4}\|"
    assert re.search(rf"^\| mnist_dp, 1 x 128 {cells}$", text, re.MULTILINE), (
        f"no row with the speed of mnist_dp, and beside tutorial, compute and checkout:\n{text}")

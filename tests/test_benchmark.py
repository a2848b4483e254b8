"""tests/benchmark.py: what it writes and judges, not how fast this machine is."""

import json
import sys

import benchmark
import pytest
from processes import Job, clean_environment
from scripts import ROOT


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the output and the JSON row of a short benchmark of cpu_ddp."""
    path = tmp_path_factory.mktemp("benchmark") / "rows.json"
    flags = ["--only", "cpu_ddp", "--nproc", 2, "--rounds", 1, "--seconds", 0.2, "--json", path]
    command = [sys.executable, ROOT / "tests/benchmark.py", *flags]
    with Job([command], [clean_environment()]) as job:
        result = job.finish(300)
    assert result.status == 0, f"cpu_ddp has no bars, but the status is not 0:\n{result.text}"
    (row,) = json.loads(path.read_text())
    return result.text, row


def test_the_table_has_a_row_for_the_script(measured):
    text, _ = measured
    assert "| cpu_ddp, 2 x 32 |" in text, f"no row of the table:\n{text}"


def test_the_json_names_the_case(measured):
    _, row = measured
    case = {key: row[key] for key in ("script", "precision", "workers")}
    expected = {"script": "cpu_ddp", "precision": "fp32", "workers": 2}
    assert case == expected, f"the row is of {case}, not of {expected}"


def test_all_numbers_are_measured(measured):
    _, row = measured
    for key in benchmark.KEYS:
        assert row[key] > 0, f"{key} was not measured: {row}"


@pytest.mark.parametrize("median, met", [(1.3, True), (1.1, False)])
def test_the_median_is_compared_with_the_bar(median, met, capsys):
    case = benchmark.Case("mnist_dp", 1, 128, 2, 512, least_speedup=1.2)
    row = {"vs_tutorial": [1.0, median, 9.0], "vs_ceiling": []}
    judged = benchmark.judge([(case, row)])
    assert judged == met, f"a speedup of {median} for the bar 1.2:\n{capsys.readouterr().out}"

"""tests/benchmark.py: what it writes and judges, not how fast this machine is."""
import json
import sys

import benchmark
from helpers import ROOT, Job, clean_environment

def test_table_and_json(tmp_path):
    flags = ["--only", "cpu_ddp", "--nproc", 2, "--rounds", 1, "--seconds", 0.2, "--json", tmp_path / "rows.json"]
    with Job([[sys.executable, ROOT / "tests/benchmark.py", *flags]], [clean_environment()]) as job:
        result = job.finish(300)
    assert result.status == 0 and "| cpu_ddp, 2 x 32 |" in result.text, result.text
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert [row.pop(key) for key in ("script", "precision", "workers")] == ["cpu_ddp", "fp32", 2]
    assert row.keys() == {"images_per_s", "vs_tutorial", "vs_ceiling", "peak_mb", "first_step_s"}
    assert min(row.values()) > 0


def test_a_missed_bar():
    case = benchmark.Case("mnist_dp", 1, 128, 2, 512, least_speedup=1.2)
    above, below = ((case, {"vs_tutorial": [1.0, median, 9.0], "vs_ceiling": []}) for median in (1.3, 1.1))
    assert benchmark.judge([above]) and not benchmark.judge([above, below])

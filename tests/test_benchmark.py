"""tests/benchmark.py at its smallest: what it prints and writes, not how fast this machine is."""

import json
import subprocess
import sys
from pathlib import Path

import benchmark
import pytest

HERE = Path(__file__).resolve().parent
KEYS = {"script", "precision", "workers", "images_per_s", "vs_tutorial", "vs_ceiling", "peak_mb", "first_step_s"}


def test_table_and_json(tmp_path):
    line = [sys.executable, str(HERE / "benchmark.py"), "--no-bars", "--rounds", "1", "--window", "0.1",
            "--only", "cpu_ddp", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert set(row) == KEYS
    assert (row["script"], row["precision"], row["workers"]) == ("cpu_ddp", "fp32", benchmark.GPUS or 2)
    assert row["vs_ceiling"] > 0 and row["images_per_s"] > 1
    assert row["vs_tutorial"] > 0 and row["peak_mb"] > 100 and row["first_step_s"] > 0.5
    assert "| cpu_ddp fp32, " in done.stdout and "| cpu_ddp: step / the step written by hand | at most 1.05 |" in done.stdout


@pytest.mark.parametrize("values, bound, upper, holds", [([1.0, 1.3, 9.0], 1.25, False, True), ([1.0, 1.2, 9.0], 1.25, False, False),
                                                         ([1.0, 1.3, 9.0], 1.25, True, False), ([1.2], 1.25, True, True)])
def test_bar(values, bound, upper, holds, capsys):
    assert benchmark.judge([("a", [1.0], 1.0, False), ("b", values, bound, upper)]) == holds
    assert capsys.readouterr().out.count("held") == 1 + holds


def test_quick_has_each_script_once():
    assert sorted(case.script for case in benchmark.cases(quick=True)) == sorted({case.script for case in benchmark.cases(quick=False)})


def test_missed_bar_is_status_1(monkeypatch):
    monkeypatch.setattr(benchmark, "cases", lambda quick: [])
    monkeypatch.setattr(benchmark, "judge", lambda bars: False)
    monkeypatch.setattr(sys, "argv", ["benchmark.py"])
    assert benchmark.main() == 1
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--no-bars"])
    assert benchmark.main() == 0


def test_seconds_to_an_accuracy():
    epochs = [(10.0, 0.88), (20.0, 0.91), (30.0, 0.90)]
    assert benchmark.reach(epochs, 0.90) == (20.0, 2)
    assert benchmark.reach(epochs, 0.92) is None

"""The code on synthetic_ddp's page: a data set of one's own, and the use of the weights."""

import os
import re
import subprocess
import sys

import pytest
import torch
from copies import make_copy
from forked import train_to_end
from scripts import ROOT

PAGE = (ROOT / "synthetic_ddp/README.md").read_text()
PREDICT, OWN_DATA = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with the files of the page's data set."""
    monkeypatch.chdir(tmp_path)
    for name, samples in (("train", 64), ("test", 13)):
        os.mkdir(name)
        for number in range(samples):
            inputs = torch.randn(20)
            torch.save((inputs, inputs[:3].argmax().item()), f"{name}/{number}.pt")
    return tmp_path


def losses(copy, *flags, **options):
    """Train three epochs, and return the numbers of each epoch's line but for the speed."""
    text = train_to_end(copy, "--epochs", 3, "--workers", 1, *flags, **options).text
    return re.findall(r"^epoch .*(?=  .* samples/s)", text, re.MULTILINE)


def test_own_data_model_and_scheduler_train_alike_on_one_and_two_processes(folder):
    """And with random transforms and dropout, which one and two processes draw differently."""
    plain = OWN_DATA.replace("noise=0.1", "noise=0").replace("nn.Dropout(0.2), ", "")
    copies = [make_copy("synthetic_ddp", folder / f"{number}.py", (None, code))
              for number, code in enumerate((plain, OWN_DATA))]
    one = losses(copies[0], "--batch-size", 16)
    two = losses(copies[0], "--batch-size", 8, nproc=2)
    assert len(one) == 3 and one == two, f"one process prints {one}, two {two}"
    noisy = losses(copies[1], "--batch-size", 8, nproc=2)
    assert len(noisy) == 3 and noisy != two, f"with noise and dropout: {noisy}"


def test_the_weights_predict(folder):
    train_to_end("synthetic_ddp", "--epochs", 1, "--workers", 0, "--checkpoint", "run.pt")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PREDICT], capture_output=True, text=True, env=env)
    assert re.fullmatch(r"tensor\(\[[012](, [012]){4}\]\)\n", done.stdout), (
        f"the page's code prints no five classes:\n{done.stdout}{done.stderr}")

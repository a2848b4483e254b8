"""The scripts: a row of one table for each (tests/README.md: how one is added); and pages."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Script(NamedTuple):
    """What the tests know about a script."""
    learn: tuple  # flags with which it learns in one epoch, on the CPU, within a few seconds
    learned: tuple[str, float]  # a name in the log, and what it is at least (a loss: at most) then
    header: str  # what the first line then begins with; {nproc}: processes
    start: tuple[str, int]  # how the smoke test starts it: launcher, processes
    own: tuple  # flags with which it trains on its own data for a moment
    data: str  # what load_data() returns: "tensors", or "data sets", which have loader processes
    saves: str = "epoch"  # what it resumes after: an "epoch", any "step", or "" (it does not save)
    best: bool = True  # whether it has validation samples, and saves the best weights


SCRIPTS = {
    "cpu_ddp": Script(
        learn=("--lr", 0.05, "--global-batch", 16),
        learned=("loss", 2.0),  # without training: about 20
        header="world size {nproc} | global batch 16 ",
        start=("torchrun", 2),
        own=("--samples", 60),
        data="tensors",
        best=False,
    ),
    "mnist_dp": Script(
        learn=("--fake-data", "--lr", 2e-3, "--global-batch", 16),
        learned=("val_accuracy", 0.7),
        header="GPUs none",
        start=("python", 1),
        own=("--fake-data", 60),
        data="tensors",
        saves="",
        best=False,
    ),
    "cifar10_ddp": Script(
        learn=("--fake-data", 256, "--image-size", 16, "--lr", 0.015, "--global-batch", 12),
        learned=("val_accuracy", 0.6),
        header="world size {nproc} on cpu | resnet18 | global batch 12 ",
        start=("torchrun", 2),
        own=("--fake-data", 60, "--model", "squeezenet1_1", "--image-size", 32, "--workers", 1),
        data="data sets",
        saves="step",
    ),
    "fashionmnist_ddp": Script(
        learn=("--fake-data", "--global-batch", 16),
        learned=("val_accuracy", 0.5),
        header="world size {nproc} on cpu | global batch 16 ",
        start=("spawn", 2),
        own=("--fake-data", 60),
        data="tensors",
    ),
    "synthetic_ddp": Script(
        learn=("--lr", 0.05, "--global-batch", 32),
        learned=("val_accuracy", 0.85),
        header="world size {nproc} on cpu | global batch 32 ",
        start=("torchrun", 2),
        own=("--samples", 80, "--workers", 1),
        data="data sets",
    ),
}
DDP_SCRIPTS = [name for name, script in SCRIPTS.items() if script.saves]
STEP_SCRIPTS = [name for name, script in SCRIPTS.items() if script.saves == "step"]
BEST_SCRIPTS = [name for name, script in SCRIPTS.items() if script.best]


def script_path(script):
    """Return the path of a script's file. script is a name, as cpu_ddp, or the path of a copy."""
    return ROOT / script / "train.py" if script in SCRIPTS else Path(script)


def load_script(script):
    """Return a script as a module, to call one of its functions."""
    name = re.sub(r"\W", "_", str(script))
    spec = importlib.util.spec_from_file_location(name, script_path(script))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # to pickle its functions and classes
    spec.loader.exec_module(module)
    return module


def name_of(path):
    """Return a path below the top of the repository: the name of a test's case."""
    return str(path.relative_to(ROOT))


def code_blocks(path, language):
    """Return the blocks of code of a page in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)

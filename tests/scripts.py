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
    saves: str = "epoch"  # what it resumes after: an "epoch", any "step", or "" (it does not save)
    best: bool = True  # whether it has validation samples, and saves the best weights
    several_processes: bool = True
    any_number: bool = True  # of processes. False: the number must divide --global-batch
    data_flag: str = "--fake-data"  # takes the number of generated training samples
    no_children: tuple = ()  # flags with which it starts no loader processes


SCRIPTS = {
    "cpu_ddp": Script(
        learn=("--lr", 0.05, "--global-batch", 16),
        learned=("loss", 2.0),  # without training: about 20
        header="world size {nproc} | global batch 16 ",
        start=("torchrun", 2),
        best=False,
        data_flag="--samples",
    ),
    "mnist_dp": Script(
        learn=("--fake-data", "--lr", 2e-3, "--batch-size", 16),
        learned=("val_accuracy", 0.7),
        header="GPUs none",
        start=("python", 1),
        saves="",
        best=False,
        several_processes=False,
    ),
    "cifar10_ddp": Script(
        learn=("--fake-data", 256, "--image-size", 16, "--lr", 0.3, "--global-batch", 12),
        learned=("val_accuracy", 0.6),
        header="world size {nproc} on cpu | resnet18 | global batch 12 ",
        start=("torchrun", 2),
        saves="step",
        no_children=("--workers", 0),
    ),
    "fashionmnist_ddp": Script(
        learn=("--fake-data", "--global-batch", 16),
        learned=("val_accuracy", 0.5),
        header="world size {nproc} on cpu | global batch 16 ",
        start=("spawn", 2),
    ),
    "synthetic_ddp": Script(
        learn=("--lr", 0.05, "--global-batch", 32),
        learned=("val_accuracy", 0.85),
        header="world size {nproc} on cpu | global batch 32 ",
        start=("torchrun", 2),
        any_number=False,
        data_flag="--samples",
        no_children=("--workers", 0),
    ),
}
DDP_SCRIPTS = [name for name, script in SCRIPTS.items() if script.several_processes]
EPOCH_SCRIPTS = [name for name, script in SCRIPTS.items() if script.saves == "epoch"]
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

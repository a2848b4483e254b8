"""The scripts, and how the tests run them: a new script is added here."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Script(NamedTuple):
    """How the tests run a script."""
    learn: tuple[str, ...]  # flags that are enough to learn in one epoch, with batch_size
    batch_size: int  # for that: of each process; of the only process where there is one
    least_accuracy: float  # on the test set, after that
    smoke_runs: tuple[tuple[str, int], ...]  # of the smoke test: launcher, number of processes
    data_flag: str = "--fake-data"  # takes the number of generated samples
    several_processes: bool = True
    has_test_set: bool = True
    saves: str = "step"  # saves, stops by signals and resumes after any step, or after an "epoch"
    no_children: tuple[str, ...] = ()  # flags with which it starts no processes of its own


SCRIPTS = {
    "cpu_ddp": Script(
        learn=("--lr", "0.05"),
        batch_size=16,
        least_accuracy=0.0,  # it is a regression: test_smoke.py reads its loss
        smoke_runs=(("python", 1), ("torchrun", 2)),
        data_flag="--samples",
        has_test_set=False,
        saves="epoch",
    ),
    "mnist_dp": Script(
        learn=("--fake-data", "--lr", "2e-3"),
        batch_size=16,
        least_accuracy=0.7,
        smoke_runs=(("python", 1),),
        several_processes=False,
        saves="",
    ),
    "cifar10_ddp": Script(
        learn=("--fake-data", "384", "--lr", "0.3"),
        batch_size=4,
        least_accuracy=0.6,
        smoke_runs=(("torchrun", 2),),
        no_children=("--workers", "0"),
    ),
    "fashionmnist_ddp": Script(
        learn=("--fake-data",),
        batch_size=8,
        least_accuracy=0.5,
        smoke_runs=(("srun", 2), ("spawn", 2)),
    ),
    "synthetic_ddp": Script(
        learn=("--lr", "0.05"),
        batch_size=16,
        least_accuracy=0.85,
        smoke_runs=(("torchrun", 2),),
        data_flag="--samples",
        saves="epoch",
        no_children=("--workers", "0"),
    ),
}
DDP_SCRIPTS = [name for name, script in SCRIPTS.items() if script.several_processes]
CHECKPOINT_SCRIPTS = [name for name, script in SCRIPTS.items() if script.saves]
STEP_SCRIPTS = [name for name, script in SCRIPTS.items() if script.saves == "step"]
EPOCH_SCRIPTS = [name for name, script in SCRIPTS.items() if script.saves == "epoch"]


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

"""The scripts, and how the tests run them: a new script is added here."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("cpu_ddp", "mnist_dp", "cifar10_ddp", "fashionmnist_ddp", "synthetic_ddp")


def script_path(script):
    """cpu_ddp, or the path of a copy, as a path."""
    return ROOT / script / "train.py" if script in SCRIPTS else Path(script)

"""Flags: --help lists them, pages rely on their defaults, and each has an effect."""

import ast
import re

import pytest
from scripts import CHECKPOINT_SCRIPTS, DDP_SCRIPTS, ROOT, SCRIPTS, load_script, script_path

# Script, flag, default, and who relies on it: a page, and its words
DEFAULTS = [
    ("cpu_ddp", "epochs", 50, "cpu_ddp", "epoch 50/50"),
    ("cpu_ddp", "batch_size", 32, "cpu_ddp", "global batch 64 "),
    ("cpu_ddp", "samples", 2048, "cpu_ddp", "of 2048 samples"),
    ("cpu_ddp", "lr", 0.02, "cpu_ddp", "loss 0.00"),
    ("mnist_dp", "epochs", 5, ".", "0.9901"),
    ("mnist_dp", "batch_size", 128, "mnist_dp", "batch 128 "),
    ("mnist_dp", "lr", 1e-3, ".", "0.9901"),
    ("cifar10_ddp", "epochs", 30, "cifar10_ddp", "30 epochs"),
    ("cifar10_ddp", "batch_size", 128, "cifar10_ddp", "0.9382"),
    ("cifar10_ddp", "lr", 0.2, "cifar10_ddp", "`--lr` (0.2)"),
    ("cifar10_ddp", "model", "resnet18", "cifar10_ddp", "ResNet-18"),
    ("fashionmnist_ddp", "epochs", 5, "fashionmnist_ddp", "epoch 5/5"),
    ("fashionmnist_ddp", "batch_size", 64, "fashionmnist_ddp", "global batch 128 of 60000"),
    ("fashionmnist_ddp", "lr", 3e-3, "fashionmnist_ddp", "0.9218"),
    ("synthetic_ddp", "epochs", 10, "synthetic_ddp", "epoch 10/10"),
    ("synthetic_ddp", "batch_size", 32, "synthetic_ddp", "global batch 64 "),
    ("synthetic_ddp", "samples", 2048, "synthetic_ddp", "of 2048 samples"),
    ("synthetic_ddp", "lr", 0.01, "synthetic_ddp", "accuracy"),
    ("synthetic_ddp", "image_size", 224, "synthetic_ddp", "--model resnet50"),
    ("synthetic_ddp", "steps", 20, "synthetic_ddp", "20 times"),
    *[(script, "seed", 0, ".", "bitwise") for script in SCRIPTS],
    *[(script, "timeout", 600, "slurm", "10 minutes") for script in DDP_SCRIPTS],
    *[(script, "save_every", 5, ".", "`--save-every` minutes (5)")
      for script in CHECKPOINT_SCRIPTS],
    *[(script, "log_every", 5, ".", "`step` line") for script in CHECKPOINT_SCRIPTS],
    *[(script, "data_dir", "data", script, "--fake-data")
      for script in ("mnist_dp", "cifar10_ddp", "fashionmnist_ddp")],
]


@pytest.mark.parametrize("script, flag, default, folder, words", DEFAULTS)
def test_a_default_is_that_of_the_pages(script, flag, default, folder, words):
    found = vars(load_script(script).parse_args([]))[flag]
    assert found == default, f"{script}: {flag} is {found} by default, but pages rely on {default}"
    page = (ROOT / folder / "README.md").read_text()
    assert words in page, f"{folder}/README.md no longer relies on {flag} {default}: {words!r}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_each_flag_and_its_default(script, capsys):
    module = load_script(script)
    with pytest.raises(SystemExit) as end:
        module.parse_args(["--help"])
    assert end.value.code == 0, f"{script} --help ends with status {end.value.code}"
    blocks = re.split(r"\n  (?=-)", capsys.readouterr().out)  # each begins with a flag
    descriptions = {block.split()[0]: " ".join(block.split()) for block in blocks}
    rows = {flag for name, flag, *_ in DEFAULTS if name == script}
    for flag, default in vars(module.parse_args([])).items():
        option = "--" + flag.replace("_", "-")
        found = descriptions.get(option, "no line")
        assert "(default: " in found, f"{script} --help: {option} has no default in {found!r}"
        if flag in rows:
            assert found.endswith(f"(default: {default})"), (
                f"{script} --help: the default of {option} is {default}, not as in {found}")
        elif flag not in ("image_size", "workers"):  # they depend on model and machine
            assert default in (None, False), f"{script}: add {flag} to the table of defaults"


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_abbreviated_flag_is_an_error(script, capsys):
    """--time, of sbatch, behind the script's name, is none of --timeout."""
    with pytest.raises(SystemExit):
        args = load_script(script).parse_args(["--epoch", "7"])
        pytest.fail(f"{script} takes --epoch for --epochs {args.epochs}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_flag_is_used(script):
    """Above train(), in it or below: --timeout was in vain in three scripts."""
    functions = [node for node in ast.parse(script_path(script).read_text()).body
                 if getattr(node, "name", "parse_args") != "parse_args"]
    used = {node.attr for function in functions for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "args"}
    unused = vars(load_script(script).parse_args([])).keys() - used
    assert not unused, f"{script} does not use its flags {sorted(unused)}"


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_a_checkpoint_that_is_a_link_stays_one(script, tmp_path):
    """To a scratch disk: what it points to is replaced."""
    (tmp_path / "run.pt").symlink_to(tmp_path / "scratch.pt")
    args = load_script(script).parse_args(["--checkpoint", str(tmp_path / "run.pt")])
    assert args.checkpoint == str(tmp_path / "scratch.pt"), (
        f"{script} replaces the link by a file: it saves to {args.checkpoint}")

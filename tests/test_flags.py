"""Flags: --help lists them, pages rely on their defaults, each has an effect.

A user's mistake ends in an error line with the remedy, and ends all processes.
"""

import ast
import re

import pytest
from copies import make_copy
from forked import train_forked
from launchers import run
from scripts import CHECKPOINT_SCRIPTS, SCRIPTS, load_script, script_path

# Pages rely on these: on speeds, accuracies, and what they say of a run without flags
EVERYWHERE = {"seed": 0}
DDP = {**EVERYWHERE, "timeout": 600}
SAVED = {**DDP, "save_every": 5, "log_every": 5}
DEFAULTS = {
    "cpu_ddp": {**DDP, "epochs": 50, "batch_size": 32, "samples": 2048, "lr": 0.02},
    "mnist_dp": {**EVERYWHERE, "epochs": 5, "batch_size": 128, "lr": 1e-3, "data_dir": "data"},
    "cifar10_ddp": {**SAVED, "epochs": 30, "batch_size": 128, "model": "resnet18", "lr": 0.2,
                    "data_dir": "data"},
    "fashionmnist_ddp": {**SAVED, "epochs": 5, "batch_size": 64, "lr": 3e-3, "data_dir": "data"},
    "synthetic_ddp": {**DDP, "epochs": 10, "batch_size": 32, "samples": 2048, "lr": 0.01,
                      "workers": 2},
}
MAY_DIFFER = {"image_size", "workers"}  # by model and machine


@pytest.mark.parametrize("script", SCRIPTS)
def test_defaults(script):
    """A flag that is added is among them, unless it is off by default."""
    found = {name: value for name, value in vars(load_script(script).parse_args([])).items()
             if name in DEFAULTS[script]
             or not (value is None or value is False or name in MAY_DIFFER)}
    assert found == DEFAULTS[script], (
        f"{script}: its defaults are {found}, and pages, and this file's table, rely on "
        f"{DEFAULTS[script]}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_each_flag_and_its_default(script, capsys):
    module = load_script(script)
    with pytest.raises(SystemExit) as end:
        module.parse_args(["--help"])
    assert end.value.code == 0, f"{script} --help ends with status {end.value.code}"
    blocks = re.split(r"\n  (?=-)", capsys.readouterr().out)  # each begins with a flag
    descriptions = {block.split()[0]: " ".join(block.split()) for block in blocks}
    for flag, default in vars(module.parse_args([])).items():
        option = "--" + flag.replace("_", "-")
        found = descriptions.get(option, "no line")
        assert "(default: " in found, f"{script} --help: {option} has no default in {found!r}"
        if flag in DEFAULTS[script]:
            assert found.endswith(f"(default: {default})"), (
                f"{script} --help: the default of {option} is {default}, not as in {found}")


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


# ---- mistakes ----
MISTAKES = {  # script, flags, what the error line names; {folder} is empty
    "a folder and generated images": ("cifar10_ddp", "--image-folder a --fake-data", "not allowed"),
    "several processes of mnist_dp": ("mnist_dp", "--fake-data", "cifar10_ddp", 2),
    "no folder for checkpoints": ("cpu_ddp", "--checkpoint {folder}/absent/run", "absent/run"),
    "samples that fill no step of cpu_ddp": ("cpu_ddp", "--samples 2", "--batch-size", 3),
    "samples that fill no step": ("synthetic_ddp", "--samples 31", "--batch-size"),
    "weights that diverge": ("cpu_ddp", "--lr 1e18 --checkpoint {folder}/run", "--lr", 2),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_line(name, tmp_path):
    script, flags, remedy, *nproc = MISTAKES[name]
    command = f"{name}: {script} {flags}"
    flags = flags.format(folder=tmp_path).split()
    end = train_forked(script, *flags, nproc=sum(nproc) or 1)
    assert end.results, f"{command} must end in an error line, not in a traceback\n{end.text}"
    for rank, status in enumerate(end.statuses):
        error = end.text if status == 2 else str(status)  # argparse has printed it
        assert "error: " in error, f"{command}: rank {rank} has no error line, but {error!r}"
        assert remedy in error, (
            f"{command}: rank {rank}'s error line does not name {remedy!r}:\n{error}")


def test_torchrun_names_the_rank_that_failed_and_its_error(tmp_path):
    copy = make_copy("cpu_ddp", tmp_path / "train.py", (
        'after "optimizer.step()"', 'assert epoch < 3 or rank == 0, "broken on purpose"'))
    status, text = run(copy, launcher="torchrun", nproc=2)
    assert status != 0, f"rank 1 raises an error, and torchrun ends with status 0\n{text}"
    report = text[text.rfind("Root Cause"):]
    for words in (r"rank +: 1 ", "broken on purpose"):
        assert re.search(words, report), f"torchrun's last lines do not have {words!r}:\n{text}"


@pytest.mark.parametrize("script, launcher", [
    ("cpu_ddp", "torchrun"), ("fashionmnist_ddp", "spawn")])
def test_an_error_of_rank_0_is_printed_once_and_ends_all_processes(script, launcher, tmp_path):
    """What only rank 0 sees, it sees before the group is formed: its launcher ends the others."""
    status, text = run(script, SCRIPTS[script].data_flag, 64, "--checkpoint", "absent/run.pt",
                       launcher=launcher, nproc=2, cwd=tmp_path)
    command = f"{script} under {launcher} with --checkpoint absent/run.pt"
    assert status != 0, f"{command} must not end with status 0\n{text}"
    errors = re.findall(r"\berror: .*", text)
    assert len(errors) == 1, f"{command} must print one error line, not {errors}\n{text}"
    assert "absent/run.pt" in errors[0], f"{command}: the error line must name it\n{text}"
    own_text = text.split(" failed (exitcode")[0]  # torchrun's own report comes last
    assert "Traceback" not in own_text, f"{command} must print no traceback\n{text}"

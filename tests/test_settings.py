"""A checkpoint is only resumed by the run that it belongs to.

Each setting that changes the weights is refused if it differs, and the error line names it. A flag
that is added must be among SETTINGS or CHANGE_NO_WEIGHTS here.
"""

import argparse
import functools
import re
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from checkpoints import load_checkpoint
from functions import load_script, train
from recorder import use_small_model
from scripts import DDP_SCRIPTS, SCRIPTS

SETTINGS = {  # flag: another value, and how the error line names the difference
    "--batch-size": ("4", "batch_size 8, not 4"),
    "--lr": ("0.002", "lr 0.001, not 0.002"),
    "--seed": ("5", "seed 3, not 5"),
    "--bf16": (None, "bf16 False, not True"),
    "--samples": ("24", "samples 16, not 24"),
    "--fake-data": ("24", "fake_data 16, not 24"),
    "--model": ("resnet34", "model resnet18, not resnet34"),
    "--pretrained": (None, "pretrained False, not True"),
    "--image-size": ("48", "image_size 32, not 48"),
}
CHANGE_NO_WEIGHTS = {
    "--help",
    "--epochs",  # more of them continue a run
    "--global-batch",  # the checkpoint's is used: see below
    "--data-dir", "--image-folder",  # where the data is: see test_real_data.py, test_own_images.py
    "--checkpoint", "--save-every", "--log-every", "--timeout",
    "--nproc", "--device-ids", "--workers",
    "--steps",  # of synthetic_ddp --model, which trains nothing
}
MEASURES = {("synthetic_ddp", "--model"), ("synthetic_ddp", "--image-size")}  # trains nothing


def flags_of(script):
    """Return the flags that a script's --help names."""
    module = load_script(script)
    flags = set()

    class Parser(argparse.ArgumentParser):
        def parse_args(self, *_):
            for action in self._actions:
                flags.update(name for name in action.option_strings if name.startswith("--"))

    module.argparse = argparse.Namespace(**{**vars(argparse), "ArgumentParser": Parser})
    module.parse_args()
    return flags


CASES = []
for script in SCRIPTS:
    for flag in sorted(flags_of(script)):
        if flag in SETTINGS and (script, flag) not in MEASURES:
            CASES.append((script, flag))


def small_model(script):
    """Return a setup for train() that makes the script fast."""
    def setup(module, rank):
        use_small_model(module, script)
    return setup


def run_once(script, path, *flags, nproc=1):
    """Train for an epoch of 16 samples, and return the argument of sys.exit of each rank."""
    flags = [SCRIPTS[script].data_flag, 16, "--batch-size", 8, "--epochs", 1, "--seed", 3,
             "--lr", 0.001, "--checkpoint", path, *SCRIPTS[script].no_children, *flags]
    ranks = train(script, *flags, nproc=nproc, setup=small_model(script))
    return [code for _, code, _ in ranks]


@functools.cache
def checkpoint_of(script):
    """Return the bytes of a script's checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        codes = run_once(script, path)
        assert codes == [0], f"{script} has ended with {codes}"
        return path.read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.pt"


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_flag_is_a_setting_or_changes_no_weights(script):
    unknown = flags_of(script) - {*SETTINGS} - CHANGE_NO_WEIGHTS
    assert not unknown, (
        f"{script}: does {unknown} change the weights? Then put it into settings in train(), and "
        "into SETTINGS here; if not, into CHANGE_NO_WEIGHTS here")


@pytest.mark.parametrize("script, flag", CASES)
def test_another_setting_is_refused_and_named(script, flag, path):
    value, words = SETTINGS[flag]
    path.write_bytes(checkpoint_of(script))
    flags = [flag]
    if value:
        flags.append(value)
    (code,) = run_once(script, path, *flags)
    assert words in str(code), (
        f"{script} has resumed with another {flag}, or does not name it. Its error line must say "
        f"{words!r}; put {flag} into settings in train(). It ended with: {code!r}")
    assert code.startswith("error: "), f"{script}: no error line: {code!r}"
    assert str(path) in code, f"{script}: the error line does not name {path}: {code!r}"
    assert "--checkpoint" in code, f"{script}: the error line has no remedy: {code!r}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_equal_settings_are_accepted(script, path):
    path.write_bytes(checkpoint_of(script))
    codes = run_once(script, path)
    assert codes == [0], f"{script} has not accepted its own checkpoint: {codes}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_checkpoint_of_another_script_is_refused(script, path):
    other = "mnist_dp" if script == "cpu_ddp" else "cpu_ddp"
    path.write_bytes(checkpoint_of(other))
    (code,) = run_once(script, path)
    assert f"script {other}, not {script}" in str(code), (
        f"{script} has resumed from a checkpoint of {other}, or does not say so: {code!r}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_number_of_samples_is_a_setting(script, path):
    """Also of real images: it shows that the data has changed."""
    path.write_bytes(checkpoint_of(script))
    settings = load_checkpoint(path)["settings"]
    unit = "images" if SCRIPTS[script].has_images else "samples"
    assert settings.get(unit) == 16, f"{script}: no {unit}: 16 in the checkpoint's {settings}"


def test_a_setting_that_is_new_and_none_is_accepted(path):
    """A flag that is added later, with None as its default, leaves old checkpoints usable."""
    path.write_bytes(checkpoint_of("cifar10_ddp"))
    checkpoint = load_checkpoint(path)
    del checkpoint["settings"]["classes"]  # None without a folder of images
    torch.save(checkpoint, path)
    codes = run_once("cifar10_ddp", path)
    assert codes == [0], f"a checkpoint without a setting that is None is refused: {codes}"


# ---- the global batch ----
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_another_global_batch_is_refused_and_named(script, path):
    path.write_bytes(checkpoint_of(script))
    for code in run_once(script, path, "--global-batch", 16, nproc=2):
        assert "global batch 8, not 16" in str(code), (
            f"{script} has resumed with another --global-batch, or does not name it: {code!r}")
        assert code.startswith("error: "), f"{script}: no error line: {code!r}"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_same_global_batch_is_accepted(script, path):
    path.write_bytes(checkpoint_of(script))
    codes = run_once(script, path, "--global-batch", 8, nproc=2)
    assert codes == [0, 0], f"{script} has not accepted its own --global-batch: {codes}"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_global_batch_of_the_first_start_stays(script, path):
    """Without --global-batch, two processes take 4 samples each, as one has taken 8."""
    path.write_bytes(checkpoint_of(script))
    codes = run_once(script, path, "--epochs", 2, nproc=2)
    assert codes == [0, 0], f"{script} has not resumed on two processes: {codes}"
    checkpoint = load_checkpoint(path)
    assert checkpoint["global_batch"] == 8, (
        f"{script}: the global batch was 8, and is {checkpoint['global_batch']} after a resume on "
        "two processes")
    assert checkpoint["step"] == 4, (
        f"{script}: 2 epochs of 16 samples have 4 steps of 8, not {checkpoint['step']}")


# ---- the model and the number of steps ----
def edited_model(hidden):
    """Return a setup for train() that edits the model: with hidden features, and a causal mask."""
    def setup(module, rank):
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.Linear(hidden, 10))
        model.register_buffer("mask", torch.full((2,), -torch.inf))
        module.CNN = lambda: model
    return setup


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The checkpoint of an edited fashionmnist_ddp, by a symbolic link, and the two links."""
    folder = tmp_path_factory.mktemp("edited")
    (folder / "link").symlink_to("run.pt")
    flags = ("--fake-data", 32, "--epochs", 1, "--checkpoint", folder / "link")
    first = train("fashionmnist_ddp", *flags, nproc=2, setup=edited_model(8))
    second = train("fashionmnist_ddp", *flags, nproc=2, setup=edited_model(9))
    return folder, [code for _, code, _ in first], [code for _, code, _ in second]


def test_a_buffer_that_is_not_finite_is_saved(edited):
    """Such as a causal mask: only weights have to be finite."""
    _, first, _ = edited
    assert first == [0, 0], f"a model with a buffer of -inf does not train: {first}"


def test_a_symbolic_link_to_the_checkpoint_is_followed(edited):
    folder, _, _ = edited
    assert (folder / "link").is_symlink(), "--checkpoint has replaced a symbolic link by a file"
    step = load_checkpoint(folder / "run.pt")["step"]
    assert step == 1, f"the file that the link names has step {step}, not 1"


def test_another_model_is_refused(edited):
    _, _, second = edited
    for code in second:
        assert str(code).startswith("error: "), f"an edited model is no error line: {code!r}"
        assert "another model" in code, f"the error line does not say what differs: {code!r}"
        assert "run.pt" in code, f"the error line does not name the checkpoint: {code!r}"
        assert "--checkpoint" in code, f"the error line has no remedy: {code!r}"
        assert "\n" not in code, f"the error has more than a line: {code!r}"


def test_fewer_epochs_than_the_checkpoint_has_are_refused(path):
    path.write_bytes(checkpoint_of("cpu_ddp"))
    checkpoint = load_checkpoint(path)
    checkpoint["step"] = 3  # an epoch has 2
    torch.save(checkpoint, path)
    (code,) = run_once("cpu_ddp", path)
    assert re.search("error: .*step 3 of 2: increase --epochs", str(code)), (
        f"a checkpoint behind the end of the run must be refused: {code!r}")

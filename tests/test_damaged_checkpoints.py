"""FILE is whole at any moment. One that cannot be used is an error line: no run starts over.

The functions that save and load are equal in all scripts: those of cpu_ddp are tested.
"""

import os
import resource

import pytest
import torch
import torch.nn as nn
from checkpoints import load_checkpoint
from functions import fork, load_script

SETTINGS = {"seed": 0, "global_batch": 8}


@pytest.fixture(scope="module")
def script():
    return load_script("cpu_ddp")


@pytest.fixture
def path(script, tmp_path):
    """A checkpoint of step 1, alone in its folder."""
    save(script, tmp_path / "run.pt", 1)
    return tmp_path / "run.pt"


def save(script, path, step, model=nn.Linear(1000, 10)):
    optimizer = torch.optim.SGD(model.parameters())
    script.save_checkpoint(str(path), model, optimizer, SETTINGS, step)


def error_of(function, *arguments):
    """Return the error line with which a function ends the program, or what it returns."""
    try:
        return f"no error, but {function(*arguments)}"
    except SystemExit as error:
        return str(error)


# --- files that cannot be used ---
class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


DAMAGES = {
    "the first half": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    "code": lambda path: torch.save(
        {"settings": SETTINGS, "model": Malicious(str(path.parent / "run"))}, path),
    "the weights alone": lambda path: torch.save(nn.Linear(2, 2).state_dict(), path),
    "the fifth version": lambda path: torch.save(  # its global batch was no setting
        {"model": {}, "optimizer": {}, "step": 4, "global_batch": 8, "settings": {}}, path),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_cannot_be_used_is_an_error_line_and_is_left(script, path, kind):
    DAMAGES[kind](path)
    before = path.read_bytes()
    error = error_of(script.load_checkpoint, str(path))
    assert error.startswith(f"error: cannot use --checkpoint {path} ("), (
        f"FILE has {kind}: no run may start over, or resume; load_checkpoint has {error}")
    assert path.read_bytes() == before, f"FILE had {kind}: it has been changed"
    assert os.listdir(path.parent) == ["run.pt"], (
        f"FILE had {kind}: its folder has {os.listdir(path.parent)}: code was executed?")


@pytest.mark.parametrize("place", ["absent/run.pt", ".", "file/run.pt", "/proc/run.pt"])
def test_a_folder_that_cannot_be_written_is_an_error_line_at_the_start(script, tmp_path, place):
    """/proc, since the tests may run as root, who can write to any other folder."""
    (tmp_path / "file").touch()
    error = error_of(script.load_checkpoint, str(tmp_path / place))
    assert error.startswith("error: cannot use --checkpoint "), (
        f"--checkpoint {place} cannot be written: the run must end before it trains: {error}")


# --- saving ---
def test_two_runs_on_one_file_leave_it_whole(script, path, monkeypatch):
    """One has written its temporary file, then another one saves, then the first renames."""
    runs = [3]

    def save_another(descriptor):
        if runs:
            save(script, path, runs.pop())

    monkeypatch.setattr(os, "fsync", save_another)
    error = error_of(save, script, path, 2)
    assert error == "no error, but None", f"two runs save to one FILE: {error}"
    assert load_checkpoint(path)["step"] == 2, "two runs save to one FILE: it is not the last one"
    assert os.listdir(path.parent) == ["run.pt"], f"they have left {os.listdir(path.parent)}"


def test_a_checkpoint_is_on_the_disk_before_it_replaces_the_last_one(script, path, monkeypatch):
    """Without fsync, FILE may be empty after a machine is lost."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(load_checkpoint(path)))
    save(script, path, 2)
    assert [checkpoint["step"] for checkpoint in synced] == [1], (
        "the new checkpoint must be written to the disk while FILE is still the old one")


def test_a_full_disk_is_an_error_line_and_leaves_the_last_checkpoint(script, path):
    def save_with_limit(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
        return error_of(save, script, path, 2, nn.Linear(10**5, 10))

    (error,) = fork(1, save_with_limit)
    assert error.startswith(f"error: cannot save {path} ("), f"a full disk: no error line: {error}"
    assert load_checkpoint(path)["step"] == 1, "a full disk: the last checkpoint has changed"
    assert os.listdir(path.parent) == ["run.pt"], f"a full disk: {os.listdir(path.parent)} is left"


def test_weights_that_are_not_finite_are_not_saved(script, path):
    model = nn.Linear(2, 2)
    model.bias.data[1] = torch.nan
    error = error_of(save, script, path, 2, model)
    assert error.startswith("error: weights are not finite"), f"no error line: {error}"
    assert "--lr" in error, f"weights that are not finite: the error line has no remedy: {error}"
    assert load_checkpoint(path)["step"] == 1, "weights that are not finite have replaced FILE"


def test_a_model_with_a_mask_is_saved_through_a_symbolic_link(script, tmp_path):
    """Only weights have to be finite: a causal mask, which is a buffer, is not."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2,), -torch.inf))
    (tmp_path / "link").symlink_to("run.pt")
    path = script.parse_args(["--checkpoint", str(tmp_path / "link")]).checkpoint
    error = error_of(save, script, path, 1, model)
    assert error == "no error, but None", f"a model with a buffer of -inf is not saved: {error}"
    assert (tmp_path / "link").is_symlink(), "--checkpoint has replaced a symbolic link by a file"
    assert load_checkpoint(tmp_path / "run.pt")["step"] == 1, "the link's target is not written"

"""FILE is whole at any moment. One that cannot be used is an error line: no run starts over.

The functions that save and load are equal in all scripts: those of cpu_ddp are tested.
"""
import os
import resource
import threading

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


def save(script, path, step, size=1000):
    model = nn.Linear(size, 10)
    script.save_checkpoint(str(path), model, torch.optim.SGD(model.parameters()), SETTINGS, step)


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


def damage(kind, path):
    """Replace the checkpoint at path by what cannot be used."""
    if kind == "text":
        path.write_text("not a checkpoint")
    elif kind == "the first half":
        path.write_bytes(path.read_bytes()[:path.stat().st_size // 2])
    elif kind == "nothing":
        path.write_bytes(b"")
    elif kind == "code":
        torch.save({"settings": SETTINGS, "model": Malicious(str(path.parent / "run"))}, path)
    elif kind == "the weights alone":
        torch.save(nn.Linear(2, 2).state_dict(), path)
    elif kind == "the fifth version":  # its global batch was not among the settings
        torch.save({"model": {}, "optimizer": {}, "step": 4, "global_batch": 8,
                    "settings": {"script": "cpu_ddp", "samples": 16}}, path)


@pytest.mark.parametrize("kind", ["text", "the first half", "nothing", "code", "the weights alone",
                                  "the fifth version"])
def test_a_file_that_cannot_be_used_is_an_error_line_and_is_left(script, path, kind):
    damage(kind, path)
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
def test_two_runs_on_one_file_leave_it_whole_at_any_moment(script, path, monkeypatch):
    """One has written its temporary file, then another begins to write, then the first renames."""
    begun = threading.Event()
    renamed = threading.Event()
    write = torch.save

    def slow_write(checkpoint, file):
        if checkpoint["step"] == 3:
            file.write(b"the first bytes")
            file.flush()
            begun.set()
            renamed.wait(60)
            file.seek(0)
        write(checkpoint, file)

    def fsync(descriptor):
        if not second.is_alive() and not renamed.is_set():
            second.start()
            begun.wait(60)

    second = threading.Thread(target=save, args=(script, path, 3))
    monkeypatch.setattr(torch, "save", slow_write)
    monkeypatch.setattr(os, "fsync", fsync)
    save(script, path, 2)
    try:
        step = load_checkpoint(path)["step"]
    except Exception as error:
        step = repr(error)
    renamed.set()
    second.join(60)
    assert step == 2, f"two runs save to one FILE: it must be whole at any moment, but is {step}"
    assert load_checkpoint(path)["step"] == 3, "two runs save to one FILE: it is not the last one"
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
        return error_of(save, script, path, 2, 10**5)

    (error,) = fork(1, save_with_limit)
    assert error.startswith(f"error: cannot save {path} ("), f"a full disk: no error line: {error}"
    assert load_checkpoint(path)["step"] == 1, "a full disk: the last checkpoint has changed"
    assert os.listdir(path.parent) == ["run.pt"], f"a full disk: {os.listdir(path.parent)} is left"


def test_weights_that_are_not_finite_are_not_saved(script, path):
    model = nn.Linear(2, 2)
    model.bias.data[1] = torch.nan
    optimizer = torch.optim.SGD(model.parameters())
    error = error_of(script.save_checkpoint, str(path), model, optimizer, SETTINGS, 2)
    assert error.startswith("error: weights are not finite"), f"no error line: {error}"
    assert "--lr" in error, f"weights that are not finite: the error line has no remedy: {error}"
    assert load_checkpoint(path)["step"] == 1, "weights that are not finite have replaced FILE"

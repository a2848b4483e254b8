"""FILE is whole at any moment. One that cannot be used is an error line: no run starts over.

The functions that save and load are equal in all scripts: those of cpu_ddp are tested.
"""

import os
import resource

import pytest
import torch
import torch.nn as nn
from checkpoints import load_checkpoint
from forked import fork
from scripts import load_script

SETTINGS = {"seed": 0, "global_batch": 8}
MODEL = nn.Linear(1000, 10)
MODEL.register_buffer("mask", torch.tensor(-torch.inf))  # only weights have to be finite


@pytest.fixture(scope="module")
def script():
    return load_script("cpu_ddp")


@pytest.fixture
def path(script, tmp_path):
    """A checkpoint of step 1, alone in its folder."""
    save(script, tmp_path / "run.pt", 1)
    return tmp_path / "run.pt"


def save(script, path, step, model=MODEL):
    saved = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    script.save_checkpoint(str(path), saved, SETTINGS, step)


def error_of(function, *arguments):
    """Return the error line with which a function ends the program, or what it returns."""
    try:
        return f"no error, but {function(*arguments)}"
    except SystemExit as error:
        return str(error)


# --- files that cannot be used ---
DAMAGES = {
    "the first half": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    "the weights alone": lambda path: torch.save(MODEL.state_dict(), path),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_cannot_be_used_is_an_error_line_and_is_left(script, path, kind):
    DAMAGES[kind](path)
    before = path.read_bytes()
    error = error_of(script.load_checkpoint, str(path))
    assert error.startswith(f"error: cannot use --checkpoint {path} ("), (
        f"FILE has {kind}: no run may start over, or resume; load_checkpoint has {error}")
    assert path.read_bytes() == before, f"FILE had {kind}: it has been changed"


@pytest.mark.parametrize("place", ["absent/run.pt", "/proc/run.pt", 250 * "x"])
def test_a_file_that_cannot_be_written_is_an_error_line_at_the_start(script, tmp_path, place):
    """/proc, since the tests may run as root, who can write to any other folder."""
    error = error_of(script.load_checkpoint, str(tmp_path / place))
    assert error.startswith("error: cannot use --checkpoint "), (
        f"--checkpoint {place} cannot be written: the run must end before it trains: {error}")


def test_a_run_without_a_checkpoint_yet_starts_and_leaves_no_file(script, tmp_path):
    checkpoint = script.load_checkpoint(str(tmp_path / "run.pt"))
    assert checkpoint == {}, f"there is no FILE, but load_checkpoint returns {checkpoint}"
    assert os.listdir(tmp_path) == [], f"the first start has left {os.listdir(tmp_path)}"


# --- saving ---
def test_file_is_whole_at_any_moment(script, path, monkeypatch):
    """A run saves. While it waits for the disk, another one does."""
    steps = []

    def save_another(descriptor):
        steps.append(load_checkpoint(path)["step"])
        if len(steps) == 1:
            save(script, path, 3)

    monkeypatch.setattr(os, "fsync", save_another)
    error = error_of(save, script, path, 2)
    assert error == "no error, but None", f"two runs save to one FILE: {error}"
    assert steps == [1, 1], f"FILE must be the old one until fsync has been called: {steps}"
    assert load_checkpoint(path)["step"] == 2, "two runs save to one FILE: it is not the last one"
    assert os.listdir(path.parent) == ["run.pt"], f"they have left {os.listdir(path.parent)}"


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
    assert load_checkpoint(path)["step"] == 1, "weights that are not finite have replaced FILE"

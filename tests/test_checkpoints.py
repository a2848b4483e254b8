"""A checkpoint is resumed by the run that it belongs to. FILE is whole at any moment.

One that cannot be used ends the run: no run starts over.
"""

import os
import resource

import pytest
import torch
import torch.nn as nn
from checkpoints import load_checkpoint
from copies import make_copy
from forked import fork, train_forked
from recorder import use_small_model
from scripts import EPOCH_SCRIPTS, SCRIPTS, STEP_SCRIPTS, load_script
from torch.multiprocessing import ProcessRaisedException

CHANGE_NO_WEIGHTS = {"epochs", "batch_size", "bf16", "nproc", "workers", "data_dir", "checkpoint",
                     "save_every", "log_every", "timeout"}


def run_once(script, path, *flags, nproc=1):
    """Train for an epoch of 16 samples, and return the argument of sys.exit of each rank."""
    details = SCRIPTS.get(script, SCRIPTS["fashionmnist_ddp"])  # or a copy of it
    flags = [details.data_flag, 16, "--batch-size", 8, "--epochs", 1, "--seed", 3,
             "--checkpoint", path, *details.no_children, *flags]
    return train_forked(script, *flags, nproc=nproc, setup=use_small_model).statuses


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_a_run_is_defined_by_all_flags_that_change_its_weights(script, tmp_path):
    """A flag that is added is among them, unless it is named in MAY_CHANGE, and here."""
    path = tmp_path / "run.pt"
    run_once(script, path)
    settings = load_checkpoint(path)["settings"]
    flags = vars(load_script(script).parse_args([]))
    missing = flags.keys() - CHANGE_NO_WEIGHTS - settings.keys()
    assert not missing, f"{script}: a run may be resumed with another {missing}, see MAY_CHANGE"
    free = settings.keys() & CHANGE_NO_WEIGHTS
    assert not free, f"{script}: a run cannot be resumed with another {free}, see MAY_CHANGE"


@pytest.mark.parametrize("script", EPOCH_SCRIPTS)
def test_small_scripts_resume_no_other_run_and_keep_the_global_batch(script, tmp_path):
    """Two processes take 4 samples each, as one has taken 8."""
    path = tmp_path / "run.pt"
    run_once(script, path)
    for flag, value in (("--lr", 0.5), ("--seed", 5), ("--samples", 24)):
        (code,) = run_once(script, path, flag, value)
        assert "error: " in str(code) and str(value) in code, (
            f"{script} resumes with another {flag}: {code!r}")
    codes = run_once(script, path, nproc=2)
    assert codes == [0, 0], f"{script} has not resumed on two processes: {codes}"
    global_batch = load_checkpoint(path)["global_batch"]
    assert global_batch == 8, f"{script}: steps had 8 samples, and after a resume {global_batch}"


def test_a_resume_whose_scheduler_would_end_at_another_epoch_is_an_error_line(tmp_path):
    """Its state has the number of epochs: one more would train at the rate 0."""
    run_once("synthetic_ddp", tmp_path / "run.pt")
    (code,) = run_once("synthetic_ddp", tmp_path / "run.pt", "--epochs", 2)
    assert "error: " in str(code) and "'epochs': 1" in code, f"it is resumed: {code!r}"


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_the_settings_and_the_global_batch_of_the_first_start_stay(script, tmp_path):
    """Two processes take 4 samples each, as one has taken 8."""
    path = tmp_path / "run.pt"
    run_once(script, path)
    codes = run_once(script, path, "--batch-size", 4, "--epochs", 2)
    assert codes == [0], f"{script} has not accepted its own checkpoint: {codes}"
    for code in run_once(script, path, "--seed", 5, "--global-batch", 16, nproc=2):
        for words in ("error: ", "seed 3, not 5", "global_batch 8, not 16"):
            assert words in str(code), f"{script} resumes another run's checkpoint: {code!r}"
    codes = run_once(script, path, "--epochs", 3, nproc=2)
    assert codes == [0, 0], f"{script} has not resumed on two processes: {codes}"
    checkpoint = load_checkpoint(path)
    found = checkpoint["settings"]["global_batch"], checkpoint["step"]
    assert found == (8, 6), (
        f"{script}: 3 epochs of 16 samples are 6 steps of 8, not (global batch, step) {found}")


def copy_with_flag(path, kind):
    """Write a copy with a flag --new of a type to path, and return path."""
    return make_copy("fashionmnist_ddp", path, ('before "import signal"', "import pathlib"),
                     ('before "--seed"', f'parser.add_argument("--new", type={kind})'))


@pytest.mark.parametrize("kind", ["int", "float", "lambda text: {text: [float(text), None]}"])
def test_another_value_of_a_setting_is_another_run(kind, tmp_path):
    """nan, as for a bound that is off, is not another value."""
    copy = copy_with_flag(tmp_path / "copy.py", kind)
    value = 1 if kind == "int" else "nan"
    path = tmp_path / "run.pt"
    for epochs in (1, 2):
        (code,) = run_once(copy, path, "--new", value, "--epochs", epochs)
        assert code == 0, f"a {kind} that is {value}: epoch {epochs} of the run ends with {code}"
    (code,) = run_once(copy, path, "--new", 2, "--epochs", 3)
    assert "error: " in str(code) and "new" in code, f"{kind}: another value is resumed: {code!r}"


@pytest.mark.parametrize("kind", ["pathlib.Path", "lambda text: {text}"])
def test_a_setting_that_cannot_be_saved_ends_the_run_at_the_start(kind, tmp_path):
    """torch.load refuses it, or a resume, in another process, cannot compare it."""
    (code,) = run_once(copy_with_flag(tmp_path / "copy.py", kind), tmp_path / "run.pt", "--new", 1)
    assert "JSON" in str(code), f"a flag of the type {kind}: the run ends with {code}"
    assert not (tmp_path / "run.pt").exists(), f"a flag of the type {kind} is saved"


def test_a_new_flag_of_a_copy_is_checked_without_being_named_anywhere(tmp_path):
    """Neither do checkpoints that lack it become useless, if its default is None."""
    flag = 'parser.add_argument("--smoothing", type=float)'
    copy = make_copy("fashionmnist_ddp", tmp_path / "copy.py", ('before "--bf16"', flag))
    path = tmp_path / "run.pt"
    run_once("fashionmnist_ddp", path)
    (code,) = run_once(copy, path, "--smoothing", 0.2)
    assert "smoothing None, not 0.2" in str(code), (
        f"a copy resumes with another value of its new flag, or does not name it: {code!r}")
    codes = run_once(copy, path, "--epochs", 2)
    assert codes == [0], f"a checkpoint without a flag that is None is refused: {codes}"

    path = tmp_path / "run-of-the-copy.pt"
    run_once(copy, path, "--smoothing", 0.2)
    (code,) = run_once("fashionmnist_ddp", path)
    assert "smoothing 0.2, not None" in str(code), (
        f"a checkpoint of a copy with a flag more is resumed without it: {code!r}")


# ---- FILE. Functions are equal in all scripts: those of fashionmnist_ddp are tested ----
SETTINGS = {"seed": 0, "global_batch": 8}
MODEL = nn.Linear(1000, 10)
MODEL.register_buffer("mask", torch.tensor(-torch.inf))  # only weights have to be finite


@pytest.fixture(scope="module")
def script():
    return load_script("fashionmnist_ddp")


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


DAMAGES = {
    "the first half": lambda path: path.write_bytes(path.read_bytes()[:path.stat().st_size // 2]),
    "the weights alone": lambda path: torch.save(MODEL.state_dict(), path),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_cannot_be_used_ends_the_run_and_is_left(path, kind):
    DAMAGES[kind](path)
    before = path.read_bytes()
    statuses = run_once("fashionmnist_ddp", path)
    assert statuses != [0], f"FILE has {kind}: the run must end, and not start over"
    assert path.read_bytes() == before, f"FILE had {kind}: it has been changed, after {statuses}"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user requires root")
def test_a_folder_that_cannot_be_written_is_an_error_line_at_the_start(script, tmp_path):
    """Here, another user's. flags: test_flags.py has a folder that does not exist."""
    os.setresuid(65534, 65534, 0)
    try:
        error = error_of(script.load_checkpoint, str(tmp_path / "run.pt"))
    finally:
        os.setresuid(0, 0, 0)
    assert error.startswith("error: ") and "run.pt" in error, (
        f"no file can be written there: the run must end before it trains: {error}")


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


def test_file_of_a_small_script_is_whole_at_any_moment(path, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.read_bytes() == before))
    seen = []
    load_script("synthetic_ddp").save({"epochs_done": 2}, str(path))
    assert seen == [True], f"FILE must be the old one until fsync has been called once: {seen}"
    assert load_checkpoint(path) == {"epochs_done": 2}, "FILE is not the new one"


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(script, path):
    def save_with_limit(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, 10**5))
        save(script, path, 2, nn.Linear(10**5, 10))

    with pytest.raises(ProcessRaisedException):
        fork(1, save_with_limit)
        pytest.fail("the disk is full, and the run goes on")
    assert load_checkpoint(path)["step"] == 1, "a full disk: the last checkpoint has changed"


def test_weights_that_are_not_finite_are_not_saved(script, path):
    model = nn.BatchNorm1d(2)
    model.bias.data[1] = torch.inf
    error = error_of(save, script, path, 2, model)
    assert error.startswith("error: ") and "NaN" in error, f"a bias is inf: {error}"
    assert load_checkpoint(path)["step"] == 1, "weights that are not finite have replaced FILE"

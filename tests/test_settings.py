"""A checkpoint is only resumed by the run that it belongs to."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from checkpoints import load_checkpoint
from functions import load_script, train
from recorder import use_small_model
from scripts import CHECKPOINT_SCRIPTS, SCRIPTS, script_path

CHANGE_NO_WEIGHTS = {"epochs", "batch_size", "bf16", "nproc", "workers", "data_dir", "checkpoint",
                     "save_every", "log_every", "timeout"}


def run_once(script, path, *flags, nproc=1):
    """Train for an epoch of 16 samples, and return the argument of sys.exit of each rank."""
    def setup(module, rank):
        use_small_model(module)

    name = script if script in SCRIPTS else "fashionmnist_ddp"  # a copy of it
    flags = [SCRIPTS[name].data_flag, 16, "--batch-size", 8, "--epochs", 1, "--seed", 3,
             "--checkpoint", path, *SCRIPTS[name].no_children, *flags]
    return [code for _, code, _ in train(script, *flags, nproc=nproc, setup=setup)]


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


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_a_run_is_defined_by_all_flags_that_change_its_weights(script, path):
    """A flag that is added is among them, unless it is named in NO_EFFECT, and here."""
    path.write_bytes(checkpoint_of(script))
    settings = load_checkpoint(path)["settings"]
    flags = vars(load_script(script).parse_args([]))
    missing = flags.keys() - CHANGE_NO_WEIGHTS - settings.keys()
    assert not missing, f"{script}: a run may be resumed with another {missing}, see NO_EFFECT"
    free = settings.keys() & CHANGE_NO_WEIGHTS
    assert not free, f"{script}: a run cannot be resumed with another {free}, see NO_EFFECT"


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_another_setting_is_refused_and_the_same_accepted(script, path):
    path.write_bytes(checkpoint_of(script))
    codes = run_once(script, path, "--batch-size", 4, "--epochs", 2)
    assert codes == [0], f"{script} has not accepted its own checkpoint: {codes}"
    for code in run_once(script, path, "--seed", 5, nproc=2):
        assert str(code).startswith("error: "), f"{script} resumes with another seed: {code!r}"
        assert "seed 3, not 5" in code, f"the error line does not name the difference: {code!r}"
        assert "--checkpoint" in code, f"the error line has no remedy: {code!r}"


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_the_global_batch_of_the_first_start_stays(script, path):
    """Two processes take 4 samples each, as one has taken 8."""
    path.write_bytes(checkpoint_of(script))
    for code in run_once(script, path, "--global-batch", 16, nproc=2):
        assert "global_batch 8, not 16" in str(code), (
            f"{script} has resumed with another --global-batch, or does not name it: {code!r}")
    codes = run_once(script, path, "--epochs", 2, nproc=2)
    assert codes == [0, 0], f"{script} has not resumed on two processes: {codes}"
    checkpoint = load_checkpoint(path)
    found = checkpoint["settings"]["global_batch"], checkpoint["step"]
    assert found == (8, 4), (
        f"{script}: 2 epochs of 16 samples have 4 steps of a global batch of 8, also if it is "
        f"resumed on two processes; global batch and step are {found}")


def test_a_new_flag_of_a_copy_is_checked_without_being_named_anywhere(path, tmp_path):
    """Neither do checkpoints that lack it become useless, if its default is None."""
    copy = tmp_path / "copy.py"
    line = '    parser.add_argument("--bf16"'
    text = script_path("fashionmnist_ddp").read_text()
    assert text.count(line) == 1, f"fashionmnist_ddp must have this line once: {line}"
    new = '    parser.add_argument("--smoothing", type=float)\n'
    copy.write_text(text.replace(line, new + line))
    path.write_bytes(checkpoint_of("fashionmnist_ddp"))
    codes = run_once(copy, path, "--epochs", 2)
    assert codes == [0], f"a checkpoint without a flag that is None is refused: {codes}"
    (code,) = run_once(copy, path, "--smoothing", 0.2)
    assert "smoothing None, not 0.2" in str(code), (
        f"a copy resumes with another value of its new flag, or does not name it: {code!r}")


def test_a_model_with_a_mask_is_saved_through_a_symbolic_link(tmp_path):
    """Only weights have to be finite: a causal mask, which is a buffer, is not."""
    def setup(module, rank):
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
        model.register_buffer("mask", torch.full((2,), -torch.inf))
        module.CNN = lambda: model

    (tmp_path / "link").symlink_to("run.pt")
    ((_, code, _),) = train("fashionmnist_ddp", "--fake-data", 32, "--epochs", 1, "--checkpoint",
                            tmp_path / "link", setup=setup)
    assert code == 0, f"a model with a buffer of -inf does not train: {code}"
    assert (tmp_path / "link").is_symlink(), "--checkpoint has replaced a symbolic link by a file"
    step = load_checkpoint(tmp_path / "run.pt")["step"]
    assert step == 1, f"the file that the link names has step {step}, not 1"

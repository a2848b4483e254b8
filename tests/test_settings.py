"""A checkpoint is only resumed by the run that it belongs to."""

import pytest
from checkpoints import load_checkpoint
from copies import make_copy
from forked import train_forked
from recorder import use_small_model
from scripts import CHECKPOINT_SCRIPTS, SCRIPTS, load_script

CHANGE_NO_WEIGHTS = {"epochs", "batch_size", "bf16", "nproc", "workers", "data_dir", "checkpoint",
                     "save_every", "log_every", "timeout"}


def run_once(script, path, *flags, nproc=1):
    """Train for an epoch of 16 samples, and return the argument of sys.exit of each rank."""
    details = SCRIPTS.get(script, SCRIPTS["fashionmnist_ddp"])  # or a copy of it
    flags = [details.data_flag, 16, "--batch-size", 8, "--epochs", 1, "--seed", 3,
             "--checkpoint", path, *details.no_children, *flags]
    return train_forked(script, *flags, nproc=nproc, setup=use_small_model).statuses


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
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


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
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


@pytest.mark.parametrize("kind, plain", [
    ("int", True), ("lambda text: {text: [1.5, None]}", True), ("pathlib.Path", False),
    ("lambda text: {text}", False), ("lambda text: torch.ones(2).numpy()", False)])
def test_a_setting_is_a_plain_value_or_an_error_at_the_start(kind, plain, tmp_path):
    """torch.load reads nothing else, and a resume, in another process, compares them."""
    copy = make_copy("fashionmnist_ddp", tmp_path / "copy.py",
                     ('before "import signal"', "import pathlib"),
                     ('before "--seed"', f'parser.add_argument("--new", type={kind})'))
    path = tmp_path / "run.pt"
    (code,) = run_once(copy, path, "--new", 1)
    if not plain:
        assert "setting new" in str(code), f"a flag of the type {kind} ends with {code}"
        return
    assert code == 0, f"a copy with a flag of the type {kind} does not train: {code}"
    (code,) = run_once(copy, path, "--new", 1, "--epochs", 2)
    assert code == 0, f"a copy with a flag of the type {kind} cannot resume: {code}"
    (code,) = run_once(copy, path, "--new", 2, "--epochs", 3)
    assert "new" in str(code), f"a copy resumes with another value of a {kind}: {code!r}"


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

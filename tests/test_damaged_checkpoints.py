"""A damaged checkpoint is detected, the previous one is used, and no run starts over by itself."""
import os
import random
import resource

import pytest
import torch
import torch.nn as nn
from checkpoints import assert_equal, load_checkpoint
from functions import load_script, train
from scripts import SCRIPTS
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchvision import models

FLIPPED_BITS = 1000


@pytest.fixture(scope="module")
def cpu_ddp():
    """The script as a module. Its function load_checkpoint is the same in all scripts."""
    return load_script("cpu_ddp")


@pytest.fixture
def path(saved, tmp_path):
    """A checkpoint of cpu_ddp, beside a previous one that says {"intact": True}."""
    path = tmp_path / "run.pt"
    path.write_bytes(saved)
    torch.save({"intact": True}, f"{path}.previous")
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a checkpoint of cpu_ddp."""
    path = tmp_path_factory.mktemp("saved") / "run.pt"
    train("cpu_ddp", "--epochs", 1, "--checkpoint", path)
    return path.read_bytes()


def was_damaged(loaded):
    """Return whether the previous checkpoint was loaded."""
    return "intact" in loaded


# --- the file ---
def test_intact_checkpoint_is_loaded(cpu_ddp, path):
    loaded = cpu_ddp.load_checkpoint(str(path))
    assert_equal(loaded, {**load_checkpoint(path), "file": str(path)}, "the loaded checkpoint")


def test_flipped_bit_is_detected(cpu_ddp, path, saved, request):
    """One bit of the data is flipped at a time. One that changes nothing may pass."""
    original = {**load_checkpoint(path), "file": str(path)}
    seed = request.config.getoption("--chaos-seed")
    data_bits = 8 * saved.index(b"PK\1\2")  # the archive's directory follows
    detected = 0
    for bit in random.Random(seed).sample(range(data_bits), FLIPPED_BITS):
        flipped = bytearray(saved)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        loaded = cpu_ddp.load_checkpoint(str(path))
        if was_damaged(loaded):
            detected += 1
        else:
            assert_equal(loaded, original, f"bit {bit} is flipped and not detected: the checkpoint")
    assert detected > FLIPPED_BITS // 2, (
        f"of {FLIPPED_BITS} flipped bits of a checkpoint, only {detected} were detected: most are "
        "in weights and names, whose checksums must be verified")


def test_truncated_checkpoint_is_detected(cpu_ddp, path, saved, request):
    generator = random.Random(request.config.getoption("--chaos-seed"))
    sizes = [0, 1, len(saved) - 1]
    for _ in range(50):
        sizes.append(generator.randrange(len(saved)))
    for size in sizes:
        path.write_bytes(saved[:size])
        loaded = cpu_ddp.load_checkpoint(str(path))
        assert was_damaged(loaded), (
            f"of the {len(saved)} bytes of a checkpoint the first {size} are left: it must not be "
            "loaded, but the previous one")


def test_damaged_checkpoint_is_left_as_it_is(cpu_ddp, path, saved):
    path.write_bytes(saved[:1000])
    cpu_ddp.load_checkpoint(str(path))
    assert path.read_bytes() == saved[:1000], "loading has changed a damaged checkpoint"


def test_damaged_checkpoint_is_named_in_a_warning(cpu_ddp, path, saved, capsys):
    path.write_bytes(saved[:1000])
    cpu_ddp.load_checkpoint(str(path))
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"warning: cannot load {path} ("), (
        f"a damaged checkpoint must be named in a warning on stderr, which is: {stderr!r}")


def test_malicious_pickle_is_not_executed(cpu_ddp, path, tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"model": Malicious()}, path)
    loaded = cpu_ddp.load_checkpoint(str(path))
    assert not (tmp_path / "executed").exists(), "a checkpoint's pickled code was executed"
    assert was_damaged(loaded), "a checkpoint with pickled code must not be loaded"


def test_checkpoint_without_its_last_file_is_the_previous_one(cpu_ddp, path):
    """A run that is killed between its two renames leaves FILE.previous alone."""
    path.unlink()
    assert was_damaged(cpu_ddp.load_checkpoint(str(path))), (
        "FILE is absent and FILE.previous is there: FILE.previous must be loaded")


@pytest.mark.parametrize("names", [
    ("run.pt",),
    ("run.pt.previous",),
    ("run.pt", "run.pt.previous"),
])
def test_no_run_starts_over_if_all_files_are_damaged(cpu_ddp, names, tmp_path):
    for name in names:
        (tmp_path / name).write_text("not a checkpoint")
    with pytest.raises(SystemExit) as error:
        loaded = cpu_ddp.load_checkpoint(str(tmp_path / "run.pt"))
        pytest.fail(f"{names} are damaged: the run must end in an error, but loads {loaded}")
    message = str(error.value)
    assert message.startswith("error: "), f"{names} are damaged: no error line, but {message!r}"
    for name in names:
        assert str(tmp_path / name) in message, f"the error line must name {name}: {message!r}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_damaged_files_end_each_script(script, tmp_path):
    for name in ("run.pt", "run.pt.previous"):
        (tmp_path / name).write_text("not a checkpoint")
    flags = (SCRIPTS[script].data_flag, 32, "--epochs", 1, "--checkpoint", tmp_path / "run.pt")
    ((_, code, _),) = train(script, *flags, *SCRIPTS[script].no_children)
    assert str(code).startswith("error: "), (
        f"{script} with damaged checkpoints must end in an error line, but ended with {code!r}")
    left = (tmp_path / "run.pt").read_text()
    assert left == "not a checkpoint", f"{script} has replaced a damaged checkpoint by a new run's"


# --- the previous file ---
@pytest.fixture(scope="module")
def resumed_from_previous(tmp_path_factory):
    """Resume a run of which FILE is damaged. Return its checkpoint and that of an undisturbed run.

    cpu_ddp saves steps 4, 8 and 12. The last one is damaged.
    """
    folder = tmp_path_factory.mktemp("previous")
    flags = ("--samples", 128, "--save-every", 1, "--checkpoint")

    def count(module, rank):
        steps = []
        register_optimizer_step_post_hook(lambda *_: steps.append(rank))
        return steps

    train("cpu_ddp", "--epochs", 3, *flags, folder / "undisturbed.pt")
    train("cpu_ddp", "--epochs", 3, *flags, folder / "run.pt")
    (folder / "run.pt").write_text("damaged")
    ((steps, code, _),) = train("cpu_ddp", "--epochs", 3, *flags, folder / "run.pt", setup=count)
    assert code == 0, f"cpu_ddp with a damaged FILE and an intact FILE.previous ends with {code!r}"
    return folder, len(steps)


def test_run_resumes_from_the_previous_file(resumed_from_previous):
    _, steps = resumed_from_previous
    assert steps == 4, (
        "FILE of step 12 is damaged, FILE.previous is of step 8: the run must compute the 4 steps "
        f"from 8 to 12, not {steps}")


def test_run_from_the_previous_file_ends_with_the_same_weights(resumed_from_previous):
    folder, _ = resumed_from_previous
    assert_equal(load_checkpoint(folder / "run.pt"), load_checkpoint(folder / "undisturbed.pt"),
                 "resumed from FILE.previous, beside an undisturbed run: the checkpoint")


# --- the disk ---
@pytest.fixture(scope="module")
def full_disk(tmp_path_factory):
    """Save a first checkpoint, then resume with a limit of 1 MB a file. Return what was seen."""
    folder = tmp_path_factory.mktemp("full_disk")
    path = folder / "run.pt"
    flags = ("--fake-data", 64, "--batch-size", 16, "--checkpoint", path)
    train("fashionmnist_ddp", "--epochs", 1, *flags)
    saved = path.read_bytes()

    def limit(module, rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))

    ((_, code, _),) = train("fashionmnist_ddp", "--epochs", 2, *flags, setup=limit)
    return path, saved, code


def test_full_disk_is_an_error_line(full_disk):
    path, _, code = full_disk
    assert str(code).startswith(f"error: cannot save {path} ("), (
        f"a checkpoint that does not fit on the disk must be an error line, not {code!r}")


def test_full_disk_leaves_the_last_checkpoint(full_disk):
    path, saved, _ = full_disk
    assert path.read_bytes() == saved, "a checkpoint that did not fit has changed the last one"


# --- the fourth version (commit 0e1f8c5) ---
FOURTH_VERSION = {  # its settings
    "cpu_ddp": {"script": "cpu_ddp", "samples": 32, "batch_size": 16, "lr": 0.01, "seed": 5,
                "bf16": False},
    "mnist_dp": {"script": "mnist_dp", "images": 32, "fake_data": 32, "batch_size": 16, "lr": 0.01,
                 "seed": 5, "bf16": False},
    "fashionmnist_ddp": {"script": "fashionmnist_ddp", "images": 32, "fake_data": 32,
                         "batch_size": 16, "lr": 0.01, "seed": 5, "bf16": False},
    "synthetic_ddp": {"script": "synthetic_ddp", "samples": 32, "batch_size": 16, "lr": 0.01,
                      "seed": 5, "bf16": False},
}


@pytest.mark.parametrize("script", FOURTH_VERSION)
def test_checkpoint_of_the_fourth_version_resumes(script, tmp_path):
    """Its layout: model, optimizer, step, settings, global_batch. The recipe is the same."""
    path = tmp_path / "run.pt"
    flags = (SCRIPTS[script].data_flag, 32, "--batch-size", 16, "--lr", 0.01, "--seed", 5,
             "--checkpoint", path)
    train(script, "--epochs", 1, *flags)
    present = load_checkpoint(path)
    torch.save({"model": present["model"], "optimizer": present["optimizer"], "step": 2,
                "settings": FOURTH_VERSION[script], "global_batch": 16}, path)
    ((_, code, _),) = train(script, "--epochs", 2, *flags)
    assert code == 0, (
        f"{script} must resume a checkpoint of the fourth version, but ended with {code!r}")
    step = load_checkpoint(path)["step"]
    assert step == 4, (
        f"{script} has resumed a checkpoint of the fourth version at step 2 of 4: it must end at "
        f"step 4, not {step}")


def test_cifar10_checkpoint_of_the_fourth_version_is_refused(tmp_path):
    """Its recipe was another one, with one parameter group."""
    path = tmp_path / "run.pt"
    model = models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"script": "cifar10_ddp", "model": "resnet18", "images": 32, "fake_data": 32,
                "batch_size": 16, "lr": 0.1, "seed": 5, "bf16": False}
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2,
                "settings": settings, "global_batch": 16}, path)
    ((_, code, _),) = train("cifar10_ddp", "--fake-data", 32, "--batch-size", 16, "--lr", 0.1,
                            "--seed", 5, "--checkpoint", path, *SCRIPTS["cifar10_ddp"].no_children)
    assert str(code).startswith(f"error: {path} "), (
        "cifar10_ddp has another recipe since the fourth version: its checkpoint must be refused "
        f"by an error line that names it, but the run ended with {code!r}")

"""Code of the pages does what they say."""

import argparse
import functools
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from checkpoints import assert_equal, load_checkpoint
from copies import make_copy
from forked import train_to_end
from image_folder import write_images
from launchers import clean_environment
from recorder import Recorder, record_small_model
from scripts import ROOT, SCRIPTS, load_script

FLAGS = ("--fake-data", 96, "--batch-size", 8, "--epochs")
TEST_LINE = r"epoch (\d)/\d  test loss [\d.]+  accuracy ([\d.]+)"


# The Python blocks of a page, in order: name, and place in a copy of the script (see copies.py).
BEFORE_EPOCHS = 'before "for epoch in range(max("'
BEFORE_LAST_LINE = 'before "test loss {test_loss"'
BLOCKS = {
    "cpu_ddp": [("single process", None)],  # see test_single_to_ddp.py
    "cifar10_ddp": [("use the weights", None)],
    "fashionmnist_ddp": [
        ("own tensors", None),
        ("clipping", 'before "optimizer.step()"'),
        ("compile", 'before "return model, torch.optim.Adam"'),
        ("best weights", BEFORE_EPOCHS),
        ("best weights", BEFORE_LAST_LINE),
        ("F1", None),
        ("F1", 'before "return loss, (logits"'),
        ("F1", BEFORE_LAST_LINE),
        ("TensorBoard", BEFORE_EPOCHS),
        ("TensorBoard", BEFORE_LAST_LINE),
    ],
}


def code_blocks(folder):
    """Return the Python blocks of a folder's page."""
    page = (ROOT / folder / "README.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def edits(script, name):
    """Return the pairs (place, code) of the blocks with this name on a script's page."""
    return [(place, code) for (block_name, place), code in zip(BLOCKS[script], code_blocks(script))
            if block_name == name]


@pytest.mark.parametrize("folder", [".", "containers", "slurm", "tests", *SCRIPTS])
def test_each_block_of_code_is_tested(folder):
    found = len(code_blocks(folder))
    expected = len(BLOCKS.get(folder, []))
    assert found == expected, f"{folder}/README.md has {found} blocks of code, tests run {expected}"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def finish_copy(name, *flags, **how):
    """Train with a copy of fashionmnist_ddp that has the page's edits of this name."""
    copy = make_copy("fashionmnist_ddp", "my.py", *edits("fashionmnist_ddp", name))
    return train_to_end(copy, *flags, **how)


def test_own_tensors_are_learned():
    for name, count in (("train.pt", 1024), ("test.pt", 200)):
        inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(count))
        torch.save((inputs, inputs[:, :3].argmax(1)), name)
    text = finish_copy("own tensors", "--batch-size", 16, "--lr", 0.01, "--epochs", 3, nproc=2).text
    accuracy = float(re.findall(TEST_LINE, text)[-1][1])
    assert accuracy > 0.8, f"the copy of the page does not learn its tensors:\n{text}"


def test_clipping_limits_the_norm_of_the_averaged_gradients():
    ranks = finish_copy("clipping", *FLAGS, 1, nproc=2, setup=Recorder).results
    norms = [gradient.norm().item() for recorder in ranks for gradient in recorder.gradients]
    assert max(norms) == pytest.approx(1.0, abs=0.01), f"clipped to 1.0, gradients are of {norms}"


def test_a_compiled_model_is_saved_under_the_names_of_the_original(tmp_path):
    """Without the compiler behind torch.compile, which takes a minute and requires g++."""
    def setup(module, rank):
        torch.compile = functools.partial(torch.compile, backend="eager")  # of this process

    finish_copy("compile", *FLAGS, 1, "--checkpoint", tmp_path / "run.pt", nproc=2, setup=setup)
    names = list(load_checkpoint(tmp_path / "run.pt")["model"])
    original = list(load_script("fashionmnist_ddp").CNN().state_dict())
    assert names == original, f"the checkpoint of the compiled model has other names: {names}"


def test_the_best_weights_are_those_of_the_best_epoch():
    """The accuracies of the test set are given: the second epoch of three is the best."""
    def setup(module, rank):
        accuracies = iter([0.5, 0.9, 0.7])
        states = []

        def evaluate(model, *_):
            states.append({name: value.clone() for name, value in model.state_dict().items()})
            return 1.0, next(accuracies)

        module.evaluate = evaluate
        return states

    ranks = finish_copy("best weights", *FLAGS, 3, nproc=2, setup=setup).results
    best = torch.load("best.pt")
    assert best["accuracy"] == 0.9, f"the best of 0.5, 0.9, 0.7 is not {best['accuracy']}"
    assert_equal(dict(best["model"]), ranks[0][1], "best.pt")
    settings = best.get("settings", {})
    assert "fake_data" in settings, f"best.pt has no settings to build its model by: {list(best)}"


def test_f1_is_that_of_the_test_images_of_all_ranks():
    ranks, _, _, text = finish_copy("F1", *FLAGS, 2, nproc=3, setup=record_small_model)
    expected = []
    for evaluations in zip(*(recorder.evaluations for recorder in ranks)):
        parts = sum(evaluations, [])
        found = F.one_hot(torch.cat([part.outputs for part in parts]).argmax(1), 10)
        labels = F.one_hot(torch.cat([part.batch[-1] for part in parts]), 10)
        right = (found * labels).sum(0)
        precision, recall = right / found.sum(0), right / labels.sum(0)
        scores = 2 * precision * recall / (precision + recall)
        expected.append(scores.nan_to_num().mean().item())
    printed = [float(number) for number in re.findall(r"^F1 ([\d.]+)$", text, re.MULTILINE)]
    assert printed == pytest.approx(expected, abs=1e-4), (
        f"F1 of the test images of all ranks is {expected}:\n{text}")


def test_tensorboard_gets_the_accuracies_that_rank_0_logs(monkeypatch):
    """A stand-in for the package tensorboard: its SummaryWriter prints."""
    def add_scalar(name, value, number):
        print(f"epoch {number}: {name} {value:.4f}")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", argparse.Namespace(
        SummaryWriter=lambda folder: argparse.Namespace(add_scalar=add_scalar)))
    text = finish_copy("TensorBoard", *FLAGS, 2, nproc=2).text
    written = re.findall(r"^epoch (\d): test accuracy ([\d.]+)$", text, re.MULTILINE)
    assert written == re.findall(TEST_LINE, text), (
        f"TensorBoard gets other values than those of the test lines:\n{text}")


# --- cifar10_ddp/README.md: the trained weights ---
MEANS = """
from pathlib import Path
results = []
for label, name in enumerate(args.classes):
    for path in Path("DIR/val", name).iterdir():
        image = transforms(args, train_set=False)(read_image(path, args.image_size))
        logits = model(normalize(image.unsqueeze(0)))[0]
        results.append([-logits.log_softmax(0)[label], logits.argmax() == label])
print(*torch.tensor(results).mean(0).tolist())
"""


def test_the_weights_classify_as_in_the_run(tmp_path):
    """With another model and another image size than those by default."""
    write_images(tmp_path / "DIR", train=24, val=11)
    flags = ("--image-folder", "DIR", "--model", "shufflenet_v2_x0_5", "--image-size", 48,
             "--lr", 2, "--batch-size", 4, "--epochs", 4, "--workers", 0,
             "--checkpoint", "images.pt")
    text = train_to_end("cifar10_ddp", *flags, nproc=2).text
    assert " 24 images in 2 classes " in text, f"it must train on DIR/train\n{text}"
    expected = re.findall(r"test loss ([\d.]+)  accuracy ([\d.]+)", text)[-1]
    shutil.copy("DIR/val/dog/1.jpg", "image.jpg")
    ((_, code),) = edits("cifar10_ddp", "use the weights")
    process = subprocess.run([sys.executable, "-c", code + MEANS], capture_output=True,
                             text=True, env=clean_environment(PYTHONPATH=ROOT))
    assert process.returncode == 0, f"the page's code fails:\n{process.stderr}"
    name, *means = process.stdout.split()
    assert name in ("cat", "dog"), f"the page's code prints the class of the image, not {name}"
    assert list(map(float, means)) == pytest.approx(list(map(float, expected)), abs=2e-4), (
        f"by the page's code, loss and accuracy of DIR/val are {means}, but in the run:\n{text}")

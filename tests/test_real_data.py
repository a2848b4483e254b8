"""The scripts train on the real data sets, read from the files that their sites offer."""

import gzip
import pickle
import re
import tarfile
from pathlib import Path

import pytest
import torch
from functions import load_script
from processes import run
from stopped_runs import finish
from torchvision.datasets import CIFAR10

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def test_fashion_mnist(tmp_path, capfd):
    """One epoch on the first 4,000 images of Debian's package."""
    if not DEBIAN.exists():
        pytest.skip("requires the real images: apt-get install dataset-fashion-mnist")
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for archive in DEBIAN.glob("*.gz"):
        (raw / archive.stem).write_bytes(gzip.decompress(archive.read_bytes()))

    def first_images(module, rank):
        load_data = module.load_data
        module.load_data = lambda args, train_set: [
            tensor[:4000] for tensor in load_data(args, train_set)]

    finish("fashionmnist_ddp", "--data-dir", tmp_path, "--epochs", 1, "--batch-size", 16, nproc=2,
           setup=first_images)
    text = capfd.readouterr().out
    accuracy = float(re.search(r"test loss [\d.]+  accuracy ([\d.]+)", text)[1])
    assert accuracy > 0.7, f"real images are not learned:\n{text}"


# --- CIFAR-10, in the format of its site: generated images, as the real ones are 170 MB ---
@pytest.fixture(scope="module")
def cifar10(tmp_path_factory):
    """Return a folder with CIFAR-10's files: five batches to train and one to test, pickled.

    Their images are those of fake_images: 100 to train, 20 to test.
    """
    folder = tmp_path_factory.mktemp("cifar10")
    batches = folder / "cifar-10-batches-py"
    batches.mkdir()
    fake_images = load_script("cifar10_ddp").fake_images
    images, labels = fake_images(100, (3, 32, 32), 0, train_set=True)
    for number in range(5):
        part = slice(20 * number, 20 * number + 20)
        write_batch(batches / f"data_batch_{number + 1}", images[part], labels[part])
    images, labels = fake_images(80, (3, 32, 32), 0, train_set=False)
    write_batch(batches / "test_batch", images, labels)
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship",
             "truck"]
    (batches / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
        archive.add(batches, batches.name)
    return folder


def write_batch(path, images, labels):
    """Write images (N, 3, 32, 32) and labels as a file of CIFAR-10."""
    rows = images.flatten(1).numpy()
    path.write_bytes(pickle.dumps({"data": rows, "labels": labels.tolist()}))


@pytest.fixture
def without_checksums(monkeypatch):
    """The generated files have other checksums than the real ones."""
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda dataset: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)


def test_cifar10_images_and_labels(cifar10, without_checksums):
    """They reach the model as the site has them, without a transform that is not the test set's."""
    module = load_script("cifar10_ddp")
    args = module.parse_args(["--data-dir", str(cifar10)])
    module.prepare_data(args)
    data = module.SeededData(args)
    count = data.count(True), data.count(False)
    assert count == (100, 20), f"100 images to train and 20 to test, not {count}"
    images, labels = module.fake_images(80, (3, 32, 32), 0, train_set=False)
    for index in range(20):
        image, label = data[0, 0, False, index]
        assert label == labels[index], f"test image {index} has label {label}, not {labels[index]}"
        assert torch.equal(image, images[index]), (
            f"test image {index} is changed: channels, rows or columns are exchanged")


def test_cifar10_trains_on_them(cifar10, without_checksums, capfd):
    finish("cifar10_ddp", "--data-dir", cifar10, "--model", "mnasnet0_5", "--image-size", 32,
           "--batch-size", 10, "--epochs", 1, nproc=2)
    text = capfd.readouterr().out
    assert "of 100 images" in text, f"the header names the 100 images of the files:\n{text}"
    assert "epoch 1/1  test loss" in text, f"the run ends with the test set:\n{text}"


def test_a_damaged_archive_is_an_error_line(cifar10):
    """The checksum of the archive is compared: this one is not the real one."""
    result = run("cifar10_ddp", "--data-dir", cifar10, "--epochs", 1)
    assert result.status == 1, f"a damaged archive ends the run with status 1:\n{result.text}"
    assert len(result.errors) == 1, f"one error line, not {result.errors}:\n{result.text}"
    assert "CIFAR10" in result.errors[0], f"it names the data set: {result.errors[0]}"

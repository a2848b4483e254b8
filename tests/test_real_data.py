"""The scripts train on the real data sets, read from the files that their sites offer."""

import gzip
import pickle
import re
from pathlib import Path

import pytest
import torch
from forked import train_to_end
from scripts import load_script
from torchvision.datasets import CIFAR10

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def test_fashion_mnist(tmp_path):
    """One epoch on the first 4,000 images."""
    if not DEBIAN.exists():
        pytest.skip("requires the real images: apt-get install dataset-fashion-mnist")
    raw = tmp_path / "FashionMNIST/raw"
    raw.mkdir(parents=True)
    for archive in DEBIAN.glob("*.gz"):
        (raw / archive.stem).write_bytes(gzip.decompress(archive.read_bytes()))

    def first_images(module, rank):
        load_data = module.load_data
        module.load_data = lambda args, train_set: [
            tensor[:4000 if train_set else 1000] for tensor in load_data(args, train_set)]

    text = train_to_end("fashionmnist_ddp", "--data-dir", tmp_path, "--epochs", 1,
                        "--batch-size", 16, nproc=2, setup=first_images).text
    accuracy = float(re.search(r"test loss [\d.]+  accuracy ([\d.]+)", text)[1])
    assert accuracy > 0.7, f"real images are not learned:\n{text}"


def test_cifar10_images_and_labels(tmp_path, monkeypatch):
    """They reach the model as the files of the site have them: here, with generated images."""
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    module = load_script("cifar10_ddp")
    images, labels = module.fake_images(120, (3, 32, 32), 0, train_set=True)
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    classes = list("abcdefghij")
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": classes}))
    for (name, _), pixels, targets in zip(CIFAR10.train_list + CIFAR10.test_list,
                                          images.split(20), labels.split(20)):
        content = {"data": pixels.flatten(1).numpy(), "labels": targets.tolist()}
        (folder / name).write_bytes(pickle.dumps(content))

    args = module.parse_args(["--data-dir", str(tmp_path)])
    module.prepare_data(args)
    data = module.SeededData(args)
    found = data.count(True), data.count(False), data.classes
    assert found == (100, 20, classes), f"100 images to train, 20 to test, 10 classes, not {found}"
    image, label = data[0, 0, False, 7]
    assert label == labels[107], f"a test image has another label: {label}"
    assert torch.equal(image, images[107]), "a test image has other channels, rows or columns"

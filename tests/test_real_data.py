"""The scripts train on the real data sets, downloaded as their sites offer them."""

import functools
import gzip
import hashlib
import io
import os
import pickle
import re
import socket
import struct
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from forked import train_to_end, watch
from recorder import FewPixels, change_sets, use_small_model
from scripts import SCRIPTS
from torchvision import datasets

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
DATA_SETS = {"mnist_dp": "MNIST", "cifar10_ddp": "CIFAR10", "fashionmnist_ddp": "FashionMNIST"}


class Images:
    """What a process trains on and tests."""

    def __init__(self, module):
        self.steps, self.evaluations, self.timeouts = [[]], [[]], []
        use_small_model(module)
        if hasattr(module, "CNN"):
            module.CNN = lambda *_: FewPixels()
        if hasattr(module, "scale"):
            watch(module, "scale", lambda *batch: self.evaluations[0].append(batch))
            watch(module, "augment", lambda *_: self.steps[0].append(self.evaluations[0].pop()))
        else:
            watch(module, "loss_and_counts", lambda args, model, *batch: (
                self.steps if model.training else self.evaluations)[0].append(batch))


def numbers_of(batch):
    return [int(image.flatten()[0]) for image in batch[0]]


@pytest.fixture
def site(tmp_path):
    """A folder, and the address at which a web server offers it."""
    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    (tmp_path / "site").mkdir()
    handler = functools.partial(Handler, directory=tmp_path / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield tmp_path / "site", f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def md5(content):
    return hashlib.md5(content).hexdigest()


def offer_mnist(folder, images, labels):
    """Write 48 images to train and 12 to test. Return attributes of the data set's class."""
    resources = []
    for name, tensor in (("train-images-idx3", images[:48]), ("train-labels-idx1", labels[:48]),
                         ("t10k-images-idx3", images[48:]), ("t10k-labels-idx1", labels[48:])):
        tensor = tensor.squeeze(1) if tensor.dim() == 4 else tensor
        header = struct.pack(f">{1 + tensor.dim()}I", 0x800 + tensor.dim(), *tensor.shape)
        content = gzip.compress(header + bytes(tensor.flatten().tolist()))
        (folder / f"{name}-ubyte.gz").write_bytes(content)
        resources.append((f"{name}-ubyte.gz", md5(content)))
    return {"resources": resources}


def offer_cifar10(folder, images, labels):
    """Write five batches to train and one to test. Return attributes of the data set's class."""
    cifar10 = datasets.CIFAR10
    names = [name for name, _ in cifar10.train_list + cifar10.test_list]
    parts = zip(images[:48].chunk(5) + (images[48:],), labels[:48].chunk(5) + (labels[48:],))
    files = {name: {"data": pixels.flatten(1).numpy(), "labels": targets.tolist()}
             for name, (pixels, targets) in zip(names, parts)}
    files["batches.meta"] = {"label_names": list("abcdefghij")}
    sums = {}
    with tarfile.open(folder / cifar10.filename, "w:gz") as archive:
        for name, content in files.items():
            content = pickle.dumps(content)
            sums[name] = md5(content)
            member = tarfile.TarInfo(f"{cifar10.base_folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return {"tgz_md5": md5((folder / cifar10.filename).read_bytes()),
            "train_list": [[name, sums[name]] for name in names[:5]],
            "test_list": [[name, sums[name]] for name in names[5:]],
            "meta": {**cifar10.meta, "md5": sums["batches.meta"]}}


@pytest.mark.parametrize("script, name", DATA_SETS.items())
def test_images_are_downloaded_and_train_or_test(script, name, site, tmp_path):
    """Two processes, and a server with images of the format and the names of the true ones.

    The first channel of an image is its number, which crops and flips do not change.
    """
    folder, address = site
    shape = (60, 3, 32, 32) if name == "CIFAR10" else (60, 1, 28, 28)
    images = torch.randint(256, shape, dtype=torch.uint8)
    images[:, 0] = torch.arange(60).view(60, 1, 1)
    labels = torch.arange(60, dtype=torch.uint8) % 7
    offer = offer_cifar10 if name == "CIFAR10" else offer_mnist
    attributes = offer(folder, images, labels)
    attributes |= {"url": address + datasets.CIFAR10.filename, "mirrors": [address]}

    def setup(module, rank):
        for attribute, value in attributes.items():
            setattr(getattr(module, name), attribute, value)
        os.environ["no_proxy"] = "127.0.0.1"
        recorder = Images(module)
        watch(socket, "create_connection",
              lambda *_: recorder.timeouts.append(socket.getdefaulttimeout()))
        return recorder

    flags = ["--data-dir", tmp_path / "data", "--epochs", 1, *SCRIPTS[script].no_children]
    flags += ["--global-batch", 12]
    nproc = 1 + SCRIPTS[script].several_processes
    ranks = train_to_end(script, *flags, nproc=nproc, setup=setup).results
    batches = [batch for rank in ranks for step in rank.steps for batch in step]
    trained = sorted(number for batch in batches for number in numbers_of(batch))
    tested = {number: (image, label) for rank in ranks for batch in rank.evaluations[0]
              for number, image, label in zip(numbers_of(batch), *batch)}
    assert trained == list(range(48)), f"it trains on images {trained}, not 0-47"
    assert sorted(tested) == list(range(48, 60)), (
        f"it tests {len(tested)} images, not 12: {len(tested.keys() & set(trained))} of those that "
        "it trains on")
    for number, (image, label) in tested.items():
        assert torch.equal(image, images[number]), f"test image {number} has other pixels"
        assert label == labels[number], f"test image {number} has label {label}"
    timeouts = [timeout for rank in ranks for timeout in rank.timeouts]
    assert timeouts and all(timeouts), f"a server that does not answer: it waits {timeouts} s"
    attributes["mirrors"], attributes["url"] = ["http://127.0.0.1:9/"], "http://127.0.0.1:9/"
    train_to_end(script, *flags, nproc=nproc, setup=setup)  # downloads nothing


def fashion_mnist(folder):
    """Write the real images into the folder of --data-dir, or skip the test."""
    if not DEBIAN.exists():
        pytest.skip("requires the real images: apt-get install dataset-fashion-mnist")
    raw = Path(folder, "FashionMNIST/raw")
    raw.mkdir(parents=True)
    for archive in DEBIAN.glob("*.gz"):
        (raw / archive.stem).write_bytes(gzip.decompress(archive.read_bytes()))


@pytest.mark.slow
def test_fashion_mnist_is_learned(tmp_path):
    """One epoch on the first 2,000 images."""
    fashion_mnist(tmp_path)

    def first_images(module, rank):
        change_sets(module, lambda data, train_set: [
            tensor[:2000 if train_set else 500] for tensor in data])

    text = train_to_end("fashionmnist_ddp", "--data-dir", tmp_path, "--epochs", 1,
                        "--global-batch", 16, nproc=2, setup=first_images).text
    accuracy = float(re.search(r"val_accuracy ([\d.]+)", text)[1])
    assert accuracy > 0.7, f"real images are not learned:\n{text}"

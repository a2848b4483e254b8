"""What is trained: real data, one's own data, models, precision."""

import argparse
import gzip
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import ROOT, assert_equal, difference, fork, load_checkpoint, load_script, run, script_path, start, train
from torchvision import models
from torchvision.transforms.functional import to_pil_image

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


# --- data ---
def test_real_fashion_mnist(tmp_path, capfd):
    """One epoch on the first 4,000 images of Debian's package."""
    if not DEBIAN.exists():
        pytest.skip("requires the real images: apt-get install dataset-fashion-mnist")
    (tmp_path / "FashionMNIST/raw").mkdir(parents=True)
    for archive in DEBIAN.glob("*.gz"):
        (tmp_path / "FashionMNIST/raw" / archive.stem).write_bytes(gzip.decompress(archive.read_bytes()))

    def setup(module, rank):
        load_data = module.load_data
        module.load_data = lambda args, train_set: (tensor[:4000] for tensor in load_data(args, train_set))

    train("fashionmnist_ddp", "--data-dir", tmp_path, "--epochs", 1, "--batch-size", 16, nproc=2, setup=setup)
    assert int(re.search(r"\((\d+)/4000\)", capfd.readouterr().out)[1]) > 2800


def test_cifar10_images_are_permuted():
    """torchvision has (N, 32, 32, 3)."""
    module, images = load_script("cifar10_ddp"), torch.randint(256, (4, 32, 32, 3), dtype=torch.uint8)
    module.CIFAR10 = lambda folder, train_set: argparse.Namespace(data=images.numpy(), targets=[3, 1, 4, 1])
    loaded, labels = module.load_data(argparse.Namespace(fake_data=None, data_dir=""), train_set=True)
    assert torch.equal(loaded[2, 1], images[2, :, :, 1]) and labels.tolist() == [3, 1, 4, 1]


# --- one's own data, as the README describes it ---
OWN_TENSORS = '''def load_data(args, train_set):  # dark and light images
    labels = torch.arange(320 if train_set else 80) % 2
    return (labels * 128).to(torch.uint8).view(-1, 1, 1, 1).repeat(1, 1, 28, 28), labels


def augment('''


def readme_block(first):
    """The code block of README.md that begins with this line."""
    return re.search(rf"```python\n({re.escape(first)}\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


def test_own_data(tmp_path):
    """Tensors in memory are learned. A Dataset with random transforms resumes exactly after SIGTERM to all."""
    text = script_path("fashionmnist_ddp").read_text()
    text = re.sub(r" +if (rank == 0|local_rank == 0 and rank > 0):.*\n +download.*\n", "", text)
    text = re.sub(r"# --- shared: images ---.*?# --- end ---\n", "", text, flags=re.DOTALL)
    text = re.sub(r'from .* FashionMNIST\n| +add\("--(data-dir|fake-data)".*\n|"fake_data": .*?,', "", text)
    load_data = re.compile(r"def load_data.*?\ndef augment\(", re.DOTALL)
    (tmp_path / "tensors.py").write_text(load_data.sub(lambda _: OWN_TENSORS, text))
    flags = ("--batch-size", 16, "--epochs", 3, "--log-every", 0, "--checkpoint")
    result = run(tmp_path / "tensors.py", *flags, tmp_path / "tensors")
    assert result.status == 0 and float(re.findall(r"test accuracy ([\d.]+)", result.text)[-1]) > 0.9, result.text

    block = readme_block("# with the imports")
    imports, functions, images, example, loop = re.split(r"^ *# .*\n", block, flags=re.MULTILINE)[1:]
    text = load_data.sub(lambda _: functions + "\n\ndef augment(", text)
    for pattern, own in {r"import argparse\n": imports + "import argparse\n",
                         r" +images, labels = \(tensor.*\n": images, r"preprocess\(images\[:2\]\)": example.strip(),
                         r" +for batch in batches\[(.*\n){3}": loop}.items():
        text, count = re.subn(pattern, lambda _: own, text)
        assert count == 1, pattern
    (tmp_path / "dataset.py").write_text(text)
    for index in range(400):  # dark and light images, of several sizes
        folder = tmp_path / "images" / ("train" if index < 320 else "test") / ("dark", "light")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(128, (3, 28 + index % 9, 40 - index % 7), dtype=torch.uint8) + index % 2 * 128
        to_pil_image(pixels).save(folder / f"{index}.png")
    options = {"launcher": "spawn", "nproc": 2, "cwd": tmp_path}
    result = run("dataset.py", *flags, "whole", **options)
    assert result.status == 0 and float(re.findall(r"test accuracy ([\d.]+)", result.text)[-1]) > 0.9, result.text
    for line, first in ("epoch 1/3  test accuracy", 11), ("step 25/", 25):
        with start("dataset.py", *flags, "resumed", **options) as job:
            job.wait_for(line)  # the processes that read the images start, or work; they get the signal too
            os.killpg(job.processes[0].pid, signal.SIGTERM)
            result = job.finish()
        assert first <= load_checkpoint(tmp_path / "resumed")["step"] < 30, result.text
    result = run("dataset.py", *flags, "resumed", **options)
    assert result.status == 0, result.text
    assert_equal(tmp_path / "whole", tmp_path / "resumed")


def test_trained_model(tmp_path):
    """The README's code that uses a trained model classifies as the run has done."""
    result = run("cifar10_ddp", "--fake-data", 256, "--epochs", 2, "--batch-size", 16,
                 "--checkpoint", tmp_path / "FILE")
    accuracy = float(re.findall(r"test accuracy ([\d.]+)", result.text)[-1])
    assert result.status == 0 and accuracy > 0.3, result.text
    code = readme_block("import torch").replace('"cifar10.pt"', repr(str(tmp_path / "FILE"))).replace("512", "256")
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout
    assert float(output) == pytest.approx(accuracy, abs=1e-4)


# --- models ---
@pytest.mark.parametrize("name", ["vit_h_14", "swin_t", "inception_v3", "googlenet"])
def test_model_is_torchvisions_and_takes_upsampled_images(name):
    with torch.device("meta"):  # shapes without numbers
        cifar10_ddp = load_script("cifar10_ddp")
        model, size = cifar10_ddp.build_model(name)
        images = cifar10_ddp.preprocess(torch.zeros(2, 3, 32, 32, dtype=torch.uint8), size)
        assert images.shape == (2, 3, size, size) and model(images).shape == (2, 10)
        aux = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
        models.get_model(name, num_classes=10, **aux).load_state_dict(model.state_dict(), assign=True)


FAMILIES = ("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet",
            "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_y_400mf",
            "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11",
            "vit_b_16", "wide_resnet50_2")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_of_each_family_of_classifiers(name):
    """On 2 processes. wrap_ddp changes no weights, buffers or random numbers, and leaves no gradients."""
    cifar10_ddp = load_script("cifar10_ddp")
    model, size = cifar10_ddp.build_model(name)

    def step(rank):
        cifar10_ddp.init_group(rank, 2, torch.device("cpu"), 60)
        images = cifar10_ddp.preprocess(torch.full((2, 3, 32, 32), 10 * rank, dtype=torch.uint8), size)
        before, random = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
        ddp_model = cifar10_ddp.wrap_ddp(model, images)
        changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
        changed += [key for key, parameter in model.named_parameters() if parameter.grad is not None]
        assert not changed and torch.equal(random, torch.get_rng_state()) and model.training
        ddp_model(images).sum().backward()
        return sum(parameter.grad.double().sum().item() for parameter in model.parameters())

    one, other = fork(2, step)
    assert one == other != 0  # the mean of their gradients


# --- precision ---
def test_bfloat16(tmp_path):
    """8 bits of mantissa change the weights, but not much."""
    for name, flags in ("fp32", ()), ("bf16", ("--bf16",)):
        train("cpu_ddp", "--epochs", 10, "--checkpoint", tmp_path / name, *flags)
    assert 0 < difference(tmp_path / "fp32", tmp_path / "bf16") < 0.05


def test_bfloat16_in_the_threads_of_data_parallel():
    """The model itself enters autocast, so that each of DataParallel's threads does."""
    types = []
    for bf16 in True, False:
        model = load_script("mnist_dp").CNN(bf16)
        model.fc1.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
        with ThreadPoolExecutor() as pool:
            pool.submit(model, torch.zeros(1, 1, 28, 28)).result()
    assert types == [torch.bfloat16, torch.float32]

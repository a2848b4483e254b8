"""Recipes and log: data files, images, rates, weight decay, bfloat16; what is printed is true."""

import gzip
import math
import pickle
import re
import shutil
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from harness import TRAIN, VAL, kill_in_step, run, run_to_end
from image_folder import write_images
from PIL import Image, ImageOps
from scripts import BEST_SCRIPTS, SCRIPTS, load_script, script_path
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset
from torchvision import datasets, models
from torchvision.transforms.v2.functional import to_pil_image

TEXTS = {script: script_path(script).read_text() for script in SCRIPTS}
DATA_SETS = {script: match[1] for script, text in TEXTS.items()
             if (match := re.search(r"from torchvision.datasets import (\w+)", text))}
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
AUGMENTING = [script for script, text in TEXTS.items() if "def augment(" in text]
scripts_that_augment = pytest.mark.parametrize("script", AUGMENTING)


@pytest.fixture
def cifar10():
    return load_script("cifar10_ddp")


# ---- learning rates, optimizers, bfloat16 ----
RISE_AND_FALL = [0.25, 0.5, 0.75, 1, 1, *[number / 16 for number in range(15, -1, -1)]]
COSINE = [(1 + math.cos(math.pi * number / 20)) / 2 for number in range(21)]


@pytest.mark.parametrize("script, expected", [
    *[(script, RISE_AND_FALL) for script in AUGMENTING], ("synthetic_ddp", COSINE)])
def test_the_rate_falls_to_zero_in_all_steps(script, expected):
    """Of 20 steps. First, it may rise for a fifth of them."""
    module = load_script(script)
    optimizer, scheduler = module.build_optimizer(module.parse_args([]), nn.Linear(1, 1), 20)
    shares = []
    for _ in range(21):
        shares.append(optimizer.param_groups[0]["lr"] / scheduler.base_lrs[0])
        optimizer.step()
        scheduler.step()
    assert shares == pytest.approx(expected), f"{script}: shares of the peak rate are {shares}"


@pytest.mark.parametrize("flags, rate", [([], 0.2), (["--pretrained"], 0.02),
                                         (["--global-batch", "512"], 0.4),
                                         (["--global-batch", "512", "--lr", "1"], 1)])
def test_the_optimizer_of_cifar10(cifar10, flags, rate):
    """--lr is the peak rate. Weights decay, biases and norms do not."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer, scheduler = cifar10.build_optimizer(cifar10.parse_args(flags), model, 20)
    assert scheduler.base_lrs == pytest.approx([rate, rate]), (
        f"cifar10_ddp {flags}: the peak rate is {scheduler.base_lrs}, not {rate}")
    decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups
              for weight in group["params"]}
    found = [decays[id(weight)] for weight in model.parameters()]
    assert found == [5e-4, 0, 0, 0], f"decay of a weight, its bias, a norm's two is {found}"
    assert all(group["nesterov"] and group["momentum"] == 0.9
               for group in optimizer.param_groups), f"no Nesterov momentum: {optimizer}"


@pytest.mark.parametrize("script, shape", [
    ("mnist_dp", (1, 28, 28)), ("fashionmnist_ddp", (1, 28, 28)), ("cifar10_ddp", (3, 32, 32)),
    ("synthetic_ddp", (10,))])
def test_bf16_computes_in_bfloat16(script, shape):
    def see(layer, inputs, output):
        if isinstance(layer, nn.Linear):
            types.add(str(output.dtype))

    module, types = load_script(script), set()
    args = module.parse_args(["--bf16"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 10))
    if script == "mnist_dp":  # whose model itself computes in bfloat16
        model = module.CNN(args.bf16)
    with register_module_forward_hook(see):
        module.loss_and_counts(args, model, torch.zeros(4, *shape), torch.zeros(4).long())
    assert types == {"torch.bfloat16"}, f"{script} --bf16 computes in {types}"


@scripts_that_augment
def test_the_loss_of_an_evaluation_is_not_smoothed(script):
    module, images = load_script(script), torch.rand(4, 3, 32, 32)
    model, labels = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).eval(), torch.arange(4)
    loss, _ = module.loss_and_counts(module.parse_args([]), model, images, labels)
    expected = nn.functional.cross_entropy(model(images), labels)
    assert torch.allclose(loss, expected), f"{script} evaluates the loss {loss}, not {expected}"


# ---- what a model is given ----
@pytest.mark.parametrize("script", ["fashionmnist_ddp", "mnist_dp"])
def test_pixels_are_from_0_to_1(script):
    def model(images):
        seen.append(images)
        return torch.zeros(1, 10)

    module, images = load_script(script), torch.tensor([[[[0, 255]]]], dtype=torch.uint8)
    seen, labels = [], torch.zeros(1).long()
    if script == "mnist_dp":
        module.loss_and_counts(None, model, images, labels)
    else:
        seen = module.scale(images, labels)
    assert seen[0].flatten().tolist() == [0, 1], f"{script}: black and white are {seen[0]}"


def test_images_are_scaled_as_pretrained_weights_expect(cifar10):
    weights = models.ResNet18_Weights.DEFAULT.transforms()
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (weights.mean, weights.std))
    expected = (images / 255 - mean) / deviation
    error = (cifar10.scale(images, None)[0] - expected).abs().max().item()
    assert error < 0.01, f"images differ by {error:.3f} from those of torchvision's weights"


@scripts_that_augment
def test_training_images_are_scaled_and_augmented_and_validation_images_are_scaled(script):
    def change(module, rank, seen):
        def see(args, model, images, labels):
            seen.append((model.training, *images.unique().tolist()))
            return loss_and_counts(args, model, images, labels)

        loss_and_counts, module.loss_and_counts = module.loss_and_counts, see
        module.scale = lambda images, labels: (torch.zeros_like(images), labels)
        module.augment = lambda args, images, labels: (images + 1, labels)

    (rank,) = run_to_end(script, "--global-batch", 16, "--epochs", 1, nproc=1, change=change)
    found = {event for event in rank.seen if isinstance(event[0], bool)}
    assert found == {(True, 1), (False, 0)}, (
        f"{script}: scale() returns 0, augment() adds 1; the loss gets (training, images) {found}")


@scripts_that_augment
def test_half_of_the_images_are_mirrored(script):
    """They grow from left to right."""
    size = 32 if script == "cifar10_ddp" else 28
    images = torch.arange(size).float().expand(400, 3, size, size)
    found, _ = load_script(script).augment(None, images, torch.zeros(400))
    mirrored = (found[:, 0, 0, 8] > found[:, 0, 0, 20]).sum().item()
    assert 150 <= mirrored <= 250, f"{script}: {mirrored} of 400 images are mirrored"


def test_cifar10_shifts_by_up_to_4_pixels(cifar10):
    """An image has its column in red and its row in green. Some are mirrored."""
    rows, columns = torch.meshgrid(torch.arange(32.), torch.arange(32.), indexing="ij")
    images = torch.stack([columns, rows, rows]).expand(3000, 3, 32, 32)
    shifted, _ = cifar10.augment(None, images, torch.zeros(3000))
    found = {tuple(map(int, image)) for image in shifted[:, :2, 16, 16]}
    expected = {(column, row) for column in range(11, 21) for row in range(12, 21)}
    assert found == expected, f"the pixel in the middle comes from {len(found)} places: {found}"


# ---- a folder of images, pretrained weights ----
def test_other_classes_to_train_than_to_validate_are_an_error(cifar10, tmp_path):
    """The labels of one set would be other classes' in the other one."""
    write_images(tmp_path)
    shutil.copytree(tmp_path / "train/cat", tmp_path / "train/bird")
    with pytest.raises(SystemExit, match="error: .*bird"):
        cifar10.load_data(cifar10.parse_args(["--image-folder", str(tmp_path)]))
        pytest.fail("a class that is only in train is not refused")


def test_crops_are_random_to_train_and_central_to_validate(cifar10, tmp_path):
    """The first channel of an image grows to the right, the second one downwards, equally fast."""
    rows, columns = torch.meshgrid(torch.arange(60), torch.arange(120), indexing="ij")
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        image = to_pil_image(torch.stack([columns, rows, rows]).to(torch.uint8))
        image.save(tmp_path / part / "cat/0.png")
    args = cifar10.parse_args(["--image-folder", str(tmp_path), "--image-size", "28"])
    train_set, val_set = cifar10.load_data(args)
    corners = [val_set[0][0][:2, place, place].tolist() for place in (0, -1)]
    expected = [[34, 4], [85, 55]]  # 7 of 8 rows, and as many columns
    assert corners == [pytest.approx(corner, abs=2) for corner in expected], (
        f"the corners of an image to validate are {corners} of it, not {expected}")
    crops = [train_set[0][0] for _ in range(8)]
    assert {crop.shape for crop in crops} == {(3, 28, 28)}, f"--image-size 28: {crops[0].shape}"
    assert len({crop.float().mean().item() for crop in crops}) > 1, "they are not cropped at random"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_a_transparent_ground_is_gray(cifar10, tmp_path, mode):
    image = Image.new("RGBA", (2, 1), "black")
    image.putpixel((1, 0), (0, 0, 0, 0))
    image.convert(mode).save(tmp_path / "image.png")
    found = [cifar10.read_image(tmp_path / "image.png", 64).getpixel((x, 0)) for x in (0, 1)]
    assert found == [(0, 0, 0), (128, 128, 128)], f"{mode}: black, transparent are read as {found}"


def test_a_photograph_is_upright_and_as_large_as_its_crops_need(cifar10, tmp_path):
    """A crop may have 8 % of its area."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    Image.new("RGB", (4000, 3000)).save(tmp_path / "image.jpg", exif=exif)
    width, height = cifar10.read_image(tmp_path / "image.jpg", 224).size
    assert width < height, "a photograph that was taken upright is read as a broad one"
    assert height < 4000, f"a photograph of 12 megapixels is decoded at {width} x {height} for 224"
    assert 0.08 * width * height > 224 ** 2, f"{width} x {height} is too small for crops of 224"


def test_an_image_with_damaged_exif_data_is_read(cifar10, tmp_path):
    """Viewers show it, too. Its width is text, and it is to be turned."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = 6, "text"
    data = exif.tobytes().replace(b"\x01\x0f", b"\x01\x00")
    Image.new("RGB", (20, 10), "red").save(tmp_path / "image.jpg", exif=data)
    with pytest.raises(Exception, match="not an integer"):
        ImageOps.exif_transpose(Image.open(tmp_path / "image.jpg"))
        pytest.fail("these EXIF data are no error in this Pillow: damage others")
    red = cifar10.read_image(tmp_path / "image.jpg", 64).getpixel((5, 5))[0]
    assert red > 250, f"an image with damaged EXIF data is read as another one: {red}"


def test_an_image_that_cannot_be_read_is_named(cifar10, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "half.jpg")
    content = (tmp_path / "half.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(content[:len(content) // 2])
    with pytest.raises(RuntimeError, match="half.jpg"):
        cifar10.read_image(tmp_path / "half.jpg", 64)
        pytest.fail("half an image is read")


@pytest.mark.parametrize("flags, small", [
    (["--image-folder", "DIR"], False), (["--pretrained"], False), (["--model", "resnet50"], False),
    ([], True)])
def test_resnet18_has_another_first_layer_for_small_images_alone(cifar10, flags, small,
                                                                 monkeypatch):
    """Pretrained weights do not fit another one. Images of CIFAR-10 are enlarged for the others."""
    args = cifar10.parse_args(flags)
    args.classes = list("0123456789")
    get_model = models.get_model
    monkeypatch.setattr(models, "get_model", lambda name, weights=None, **more: get_model(
        name, **more))
    found = cifar10.build_model(args).conv1.kernel_size, cifar10.resize(
        args, torch.zeros(2, 3, 32, 32)).shape[-1]
    expected = ((3, 3), 32) if small else ((7, 7), 224)
    assert found == expected, f"cifar10_ddp {flags}: first layer, size of images are {found}"


def test_pretrained_weights_are_all_but_those_of_the_last_layer(cifar10, tmp_path, monkeypatch,
                                                                capsys):
    """Modules of mnasnet read the weights' version. The log names the others."""
    url = models.get_model_weights("mnasnet0_5").DEFAULT.url
    file = tmp_path / "hub/checkpoints" / Path(url).name
    file.parent.mkdir(parents=True)
    weights = models.get_model("mnasnet0_5").state_dict()
    torch.save(weights, file)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    args = cifar10.parse_args(["--image-folder", "DIR", "--model", "mnasnet0_5", "--pretrained"])
    args.classes = ["cat", "dog"]
    state = cifar10.build_model(args).state_dict()
    others = [name for name in weights if not torch.equal(state[name], weights[name])]
    last_layer = ["classifier.1.weight", "classifier.1.bias"]
    assert others == last_layer, f"--pretrained: these are not the pretrained weights: {others}"
    named = set(re.findall(r"[\w.]+\.[\w.]+", capsys.readouterr().out))
    assert named == set(last_layer), f"new weights are {last_layer}, and the log names {named}"


def test_pretrained_weights_are_downloaded_by_prepare_data(cifar10, monkeypatch):
    """Otherwise, by all processes of a machine at once, into one file."""
    asked = []
    monkeypatch.setattr(models, "get_model", lambda name, weights=None: asked.append(weights))
    cifar10.prepare_data(cifar10.parse_args(["--image-folder", "DIR", "--pretrained"]))
    assert asked == ["DEFAULT"], f"prepare_data() downloads the weights {asked}"


# ---- data files ----
def write_mnist(folder, parts):
    """Write files as MNIST and FashionMNIST have them."""
    for name, images, labels in zip(("train", "t10k"), *parts):
        for kind, tensor in (("images-idx3", images[:, 0]), ("labels-idx1", labels)):
            header = struct.pack(f">{1 + tensor.dim()}I", 0x800 + tensor.dim(), *tensor.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(header + tensor.numpy().tobytes())


def write_cifar10(folder, parts):
    """Write files as CIFAR-10 has them: five to train, one to test."""
    files = {"batches.meta": {"label_names": list("abcdefghij")}}
    for names, images, labels in zip((datasets.CIFAR10.train_list, datasets.CIFAR10.test_list),
                                     *parts):
        for (name, _), *batch in zip(names, images.chunk(len(names)), labels.chunk(len(names))):
            files[name] = {"data": batch[0].flatten(1).numpy(), "labels": batch[1].tolist()}
    for name, content in files.items():
        (folder / name).write_bytes(pickle.dumps(content))


@pytest.mark.parametrize("script, name", DATA_SETS.items())
def test_the_training_set_trains_and_the_test_set_validates(script, name, tmp_path, monkeypatch):
    images = torch.randint(256, (60, 3 if name == "CIFAR10" else 1, 28, 28), dtype=torch.uint8)
    if name == "CIFAR10":
        images = torch.nn.functional.pad(images, (2, 2, 2, 2))
        monkeypatch.setattr(datasets.cifar, "check_integrity", lambda *_: True)
    labels = (torch.arange(60) % 7).to(torch.uint8)
    parts = images.split((48, 12)), labels.split((48, 12))
    folder = tmp_path / ("cifar-10-batches-py" if name == "CIFAR10" else f"{name}/raw")
    folder.mkdir(parents=True)
    (write_cifar10 if name == "CIFAR10" else write_mnist)(folder, parts)
    module = load_script(script)
    sets = module.load_data(module.parse_args(["--data-dir", str(tmp_path)]))
    for number, data in enumerate(sets):
        found = data.tensors if isinstance(data, TensorDataset) else data
        assert torch.equal(found[0], parts[0][number]), f"{script}: set {number} has other images"
        assert torch.equal(found[1], parts[1][number].long()), (
            f"{script}: set {number} has the labels {found[1].tolist()}")


@pytest.mark.parametrize("script, name", DATA_SETS.items())
def test_a_download_has_a_timeout(script, name, tmp_path, monkeypatch):
    """The connection is refused."""
    def connect(*arguments, **options):
        timeouts.append(socket.getdefaulttimeout())
        raise ConnectionRefusedError

    module, timeouts = load_script(script), []
    for attribute in ("url", "mirrors"):
        address = "http://127.0.0.1:9/"
        value = [address] if attribute == "mirrors" else address
        monkeypatch.setattr(getattr(datasets, name), attribute, value, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(socket, "create_connection", connect)
    socket.setdefaulttimeout(None)
    try:
        with pytest.raises(Exception, match=r"opening|urlopen|refused"):
            getattr(module, "prepare_data", module.train)(
                module.parse_args(["--data-dir", str(tmp_path)]))
            pytest.fail(f"{script} does not download {name}")
    finally:
        socket.setdefaulttimeout(None)
    assert set(timeouts) == {60}, f"{script}: a server that does not answer: {timeouts} seconds"


@pytest.mark.slow
def test_fashion_mnist_is_learned(tmp_path):
    """One epoch on the first 2,000 images."""
    def change(module, rank, seen):
        load_data = module.load_data
        module.load_data = lambda args: [[tensor[:size] for tensor in data] for data, size in zip(
            load_data(args), (2000, 500))]

    if not DEBIAN.exists():
        pytest.skip("requires the real images: apt-get install dataset-fashion-mnist")
    (tmp_path / "FashionMNIST/raw").mkdir(parents=True)
    for archive in DEBIAN.glob("*.gz"):
        (tmp_path / "FashionMNIST/raw" / archive.stem).write_bytes(
            gzip.decompress(archive.read_bytes()))
    rank, _ = run_to_end("fashionmnist_ddp", "--data-dir", tmp_path, "--epochs", 1,
                         "--global-batch", 16, problem="own", change=change)
    accuracy = float(re.search(r"val_accuracy ([\d.]+)", rank.text)[1])
    assert accuracy > 0.7, f"real images are not learned:\n{rank.text}"


# ---- what is printed ----
def with_clock(module, rank, seen):
    """Let a step of 4 samples of a process take 4 seconds, an evaluation more than 1,000.

    Rank 0 waits for its samples for a quarter of this time, rank 1 for three quarters.
    """
    class SlowSet(TensorDataset):
        def __getitem__(self, index):
            clock.append(wait / 4 if len(self) == TRAIN else 1)
            return super().__getitem__(index)

    def load_slow_data(args):
        return [SlowSet(*data.tensors) if isinstance(data, TensorDataset) else data
                for data in load_data(args)]

    def compute(args, model, *batch):
        clock.append((4 - wait) * len(batch[0]) / 4 if model.training else 1000)
        return loss_and_counts(args, model, *batch)

    clock, load_data, loss_and_counts = [], module.load_data, module.loss_and_counts
    wait = (1.0, 3.0)[rank] if hasattr(module, "OnDevice") else 0.0
    module.load_data, module.loss_and_counts = load_slow_data, compute
    time.monotonic = time.perf_counter = lambda: sum(clock)
    torch.cuda.max_memory_allocated = lambda: 3e9 if rank else 1e9


@pytest.mark.parametrize("script", BEST_SCRIPTS)
def test_rate_speed_wait_and_time_left_are_true(script):
    """Two processes, 2 epochs of 7 steps of 8 samples. wait is that of the slowest process."""
    more = ["--log-every", 8] if script == "cifar10_ddp" else []
    flags = ["--global-batch", 8, "--epochs", 2, "--lr", 0.1, *more]
    text = run_to_end(script, *flags, change=with_clock)[0].text
    found = re.findall(r"^epoch \d/2 .*  (lr .*)", text, re.MULTILINE)
    wait = "  wait 75%" if SCRIPTS[script].data == "data sets" else ""
    expected = [f"lr {rate}  seconds 28.0  samples/s 2{wait}  GPU GB 3.0" for rate in (0.1, 0.05)]
    assert found == expected, f"{script} prints {found}, not {expected}\n{text}"
    found = re.findall(r"step (\d+)(?:/14| of this epoch)  loss [\d.]+(.*)", text)
    expected = 2 * [("3", ""), ("6", "")]  # after 10 seconds, and after 10 more
    if script == "cifar10_ddp":  # every 8 seconds, with the waiting until this step's exchange
        expected = [(str(step), f"  2 samples/s  wait {wait}%  0:00:{4 * (14 - step):02} left")
                    for step, wait in zip((3, 5, 7, 10, 12, 14), 2 * (50, 60, 64))]
    assert found == expected, f"{script} prints {found}, not {expected}\n{text}"


def test_the_speed_of_an_epoch_that_is_resumed_is_true(tmp_path):
    """Of its last steps alone."""
    def change(module, rank, seen):
        with_clock(module, rank, seen)
        kill_in_step(6)

    flags = ["--global-batch", 8, "--epochs", 1, "--save-every", 0, "--checkpoint", tmp_path / "a"]
    run("cifar10_ddp", *flags, nproc=1, change=change)
    (rank,) = run_to_end("cifar10_ddp", *flags, nproc=1, change=with_clock)
    assert "resumed" in rank.text and "samples/s 1 " in rank.text, rank.text


@pytest.mark.parametrize("script", SCRIPTS)
def test_lines_are_printed_at_once(script, tmp_path, monkeypatch):
    """To a file, as in Slurm: what a process that is killed has not written there is lost."""
    module = load_script(script)
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        if script == "mnist_dp":
            module.train(module.parse_args(["--fake-data", "8", "--epochs", "1"]))
        else:
            module.log("epoch 1/1  loss ")
        assert "epoch 1/1  loss " in (tmp_path / "log").read_text(), (
            f"{script}: a line is not in the log when it is printed")


def test_mnist_dp_uses_each_image_once_and_prints_means():
    """Two epochs of 4 and 2 batches, the last ones incomplete. The rate falls after each epoch."""
    def change(module, rank, seen):
        def see(args, model, images, labels):
            loss, count = loss_and_counts(args, model, images, labels)
            numbers = images[:, 0].int().tolist()
            seen.append(("batch", model.training, numbers, loss.item(), count.item()))
            return loss, count

        def before_step(optimizer, *_):
            seen.append(("rate", optimizer.param_groups[0]["lr"]))

        loss_and_counts, module.loss_and_counts = module.loss_and_counts, see
        module.CNN = lambda bf16: module.build_model(None)
        register_optimizer_step_pre_hook(before_step)

    flags = ("--fake-data", "--global-batch", 16, "--epochs", 2, "--lr", 0.5)
    rank, again = (run_to_end("mnist_dp", *flags, nproc=1, change=change)[0] for _ in range(2))
    assert str(rank.seen) == str(again.seen), "two runs with the same --seed differ"
    rates = [event[1] for event in rank.seen if event[0] == "rate"]
    assert rates == 4 * [0.5] + 4 * [0.25], f"the rates of the steps are {rates}"
    batches = [event[1:] for event in rank.seen if event[0] == "batch"]
    orders = [[numbers for _, numbers, *_ in batches[first:first + 4]] for first in (0, 6)]
    assert orders[0] != orders[1], f"two epochs train in the same order: {orders[0]}"
    lines = re.findall(r"^epoch .*", rank.text, re.MULTILINE)
    for line, of_epoch in zip(lines, (batches[:6], batches[6:]), strict=True):
        for training, prefix, expected in ((True, "", range(TRAIN)),
                                           (False, "val_", range(TRAIN, TRAIN + VAL))):
            part = [batch[1:] for batch in of_epoch if batch[0] is training]
            found = sorted(sum((numbers for numbers, *_ in part), []))
            assert found == [*expected], f"training {training}: it uses the images {found}"
            loss = sum(len(numbers) * loss for numbers, loss, _ in part) / len(expected)
            accuracy = sum(count for *_, count in part) / len(expected)
            means = f"  {prefix}loss {loss:.4f}  {prefix}accuracy {accuracy:.4f}  "
            assert means in line, f"no {means} in {line}"

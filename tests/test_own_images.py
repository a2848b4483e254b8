"""cifar10_ddp trains on a folder of images as people have them, and from pretrained weights."""

import os
import re
import subprocess

import pytest
import torch
from image_folder import write_images
from PIL import Image
from scripts import load_script
from torchvision import models
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image


@pytest.fixture(scope="module")
def script():
    return load_script("cifar10_ddp")


# ---- folders ----
@pytest.mark.parametrize("command, named", [
    ("mv val/dog val/wolf", "wolf"), ("mkdir train/bird; cp train/cat/0.png train/bird", "bird")])
def test_other_classes_to_train_than_to_validate_are_an_error(script, tmp_path, command, named):
    """The labels of one set would be other classes' in the other one."""
    folder = write_images(tmp_path / "images")
    subprocess.run(["bash", "-c", command], cwd=folder, check=True, timeout=30)
    with pytest.raises(SystemExit, match=f"error: .*{named}"):
        script.load_data(script.parse_args(["--image-folder", str(folder)]))
        pytest.fail(f"{command}: other classes to train than to validate are not refused")


def test_images_to_validate_keep_their_proportions(script, tmp_path):
    """The first channel of an image grows to the right, the second one downwards, equally fast."""
    rows, columns = torch.meshgrid(torch.arange(60), torch.arange(120), indexing="ij")
    image = to_pil_image(torch.stack([columns, rows, rows]).to(torch.uint8))
    for part in ("train", "val"):
        (tmp_path / part / "cat").mkdir(parents=True)
        image.save(tmp_path / part / "cat/0.png")
    args = script.parse_args(["--image-folder", str(tmp_path), "--image-size", "28"])
    train_set, val_set = script.load_data(args)
    found = val_set[0][0]
    assert found.shape == (3, 28, 28), f"--image-size 28 makes images {tuple(found.shape)}"
    spans = [channel.max().item() - channel.min().item() for channel in found[:2]]
    assert abs(spans[0] - spans[1]) <= 3, f"images to validate are squeezed: they span {spans}"
    crops = {train_set[0][0].float().mean().item() for _ in range(8)}
    assert len(crops) > 1, "images to train are not cropped at random"
    assert train_set[0][0].shape == (3, 28, 28), "a crop has another size"


# ---- kinds of image files ----
def gradient():
    """Return an image of 64 x 64 pixels whose bands differ."""
    band = Image.radial_gradient("L").resize((64, 64))
    return Image.merge("RGB", [band, band.rotate(90).point(lambda level: level // 2),
                               Image.linear_gradient("L").resize((64, 64))])


def difference(path, picture, script):
    """Return by how many levels the image in a file differs from its picture, at most."""
    image = script.read_image(path, 64)
    assert image.size == picture.size, f"{path.name} is read as {image.size}, not {picture.size}"
    change = pil_to_tensor(image).int() - pil_to_tensor(picture.convert("RGB")).int()
    return change.abs().max().item()


@pytest.mark.parametrize("color", ["black", "white"])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_a_drawing_on_transparent_ground_is_on_gray(script, tmp_path, mode, color):
    """Its shape is in the alpha channel alone: black and white ones differ from their ground."""
    alpha = Image.linear_gradient("L").resize((64, 64))
    if mode == "P":
        alpha = alpha.point(lambda level: 255 * (level > 99))
    image = Image.new("RGBA", (64, 64), color)
    image.putalpha(alpha)
    path = tmp_path / "image.png"
    image.convert(mode).save(path)
    shape = Image.composite(*(Image.new("L", (64, 64), name) for name in (color, "gray")), alpha)
    found = difference(path, shape, script)
    assert found <= 2, f"{mode}: a drawing in {color} differs by {found} levels from one on gray"


def test_a_photograph_is_read_upright(script, tmp_path):
    """As viewers show it, by its EXIF data."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    picture = gradient().transpose(Image.Transpose.ROTATE_90)
    picture.save(tmp_path / "image.jpg", quality=100, subsampling=0, exif=exif)
    found = difference(tmp_path / "image.jpg", gradient(), script)
    assert found <= 4, f"a photograph that was turned differs by {found} levels"


def test_a_large_photograph_is_decoded_at_a_size_that_is_enough(script, tmp_path):
    """A crop of 8 % of its area still has more than --image-size pixels."""
    Image.new("RGB", (4000, 3000)).save(tmp_path / "image.jpg")
    width, height = script.read_image(tmp_path / "image.jpg", 224).size
    assert width < 4000, f"a photograph of 12 megapixels is decoded at {width} x {height} for 224"
    assert 0.08 * width * height > 224 ** 2, f"{width} x {height} is too small for crops of 224"


@pytest.mark.parametrize("name", ["half.jpg", "text.png"])
def test_an_image_that_cannot_be_read_is_named(script, tmp_path, name):
    gradient().save(tmp_path / "half.jpg")
    content = (tmp_path / "half.jpg").read_bytes()
    (tmp_path / name).write_bytes(content[:len(content) // 2] if "half" in name else b"no image")
    with pytest.raises(RuntimeError) as end:
        script.read_image(tmp_path / name, 64)
        pytest.fail(f"{name} is read")
    assert str(tmp_path / name) in str(end.value), f"the error must name the file: {end.value}"


# ---- models ----
@pytest.mark.parametrize("flags, same", [
    (["--image-folder", "DIR"], True), (["--fake-data", "--pretrained"], True),
    (["--fake-data", "--model", "resnet50"], True), (["--fake-data"], False)])
def test_resnet18_has_another_first_layer_for_small_images_alone(script, flags, same, monkeypatch):
    """Pretrained weights do not fit another one, and images of 224 pixels need it."""
    args = script.parse_args(flags)
    args.classes = list("0123456789")
    monkeypatch.setattr(script, "log", print)
    get_model = models.get_model
    monkeypatch.setattr(models, "get_model", lambda name, weights=None, **more: get_model(
        name, **more))
    shapes = [model.conv1.weight.shape for model in (
        script.build_model(args), get_model(args.model))]
    assert (shapes[0] == shapes[1]) == same, f"{flags}: the first layer is of {shapes[0]}"
    size = 224 if same else 32
    images = script.resize(args, torch.zeros(2, 3, 32, 32))
    if args.image_folder is None:
        assert images.shape[-1] == size, f"{flags}: images are {tuple(images.shape)}, not {size}"


def test_images_are_normalized_as_pretrained_weights_expect(script):
    """ImageNet's mean and deviation of each channel."""
    weights = models.ResNet18_Weights.DEFAULT.transforms()
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in (weights.mean, weights.std))
    expected = (images / 255 - mean) / deviation
    error = (script.scale(images, None)[0] - expected).abs().max().item()
    assert error < 0.01, f"images differ by {error:.3f} from those of torchvision's weights"


@pytest.mark.parametrize("flags, rate", [([], 0.2), (["--pretrained"], 0.02),
                                         (["--global-batch", "512"], 0.4),
                                         (["--global-batch", "512", "--lr", "1"], 1)])
def test_the_peak_rate(script, flags, rate):
    args = script.parse_args(["--fake-data", *flags])
    optimizer, scheduler = script.build_optimizer(args, torch.nn.Linear(2, 2), 100)
    assert scheduler.base_lrs == pytest.approx([rate, rate]), (
        f"cifar10_ddp {flags}: the peak rate is {scheduler.base_lrs}, not {rate}")


def test_pretrained_weights_are_all_but_those_of_the_last_layer(script, tmp_path, monkeypatch,
                                                                capsys):
    """Modules of mnasnet read the weights' version. The log names the others."""
    url = models.get_model_weights("mnasnet0_5").DEFAULT.url
    file = tmp_path / "hub" / "checkpoints" / os.path.basename(url)
    file.parent.mkdir(parents=True)
    weights = models.get_model("mnasnet0_5").state_dict()
    torch.save(weights, file)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    args = script.parse_args(["--image-folder", "DIR", "--model", "mnasnet0_5", "--pretrained"])
    args.classes = ["cat", "dog"]
    state = script.build_model(args).state_dict()
    assert state["classifier.1.weight"].shape == (2, 1280), "the last layer is not for two classes"
    others = [name for name in weights if not torch.equal(state[name], weights[name])]
    last_layer = ["classifier.1.weight", "classifier.1.bias"]
    assert others == last_layer, f"--pretrained: these are not the pretrained weights: {others}"
    named = set(re.findall(r"[\w.]+\.[\w.]+", capsys.readouterr().out))
    assert named == set(last_layer), f"new weights are {last_layer}, and the log names {named}"

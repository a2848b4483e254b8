"""cifar10_ddp trains on a folder of images as people have them, and from pretrained weights."""

import os
import re
import shutil
import struct
import subprocess
from copy import deepcopy

import pytest
import torch
from checkpoints import load_checkpoint
from copies import make_copy
from forked import train_forked, train_to_end, watch
from image_folder import TINY, write_images
from PIL import Image
from scripts import load_script
from torchvision import models
from torchvision.transforms.v2.functional import pil_to_tensor


@pytest.fixture(scope="module")
def script():
    return load_script("cifar10_ddp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


def flags_of(folder, batch_size, epochs):
    return (*TINY, "--image-folder", folder, "--batch-size", batch_size, "--epochs", epochs,
            "--workers", 0)


# --- folders ---
@pytest.mark.parametrize("command, named", [
    ("mv val/dog val/wolf", "wolf"), ("mkdir train/bird; cp train/cat/0.png train/bird", "bird")])
def test_other_classes_to_train_than_to_test_are_an_error_line(tmp_path, command, named):
    """The labels of one set would be other classes' in the other one."""
    folder = write_images(tmp_path / "images")
    subprocess.run(["bash", "-c", command], cwd=folder, check=True, timeout=30)
    (status,) = train_forked("cifar10_ddp", *flags_of(folder, 6, 1)).statuses
    assert "error: " in str(status) and named in status, f"{command}: it ends with {status!r}"


def test_a_folder_may_be_moved_but_gets_no_other_images(folder, tmp_path):
    """Here, into a folder whose name begins with a dot."""
    shutil.copytree(folder, tmp_path / "images")
    flags = ("--checkpoint", tmp_path / "run.pt")
    train_to_end("cifar10_ddp", *flags_of(tmp_path / "images", 6, 1), *flags)
    (tmp_path / ".moved").mkdir()
    moved = (tmp_path / "images").rename(tmp_path / ".moved/images")
    train_to_end("cifar10_ddp", *flags_of(moved, 6, 2), *flags)
    shutil.copy(moved / "train/dog/1.jpg", moved / "train/dog/more.jpg")
    (status,) = train_forked("cifar10_ddp", *flags_of(moved, 6, 3), *flags).statuses
    assert "images 12, not 13" in str(status), f"a resume with one image more: {status!r}"


def test_test_images_keep_their_proportions(script):
    """The first channel of an image grows to the right, the second one downwards, equally fast."""
    rows, columns = torch.meshgrid(torch.arange(60), torch.arange(120), indexing="ij")
    image = torch.stack([columns, rows, rows]).to(torch.uint8)
    args = script.parse_args(["--image-folder", "DIR", "--image-size", "28"])
    found = script.transforms(args, train_set=False)(image)
    assert found.shape == (3, 28, 28), f"--image-size 28 makes test images {tuple(found.shape)}"
    spans = [channel.max().item() - channel.min().item() for channel in found[:2]]
    assert abs(spans[0] - spans[1]) <= 3, f"test images are squeezed: they span {spans} pixels"


# --- kinds of image files ---
def gradient():
    """Return an image of 64 x 64 pixels whose bands differ."""
    band = Image.radial_gradient("L").resize((64, 64))
    return Image.merge("RGB", [band, band.rotate(90).point(lambda level: level // 2),
                               Image.linear_gradient("L").resize((64, 64))])


def picture_in(mode):
    """Return the gradient in this mode, and the same in 8 bits."""
    rgb, grey = gradient(), gradient().convert("L")
    if mode.startswith("I"):
        deep = grey.convert("I").point(lambda level: level * 257)
        return deep if mode == "I" else deep.convert(mode), grey
    image = rgb.quantize(64) if mode == "P" else rgb.convert(mode)
    return image, grey if mode in ("L", "LA", "F") else image.convert("RGB")


def difference(path, picture, script):
    """Return by how many levels the image in a file differs from its picture, at most."""
    image = script.read_image(path, 64)
    assert image.size == picture.size, f"{path.name} is read as {image.size}, not {picture.size}"
    change = pil_to_tensor(image).int() - pil_to_tensor(picture.convert("RGB")).int()
    return change.abs().max().item()


@pytest.mark.parametrize("mode, suffix", [("LA", "png"), ("I;16", "png"), ("CMYK", "jpg")])
def test_image_is_read_as_its_picture_of_8_bits(script, tmp_path, mode, suffix):
    image, picture = picture_in(mode)
    path = tmp_path / f"image.{suffix}"
    image.save(path, quality=100)
    found = difference(path, picture, script)
    limit = 6 if suffix == "jpg" else 2  # JPEG loses some
    assert found <= limit, f"{mode} in a {suffix} file differs from its picture by {found} levels"


@pytest.mark.parametrize("color", ["black", "white"])
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_a_drawing_on_transparent_ground_is_seen(script, tmp_path, mode, color):
    """Its shape is in the alpha channel alone: black and white ones differ from their ground."""
    alpha = Image.linear_gradient("L").resize((64, 64))
    if mode == "P":
        alpha = alpha.point(lambda level: 255 * (level > 99))
    image = Image.new("RGBA", (64, 64), color)
    image.putalpha(alpha)
    path = tmp_path / "image.png"
    image.convert(mode).save(path)
    least, greatest = script.read_image(path, 64).convert("L").getextrema()
    assert greatest - least > 120, (
        f"{mode}: a drawing in {color} is read as levels from {least} to {greatest} of 255")
    shape = Image.composite(*(Image.new("L", (64, 64), name) for name in (color, "gray")), alpha)
    found = difference(path, shape, script)
    assert found <= 2, f"{mode}: a drawing in {color} differs by {found} levels from one on gray"


def test_an_opaque_picture_with_an_alpha_channel_keeps_its_colors(script, tmp_path):
    picture = gradient()
    image = picture.convert("RGBA")
    image.save(tmp_path / "image.png")
    found = difference(tmp_path / "image.png", picture, script)
    assert found == 0, f"an opaque picture in RGBA differs by {found} levels from that in RGB"


def test_a_photograph_with_damaged_exif_data_is_read(script, tmp_path):
    """Upright, as viewers show it. A tag that has to be a number is a text."""
    tags = struct.pack("<HHI4s", 0x0100, 2, 4, b"abc") + struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + tags + b"\0\0\0\0"
    picture = gradient().transpose(Image.Transpose.ROTATE_90)
    picture.save(tmp_path / "image.jpg", quality=100, subsampling=0, exif=exif)
    found = difference(tmp_path / "image.jpg", gradient(), script)
    assert found <= 4, f"with damaged EXIF data, a photograph differs by {found} levels"


def test_a_large_photograph_is_decoded_at_a_size_that_is_enough(script, tmp_path):
    """A crop of 8 % of its area still has more than --image-size pixels. Those to test are high."""
    for name, size in (("train", (4000, 3000)), ("val", (3000, 4000))):
        for label in ("cat", "dog"):
            (tmp_path / name / label).mkdir(parents=True)
            Image.new("RGB", size).save(tmp_path / name / label / "0.jpg")
    args = script.parse_args(["--image-folder", str(tmp_path), "--image-size", "224"])
    (width, height), (test_width, test_height) = (
        data[0][0].size for data in script.load_data(args))
    assert width > height and test_width < test_height, (
        f"train has wide images, val high ones: trained on {width} x {height}, "
        f"tested on {test_width} x {test_height}")
    assert width < 4000, f"a photograph of 12 megapixels is decoded at {width} x {height} for 224"
    assert 0.08 * width * height > 224 ** 2, f"{width} x {height} is too small for crops of 224"


@pytest.mark.parametrize("name", ["I.tif", "F.tif", "half.jpg", "text.png"])
def test_image_that_cannot_be_read_is_named(script, tmp_path, name):
    """Numbers of 32 bits have no range that is black to white."""
    if name == "text.png":
        (tmp_path / name).write_text("no image")
    elif name == "half.jpg":
        gradient().save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:len(content) // 2])
    else:
        picture_in(name[0])[0].save(tmp_path / name)
    with pytest.raises(RuntimeError) as end:
        script.read_image(tmp_path / name, 64)
        pytest.fail(f"{name} is read")
    assert str(tmp_path / name) in str(end.value), f"the error must name the file: {end.value}"


# --- pretrained weights ---
AVERAGE = """
from torch.optim.swa_utils import AveragedModel
average = AveragedModel(model)"""


def different(states, others):
    return [name for name in others if not torch.equal(states[name], others[name])]


def test_what_is_made_of_the_model_has_pretrained_weights_and_a_resume_its_own(folder, tmp_path):
    """Modules of mnasnet read the weights' version."""
    url = models.get_model_weights("mnasnet0_5").DEFAULT.url
    file = tmp_path / "hub" / "checkpoints" / os.path.basename(url)
    file.parent.mkdir(parents=True)
    weights = models.get_model("mnasnet0_5").state_dict()
    torch.save(weights, file)
    copy = make_copy("cifar10_ddp", tmp_path / "train.py", ('before "saved = {"', AVERAGE),
                     ('after "saved = {"', 'saved["average"] = average'))

    def see(module, rank):
        """Return the states of the average at the start, and of the model before each call."""
        os.environ["TORCH_HOME"] = str(tmp_path)
        states = []
        watch(module, "restore", lambda checkpoint, settings, saved: states.append(
            deepcopy(saved["average"].module.state_dict())))
        watch(module, "loss_and_counts", lambda args, model, *_: states.append(
            deepcopy(getattr(model, "module", model).state_dict())))
        return states

    flags = (*flags_of(folder, 3, 1), "--model", "mnasnet0_5", "--pretrained", "--checkpoint",
             tmp_path / "run.pt")
    end = train_to_end(copy, *flags, nproc=2, setup=see)
    last_layer = ["classifier.1.weight", "classifier.1.bias"]
    for rank, states in enumerate(end.results):
        for what, state in zip(("an average", "the model in the first step"), states):
            others = different(state, weights)
            assert others == last_layer, f"--pretrained, rank {rank}: {what} has others: {others}"
    (line,) = re.findall("^pretrained.*", end.text, re.MULTILINE)
    named = set(re.findall(r"[\w.]+\.[\w.]+", line))
    assert named == set(last_layer), f"new weights are {last_layer}, and the log has\n{line}"

    torch.save(models.get_model("mnasnet0_5").state_dict(), file)
    saved = load_checkpoint(tmp_path / "run.pt")["model"]
    for rank, states in enumerate(train_to_end(copy, *flags, nproc=2, setup=see).results):
        others = different(states[1], saved)
        assert not others, f"a resume with --pretrained, rank {rank}: it has other {others}"

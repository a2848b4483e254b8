"""cifar10_ddp trains on a folder of images as people have them, and from pretrained weights."""

import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoints import load_checkpoint
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


# --- folders that cannot be meant ---
MISTAKES = {  # what is done to a folder, and what the error line names
    "no val": ("rm -r val", "/images/val"),
    "other classes": ("mv val/dog val/wolf", "classes.*dog.*wolf"),
    "empty class": ("rm val/cat/*", "classes cat[.]"),
    "class that val lacks": ("mkdir train/bird; cp train/cat/0.png train/bird",
                             "the same classes.*'bird'"),
    "one level too many": ("mkdir up; mv train val up; mkdir train val; "
                           "mv up/train train/images; mv up/val val/images",
                           "the only class in .*/images/train is images"),
    "hidden folder": ("mkdir train/cat/.ipynb_checkpoints; cp train/cat/* train/cat/.ipynb*",
                      "/train/cat/[.]ipynb_checkpoints/"),
    "folder of a Synology": ("mkdir train/cat/@eaDir; cp train/cat/0.png train/cat/@eaDir",
                             "/train/cat/@eaDir/"),
    "hidden file": ("echo Mac OS X > train/cat/._0.jpg", "/train/cat/[.]_0[.]jpg"),
    "unreadable folder": ("mkdir -m 0 train/cat/more",
                          "Permission denied: .*/images/train/cat/more"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_the_folder_is_one_error_line(script, name):
    command, named = MISTAKES[name]
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = write_images(Path(parent) / "images")
        subprocess.run(["bash", "-c", command], cwd=folder, check=True, timeout=30)
        os.seteuid(user or 65534)  # root reads everything
        try:
            with pytest.raises(SystemExit) as end:
                script.load_sets(script.parse_args(["--image-folder", str(folder)]))
                pytest.fail(f"{name}: {command} is accepted")
        finally:
            os.seteuid(user)
    assert re.fullmatch(f"error: .*{named}.{{0,150}}", end.value.code), (
        f"{name}: there must be one error line that names {named!r}, not {end.value.code!r}")


def test_number_of_unused_files_is_printed(script, folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "images")
    for name in ("readme.txt", "cat/0.gif", "dog/0.heic"):
        (copy / "train" / name).touch()
    script.image_folder(str(copy / "train"), 32)
    text = capsys.readouterr().out
    counts = re.findall(r" (\d+) ", text)
    assert counts == ["1", "2"], f"1 file beside the classes and 2 in them are no images: {text}"


def test_all_ranks_use_the_files_of_rank_0(folder, tmp_path):
    """On the second machine, a class has another name: its files lack there."""
    other = shutil.copytree(folder, tmp_path / "other")
    for part in ("train", "val"):
        (other / part / "cat").rename(other / part / "apple")

    def use_other_disk(module, rank):
        if rank == 1:  # as if the folder were on another disk
            scandir, open_image = os.scandir, Image.open
            os.scandir = lambda path: scandir(str(path).replace(str(folder), str(other)))
            Image.open = lambda path: open_image(path.replace(str(folder), str(other)))

    end = train_forked("cifar10_ddp", *flags_of(folder, 2, 1), nproc=2, setup=use_other_disk)
    assert re.search(f"cannot read the image {folder}/train/cat/.*No such file", end.text), (
        f"a file that a machine lacks ends the run with an error that names it\n{end.text}")


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


@pytest.mark.parametrize("sizes, accepted", [
    ([(64, 48)], True), ([(64, 48), (16, 12)], True), ([(64, 48), (31, 23), (8, 6)], True),
    ([(64, 48), (64, 48)], False), ([(64, 48), (63, 48)], False), ([(64, 48), (48, 64)], False),
    ([(64, 48), (24, 24)], False), ([(16, 12), (64, 48)], False),
    ([(64, 48), (16, 12), (64, 48)], False)])
@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_tiff_of_several_pages_is_refused_unless_they_are_smaller_copies(
        script, tmp_path, sizes, accepted, compression):
    pages = [gradient().resize(size) for size in sizes]
    path = tmp_path / "image.tif"
    pages[0].save(path, save_all=True, append_images=pages[1:], compression=compression)
    if accepted:
        found = difference(path, pages[0], script)
        assert found == 0, f"the first of pages of {sizes} pixels differs by {found} levels"
        return
    with pytest.raises(RuntimeError) as end:
        script.read_image(path, 64)
        pytest.fail(f"of pages of {sizes} pixels, only the first is read")
    assert "several pages" in str(end.value), f"pages of {sizes} pixels: {end.value}"


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
        data[0][0].size for data in script.load_sets(args))
    assert width > height and test_width < test_height, (
        f"train has wide images, val high ones: trained on {width} x {height}, "
        f"tested on {test_width} x {test_height}")
    assert width < 4000, f"a photograph of 12 megapixels is decoded at {width} x {height} for 224"
    assert 0.08 * width * height > 224 ** 2, f"{width} x {height} is too small for crops of 224"


def write_tiff_of_12_bits(path):
    """Write 8 x 8 black pixels as some cameras do: Pillow reads them, and does not write them."""
    tags = {256: 8, 257: 8, 258: 12, 259: 1, 262: 1, 273: 200, 277: 1, 278: 8, 279: 96}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    path.write_bytes((b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries).ljust(296, b"\0"))


@pytest.mark.parametrize("name", ["I.tif", "F.tif", "12 bits.tif", "half.jpg", "text.png"])
def test_image_that_cannot_be_read_is_named(script, tmp_path, name):
    if name == "text.png":
        (tmp_path / name).write_text("no image")
    elif name == "half.jpg":
        gradient().save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:len(content) // 2])
    elif name == "12 bits.tif":
        write_tiff_of_12_bits(tmp_path / name)
    else:
        picture_in(name[0])[0].save(tmp_path / name)
    with pytest.raises(RuntimeError) as end:
        script.read_image(tmp_path / name, 64)
    assert f"cannot read the image {tmp_path / name}: " in str(end.value), (
        f"the error must name the file: {end.value}")


# --- pretrained weights ---
def test_ranks_start_from_pretrained_weights_and_a_resume_needs_no_file(folder, tmp_path):
    url = models.get_model_weights("squeezenet1_1").DEFAULT.url
    file = tmp_path / "hub" / "checkpoints" / os.path.basename(url)
    file.parent.mkdir(parents=True)
    torch.manual_seed(1)
    weights = models.get_model("squeezenet1_1").state_dict()
    torch.save(weights, file)

    def see(module, rank):
        os.environ["TORCH_HOME"] = str(tmp_path)
        states = []
        watch(module, "loss_and_correct", lambda model, *_: states.append(
            {name: value.clone() for name, value in model.state_dict().items()}))
        return states

    flags = ("--pretrained", "--checkpoint", tmp_path / "run.pt")
    ranks = train_to_end("cifar10_ddp", *flags_of(folder, 6, 1), *flags, nproc=2, setup=see).results
    for rank, (start, *_) in enumerate(ranks):
        different = [name for name in weights
                     if not torch.equal(start[f"module.{name}"], weights[name])]
        assert different == ["classifier.1.weight", "classifier.1.bias"], (
            f"--pretrained on rank {rank}: layers that do not have these weights: {different}")
    file.unlink()
    end = load_checkpoint(tmp_path / "run.pt")["model"]
    ranks = train_to_end("cifar10_ddp", *flags_of(folder, 6, 2), *flags, nproc=2, setup=see).results
    for rank, (start, *_) in enumerate(ranks):  # it evaluates first, without DDP
        different = [name for name in end if not torch.equal(start[name], end[name])]
        assert not different, f"a resume with --pretrained, rank {rank}: other weights {different}"


@pytest.mark.parametrize("change", [
    lambda weights: {f"module.{name}": weight for name, weight in weights.items()},
    lambda weights: {"model": weights, "step": 7}], ids=["DDP's names", "a whole checkpoint"])
def test_weights_of_which_none_fits_are_an_error_line(script, change):
    model = models.get_model("squeezenet1_1")
    with pytest.raises(SystemExit, match="error: .*fit"):
        script.load_pretrained(model, change(model.state_dict()))
        pytest.fail("weights of which none fits are loaded: the model starts from random ones")


def test_weights_that_do_not_fit_are_named(script, capsys):
    """Weights for 1000 classes, and a model for 7. Modules of mnasnet read the weights' version."""
    model = models.get_model("mnasnet0_5", num_classes=7)
    script.load_pretrained(model, models.get_model("mnasnet0_5").state_dict())
    text = capsys.readouterr().out
    assert text == "pretrained, but for classifier.1.bias, classifier.1.weight\n", (
        f"all layers but the last are loaded, and what is not is named: {text}")

"""cifar10_ddp trains on a folder of images as people have them, and from pretrained weights."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from functions import load_script, train, watch
from image_folder import CLASSES, TINY, part_and_label, print_to, run, write_images
from PIL import Image, PngImagePlugin
from torchvision import models
from torchvision.transforms.v2.functional import pil_to_tensor

SCRIPT = "cifar10_ddp"
EPOCHS = 2


@pytest.fixture(scope="module")
def script():
    return load_script(SCRIPT)


def settings_of(script, *flags):
    return script.parse_args([str(flag) for flag in (*TINY, *flags)])


# --- training and test ---
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve images to train on, and five to test on: an odd number for two processes."""
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Train on two processes. Return what is printed, and what the model was given by all ranks:
    a list of (training or not, part, true label, label).
    """
    trial = tmp_path_factory.mktemp("trained")
    seen = trial / "seen"

    def prepare(module, rank):
        def see(model, images, labels):
            with open(seen, "a") as file:
                for image, label in zip(images, labels):
                    print(model.training, *part_and_label(image), label.item(), file=file)

        watch(module, "loss_and_correct", see)

    end = run(SCRIPT, trial, "--image-folder", folder, "--epochs", EPOCHS, "--batch-size", 2,
              "--workers", 0, nproc=2, prepare=prepare)
    assert end.statuses == [0, 0], end.text
    return end.text, seen.read_text().splitlines()


def test_trains_and_tests_on_the_images_of_the_folder(trained):
    _, seen = trained
    expected = []
    for training, part, counts in (True, "train", (6, 6)), (False, "val", (3, 2)):
        for label, count in enumerate(counts):
            expected += [f"{training} {part} {label} {label}"] * count * EPOCHS
    assert sorted(seen) == sorted(expected), (
        "in each epoch, each image in DIR/train is trained on and each in DIR/val tested on, with "
        f"the number of its folder in {CLASSES} as the label, not (training, part, class, label): "
        f"{sorted(seen)}")


def test_first_line_has_the_number_of_classes(trained):
    text, _ = trained
    assert " of 12 images in 2 classes " in text, f"the first line says what is trained on\n{text}"


@pytest.mark.parametrize("name, flags", [
    (SCRIPT, ("--fake-data", 8, "--workers", 1, "--log-every", 60, *TINY)),
    ("fashionmnist_ddp", ("--fake-data", 8)), ("synthetic_ddp", ("--samples", 8))])
def test_fewer_test_samples_than_processes(name, flags, tmp_path):
    """There are two. One process accumulates the gradients of the same parts, if it can."""
    lines = {}
    for nproc in (1, 4):
        log = tmp_path / str(nproc)
        size = ("--batch-size", 2, "--global-batch", 8)
        if name == "synthetic_ddp":
            size = ("--batch-size", 8 // nproc)
        ranks = train(name, *flags, "--epochs", 2, *size, nproc=nproc,
                      setup=lambda module, rank: print_to(log))
        assert [code for _, code, _ in ranks] == [0] * nproc, log.read_text()
        lines[nproc] = [float(number) for number in
                        re.findall(r"test loss (\S+)  accuracy (\S+)", log.read_text())[-1]]
    assert lines[4] == pytest.approx(lines[1], abs=2e-4), (
        f"{name}: test loss and accuracy on 2 samples must be those of one process, {lines[1]}, on "
        f"4 processes, not {lines[4]}")


# --- folders that cannot be meant ---
def rename(old, new):
    return lambda folder: (folder / old).rename(folder / new)


def empty(folder):
    for path in (folder / "val" / "cat").iterdir():
        path.unlink()


def empty_in_both(folder):
    for part in ("train", "val"):
        (folder / part / "bird").mkdir()


def one_level_too_many(folder):
    for part in ("train", "val"):
        (folder / part).rename(folder / "images")
        (folder / part).mkdir()
        (folder / "images").rename(folder / part / "images")


def unreadable(folder):
    (folder / "train" / "cat" / "more").mkdir(mode=0)


def hidden_class(folder):
    shutil.copytree(folder / "train" / "cat", folder / "train" / ".ipynb_checkpoints")


def hidden_folder(folder):
    shutil.copytree(folder / "train" / "cat", folder / "train" / "cat" / ".ipynb_checkpoints")


def hidden_file(folder):
    (folder / "train" / "cat" / "._0.jpg").write_bytes(b"Mac OS X")


def many_differences(folder):
    for number in range(30):
        shutil.copytree(folder / "train" / "cat", folder / "train" / f"class{number:02}")


MISTAKES = {  # what is done to a folder, and what the error line names
    "no folder": (shutil.rmtree, "/images/train"),
    "no val": (lambda folder: shutil.rmtree(folder / "val"), "/images/val"),
    "other classes": (rename("val/dog", "val/wolf"), "different classes: dog, wolf"),
    "many differences": (many_differences, "class08, class09"),
    "empty class": (empty, "classes cat[.]"),
    "empty class in both": (empty_in_both, "classes bird[.]"),
    "one level too many": (one_level_too_many, "the only class in .*/images/train is images"),
    "hidden class": (hidden_class, "/train/[.]ipynb_checkpoints/"),
    "hidden folder": (hidden_folder, "/train/cat/[.]ipynb_checkpoints/"),
    "hidden file": (hidden_file, "/train/cat/[.]_0[.]jpg"),
    "unreadable folder": (unreadable, "Permission denied: .*/images/train/cat/more"),
}


@pytest.fixture
def own_folder():
    """A folder that an unprivileged user can read."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield write_images(Path(folder) / "images")


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_the_folder_is_one_error_line(script, own_folder, name):
    change, named = MISTAKES[name]
    change(own_folder)
    user = os.geteuid()
    os.seteuid(user or 65534)  # root reads everything
    try:
        with pytest.raises(SystemExit) as end:
            script.SeededData(settings_of(script, "--image-folder", own_folder))
    finally:
        os.seteuid(user)
    assert re.fullmatch(f"error: --image-folder .*{named}.{{0,150}}", end.value.code), (
        f"{name}: it must end in one error line on --image-folder that names {named!r}, not with "
        f"{end.value.code!r}")


def test_number_of_unused_files_is_printed(script, folder, tmp_path, capsys):
    copy = shutil.copytree(folder, tmp_path / "images")
    for name in ("readme.txt", "cat/0.gif", "dog/0.heic"):
        (copy / "train" / name).write_bytes(b"")
    script.image_folder(str(copy / "train"))
    text = capsys.readouterr().out
    assert "3 files are not used" in text, f"the number of files without images: {text!r}"


def test_all_ranks_use_the_files_of_rank_0(folder, tmp_path):
    """On the second machine, a class has another name: its files lack there."""
    other = shutil.copytree(folder, tmp_path / "other")
    for part in ("train", "val"):
        (other / part / "cat").rename(other / part / "apple")

    def prepare(module, rank):
        if rank == 1:  # as if the folder were on another disk
            scandir, open_image = os.scandir, Image.open
            os.scandir = lambda path: scandir(str(path).replace(str(folder), str(other)))
            Image.open = lambda path, *rest: open_image(
                getattr(path, "name", str(path)).replace(str(folder), str(other)), *rest)

    end = run(SCRIPT, tmp_path, "--image-folder", folder, "--epochs", 1, "--batch-size", 2,
              "--workers", 0, nproc=2, prepare=prepare)
    assert re.search(f"cannot read the image {folder}/train/cat/.*No such file", end.text), (
        f"a file that a machine lacks ends the run with an error that names it\n{end.text}")


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
    if mode == "P with transparency":
        image = rgb.quantize(64)
        image.info["transparency"] = bytes(range(64))
        return image, image.convert("RGB")
    image = rgb.quantize(64) if mode == "P" else rgb.convert(mode)
    return image, grey if mode in ("L", "LA", "F") else image.convert("RGB")


def difference(path, picture, script):
    """Return by how many levels the image in a file differs from its picture, at most."""
    read = pil_to_tensor(script.read_image(path)).int()
    return (read - pil_to_tensor(picture.convert("RGB")).int()).abs().max().item()


KINDS = [(mode, suffix) for suffix, modes in {
    "png": "1 L LA P RGB RGBA I;16 I;16B", "tif": "1 L LA P RGB RGBA CMYK YCbCr I;16 I;16B",
    "bmp": "1 L P RGB", "ppm": "1 L RGB I", "pgm": "L I;16", "webp": "L RGB RGBA",
    "jpg": "L RGB CMYK", "jpeg": "L", "tiff": "L",
}.items() for mode in modes.split()] + [("P with transparency", "png")]


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("mode, suffix", KINDS)
def test_image_is_read_as_its_picture_of_8_bits(script, tmp_path, mode, suffix):
    image, picture = picture_in(mode)
    path = tmp_path / f"image.{suffix}"
    image.save(path, **({"lossless": True} if suffix == "webp" else {"quality": 100}))
    limit = 6 if suffix in ("jpg", "jpeg") else 2  # JPEG loses some
    found = difference(path, picture, script)
    assert found <= limit, f"{mode} in a {suffix} file differs from its picture by {found} levels"


def test_png_of_16_bits_in_mode_i(script, tmp_path, monkeypatch):
    """As Pillow before 10.3 opens it."""
    monkeypatch.setitem(PngImagePlugin._MODES, (16, 0), ("I", "I;16B"))
    image, picture = picture_in("I;16")
    image.save(tmp_path / "image.png")
    found = difference(tmp_path / "image.png", picture, script)
    assert found <= 2, f"a PNG of 16 bits in mode I differs from its picture by {found} levels"


def write_12_bits(path):
    picture_in("I;16")[0].save(path)
    path.write_bytes(path.read_bytes().replace(b"\2\1\3\0\1\0\0\0\x10", b"\2\1\3\0\1\0\0\0\x0c", 1))


UNREADABLE = {
    "I.tif": lambda path: picture_in("I")[0].save(path),
    "F.tif": lambda path: picture_in("F")[0].save(path),
    "12-bits.tif": write_12_bits,
    "text.png": lambda path: path.write_text("no image"),
    "empty.jpg": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_image_that_cannot_be_read_is_named(script, tmp_path, name):
    UNREADABLE[name](tmp_path / name)
    with pytest.raises(RuntimeError) as end:
        script.read_image(tmp_path / name)
    assert f"cannot read the image {tmp_path / name}: " in str(end.value), (
        f"the error must name the file: {end.value}")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photograph_is_upright(script, tmp_path, orientation, suffix):
    """A camera turns the picture into one that EXIF says how to turn back."""
    methods = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # of Image.transpose, inverted
    picture = gradient().crop((0, 0, 48, 64))
    turned = picture if orientation == 1 else picture.transpose(methods[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"image.{suffix}"
    turned.save(path, exif=exif,
                **({"lossless": True} if suffix == "webp" else {"quality": 100, "subsampling": 0}))
    found = difference(path, picture, script)
    assert found <= 4, f"EXIF orientation {orientation} in a {suffix} file: {found} levels"


# --- pretrained weights ---
URL = models.get_model_weights("squeezenet1_1").DEFAULT.url
FILE = os.path.basename(URL)


@pytest.fixture(scope="module")
def pretrained(folder, tmp_path_factory):
    """Train with a file of weights, and resume without it. Return weights, starts and resume."""
    home = tmp_path_factory.mktemp("home")
    file = home / "hub" / "checkpoints" / FILE
    file.parent.mkdir(parents=True)
    torch.manual_seed(1)
    weights = models.get_model("squeezenet1_1").state_dict()
    torch.save(weights, file)

    def prepare(module, rank):
        os.environ["TORCH_HOME"] = str(home)

        def see(model, *_):
            if model.training and not (home / str(rank)).exists():
                torch.save(model.module.state_dict(), home / str(rank))

        watch(module, "loss_and_correct", see)

    def live(epochs):
        return run(SCRIPT, home, "--image-folder", folder, "--pretrained", "--workers", 0,
                   "--batch-size", 6, "--epochs", epochs, "--checkpoint", home / "run.pt", nproc=2,
                   prepare=prepare)

    first = live(1)
    assert first.statuses == [0, 0], first.text
    file.unlink()
    return weights, [torch.load(home / str(rank)) for rank in (0, 1)], live(2)


LAST = ["classifier.1.weight", "classifier.1.bias"]


@pytest.mark.parametrize("rank", [0, 1])
def test_layers_start_from_the_pretrained_weights(pretrained, rank):
    weights, first, _ = pretrained
    different = [name for name, tensor in weights.items()
                 if not torch.equal(first[rank][name], tensor)]
    assert different == LAST, (
        "with --pretrained, all layers but the last start from torchvision's weights on all ranks; "
        f"on rank {rank}, these differ: {different}")


def test_resume_needs_no_pretrained_weights(pretrained):
    *_, resumed = pretrained
    assert resumed.statuses == [0, 0] and "steps 1 to 2\n" in resumed.text, (
        f"a resume with --pretrained needs neither network nor file\n{resumed.text}")


def test_missing_pretrained_weights_are_one_error_line(script, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as end:
        script.pretrained_weights(settings_of(script))
    assert re.fullmatch(f"error: .*{FILE} into {tmp_path}/hub/checkpoints", end.value.code), (
        "without network and file, --pretrained must end in one error line that names the file "
        f"{FILE} and its folder: {end.value.code!r}")


def small_vit(size, classes=1000):
    return models.VisionTransformer(size, 16, 1, 2, 8, 8, num_classes=classes)


MODELS = {  # pretrained at 224 pixels, and to be trained at other ones, on 7 classes
    "vit": (small_vit(224), small_vit(96, 7)),
    "mnasnet": (models.mnasnet0_5(), models.mnasnet0_5(num_classes=7)),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_layers_but_the_last_are_loaded(script, name, capsys):
    """Also those whose shape depends on the image size."""
    weights, model = MODELS[name]
    script.load_pretrained(model, weights.state_dict())
    text = capsys.readouterr().out
    last = list(model.state_dict())[-2:]
    assert text == f"pretrained, but for {', '.join(last)}\n", (
        f"{name}: all layers but {last} are loaded, and what is not is named: {text}")

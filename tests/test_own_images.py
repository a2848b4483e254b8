"""cifar10_ddp trains on a folder of images, and starts from pretrained weights."""

import os
import shutil
import traceback

import pytest
import torch
from checkpoints import load_checkpoint
from functions import load_script, train, watch
from image_folder import CLASSES, TINY, left_after, part_and_label, print_to, write_images
from processes import start
from torchvision import models

SCRIPT = "cifar10_ddp"
EPOCHS = 2


# --- training and test ---
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve images to train on, and five to test on: an odd number for two processes."""
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Train on a folder, on two processes. Return the checkpoint and what the model was given.

    That is a list of (training or not, part, true label, label) for each rank.
    """
    checkpoint = tmp_path_factory.mktemp("trained") / "run.pt"

    def setup(module, rank):
        seen = []

        def see(model, images, labels):
            if not model.training and torch.is_grad_enabled():
                return  # the pass of wrap_ddp
            for image, label in zip(images, labels):
                seen.append((model.training, *part_and_label(image), label.item()))

        watch(module, "loss_and_correct", see)
        return seen

    ranks = train(SCRIPT, *TINY, "--image-folder", folder, "--epochs", EPOCHS, "--batch-size", 2,
                  "--workers", 0, "--checkpoint", checkpoint, nproc=2, setup=setup)
    return checkpoint, [seen for seen, *_ in ranks]


def test_trains_on_the_images_in_train(trained):
    parts = [part for seen in trained[1] for training, part, *_ in seen if training]
    assert parts == ["train"] * 12 * EPOCHS, (
        f"--image-folder trains on the 12 images in DIR/train, in each of {EPOCHS} epochs, and on "
        f"no other; it trained on images of {parts}")


def test_tests_on_the_images_in_val(trained):
    parts = [part for seen in trained[1] for training, part, *_ in seen if not training]
    assert parts == ["val"] * 5 * EPOCHS, (
        f"--image-folder tests on the 5 images in DIR/val, each once in each of {EPOCHS} epochs on "
        f"all processes together; it tested on images of {parts}")


def test_label_is_the_class_of_the_folder(trained):
    wrong = [sample for seen in trained[1] for sample in seen if sample[2] != sample[3]]
    assert not wrong, (f"the label of an image is the number of its folder in {CLASSES}; wrong "
                       f"(training, part, class of the image, label): {wrong}")


def test_model_has_as_many_outputs_as_there_are_classes(trained):
    outputs = len(load_checkpoint(trained[0])["model"]["classifier.1.bias"])
    assert outputs == len(CLASSES), f"{outputs} outputs of the model for the classes {CLASSES}"


def test_checkpoint_has_the_names_of_the_classes(trained):
    settings = load_checkpoint(trained[0])["settings"]
    assert settings.get("classes") == CLASSES, (
        f"the settings in a checkpoint have the class names {CLASSES}, in the order of the labels: "
        f"{settings}")


def first_error(*flags, **how):
    """Run the script on one process. Return what sys.exit is given, and the group was formed."""
    def setup(module, rank):
        formed = []
        watch(module, "init_process", lambda *_: formed.append(True))
        return formed

    ((formed, code, _),) = train(SCRIPT, *TINY, "--workers", 0, *flags, setup=setup, **how)
    return code, bool(formed)


def test_checkpoint_of_other_classes_is_refused(trained, folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    for part in ("train", "val"):
        (other / part / "dog").rename(other / part / "wolf")
    code, _ = first_error("--image-folder", other, "--epochs", EPOCHS, "--batch-size", 2,
                          "--checkpoint", trained[0])
    assert "error: " in str(code) and "belongs to another run" in code, (
        f"a checkpoint of the classes {CLASSES} must be refused for cat and wolf, not: {code!r}")
    assert "['cat', 'dog'], not ['cat', 'wolf']" in code, (
        f"the error line names the classes of the checkpoint and of the folder: {code!r}")


# --- mistakes ---
def no_folder(folder):
    shutil.rmtree(folder)
    return [str(folder)]


def no_val(folder):
    shutil.rmtree(folder / "val")
    return [str(folder), "val"]


def no_class(folder):
    shutil.rmtree(folder / "train" / "cat")
    shutil.rmtree(folder / "train" / "dog")
    return [str(folder), "train"]


def other_classes(folder):
    (folder / "val" / "dog").rename(folder / "val" / "wolf")
    return [str(folder), "train and val have different classes: dog, wolf"]


def missing_class(folder):
    shutil.rmtree(folder / "val" / "dog")
    return [str(folder), "train and val have different classes: dog"]


def empty_class_to_train(folder):
    (folder / "train" / "bird").mkdir()
    (folder / "val" / "bird").mkdir()
    shutil.copy(folder / "val" / "cat" / "0.png", folder / "val" / "bird" / "0.png")
    return [str(folder), "bird"]


def empty_class_to_test(folder):
    for path in (folder / "val" / "cat").iterdir():
        path.unlink()
    return [str(folder), "cat"]


MISTAKES = [no_folder, no_val, no_class, other_classes, missing_class, empty_class_to_train,
            empty_class_to_test]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_in_the_folder_is_one_error_line(mistake, tmp_path):
    names = mistake(write_images(tmp_path / "images"))
    code, formed = first_error("--image-folder", tmp_path / "images", "--batch-size", 4)
    assert str(code).startswith("error: --image-folder "), (
        f"{mistake.__name__}: it must end in an error line on --image-folder, not with {code!r}")
    assert "\n" not in code, f"{mistake.__name__}: the error must be one line: {code}"
    for name in names:
        assert name in code, f"{mistake.__name__}: the error line must name {name!r}: {code!r}"
    assert not formed, (f"{mistake.__name__}: rank 0 must end before the group is formed, or the "
                        "others wait for it")


def test_image_folder_and_fake_data_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as exit:
        load_script(SCRIPT).parse_args(["--image-folder", "DIR", "--fake-data"])
    text = capsys.readouterr().err
    assert exit.value.code == 2, f"--image-folder with --fake-data must be refused: {text}"
    assert "error: argument --fake-data: not allowed with argument --image-folder" in text, (
        f"the error line must name both flags: {text}")


@pytest.fixture(scope="module")
def run_without_folder(tmp_path_factory):
    """Start two processes under torchrun on a folder that does not exist."""
    folder = tmp_path_factory.mktemp("none") / "images"
    with start(SCRIPT, *TINY, "--image-folder", folder, launcher="torchrun", nproc=2) as job:
        result = job.finish()
        return result, left_after(10, job.pids)


def test_mistake_under_torchrun_is_one_error_line(run_without_folder):
    errors = run_without_folder[0].errors
    assert len(errors) == 1 and "--image-folder" in errors[0], (
        f"only rank 0 prints an error line, but there are {len(errors)}: {errors}\n"
        f"{run_without_folder[0].text}")


def test_mistake_under_torchrun_ends_all_processes(run_without_folder):
    result, left = run_without_folder
    assert result.status != 0, f"torchrun must fail without a folder\n{result.text}"
    assert not left, f"10 s after the end, the processes {left} are left\n{result.text}"


# --- images that cannot be decoded ---
def truncate(path):
    data = path.read_bytes()
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(data[:len(data) // 2])
    os.replace(temporary, path)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Under torchrun, truncate a JPEG after epoch 1. Return the checkpoint and the job's end."""
    folder = write_images(tmp_path_factory.mktemp("damaged") / "images")
    checkpoint = folder / "run.pt"
    image = folder / "train" / "dog" / "1.jpg"
    with start(SCRIPT, *TINY, "--image-folder", folder, "--epochs", 200, "--batch-size", 2,
               "--workers", 1, "--checkpoint", checkpoint, launcher="torchrun", nproc=2) as job:
        job.wait_for("saved step 3 ")
        truncate(image)
        result = job.finish()
        left = left_after(10, job.pids)
    return image, checkpoint, result, left


def test_damaged_image_ends_the_run(damaged):
    _, _, result, _ = damaged
    assert result.status != 0, f"a truncated JPEG must end the run with an error\n{result.text}"


def test_error_names_the_damaged_image(damaged):
    image, _, result, _ = damaged
    assert f"cannot read the image {image}" in result.text, (
        f"the error must name the file {image}\n{result.text}")


def test_damaged_image_leaves_no_process(damaged):
    *_, result, left = damaged
    assert not left, f"10 s after the end, the processes {left} are left\n{result.text}"


def test_damaged_image_leaves_the_checkpoint(damaged):
    _, checkpoint, result, _ = damaged
    step = load_checkpoint(checkpoint)["step"]
    saved = result.text.count("saved step ")
    assert step == 3 * saved, (f"the checkpoint of the last of {saved} epochs of 3 steps must be "
                               f"loadable, but it is of step {step}\n{result.text}")


@pytest.mark.parametrize("workers", [0, 1])
def test_text_in_place_of_an_image_is_named(workers, tmp_path):
    folder = write_images(tmp_path / "images")
    image = folder / "train" / "cat" / "4.png"
    image.write_text("no image")
    log = tmp_path / "log"

    def setup(module, rank):
        print_to(log)
        main = module.main

        def main_as_python():
            try:
                main()
            except Exception:
                traceback.print_exc()
                raise SystemExit(1) from None

        module.main = main_as_python

    ((_, code, _),) = train(SCRIPT, *TINY, "--image-folder", folder, "--workers", workers,
                            "--epochs", 1, "--batch-size", 4, setup=setup)
    text = log.read_text()
    assert code == 1, f"a text file named .png must end the run, but the status is {code}\n{text}"
    assert f"cannot read the image {image}" in text, f"the error must name {image}\n{text}"


# --- pretrained weights ---
URL = models.get_model_weights("squeezenet1_1").DEFAULT.url
FILE = os.path.basename(URL)


class Pretrained:
    """The end of two runs with --pretrained: with a file of weights, and resumed without it."""


@pytest.fixture(scope="module")
def pretrained(folder, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    file = home / "hub" / "checkpoints" / FILE
    file.parent.mkdir(parents=True)
    torch.manual_seed(1)
    ends = Pretrained()
    ends.weights = models.get_model("squeezenet1_1").state_dict()
    torch.save(ends.weights, file)
    ends.log = home / "log"

    def setup(module, rank):
        os.environ["TORCH_HOME"] = str(home)
        print_to(ends.log)
        first = {}

        def see(model, *_):
            if model.training and not first:
                for name, tensor in model.state_dict().items():
                    first[name.removeprefix("module.")] = tensor.clone()

        watch(module, "loss_and_correct", see)
        return first

    def live(epochs):
        return train(SCRIPT, *TINY, "--image-folder", folder, "--pretrained", "--workers", 0,
                     "--batch-size", 6, "--epochs", epochs, "--checkpoint", home / "run.pt",
                     nproc=2, setup=setup)

    ends.first = [first for first, *_ in live(1)]
    file.unlink()
    ends.resumed = [code for _, code, _ in live(2)]
    return ends


@pytest.mark.parametrize("rank", [0, 1])
def test_layers_start_from_the_pretrained_weights(pretrained, rank):
    first = pretrained.first[rank]
    different = [name for name, tensor in pretrained.weights.items()
                 if not torch.equal(first[name], tensor)]
    assert different == ["classifier.1.weight", "classifier.1.bias"], (
        "with --pretrained, all layers but the last start from torchvision's weights on all ranks; "
        f"on rank {rank}, these differ: {different}")


def test_resume_needs_no_pretrained_weights(pretrained):
    text = pretrained.log.read_text()
    assert pretrained.resumed == [0, 0], (
        "a resume with --pretrained needs neither network nor file, but it ended with "
        f"{pretrained.resumed}\n{text}")
    assert "steps 1 to 2\n" in text, f"it must resume from the checkpoint of step 1\n{text}"


def test_missing_pretrained_weights_are_one_error_line(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    code, formed = first_error("--image-folder", folder, "--pretrained", "--batch-size", 4)
    assert str(code).startswith("error: "), (
        f"--pretrained without network and file must end in an error line, not with {code!r}")
    assert "\n" not in code, f"the error must be one line: {code}"
    assert FILE in code, f"the error line must name the file {FILE}: {code!r}"
    place = str(tmp_path / "hub" / "checkpoints")
    assert place in code, f"the error line must say where to put the file, {place}: {code!r}"
    assert not formed, "rank 0 must end before the group is formed, or the others wait for it"

"""cifar10_ddp trains any classifier of torchvision: here, one of each kind."""

import re

import pytest
import torch
from scripts import ROOT, load_script
from torchvision import models

NAMES = ["resnet18", "resnet50", "squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5",
         "efficientnet_b0", "convnext_tiny", "maxvit_t", "swin_v2_t", "swin_v2_b",
         "vit_b_16", "densenet121", "mobilenet_v3_small", "vgg11", "alexnet"]


def test_the_models_that_pages_name_are_tested():
    pages = [path.read_text() for pattern in ("*.md", "*/*.md", "*/*.sbatch", "*/train.py")
             for path in ROOT.glob(pattern)]
    named = {name for page in pages for name in re.findall(r"--model ([a-z]\w+)", page)}
    assert named <= set(NAMES), f"pages name models that are not tested: {named - set(NAMES)}"


@pytest.mark.parametrize("name", NAMES)
def test_a_model_maps_images_of_its_size_to_logits(name):
    """On PyTorch's device without data."""
    module = load_script("cifar10_ddp")
    args = module.parse_args(["--model", name])
    with torch.device("meta"):
        logits = module.build_model(args, 7)(torch.empty(2, 3, args.image_size, args.image_size))
    shape = getattr(logits, "shape", type(logits))
    assert shape == (2, 7), f"{name} maps 2 images of {args.image_size} pixels to {shape}"


@pytest.mark.parametrize("train_set", [True, False])
@pytest.mark.parametrize("flags", [[], ["--image-folder", "DIR"]], ids=["CIFAR-10", "own images"])
@pytest.mark.parametrize("size", [32, 96])
def test_images_have_the_size_of_the_model(size, flags, train_set):
    module = load_script("cifar10_ddp")
    transform = module.transforms(module.parse_args([*flags, "--image-size", str(size)]), train_set)
    image, _ = transform(torch.zeros(3, 32, 32, dtype=torch.uint8), 0)
    assert image.shape == (3, size, size), f"--image-size {size}, {flags}: {tuple(image.shape)}"


@pytest.mark.parametrize("flags, same", [
    (["--image-folder", "DIR"], True), (["--fake-data", "--pretrained"], True),
    (["--fake-data", "--pretrained", "--image-size", "32"], True), (["--fake-data"], False)])
def test_resnet18_has_torchvisions_first_layer_but_for_small_images(flags, same):
    """Pretrained weights do not fit another one, and images of 224 pixels need it."""
    module = load_script("cifar10_ddp")
    shapes = [model.conv1.weight.shape for model in (
        module.build_model(module.parse_args(flags), 10), models.resnet18())]
    assert (shapes[0] == shapes[1]) == same, f"{flags}: the first layer is of {shapes[0]}"

"""cifar10_ddp gives a model images of its size, and small ones another first layer."""

import pytest
import torch
from scripts import load_script
from torchvision import models

@pytest.mark.parametrize("train_set", [True, False])
@pytest.mark.parametrize("flags", [[], ["--image-folder", "DIR"]], ids=["CIFAR-10", "own images"])
@pytest.mark.parametrize("size", [32, 96])
def test_images_have_the_size_of_the_model(size, flags, train_set):
    module = load_script("cifar10_ddp")
    transform = module.transforms(module.parse_args([*flags, "--image-size", str(size)]), train_set)
    pixels = 32 if train_set else 40  # as of a photograph that the weights are used for
    image, _ = transform(torch.zeros(3, pixels, pixels, dtype=torch.uint8), 0)
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

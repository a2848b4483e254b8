"""Recipes: learning rates, optimizers, what a model is given, flips, crops, bfloat16."""

import pytest
import torch
import torch.nn as nn
from forked import train_to_end
from recorder import FewPixels, use_small_model
from scripts import DDP_SCRIPTS, SCRIPTS, load_script
from torch.nn.modules.module import register_module_forward_hook

WARMING_UP = [script for script in DDP_SCRIPTS if "fake" in SCRIPTS[script].data_flag]
WITH_BF16 = [script for script in SCRIPTS if "bf16" in vars(load_script(script).parse_args([]))]


@pytest.mark.parametrize("script", WARMING_UP)
def test_the_rate_rises_for_a_fifth_of_the_steps_and_falls_to_zero(script):
    """Of 20 steps: it is at the peak in the fourth and fifth one."""
    module = load_script(script)
    args = module.parse_args(["--fake-data"])
    optimizer, scheduler = module.build_optimizer(args, nn.Linear(2, 2), 20)
    peak = scheduler.base_lrs[0]
    shares = []
    for _ in range(20):
        shares.append(optimizer.param_groups[0]["lr"] / peak)
        optimizer.step()
        scheduler.step()
    expected = [0.25, 0.5, 0.75, 1, 1, *[number / 16 for number in range(15, 0, -1)]]
    assert shares == pytest.approx(expected), f"{script}: shares of the peak rate are {shares}"
    assert optimizer.param_groups[0]["lr"] == 0, f"{script}: the rate does not end at 0"


def test_the_optimizer_of_cifar10():
    """Weights decay, biases and norms do not."""
    module = load_script("cifar10_ddp")
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer, _ = module.build_optimizer(module.parse_args(["--fake-data"]), model, 20)
    decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups
              for weight in group["params"]}
    found = [decays[id(weight)] for weight in model.parameters()]
    assert found == [5e-4, 0, 0, 0], f"decay of a weight, its bias, a norm's two is {found}"
    assert all(group["nesterov"] and group["momentum"] == 0.9
               for group in optimizer.param_groups), f"no Nesterov momentum: {optimizer}"


def images_that_a_model_sees(script, images, training):
    """Return what the script's step, or its evaluation, gives to the model."""
    module = load_script(script)
    args = module.parse_args(["--fake-data"])
    seen = []
    model = FewPixels().train(training)
    model.register_forward_pre_hook(lambda model, inputs: seen.extend(inputs))
    batch = images, torch.zeros(len(images)).long()
    if hasattr(module, "scale"):
        batch = module.scale(*batch)
    if training:
        batch = module.augment(args, *batch)
    module.loss_and_counts(args, model, *batch)
    return seen[0]


@pytest.mark.parametrize("script", ["fashionmnist_ddp", "mnist_dp"])
def test_pixels_are_scaled_to_1(script):
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 28, 28)
    seen = images_that_a_model_sees(script, images, training=False)
    found = [seen[0].unique().tolist(), seen[1].unique().tolist()]
    assert found == [[0], [1]], f"{script}: black and white are {found}"


@pytest.mark.parametrize("script, size", [("fashionmnist_ddp", 28), ("cifar10_ddp", 32)])
def test_half_of_the_images_are_mirrored_in_training_alone(script, size):
    """They grow from left to right; cifar10_ddp shifts them, too."""
    channels = 1 if script == "fashionmnist_ddp" else 3
    images = torch.arange(size, dtype=torch.uint8).expand(400, channels, size, size)
    for training, least, most in ((True, 150, 250), (False, 0, 0)):
        seen = images_that_a_model_sees(script, images, training)
        mirrored = (seen[:, 0, 0, 8] > seen[:, 0, 0, 20]).sum().item()
        assert least <= mirrored <= most, (
            f"{script}, training {training}: {mirrored} of 400 images are mirrored")
        different = len(seen.unique(dim=0))
        assert training or different == 1, f"{script}: equal images to validate become {different}"


def test_cifar10_shifts_by_up_to_4_pixels():
    """An image has its column in red and its row in green. Some are mirrored."""
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    images = torch.stack([columns, rows, rows]).float().expand(3000, 3, 32, 32)
    shifted, _ = load_script("cifar10_ddp").augment(None, images, torch.zeros(3000))
    found = {tuple(map(int, image)) for image in shifted[:, :2, 16, 16]}
    expected = {(column, row) for column in range(11, 21) for row in range(12, 21)}
    assert found == expected, f"the pixel in the middle comes from {len(found)} places: {found}"


@pytest.mark.parametrize("script", WITH_BF16)
def test_bfloat16_in_training_and_evaluation(script):
    def setup(module, rank):
        def see(layer, inputs, output):
            if isinstance(layer, nn.Linear):
                types.add((layer.training, str(output.dtype)))

        types = set()
        if script != "mnist_dp":  # whose model enters it
            use_small_model(module)
        register_module_forward_hook(see)
        return types

    flags = [SCRIPTS[script].data_flag, 32, "--global-batch", 8, *SCRIPTS[script].no_children]
    (types,) = train_to_end(script, *flags, "--epochs", 1, "--bf16", setup=setup).results
    expected = {(True, "torch.bfloat16"), (False, "torch.bfloat16")}
    assert types == expected, f"{script} --bf16: layers (in training?) compute in {types}"

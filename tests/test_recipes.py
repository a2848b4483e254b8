"""The recipes: learning rates, weight decay, dropout, pixels, flips and crops."""

import argparse

import pytest
import torch
import torch.nn as nn
from functions import load_script, train
from recorder import use_small_model
from scripts import IMAGE_SCRIPTS, SCRIPTS
from torch.optim.optimizer import register_optimizer_step_pre_hook

# ---- learning rates ----
DECAY = [1, 0.75, 0.5, 0.25]  # factors of steps 0, 3, 6 and 9 of 12: linear decay
WARM_UP = [1 / 2.4, 0.9375, 0.625, 0.3125]  # over a fifth of the steps, then linear decay


def two_groups(script):
    """Return a setup for train(): a model with two parameter groups, whose rates are recorded."""
    def setup(module, rank):
        steps = []
        use_small_model(module, script)
        build_model = module.build_model

        def build_two_groups(*arguments):
            model, _ = build_model(*arguments)
            first, *others = model.parameters()
            groups = [{"params": [first]}, {"params": others, "lr": 2e-5}]
            return model, torch.optim.SGD(groups, lr=1e-3)

        def before_step(optimizer, *_):
            steps.append([group["lr"] for group in optimizer.param_groups])

        module.build_model = build_two_groups
        register_optimizer_step_pre_hook(before_step)
        return steps

    return setup


@pytest.fixture(scope="module", params=SCRIPTS)
def rates(request):
    """A script, and the rates of its two parameter groups in each of 12 steps."""
    script = request.param
    flags = (SCRIPTS[script].data_flag, 48, "--batch-size", 16, "--epochs", 4,
             *SCRIPTS[script].no_children)
    ((steps, code, _),) = train(script, *flags, setup=two_groups(script))
    assert code == 0, f"{script} has ended with {code}"
    return script, steps


@pytest.mark.parametrize("group, peak", [(0, 1e-3), (1, 2e-5)])
def test_each_parameter_group_has_its_peak_rate_times_the_factor(rates, group, peak):
    script, steps = rates
    factors = [step_rates[group] / peak for step_rates in steps[::3]]
    expected = WARM_UP if SCRIPTS[script].warm_up else DECAY
    assert factors == pytest.approx(expected), (
        f"{script}: the learning rate of parameter group {group}, as factors of its peak in steps "
        f"1, 4, 7 and 10 of 12, is {factors}, not {expected}")


# ---- cifar10_ddp's optimizer ----
@pytest.fixture(scope="module")
def decayed():
    """The peak rate, and weights and biases of cifar10_ddp before and after 3 steps of SGD.

    The gradients are zero: weights shrink by weight decay alone.
    """
    module = load_script("cifar10_ddp")
    args = argparse.Namespace(model="resnet18", image_folder=None, lr=6400.0)
    model, optimizer = module.build_model(args, 10, 8, torch.device("cpu"))
    first = model.fc.weight[0, 0].item(), model.fc.bias[0].item(), model.bn1.weight[0].item()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        optimizer.step()
    last = model.fc.weight[0, 0].item(), model.fc.bias[0].item(), model.bn1.weight[0].item()
    return [group["lr"] for group in optimizer.param_groups], first, last


def test_the_peak_rate_of_cifar10_is_for_256_images(decayed):
    peaks, _, _ = decayed
    assert peaks == [200, 200], f"--lr 6400 with a global batch of 8 is 200, not {peaks}"


def test_the_weights_of_cifar10_shrink_by_weight_decay_with_nesterovs_momentum(decayed):
    _, first, last = decayed
    expected = first[0]
    momentum = 0.0
    for _ in range(3):
        decay = 5e-4 * expected
        momentum = 0.9 * momentum + decay
        expected -= 200 * (decay + 0.9 * momentum)
    assert last[0] == pytest.approx(expected, rel=1e-4), (
        f"weight decay 5e-4 with Nesterov's momentum 0.9 makes {first[0]} {expected}, "
        f"not {last[0]}")


def test_biases_and_norms_of_cifar10_do_not_shrink(decayed):
    _, first, last = decayed
    assert last[1:] == first[1:], (
        f"without gradients, a bias and a norm's weight were {first[1:]}, and are {last[1:]}")


# ---- models ----
@pytest.mark.parametrize("script", ["mnist_dp", "fashionmnist_ddp"])
@pytest.mark.parametrize("layer, probability", [("dropout1", 0.25), ("dropout2", 0.5)])
def test_dropout(script, layer, probability):
    module = load_script(script)
    model = module.CNN(False) if script == "mnist_dp" else module.CNN()
    zeros = []

    def count_zeros(dropout, inputs, output):
        zeros.append((output[inputs[0] > 0] == 0).double().mean().item())

    getattr(model, layer).register_forward_hook(count_zeros)
    torch.manual_seed(0)
    model(torch.rand(64, 1, 28, 28))
    assert zeros == [pytest.approx(probability, abs=0.03)], (
        f"{script}: {layer} sets {zeros} of its inputs to zero, not {probability}")


# ---- pixels ----
class See(nn.Module):
    """A model that keeps its inputs."""

    def __init__(self, channels):
        super().__init__()
        self.linear = nn.Linear(channels, 10)

    def forward(self, images):
        self.images = images
        return self.linear(images.mean((2, 3)))


@pytest.mark.parametrize("script", IMAGE_SCRIPTS)
def test_black_and_white_pixels(script):
    """The model sees black and white as the ends of its range; the data is not written to."""
    channels = SCRIPTS[script].channels
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    images = images.repeat(1, channels, 28, 28)
    model = See(channels).eval()
    load_script(script).loss_and_correct(model, images, torch.tensor([0, 1]))
    ends = model.images[0].unique().tolist() + model.images[1].unique().tolist()
    expected = SCRIPTS[script].black_and_white
    assert ends == pytest.approx(expected), (
        f"{script}: the model sees black and white as {ends}, not {expected}")
    assert images.unique().tolist() == [0, 255], f"{script}: loss_and_correct changes its images"


# ---- flips and crops ----
def numbered_images(count, size):
    """Return images (count, 3, size, size) whose pixels are numbered."""
    return torch.arange(size * size).view(1, 1, size, size).expand(count, 3, size, size)


def test_fashionmnist_flips_half_of_the_images():
    torch.manual_seed(0)
    images = load_script("fashionmnist_ddp").augment(numbered_images(2000, 28))
    flipped = (images[:, 0, 0, 0] > images[:, 0, 0, 1]).sum().item()
    assert 900 < flipped < 1100, f"of 2000 images {flipped} are flipped, not half"


@pytest.fixture(scope="module")
def crops():
    """2000 images (3, 32, 32) with numbered pixels, as cifar10_ddp's transforms return them."""
    module = load_script("cifar10_ddp")
    args = argparse.Namespace(model="resnet18", image_folder=None, image_size=None)
    transform = module.transforms(args, train_set=True)
    torch.manual_seed(0)
    image = torch.stack([torch.arange(32).repeat(32, 1), torch.arange(32).repeat(32, 1).T,
                         torch.zeros(32, 32)]).to(torch.uint8)  # column, row, 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other, on images so small
    images = torch.stack([transform(image) for _ in range(2000)])
    torch.set_num_threads(threads)
    return images


def test_cifar10_flips_half_of_the_images(crops):
    flipped = (crops[:, 0, 16, 16] > crops[:, 0, 16, 17]).sum().item()
    assert 900 < flipped < 1100, f"of 2000 images {flipped} are flipped, not half"


def test_cifar10_crops_at_all_places(crops):
    flipped = crops[:, 0, 16, 16] > crops[:, 0, 16, 17]
    places = set(map(tuple, crops[~flipped, :2, 16, 16].tolist()))
    assert len(places) == 81, (
        f"images padded by 4 pixels have 9 x 9 crops, of which {len(places)} are used")


def test_cifar10_does_not_change_the_images_of_the_test_set():
    module = load_script("cifar10_ddp")
    args = argparse.Namespace(model="resnet18", image_folder=None, image_size=None)
    image = torch.randint(256, (3, 32, 32), dtype=torch.uint8)
    transformed = module.transforms(args, train_set=False)(image)
    assert torch.equal(transformed, image), "a test image is changed by the transforms"

"""The recipes: learning rates, weight decay, dropout, pixels, flips and crops."""

import pytest
import torch
import torch.nn as nn
from functions import load_script
from recorder import use_small_model
from scripts import IMAGE_SCRIPTS, SCRIPTS
from stopped_runs import finish
from torch.optim.optimizer import register_optimizer_step_pre_hook

# ---- learning rates ----
DECAY = [1, 0.75, 0.5, 0.25]  # factors of steps 0, 3, 6 and 9 of 12: linear decay
WARM_UP = [1 / 2.4, 0.9375, 0.625, 0.3125]  # over a fifth of the steps, then linear decay


def record_rates(module, rank):
    """A setup for train(): it returns a list that gets the groups' learning rates in each step.

    Where the script has a function of the rate, the model has two groups, with --lr and 0.02 of it.
    """
    steps = []
    use_small_model(module)
    if hasattr(module, "learning_rate"):
        build_model = module.build_model

        def build_two_groups(args, *arguments):
            model, _ = build_model(args, *arguments)
            first, *others = model.parameters()
            groups = [{"params": [first]}, {"params": others, "lr": 0.02 * args.lr}]
            return model, torch.optim.SGD(groups, lr=args.lr)

        module.build_model = build_two_groups
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: steps.append([group["lr"] for group in optimizer.param_groups]))
    return steps


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_parameter_group_has_its_peak_rate_times_the_factor(script):
    flags = (SCRIPTS[script].data_flag, 48, "--batch-size", 16, "--epochs", 4, "--lr", 1e-3,
             *SCRIPTS[script].no_children)
    (steps,) = finish(script, *flags, nproc=1, setup=record_rates)
    expected = WARM_UP if SCRIPTS[script].warm_up else DECAY
    for group, peak in zip(range(len(steps[0])), (1e-3, 2e-5)):
        factors = [rates[group] / peak for rates in steps[::3]]
        assert factors == pytest.approx(expected), (
            f"{script}: the learning rate of parameter group {group}, as factors of its peak in "
            f"steps 1, 4, 7 and 10 of 12, is {factors}, not {expected}")


def test_the_optimizer_of_cifar10():
    """The peak rate is for 256 images; weights decay, biases and norms do not.

    The gradients are zero: in 3 steps, weights shrink by decay with Nesterov's momentum alone.
    """
    module = load_script("cifar10_ddp")
    model, optimizer = module.build_model(
        module.parse_args(["--lr", "6400"]), 10, 8, torch.device("cpu"))
    peaks = [group["lr"] for group in optimizer.param_groups]
    assert peaks == [200, 200], f"--lr 6400 with a global batch of 8 is 200, not {peaks}"
    factor, momentum = 1.0, 0.0
    for _ in range(3):
        momentum = 0.9 * momentum + 5e-4 * factor
        factor -= 200 * (5e-4 * factor + 0.9 * momentum)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(3):
        optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (factor if parameter.ndim > 1 else 1)
        assert torch.allclose(parameter, expected, rtol=1e-4), (
            f"without gradients, {name} should shrink by {factor} if it is a weight, and stay if a "
            f"bias or norm: {before[name].flatten()[:3]} is {parameter.flatten()[:3]}")


# ---- models ----
@pytest.mark.parametrize("script, arguments", [("mnist_dp", [False]), ("fashionmnist_ddp", [])])
def test_dropout(script, arguments):
    model = load_script(script).CNN(*arguments)
    for layer, probability in ((model.dropout1, 0.25), (model.dropout2, 0.5)):
        seen = []
        hook = layer.register_forward_hook(lambda _, *values: seen.append(values))
        torch.manual_seed(0)
        model(torch.rand(64, 1, 28, 28))
        hook.remove()
        (((inputs,), output),) = seen
        zeros = (output[inputs > 0] == 0).double().mean().item()
        assert zeros == pytest.approx(probability, abs=0.03), (
            f"{script}: a layer sets {zeros} of its inputs to zero, not {probability}")


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
def test_fashionmnist_flips_half_of_the_images_in_training_alone():
    module = load_script("fashionmnist_ddp")
    model = See(1)
    images = torch.arange(28, dtype=torch.uint8).expand(2000, 1, 28, 28)
    torch.manual_seed(0)
    for training, least, most in ((True, 900, 1100), (False, 0, 0)):
        model.train(training)
        module.loss_and_correct(model, images, torch.zeros(2000, dtype=torch.long))
        flipped = (model.images[:, 0, 0, 0] > model.images[:, 0, 0, 1]).sum().item()
        assert least <= flipped <= most, (
            f"with model.training {training}, {flipped} of 2000 images are flipped")


def test_cifar10_flips_half_of_the_images_and_crops_at_all_places():
    """Images of 32 pixels, padded by 4, have 9 x 9 crops."""
    module = load_script("cifar10_ddp")
    transform = module.transforms(module.parse_args([]), train_set=True)
    torch.manual_seed(0)
    image = torch.stack([torch.arange(32).repeat(32, 1), torch.arange(32).repeat(32, 1).T,
                         torch.zeros(32, 32)]).to(torch.uint8)  # column, row, 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other, on images so small
    crops = torch.stack([transform(image) for _ in range(2000)])
    torch.set_num_threads(threads)
    flipped = crops[:, 0, 16, 16] > crops[:, 0, 16, 17]
    assert 900 < flipped.sum() < 1100, f"of 2000 images {flipped.sum()} are flipped, not half"
    places = set(map(tuple, crops[~flipped, :2, 16, 16].tolist()))
    assert len(places) == 81, f"of 9 x 9 crops, {len(places)} are used"
    test_image = module.transforms(module.parse_args([]), train_set=False)(image)
    assert torch.equal(test_image, image), "a test image is changed by the transforms"

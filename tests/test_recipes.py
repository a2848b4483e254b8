"""The recipes: learning rates, weight decay, dropout, pixels, flips and crops, bfloat16."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn
from functions import finish, load_script
from recorder import record_small_model
from scripts import SCRIPTS

DECAY = [1, 0.75, 0.5, 0.25]  # factors of steps 0, 3, 6 and 9 of 12: linear decay
WARM_UP = [1 / 2.4, 0.9375, 0.625, 0.3125]  # over a fifth of the steps, then linear decay


# ---- learning rates and weight decay ----
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_parameter_group_has_its_peak_rate_times_the_factor(script):
    flags = (SCRIPTS[script].data_flag, 48, "--batch-size", 16, "--epochs", 4, "--lr", 1e-3,
             *SCRIPTS[script].no_children)
    (recorder,) = finish(script, *flags, nproc=1, setup=record_small_model)
    expected = WARM_UP if script in ("cifar10_ddp", "fashionmnist_ddp") else DECAY
    for number, peak in zip(range(len(recorder.rates[0])), (1e-3, 2e-5)):
        factors = [rates[number] / peak for rates in recorder.rates[::3]]
        assert factors == pytest.approx(expected), (
            f"{script}: the learning rate of parameter group {number}, as factors of its peak in "
            f"steps 1, 4, 7 and 10 of 12, must be {expected}, not {factors}")


def test_the_optimizer_of_cifar10():
    """The peak rate is for 256 images. Weights decay, but biases and norms do not."""
    module = load_script("cifar10_ddp")
    args = module.parse_args(["--lr", "6400"])
    model, optimizer = module.build_model(args, 10, 8, torch.device("cpu"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        assert group["lr"] == 200, f"--lr 6400 with a global batch of 8 is 200, not {group['lr']}"
        assert (group["momentum"], group["nesterov"]) == (0.9, True), (
            "cifar10_ddp trains with Nesterov's momentum of 0.9")
        for parameter in group["params"]:
            expected = 5e-4 if parameter.ndim > 1 else 0
            assert group["weight_decay"] == expected, (
                f"{names[parameter]} must have a weight decay of {expected}")
            names.pop(parameter)
    assert not names, f"the optimizer does not train {list(names.values())}"


# ---- dropout and pixels ----
@pytest.mark.parametrize("script, arguments", [("mnist_dp", [False]), ("fashionmnist_ddp", [])])
def test_dropout(script, arguments):
    model = load_script(script).CNN(*arguments)
    for layer, probability in ((model.dropout1, 0.25), (model.dropout2, 0.5)):
        shares = []
        hook = layer.register_forward_hook(lambda _, inputs, output: shares.append(
            (output[inputs[0] > 0] == 0).double().mean().item()))
        torch.manual_seed(0)
        model(torch.rand(64, 1, 28, 28))
        hook.remove()
        assert shares == [pytest.approx(probability, abs=0.03)], (
            f"{script}: a layer sets {shares} of its inputs to zero, not {probability}")


class See(nn.Module):
    """A model that keeps its inputs."""

    def __init__(self, channels):
        super().__init__()
        self.linear = nn.Linear(channels, 10)

    def forward(self, images):
        self.images = images
        return self.linear(images.mean((2, 3)))


@pytest.mark.parametrize("script, channels, black, white", [
    ("mnist_dp", 1, 0, 1), ("fashionmnist_ddp", 1, 0, 1), ("cifar10_ddp", 3, -115 / 57, 140 / 57)])
def test_black_and_white_pixels(script, channels, black, white):
    images = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1)
    images = images.repeat(1, channels, 28, 28)
    model = See(channels).eval()
    load_script(script).loss_and_correct(model, images, torch.tensor([0, 1]))
    ends = model.images[0].unique().tolist() + model.images[1].unique().tolist()
    assert ends == pytest.approx([black, white]), (
        f"{script}: the model sees black and white as {ends}, not {[black, white]}")
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
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    image = torch.stack([columns, rows, 0 * rows]).to(torch.uint8)
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


# ---- bfloat16 ----
@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp", "synthetic_ddp"])
def test_bfloat16_in_training_and_evaluation(script):
    flags = (SCRIPTS[script].data_flag, 16, "--batch-size", 8, "--epochs", 1, "--bf16")
    (recorder,) = finish(script, *flags, *SCRIPTS[script].no_children, nproc=1,
                         setup=record_small_model)
    types = {part.outputs.dtype for parts in recorder.steps + recorder.evaluations
             for part in parts}
    assert types == {torch.bfloat16}, f"with --bf16, {script} computes in {types}"


@pytest.mark.parametrize("bf16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_the_model_of_data_parallel_enters_autocast_in_each_thread(bf16, dtype):
    """Autocast is local to a thread, and nn.DataParallel starts one for each GPU."""
    model = load_script("mnist_dp").CNN(bf16)
    dtypes = []
    model.fc1.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with ThreadPoolExecutor() as pool:
        pool.submit(model, torch.zeros(1, 1, 28, 28)).result()
    assert dtypes == [dtype], f"with bf16={bf16}, a thread computes in {dtypes[0]}"

"""The recipes: learning rates, weight decay, pixels, flips and crops, bfloat16."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn
from forked import train_to_end
from recorder import Recorder, change_sets, loss_name, record_small_model
from scripts import SCRIPTS, STEP_SCRIPTS, load_script

# ---- learning rates and weight decay ----
@pytest.mark.parametrize("script", ["mnist_dp", *STEP_SCRIPTS])
def test_each_parameter_group_has_its_peak_rate_times_learning_rate(script):
    """Or times a linear decay, where a scheduler of PyTorch computes it."""
    flags = (SCRIPTS[script].data_flag, 48, "--batch-size", 16, "--epochs", 4, "--lr", 1e-3,
             *SCRIPTS[script].no_children)
    (recorder,) = train_to_end(script, *flags, setup=record_small_model).results
    factor = getattr(load_script(script), "learning_rate", lambda step, total: 1 - step / total)
    args = [None] if hasattr(load_script(script), "loss_and_counts") else []
    expected = [factor(*args, step, 12) for step in range(0, 12, 3)]
    for number, peak in zip(range(len(recorder.rates[0])), (1e-3, 2e-5)):
        factors = [rates[number] / peak for rates in recorder.rates[::3]]
        assert factors == pytest.approx(expected), (
            f"{script}: in steps 1, 4, 7 and 10 of 12, the learning rate of parameter group "
            f"{number} must be its peak times {expected}, not {factors}")
    assert min(expected) > 0 and max(expected) <= 1 and expected[-1] < 0.5 * max(expected), (
        f"{script}: learning rates are above 0, at most the peak, and decay, but are {expected}")


def test_the_optimizer_of_cifar10():
    """Weights decay, but biases and norms do not."""
    module = load_script("cifar10_ddp")
    args = module.parse_args([])
    model = module.build_model(args, 10)
    optimizer = module.build_optimizer(args, model, 8)
    decay = {parameter: group["weight_decay"]
             for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        expected = 5e-4 if parameter.ndim > 1 else 0
        assert decay[parameter] == expected, f"{name} must have a weight decay of {expected}"


def test_what_cifar10_computes_from_flags_and_data_reaches_model_and_optimizer():
    """On two processes of 4 images, of three classes."""
    def three_classes(data, train_set):
        data.tensors = (data.tensors[0], data.tensors[1] % 3)
        data.classes = ["a", "b", "c"]
        return data

    def setup(module, rank):
        change_sets(module, three_classes)
        return Recorder(module, rank)

    flags = ("--fake-data", 32, "--batch-size", 4, "--epochs", 2, "--lr", 0.32, "--workers", 0,
             "--model", "squeezenet1_1", "--image-size", 48)
    (recorder, _) = train_to_end("cifar10_ddp", *flags, nproc=2, setup=setup).results
    parts = [part for parts in recorder.steps + recorder.evaluations for part in parts]
    shapes = {(*part.batch[0].shape[1:], *part.outputs.shape[1:]) for part in parts}
    assert shapes == {(3, 48, 48, 3)}, (
        f"--image-size 48 and three classes: images and logits are of {shapes}")
    learning_rate = load_script("cifar10_ddp").learning_rate
    expected = [0.32 * 8 / 256 * learning_rate(None, step, 8) for step in range(8)]
    rates = [rates[0] for rates in recorder.rates]
    assert rates == pytest.approx(expected), (
        f"--lr 0.32 with a global batch of 8 must have the rates {expected}, not {rates}")


# ---- layers ----
def test_the_two_scripts_of_mnist_train_the_same_cnn():
    """Their speeds are compared."""
    one, other = load_script("mnist_dp").CNN(False), load_script("fashionmnist_ddp").CNN()
    other.load_state_dict(one.state_dict())
    images = torch.rand(4, 1, 28, 28)
    outputs = []
    for model in (one, other):
        torch.manual_seed(0)
        outputs.append(model(images))
    assert torch.equal(*outputs), "mnist_dp and fashionmnist_ddp have different CNNs, or dropouts"


# ---- pixels, flips and crops ----
def inputs_of_model(module, images, training=False):
    """Return what the loss function gives the model."""
    model = nn.Flatten().train(training)
    inputs = []
    model.register_forward_pre_hook(lambda _, arguments: inputs.extend(arguments))
    args = [None] if hasattr(module, "loss_and_counts") else []
    loss_function = getattr(module, loss_name(module))
    loss_function(*args, model, images, torch.zeros(len(images), dtype=torch.long))
    return inputs[0]


@pytest.mark.parametrize("script, black, white", [
    ("cifar10_ddp", -115 / 57, 140 / 57), ("mnist_dp", 0, 1), ("fashionmnist_ddp", 0, 1)])
def test_pixels_are_scaled(script, black, white):
    images = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2)
    found = inputs_of_model(load_script(script), images).flatten().tolist()
    assert found == pytest.approx([black, white]), f"{script}: black and white are {found}"


@pytest.mark.parametrize("script", ["cifar10_ddp", "mnist_dp", "fashionmnist_ddp"])
def test_normalize_takes_no_floats(script):
    """As ToDtype and Normalize of tutorials return: they would be normalized a second time."""
    module = load_script(script)
    image = torch.rand(3, 32, 32)
    if hasattr(module, "transforms"):  # its own keep the kind of numbers
        image, _ = module.transforms(module.parse_args([]), True)(image, 0)
    with pytest.raises(TypeError, match="uint8"):
        module.normalize(image.unsqueeze(0))
        pytest.fail(f"{script} normalizes floats a second time, or takes them as 0 and 1")


def test_fashionmnist_flips_half_of_the_images_in_training_alone():
    module = load_script("fashionmnist_ddp")
    images = torch.arange(28, dtype=torch.uint8).expand(2000, 1, 28, 28)
    torch.manual_seed(0)
    for training, least, most in ((True, 900, 1100), (False, 0, 0)):
        inputs = inputs_of_model(module, images, training)
        flipped = (inputs[:, 0, 0, 0] > inputs[:, 0, 0, 1]).sum().item()
        assert least <= flipped <= most, (
            f"with model.training {training}, {flipped} of 2000 images are flipped")


def test_cifar10_flips_and_crops_in_training_alone():
    """The first channels of an image are its columns and rows."""
    module = load_script("cifar10_ddp")
    args = module.parse_args([])
    transform = module.transforms(args, train_set=True)
    random.seed(0)
    torch.manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    image = torch.stack([columns, rows, 0 * rows]).to(torch.uint8)
    crops = torch.stack([transform(image, 0)[0] for _ in range(200)])
    flipped = crops[:, 0, 16, 16] > crops[:, 0, 16, 17]
    assert 70 <= flipped.sum() <= 130, f"of 200 images {flipped.sum()} are flipped, not half"
    for name, places in (("columns", crops[~flipped, 0, 16, 16]), ("rows", crops[:, 1, 16, 16])):
        assert len(places.unique()) > 4, f"crops begin at few {name}: {places.unique().tolist()}"
    test_image = module.transforms(args, train_set=False)(image)
    assert torch.equal(test_image, image), "a test image is changed by the transforms"


# ---- bfloat16 ----
@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp", "synthetic_ddp"])
def test_bfloat16_in_training_and_evaluation(script):
    flags = (SCRIPTS[script].data_flag, 16, "--batch-size", 8, "--epochs", 1, "--bf16")
    (recorder,) = train_to_end(script, *flags, *SCRIPTS[script].no_children,
                               setup=record_small_model).results
    types = {part.outputs.dtype for parts in recorder.steps + recorder.evaluations
             for part in parts}
    assert types == {torch.bfloat16}, f"with --bf16, {script} computes in {types}"


def test_the_model_of_data_parallel_enters_autocast_in_each_thread():
    """Autocast is local to a thread, and nn.DataParallel starts one for each GPU."""
    model = load_script("mnist_dp").CNN(bf16=True)
    dtypes = []
    model.fc1.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    with ThreadPoolExecutor() as pool:
        logits = pool.submit(model, torch.zeros(1, 1, 28, 28)).result()
    assert dtypes == [torch.bfloat16], f"with --bf16, a thread computes in {dtypes[0]}"
    assert logits.dtype == torch.float32, f"with --bf16, the loss is computed in {logits.dtype}"

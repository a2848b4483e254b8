"""Each epoch uses each sample once, in an order of its own, on any number of processes.

The parts of a step and their random numbers do not depend on the number of processes, and the
gradient is that of the batch's mean.
"""

import functools
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from checkpoints import difference, progress
from copies import make_copy
from forked import fork, train_to_end, train_until, watch
from recorder import change_sets, record_small_model, use_small_model
from scripts import EPOCH_SCRIPTS, SCRIPTS, STEP_SCRIPTS, load_script
from torch.utils.data import TensorDataset

SAMPLES = 72  # 3 epochs of 4 steps use 16 each, and 8 are left over
EPOCHS = 3
GLOBAL_BATCH = 16
CASES = [("mnist_dp", 1, 16)]  # script, processes, batch size
CASES += [(script, 4, 4) for script in STEP_SCRIPTS + EPOCH_SCRIPTS]
CASES += [(script, 3, 5) for script in STEP_SCRIPTS]  # shares of 6, in two parts, 5 and 5


@functools.cache
def record(script, nproc, batch_size, seed=0):
    """Train on numbered samples with steps of 16, and return what each rank has recorded.

    All values of a sample are its number, which flips and crops do not change.
    """
    def number_samples(data, train_set):
        inputs = data.tensors[0] if isinstance(data, TensorDataset) else data[0]
        numbers = torch.arange(len(inputs), dtype=inputs.dtype)
        inputs.copy_(numbers.view(-1, *[1] * (inputs.dim() - 1)))
        return data

    def setup(module, rank):
        change_sets(module, number_samples)
        return record_small_model(module, rank)

    flags = [SCRIPTS[script].data_flag, SAMPLES, "--epochs", EPOCHS, "--batch-size", batch_size,
             "--lr", 0, "--seed", seed, *SCRIPTS[script].no_children]
    if script in STEP_SCRIPTS:
        flags += ["--global-batch", GLOBAL_BATCH]
    return train_to_end(script, *flags, nproc=nproc, setup=setup).results


def parts_of_steps(case):
    """Return for each step the parts of all ranks."""
    return [sum(parts_of_ranks, [])
            for parts_of_ranks in zip(*(recorder.steps for recorder in record(*case)))]


def samples_of_epochs(case):
    """Return for each epoch a list of the numbers of the samples in each of its steps."""
    steps = [[number for part in parts for number in part.numbers()]
             for parts in parts_of_steps(case)]
    length = len(steps) // EPOCHS
    return [steps[first:first + length] for first in range(0, len(steps), length)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_epoch_uses_each_sample_once_in_steps_of_a_global_batch(case):
    expected = [GLOBAL_BATCH] * 4
    if case[0] == "mnist_dp":  # it leaves nothing over
        expected.append(SAMPLES - sum(expected))
    for steps in samples_of_epochs(case):
        sizes = [len(samples) for samples in steps]
        assert sizes == expected, f"steps of an epoch have {sizes} samples, not {expected}"
        different = len(set(sum(steps, [])))
        assert different == sum(expected), (
            f"an epoch uses {different} different samples, not each of {sum(expected)} once")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_order_differs_by_epoch_and_by_seed(script):
    case = (script, 1, GLOBAL_BATCH)
    orders = samples_of_epochs(case) + samples_of_epochs((*case, 1))
    for number, order in enumerate(orders):
        assert order not in orders[:number], (
            f"3 epochs with --seed 0 and 3 with --seed 1: number {number + 1} repeats an order")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_parts_and_their_random_numbers_do_not_depend_on_the_number_of_processes(script):
    """On 2 processes, the parts of a step are the shares of 4 processes."""
    on_4, on_2 = (
        [sorted((part.seed, part.numbers()) for part in parts) for parts in parts_of_steps(case)]
        for case in ((script, 4, 4), (script, 2, 4)))
    assert on_2 == on_4, (
        f"seeds and samples of the parts of step 1 on 2 processes are\n{on_2[0]}\non 4\n{on_4[0]}")
    seeds = {seed for parts in on_4 for seed, _ in parts}
    assert len(seeds) == 48, f"dropout repeats: 48 parts of steps have {len(seeds)} seeds"
    others = {part.seed for parts in parts_of_steps((script, 1, GLOBAL_BATCH, 1)) for part in parts}
    assert not seeds & others, f"dropout does not depend on --seed: {len(seeds & others)} are equal"


def test_transforms_differ_by_image_epoch_and_seed_in_training_alone():
    """By the random numbers of torch and of Python that a transform draws, on two processes."""
    def draw_in_transforms(module, rank):
        draws = {True: [], False: []}

        def transforms(args, train_set):
            def transform(image, label):
                draws[train_set].append((torch.rand(1).item(), random.random()))
                return image, label

            return transform

        module.transforms = transforms
        use_small_model(module)
        return draws

    flags = ("--fake-data", 32, "--batch-size", 8, "--workers", 0, "--epochs", 3, "--seed")
    runs = [train_to_end("cifar10_ddp", *flags, seed, nproc=2, setup=draw_in_transforms).results
            for seed in (0, 1)]
    for library in (0, 1):
        drawn = [numbers[library] for ranks in runs for draws in ranks for numbers in draws[True]]
        assert len(drawn) == 2 * 3 * 32, (
            f"{len(drawn)} images are transformed as in training, not 192: test images, too?")
        different = len(set(drawn))
        assert different == len(drawn), (
            f"crops and flips repeat: 32 images in 3 epochs of 2 runs, with other seeds, are "
            f"transformed by {different} different random numbers, not by 192")
    tested = [len(draws[False]) for ranks in runs for draws in ranks]
    assert tested == 4 * [3 * 4], f"4 test images of each rank are transformed {tested} times"


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_sample_that_is_drawn_several_times_in_an_epoch_is_transformed_anew(nproc, tmp_path):
    """As the weighted sampling of the page draws rare ones. Here, all are the same one."""
    copy = make_copy("cifar10_ddp", tmp_path / "train.py", (
        'instead of "order = torch.randperm("', "order = torch.zeros(images, dtype=torch.long)"))

    def setup(module, rank):
        use_small_model(module)
        batches = []
        watch(module, "loss_and_counts", lambda args, model, images, labels: batches.append(
            images.clone()) if model.training else None)
        return batches

    ranks = train_to_end(copy, "--fake-data", 64, "--batch-size", 16 // nproc, "--workers", 0,
                         "--epochs", 1, nproc=nproc, setup=setup).results
    crops = torch.cat([images for batches in ranks for images in batches]).unique(dim=0)
    assert len(crops) > 40, (  # of 9 * 9 * 2, by chance 53 different ones
        f"one image, drawn 64 times in an epoch, is cropped and flipped in {len(crops)} ways")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_gradient_is_that_of_the_mean_of_the_batch(case):
    """Parts of the batch may have other sizes, and ranks other numbers of parts."""
    for step, parts in enumerate(parts_of_steps(case)):
        sizes = [len(part.numbers()) for part in parts]
        assert max(sizes) <= case[2], f"--batch-size {case[2]}: there are parts of {sizes}"
        expected = sum(part.gradient for part in parts) / sum(sizes)
        for rank, recorder in enumerate(record(*case)):
            gradient = recorder.gradients[step]
            error = ((gradient - expected).norm() / expected.norm()).item()
            assert error < 1e-5, (
                f"step {step + 1}, rank {rank}: the gradient differs from that of the batch's mean "
                f"by {100 * error:.3g} %")


@pytest.mark.parametrize("case", [case for case in CASES if case[0] != "cpu_ddp"], ids=str)
def test_evaluation_uses_each_test_sample_once_after_each_epoch(case):
    """The 18 test samples are spread as 5, 5, 4 and 4 over four processes."""
    evaluations = list(zip(*(recorder.evaluations for recorder in record(*case))))
    assert len(evaluations) == EPOCHS, f"{len(evaluations)} evaluations in {EPOCHS} epochs"
    for of_ranks in evaluations:
        numbers = sorted(number for parts in of_ranks for part in parts
                         for number in part.numbers())
        assert numbers == list(range(18)), f"the evaluation uses the test samples {numbers}"


@pytest.mark.parametrize("script", ["fashionmnist_ddp", "synthetic_ddp"])
def test_evaluation_uses_rank_0s_running_statistics_and_leaves_modes_as_they_were(script):
    """A copy may have frozen layers. (synthetic_ddp calls model.train() in each epoch.)"""
    module = load_script(script)
    cpu = torch.device("cpu")

    def evaluate(rank):
        dist.init_process_group("gloo", rank=rank, world_size=2)
        model = nn.Sequential(nn.BatchNorm1d(4, affine=False).eval(), nn.Dropout())
        model[0].running_mean += rank
        modes_before = [layer.training for layer in model.modules()]
        modes = []

        def loss_and_counts(args, model, inputs):
            modes.extend(layer.training for layer in model.modules())
            return inputs.sum(), inputs.sum()

        module.loss_and_counts = loss_and_counts
        module.evaluate(None, model, [(torch.ones(2, 4),)], cpu)
        modes_after = [layer.training for layer in model.modules()]
        return model[0].running_mean.tolist(), modes, modes_before, modes_after

    for rank, (means, modes, before, after) in enumerate(fork(2, evaluate)):
        assert means == [0, 0, 0, 0], f"rank {rank} evaluates with BatchNorm's means {means}"
        assert not any(modes), f"rank {rank} evaluates with layers that train: {modes}"
        assert script == "synthetic_ddp" or after == before, (
            f"layers trained as {before}, and after an evaluation as {after}")


# ---- resumed on another number of processes ----
def use_sgd(module, rank):
    """Adam may turn what rounding leaves of a gradient into a large step."""
    torch.optim.Adam = lambda parameters, **_: torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("script, flags, first, second, tolerance", [
    # They draw no random numbers in a step. The shares of 3 processes are 6, 5 and 5 samples
    ("cpu_ddp", ["--samples", 170], 4, 3, 1e-5),
    ("synthetic_ddp", ["--samples", 170, "--workers", 0], 4, 2, 1e-5),
    ("fashionmnist_ddp", ["--fake-data", 96], 4, 2, 1e-5),  # dropout, flips
    # BatchNorm, crops. The sum of two numbers has no order: parameters are equal
    ("cifar10_ddp", ["--fake-data", 48, "--model", "mnasnet0_5", "--image-size", 32,
                     "--workers", 0], 2, 1, 0),
])
def test_resumed_on_fewer_processes(script, flags, first, second, tolerance, tmp_path):
    """Where second divides first, weights differ by the order of summation, not by dropout masks.

    Those would change them by 0.02.
    """
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    flags += ["--batch-size", 4, "--epochs", 3, "--checkpoint"]
    train_to_end(script, *flags, whole, nproc=first, setup=use_sgd)
    train_until(script, *flags, resumed, nproc=first, after=7, setup=use_sgd)
    train_to_end(script, *flags, resumed, nproc=second, setup=use_sgd)
    places = progress(whole), progress(resumed)
    assert places[0] == places[1], f"the resumed run has another global batch: it ends at {places}"
    found = difference(whole, resumed)
    assert found <= tolerance, (
        f"resumed on another number of processes, weights differ by {found:.1e} at the end: are "
        "these other samples or parts, another batch, or other random numbers?")

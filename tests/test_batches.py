"""Each epoch uses each sample once, in an order of its own, on any number of processes.

A run is defined by its global batch and its batch size: the parts of a step and their random
numbers do not depend on the number of processes, and the gradient is that of the batch's mean.
"""

import argparse
import functools

import pytest
import torch
import torch.nn as nn
from functions import fork, load_script, train
from recorder import Recorder, number_samples, use_small_model
from scripts import DDP_SCRIPTS, SCRIPTS, TESTED_SCRIPTS

SAMPLES = 72  # 3 epochs of 4 steps use 16 each, and 8 are left over
EPOCHS = 3
STEPS_PER_EPOCH = 4
GLOBAL_BATCH = 16


@functools.cache
def record(script, nproc, batch_size):
    """Train on numbered samples with steps of 16, and return what each rank has recorded.

    The learning rate is 0: the weights are those of the first step.
    """
    def setup(module, rank):
        number_samples(module)
        use_small_model(module, script)
        if hasattr(module, "augment"):
            module.augment = lambda images: images
        return Recorder(module, script)

    details = SCRIPTS[script]
    flags = [details.data_flag, SAMPLES, "--epochs", EPOCHS, "--batch-size", batch_size, "--lr", 0,
             *details.no_children]
    if details.several_processes:
        flags += ["--global-batch", GLOBAL_BATCH]
    ranks = train(script, *flags, nproc=nproc, setup=setup)
    codes = [code for _, code, _ in ranks]
    assert codes == [0] * nproc, f"{script} on {nproc} processes has ended with {codes}"
    return [recorder for recorder, _, _ in ranks]


def on_even_shares(script):
    """Return the ranks of 4 processes that take 4 samples each; of mnist_dp, the only one."""
    if SCRIPTS[script].several_processes:
        return record(script, nproc=4, batch_size=4)
    return record(script, nproc=1, batch_size=GLOBAL_BATCH)


def on_uneven_shares(script):
    """Return the ranks of 3 processes: shares of 6, 5 and 5 samples in parts of 2 or 3."""
    return record(script, nproc=3, batch_size=3)


def samples_of_steps(ranks):
    """Return for each step the numbers of the samples that all ranks have used."""
    steps = []
    for parts_of_ranks in zip(*(recorder.steps for recorder in ranks)):
        steps.append([number for parts in parts_of_ranks for part in parts
                      for number in part.numbers()])
    return steps


def samples_of_epochs(ranks):
    steps = samples_of_steps(ranks)
    return [sum(steps[first:first + STEPS_PER_EPOCH], [])
            for first in range(0, len(steps), STEPS_PER_EPOCH)]


def assert_each_once(script, numbers, expected, what):
    """Fail if a sample occurs twice, or another number of samples than expected."""
    twice = sorted(number for number in set(numbers) if numbers.count(number) > 1)
    assert not twice, f"{script}: {what} uses samples more than once: {twice}"
    assert len(numbers) == expected, f"{script}: {what} uses {len(numbers)} samples, not {expected}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_step_uses_a_global_batch(script):
    ranks = on_even_shares(script)
    sizes = [len(numbers) for numbers in samples_of_steps(ranks)]
    expected = [GLOBAL_BATCH] * EPOCHS * STEPS_PER_EPOCH
    assert sizes == expected, f"{script}: samples in each step: {sizes}, not {expected}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_epoch_uses_each_sample_once(script):
    ranks = on_even_shares(script)
    for epoch, numbers in enumerate(samples_of_epochs(ranks)):
        assert_each_once(script, numbers, STEPS_PER_EPOCH * GLOBAL_BATCH, f"epoch {epoch + 1}")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_each_epoch_uses_each_sample_once_on_uneven_shares(script):
    ranks = on_uneven_shares(script)
    for epoch, numbers in enumerate(samples_of_epochs(ranks)):
        assert_each_once(script, numbers, STEPS_PER_EPOCH * GLOBAL_BATCH, f"epoch {epoch + 1}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_order_differs_by_epoch(script):
    ranks = on_even_shares(script)
    orders = samples_of_epochs(ranks)
    for epoch in range(1, EPOCHS):
        assert orders[epoch] != orders[epoch - 1], (
            f"{script}: epochs {epoch} and {epoch + 1} use the samples in the same order: "
            f"{orders[epoch][:12]} ...")


@pytest.mark.parametrize("script", SCRIPTS)
def test_all_parts_have_different_random_numbers(script):
    ranks = on_even_shares(script)
    seeds = [part.seed for recorder in ranks for parts in recorder.steps for part in parts]
    assert len(set(seeds)) == len(seeds), (
        f"{script}: dropout repeats: {len(seeds)} parts of steps have {len(set(seeds))} seeds")


@pytest.mark.parametrize("nproc", [2, 1])
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_parts_and_their_random_numbers_do_not_depend_on_the_number_of_processes(script, nproc):
    """On fewer processes, the parts of a step are the shares of 4 processes."""
    ranks = on_even_shares(script)
    fewer = record(script, nproc, batch_size=4)
    for step in range(EPOCHS * STEPS_PER_EPOCH):
        on_4 = parts_of_step(ranks, step)
        on_fewer = parts_of_step(fewer, step)
        assert on_fewer == on_4, (
            f"{script}: step {step + 1} on {nproc} processes has other parts, or other random "
            f"numbers, than on 4 processes. Seeds and samples:\n{on_fewer}\non 4:\n{on_4}")


def parts_of_step(ranks, step):
    """Return for each part of the step its seed and the numbers of its samples, sorted."""
    return sorted((part.seed, part.numbers())
                  for recorder in ranks for part in recorder.steps[step])


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_no_part_is_larger_than_the_batch_size(script):
    ranks = on_uneven_shares(script)
    largest = max(len(part.targets)
                  for recorder in ranks for parts in recorder.steps for part in parts)
    assert largest <= 3, f"{script}: --batch-size 3, but a process takes {largest} samples at once"


def expected_gradients(script, ranks):
    """Return for each step the gradient of the mean loss of its samples, by autograd alone."""
    module = load_script(script)
    use_small_model(module, script)
    if hasattr(module, "augment"):
        module.augment = lambda images: images
    args = argparse.Namespace(lr=0.0, seed=0)
    torch.manual_seed(0)
    model = build_model(module, script, args)
    loss_function = getattr(module, SCRIPTS[script].loss_function)
    gradients = []
    for parts_of_ranks in zip(*(recorder.steps for recorder in ranks)):
        parts = [part for parts in parts_of_ranks for part in parts]
        inputs = torch.cat([part.inputs for part in parts])
        targets = torch.cat([part.targets for part in parts])
        result = loss_function(model, inputs, targets)
        loss = result[0] if isinstance(result, tuple) else result
        gradient = torch.autograd.grad(loss / len(targets), list(model.parameters()))
        gradients.append(torch.cat([part.flatten() for part in gradient]))
    return gradients


def build_model(module, script, args):
    if script == "cpu_ddp":  # it has no device
        return module.build_model(args)[0]
    return module.build_model(args, torch.device("cpu"))[0]


def assert_gradients_of_the_mean(script, ranks, shares):
    expected = expected_gradients(script, ranks)
    for rank, recorder in enumerate(ranks):
        for step, gradient in enumerate(recorder.gradients):
            error = ((gradient - expected[step]).norm() / expected[step].norm()).item()
            assert error < 1e-5, (
                f"{script}, {shares}: the gradient is not that of the batch's mean, but differs by "
                f"{100 * error:.3g} %. In step {step + 1}, rank {rank} has {gradient[:3].tolist()} "
                f"..., not {expected[step][:3].tolist()} ...")


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_gradient_is_that_of_the_mean_of_the_batch(script):
    ranks = on_even_shares(script)
    assert_gradients_of_the_mean(script, ranks, f"even shares on {len(ranks)} processes")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_gradient_is_that_of_the_mean_of_the_batch_on_uneven_shares(script):
    ranks = on_uneven_shares(script)
    assert_gradients_of_the_mean(script, ranks, "shares of 6, 5 and 5 samples on 3 processes")


def assert_evaluations_use_each_sample_once(script, ranks):
    for evaluation in zip(*(recorder.evaluations for recorder in ranks)):
        numbers = [number for parts in evaluation for part in parts for number in part.numbers()]
        assert_each_once(script, numbers, SAMPLES // 4, "the evaluation")


@pytest.mark.parametrize("script", TESTED_SCRIPTS)
def test_evaluation_uses_each_test_sample_once(script):
    """The 18 test samples are spread as 5, 5, 4 and 4 over the processes."""
    assert_evaluations_use_each_sample_once(script, on_even_shares(script))


@pytest.mark.parametrize("script", sorted({*TESTED_SCRIPTS} & {*DDP_SCRIPTS}))
def test_evaluation_on_3_processes_uses_each_test_sample_once(script):
    assert_evaluations_use_each_sample_once(script, on_uneven_shares(script))


@pytest.mark.parametrize("script", TESTED_SCRIPTS)
def test_each_epoch_is_evaluated(script):
    ranks = on_even_shares(script)
    counts = [len(recorder.evaluations) for recorder in ranks]
    assert counts == [EPOCHS] * len(ranks), f"{script}: evaluations of each rank: {counts}"


@pytest.fixture(scope="module")
def evaluated():
    """What evaluate() returns on 3 ranks, and the rank's running mean after it.

    The 10 samples are spread as 4, 3 and 3. The model's running mean differs on each rank.
    """
    inputs = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    labels = inputs.argmax(1)
    labels[9] = 3 - labels[9]  # one is wrong
    module = load_script("cifar10_ddp")
    module.loss_and_correct = count_largest
    args = argparse.Namespace(batch_size=2, bf16=False)
    device = torch.device("cpu")

    def evaluate(rank):
        module.init_process(rank, 3, device, 60)
        model = nn.BatchNorm1d(4, affine=False)
        model.running_mean += 1000 * rank * torch.arange(4)
        batches = zip(inputs[rank::3].split(2), labels[rank::3].split(2))
        return module.evaluate(model, batches, device, args), model.running_mean, model.training

    return fork(3, evaluate)


def count_largest(model, inputs, labels):
    return torch.tensor(0.5 * len(labels)), (model(inputs).argmax(1) == labels).sum()


def test_evaluation_uses_the_running_statistics_of_rank_0(evaluated):
    for rank, (_, running_mean, _) in enumerate(evaluated):
        assert running_mean.tolist() == [0, 0, 0, 0], (
            f"evaluation of rank {rank} has its own BatchNorm statistics: {running_mean}")


def test_evaluation_returns_the_means_of_all_samples(evaluated):
    for rank, (means, _, _) in enumerate(evaluated):
        assert means == pytest.approx((0.5, 0.9)), (
            f"evaluation of rank {rank}: mean loss and accuracy of 10 samples are {means}, "
            "not (0.5, 0.9)")


def test_evaluation_leaves_the_model_in_training_mode(evaluated):
    modes = [training for _, _, training in evaluated]
    assert modes == [True] * 3, f"after evaluation, model.training on each rank: {modes}"

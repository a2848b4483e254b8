"""First guarantee: a run is equal on any number of processes.

The same samples in a step, the gradient of the mean of the global batch, equal losses and weights,
each validation sample once. Samples are numbered: all values of an input are its number.
"""

import functools
import re
import sys

import pytest
import torch
import torch.nn as nn
from checkpoints import assert_equal
from forked import fork, train_to_end
from recorder import (change_sets, first_samples, flat, loss_of, number_samples, numbers_of,
                      record_small_model, sets_of, use_small_model)
from scripts import BEST_SCRIPTS, DDP_SCRIPTS, SCRIPTS, STEP_SCRIPTS, load_script

SAMPLES = 56
EPOCHS = 3
CASES = [(script, nproc) for script in DDP_SCRIPTS for nproc in (1, 2, 3)]


def flags_of(script, seed=0):
    """Return flags for 4 steps of 12 or 13 samples in an epoch. 13 make unequal shares."""
    global_batch = 13 if SCRIPTS[script].any_number else 12
    more = ["--batch-size", 4] if script in STEP_SCRIPTS else []  # gradient accumulation
    return [SCRIPTS[script].data_flag, SAMPLES, "--epochs", EPOCHS, "--global-batch", global_batch,
            "--seed", seed, *SCRIPTS[script].no_children, *more]


@functools.cache
def record(script, nproc, seed=0):
    """Train on numbered samples. Return what each rank has recorded, and what is printed."""
    def setup(module, rank):
        def number(data, train_set):
            numbers.append(number_samples(data))
            return data

        numbers = []
        change_sets(module, number)
        recorder = record_small_model(module, rank)
        recorder.sets = numbers
        return recorder

    end = train_to_end(script, *flags_of(script, seed), nproc=nproc, setup=setup)
    return end.results, end.text


def batches_of_steps(script, nproc, seed=0):
    """Return for each step the batches of all ranks."""
    ranks, _ = record(script, nproc, seed)
    return [sum(of_ranks, []) for of_ranks in zip(*(rank.steps for rank in ranks), strict=True)]


def samples_of_epochs(script, nproc, seed=0):
    """Return for each epoch a list of the sorted numbers of the samples in each of its steps."""
    steps = [sorted(numbers_of(batches)) for batches in batches_of_steps(script, nproc, seed)]
    length = len(steps) // EPOCHS
    return [steps[first:first + length] for first in range(0, len(steps), length)]


def reference(script, nproc):
    """Return module, flags, and the model at the start of a run with its optimizer."""
    module = load_script(script)
    use_small_model(module)
    args = module.parse_args([str(flag) for flag in flags_of(script)])
    module.load_data(args)  # sets the classes
    model = module.build_model(args)
    ranks, _ = record(script, nproc)
    model.load_state_dict(ranks[0].start)
    if hasattr(module, "evaluate"):
        return module, args, model, *module.build_optimizer(args, model, len(ranks[0].steps))
    return module, args, model, module.build_optimizer(args, model), None


# ---- what a step has ----
@pytest.mark.parametrize("script, nproc", CASES)
def test_each_epoch_uses_each_sample_once_in_steps_of_the_global_batch(script, nproc):
    ranks, _ = record(script, nproc)
    train_set = ranks[0].sets[0]
    global_batch = load_script(script).parse_args(
        [str(flag) for flag in flags_of(script)]).global_batch
    for steps in samples_of_epochs(script, nproc):
        sizes = [len(samples) for samples in steps]
        expected = len(train_set) // global_batch * [global_batch]
        assert sizes == expected, f"steps of an epoch have {sizes} samples, not {expected}"
        used = set(sum(steps, []))
        assert len(used) == sum(sizes) and used <= set(train_set), (
            f"an epoch uses {len(used)} different training samples, not {sum(sizes)}")


@pytest.mark.parametrize("script, nproc", [case for case in CASES if case[1] > 1])
def test_a_step_has_the_same_samples_on_any_number_of_processes(script, nproc):
    found, alone = samples_of_epochs(script, nproc), samples_of_epochs(script, 1)
    assert found == alone, (
        f"{script}: the samples of the first step are\n{found[0][0]} on {nproc} processes\n"
        f"{alone[0][0]} on one")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_order_differs_by_epoch_and_by_seed(script):
    orders = samples_of_epochs(script, 1) + samples_of_epochs(script, 1, 1)
    for number, order in enumerate(orders):
        assert order not in orders[:number], (
            f"3 epochs with --seed 0 and 3 with --seed 1: number {number + 1} repeats an order")
    first, other = (flat(record(script, 1, seed)[0][0].start.values()) for seed in (0, 1))
    assert not torch.equal(first, other), f"{script}: --seed 1 starts with the weights of --seed 0"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_random_numbers_differ_by_rank_epoch_and_seed(script):
    """Those of dropout. A seed may serve all steps of an epoch, or one part of a step."""
    ranks = [rank for seed in (0, 1) for rank in record(script, 2, seed)[0]]
    length = len(ranks[0].steps) // EPOCHS
    seeds = [set(sum(rank.seeds[first:first + length], []))
             for rank in ranks for first in range(0, EPOCHS * length, length)]
    different = len(set.union(*seeds))
    assert different == sum(map(len, seeds)), (
        f"{script}: 2 runs of {EPOCHS} epochs on 2 ranks share seeds: {different} different ones")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_parts_and_their_random_numbers_are_equal_on_one_and_two_processes(script):
    """4 parts of 13 images, of at most 4: a GPU that accumulates gradients makes the same."""
    on_1, on_2 = ([sorted((seed, numbers_of([batch])) for rank in record(script, nproc)[0]
                          for batch, seed in zip(rank.steps[step], rank.seeds[step]))
                   for step in range(4)] for nproc in (1, 2))
    assert on_1 == on_2, (
        f"{script}: parts of step 1 are\n{on_1[0]} on one process\n{on_2[0]} on two")
    sizes = [len(numbers) for _, numbers in on_1[0]]
    assert max(sizes) <= 4, f"--batch-size 4: a process computes {sizes} images at once"


# ---- what a step does ----
@pytest.mark.parametrize("script, nproc", CASES)
def test_the_gradient_is_that_of_the_mean_of_the_global_batch(script, nproc):
    """On all ranks, of 13 samples on 2 and 3 processes: computed again, by autograd alone."""
    module, args, model, *_ = reference(script, nproc)
    ranks, _ = record(script, nproc)
    for step, batches in enumerate(batches_of_steps(script, nproc)):
        model.load_state_dict(ranks[0].weights[step])
        whole = [torch.cat(tensors) for tensors in zip(*batches)]
        loss = loss_of(module, args, model, whole)
        expected = flat(torch.autograd.grad(loss, list(model.parameters())))
        for rank, recorder in enumerate(ranks):
            error = ((recorder.gradients[step] - expected).norm() / expected.norm()).item()
            assert error < 1e-5, (
                f"{script}, step {step + 1}, rank {rank} of {nproc}: the gradient differs from "
                f"that of the mean of the global batch by {100 * error:.3g} %")


@pytest.mark.parametrize("script, nproc", CASES)
def test_weights_and_losses_are_those_of_a_plain_loop(script, nproc):
    """The loop has the same samples, the whole batch at once, the script's optimizer."""
    module, args, model, optimizer, scheduler = reference(script, nproc)
    ranks, text = record(script, nproc)
    steps = batches_of_steps(script, nproc)
    losses, samples = [], []
    for batches in steps:
        whole = [torch.cat(tensors) for tensors in zip(*batches)]
        optimizer.zero_grad()
        loss = loss_of(module, args, model, whole)
        loss.backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item() * len(whole[0]))
        samples.append(len(whole[0]))
    for rank, recorder in enumerate(ranks):
        found, expected = flat(recorder.model.parameters()), flat(model.parameters())
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < 1e-4, (
            f"{script}: rank {rank} of {nproc} ends with weights that differ from those of a "
            f"plain loop by {100 * error:.3g} %")
    length = len(steps) // EPOCHS
    means = [sum(losses[first:first + length]) / sum(samples[first:first + length])
             for first in range(0, len(steps), length)]
    logged = [float(loss) for loss in re.findall(r"^epoch \d+/3  loss ([\d.]+)", text, re.M)]
    assert logged == pytest.approx(means, abs=1e-4, rel=1e-4), (
        f"{script} on {nproc} processes: losses of the epochs must be {means}:\n{text}")


@pytest.mark.parametrize("script, nproc", [case for case in CASES if case[1] > 1])
def test_all_ranks_end_with_the_same_weights(script, nproc):
    ranks, _ = record(script, nproc)
    for rank, recorder in enumerate(ranks):
        assert_equal(recorder.model.state_dict(), ranks[0].model.state_dict(),
                     f"{script}: the model of rank {rank}, beside that of rank 0")


# ---- validation ----
@pytest.mark.parametrize("script, nproc", [case for case in CASES if case[0] in BEST_SCRIPTS])
def test_each_validation_sample_is_counted_once(script, nproc):
    """The last line's loss and accuracy are those of the whole set, computed at once."""
    ranks, text = record(script, nproc)
    val_set = ranks[0].sets[1]
    for epoch in range(EPOCHS):
        found = sorted(numbers_of(sum((rank.evaluations[epoch] for rank in ranks), [])))
        assert found == val_set, (
            f"{script} on {nproc} processes: epoch {epoch + 1} evaluates the samples\n{found}\n"
            f"not each of\n{val_set}\nonce")
    module, args, model, *_ = reference(script, nproc)
    model.load_state_dict(ranks[0].model.state_dict())
    model.eval()
    batches = sum((rank.evaluations[-1] for rank in ranks), [])
    whole = [torch.cat(tensors) for tensors in zip(*batches)]
    with torch.no_grad():
        loss, counts = module.loss_and_counts(args, model, *whole)
    accuracy = module.metrics(counts, len(val_set))["accuracy"]
    expected = f"val_loss {loss:.4f}  val_accuracy {accuracy:.4f}"
    assert expected in text.splitlines()[-1], f"{script}: the last line must say {expected}\n{text}"


@pytest.mark.parametrize("script", BEST_SCRIPTS)
def test_fewer_validation_samples_than_processes_and_none(script):
    """A rank without samples takes part, and without any there is no result."""
    for count, words in ((1, "val_loss"), (0, "no validation samples")):
        def setup(module, rank):
            change_sets(module, lambda data, train_set: (
                data if train_set else first_samples(data, count)))
            use_small_model(module)

        text = train_to_end(script, *flags_of(script), nproc=2, setup=setup).text
        assert words in text, f"{script} with {count} validation samples: no {words!r}\n{text}"
        assert "nan" not in text, f"{script} with {count} validation samples:\n{text}"


@pytest.mark.parametrize("script", BEST_SCRIPTS)
def test_an_evaluation_uses_rank_0s_buffers_and_restores_all_modes(script):
    """BatchNorm's averages are those of each rank's samples; a frozen layer stays frozen."""
    module = load_script(script)

    def evaluate(rank):
        torch.distributed.init_process_group("gloo")
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout().eval())
        model[0].running_mean.fill_(rank)
        modes = []

        def loss_and_counts(args, model, inputs):
            modes.extend(layer.training for layer in model.modules())
            return inputs.mean(), inputs.sum()

        module.loss_and_counts = loss_and_counts
        module.evaluate(None, model, [(torch.ones(2, 4),)])
        return (model[0].running_mean.tolist(), any(modes),
                [layer.training for layer in model.modules()])

    for rank, found in enumerate(fork(2, evaluate)):
        expected = ([0, 0, 0, 0], False, [True, True, False])
        assert found == expected, (
            f"{script}, rank {rank}: averages, a layer that trains in an evaluation, and modes "
            f"after it must be {expected}, not {found}")


# ---- flags ----
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_all_ranks_use_the_flags_of_rank_0(script):
    """Their launchers may be given others: one for each machine."""
    def setup(module, rank):
        sys.argv += ["--lr", "0.5", "--seed", "7", "--epochs", "1"] if rank == 1 else []
        recorder = record_small_model(module, rank)
        return recorder

    ranks = [train_to_end(script, *flags_of(script), nproc=2, setup=how).results
             for how in (setup, record_small_model)]
    found, expected = ([rank.gradients for rank in of_run] for of_run in ranks)
    assert_equal(found, expected,
                 f"{script}, whose rank 1 was given other flags: gradients [rank][step]")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_generated_samples_depend_on_the_seed_and_those_to_validate_are_others(script):
    module = load_script(script)

    def inputs_of(seed):
        torch.manual_seed(seed)
        args = module.parse_args([SCRIPTS[script].data_flag, "40", "--seed", str(seed)])
        for data in sets_of(module, module.load_data(args)):
            if isinstance(data, (tuple, list)):
                data = list(zip(*data))
            yield {tuple(data[index][0].flatten().tolist()) for index in range(len(data))}

    sets, (other, *_) = list(inputs_of(0)), inputs_of(1)
    assert not sets[0] & other, f"{script}: --seed 1 generates samples of --seed 0"
    assert not set.intersection(*sets) or len(sets) == 1, (
        f"{script}: generated validation samples are training samples")

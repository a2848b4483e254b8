"""First guarantee: a run is equal on any number of processes.

The same samples in a step, the gradient of the mean of the global batch, equal losses and weights,
each validation sample once. On the tests' own problem, and on each script's own data and model.
"""

import functools
import itertools
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from harness import (EPOCHS, STEPS, TRAIN, VAL, flags_of, give_problem, keep_samples, own_flags,
                     run_to_end, text_of, weights_of, wrap)
from scripts import BEST_SCRIPTS, DDP_SCRIPTS, SCRIPTS, load_script

scripts = pytest.mark.parametrize("script", DDP_SCRIPTS)
scripts_with_best = pytest.mark.parametrize("script", BEST_SCRIPTS)
numbers_of_processes = pytest.mark.parametrize("nproc", [1, 2, 3])


@functools.cache
def trained(script, nproc, seed=0):
    """Return the ranks of a run without random numbers. Of 13 samples, the shares are unequal."""
    return run_to_end(script, *flags_of(script), "--seed", seed, nproc=nproc)


def batches_of_steps(rank):
    """Return for each step of a rank its batches: ("train", numbers of samples, seed)."""
    events = [event for event in rank.seen if event[0] in ("train", "step")]
    ends = [place for place, event in enumerate(events) if event[0] == "step"]
    return [events[before + 1:end] for before, end in itertools.pairwise([-1, *ends])]


def samples_of_steps(script, nproc, seed=0):
    """Return for each step the numbers of the samples of all ranks."""
    steps = zip(*map(batches_of_steps, trained(script, nproc, seed)), strict=True)
    return [sorted(number for batches in ranks for _, numbers, _ in batches for number in numbers)
            for ranks in steps]


def epochs(items):
    """Return these items of all epochs as a list for each epoch."""
    length = len(items) // EPOCHS
    return [items[first:first + length] for first in range(0, len(items), length)]


@scripts
def test_rank_0_alone_prints(script):
    """Otherwise the log of 64 GPUs has each line 64 times."""
    found = trained(script, 3)
    printed = [len(re.findall("^(?:world size|epoch) ", rank.text, re.M)) for rank in found]
    assert printed[0] > EPOCHS and printed[1:] == [0, 0], (
        f"{script}: rank 0 alone must print. The ranks print {printed} lines\n{text_of(found)}")
    logged = [sum(event[0] == "results" for event in rank.seen) for rank in found]
    assert logged == [EPOCHS if script in BEST_SCRIPTS else 0, 0, 0], (
        f"{script}: the ranks call log_results() {logged} times")


@numbers_of_processes
@scripts
def test_a_step_has_the_same_samples_and_an_epoch_has_each_sample_once(script, nproc):
    steps, size = samples_of_steps(script, nproc), flags_of(script)[1]
    assert [len(step) for step in steps] == EPOCHS * STEPS * [size], (
        f"{script} on {nproc} processes: a step must have {size} samples: {steps}")
    for epoch in epochs(steps):
        assert len(set(range(TRAIN)) & set(sum(epoch, []))) == STEPS * size, (
            f"{script} on {nproc} processes: an epoch has samples twice, or others: {epoch}")
    assert steps == samples_of_steps(script, 1), (
        f"{script} on {nproc} processes: the samples of the steps are not those of one process")


@scripts
def test_the_order_differs_by_epoch_and_by_seed(script):
    orders = epochs(samples_of_steps(script, 2)) + epochs(samples_of_steps(script, 2, seed=1))
    for number, order in enumerate(orders):
        assert order not in orders[:number], (
            f"{script}: 3 epochs with --seed 0, 3 with --seed 1: number {number} repeats an order")
    first, other = (trained(script, 2, seed)[0].seen[0][1] for seed in (0, 1))
    assert not torch.equal(first, other), f"{script}: --seed 1 starts with the weights of --seed 0"


@scripts
def test_random_numbers_differ_by_rank_epoch_and_seed(script):
    """Those of dropout. A seed may serve all steps of an epoch, or one part of a step."""
    seeds = [{seed for _, _, seed in sum(epoch, [])} for of_run in (0, 1)
             for rank in trained(script, 2, of_run) for epoch in epochs(batches_of_steps(rank))]
    assert len(set.union(*seeds)) == sum(map(len, seeds)), (
        f"{script}: two runs of {EPOCHS} epochs on two ranks share seeds: {seeds}")


def test_a_gpu_that_adds_up_gradients_computes_the_parts_of_several_gpus():
    """Parts of 3 or 4 of 13 images, with equal random numbers: dropout and BatchNorm are equal."""
    on_1, on_2 = ([sorted(sum(ranks, [])) for ranks in zip(*map(
        batches_of_steps, trained("cifar10_ddp", nproc)))] for nproc in (1, 2))
    assert on_1 == on_2, f"cifar10_ddp: parts on one process\n{on_1}\nand on two\n{on_2}"
    sizes = {len(numbers) for _, numbers, _ in sum(on_1, [])}
    assert sizes == {3, 4}, f"cifar10_ddp --batch-size 4: parts have {sizes} images"
    ranks = run_to_end("cifar10_ddp", *flags_of("cifar10_ddp"), "--batch-size", 1)
    sizes = {len(batch[1]) for rank in ranks for batch in sum(batches_of_steps(rank), [])}
    assert sizes == {1}, f"cifar10_ddp --batch-size 1: parts have {sizes} images"


@numbers_of_processes
@scripts
def test_weights_and_results_are_those_of_a_plain_loop(script, nproc):
    """The loop computes each batch at once, and uses no function of the script.

    The optimizer is SGD: the weights would differ with any other gradient, also with a multiple.
    """
    ranks = trained(script, nproc)
    problem, args = SimpleNamespace(), SimpleNamespace(lr=0.1)
    give_problem(problem, "fashionmnist_ddp", [], noisy=False)
    (x, y), (val_x, val_y) = problem.load_data(args)
    model = problem.build_model(args)
    nn.utils.vector_to_parameters(ranks[0].seen[0][1].clone(), model.parameters())
    optimizer, schedule = problem.build_optimizer(args, model, EPOCHS * STEPS)
    expected, losses, right = [], [], []
    for number, step in enumerate(samples_of_steps(script, nproc), start=1):
        optimizer.zero_grad()
        logits = model(x[step, 1:])
        loss = F.cross_entropy(logits, y[step])
        loss.backward()
        optimizer.step()
        if script in BEST_SCRIPTS:  # the others have no schedule
            schedule.step()
        losses.append(loss.item())
        right.append((logits.argmax(1) == y[step]).double().mean().item())
        expected.append(weights_of(model))
        if number % STEPS == 0:
            results = {"loss": sum(losses[-STEPS:]) / STEPS}
            if script in BEST_SCRIPTS:
                results["accuracy"] = sum(right[-STEPS:]) / STEPS
                logits = model(val_x[:, 1:])
                results["val_loss"] = F.cross_entropy(logits, val_y).item()
                results["val_accuracy"] = (logits.argmax(1) == val_y).double().mean().item()
            (line,) = re.findall(rf"^epoch {number // STEPS}/3  (?!step).*", ranks[0].text, re.M)
            found = {name: float(re.search(rf"\b{name} (\S+)", line)[1]) for name in results}
            assert found == pytest.approx(results, abs=1e-4), (
                f"{script} on {nproc} processes prints {line!r}: it must be {results}")
    for number, rank in enumerate(ranks):
        found = [event[1] for event in rank.seen if event[0] == "step"]
        errors = [(one - other).abs().max().item() for one, other in zip(found, expected)]
        assert max(errors) < 1e-5, (
            f"{script}, rank {number} of {nproc}: after its steps, weights differ from those of "
            f"a plain loop by up to {errors}")


@scripts_with_best
def test_sums_keep_no_batch_in_memory(script):
    """They would, by the graph of a loss, until the end of the epoch."""
    module = load_script(script)
    sums = module.Sums(module.parse_args([]))
    sums.add(2 * torch.ones((), requires_grad=True), torch.ones(()), 3)
    module.restart_alarm(0)
    assert not sums.loss.requires_grad, f"{script}: the sum of losses keeps each batch's graph"


# ---- validation ----
@numbers_of_processes
@scripts_with_best
def test_an_evaluation_has_each_validation_sample_once(script, nproc):
    expected = EPOCHS * [[*range(TRAIN, TRAIN + VAL)]]
    ranks = [epochs([event for event in rank.seen if event[0] == "val"])
             for rank in trained(script, nproc)]
    found = [sorted(number for evaluation in of_ranks for _, numbers, _ in evaluation
                    for number in numbers) for of_ranks in zip(*ranks)]
    assert found == expected, f"{script} on {nproc} processes evaluates the samples {found}"
    largest = max(len(numbers) for of_ranks in ranks for _, numbers, _ in sum(of_ranks, []))
    assert largest <= flags_of(script)[1], f"{script} evaluates {largest} samples at once"


@pytest.mark.parametrize("count, words", [(1, "val_loss"), (0, "no validation samples")])
@scripts_with_best
def test_fewer_validation_samples_than_processes_and_none(script, count, words):
    """A rank without samples takes part, and without any there is no result."""
    text = text_of(run_to_end(script, *flags_of(script), change=lambda module, rank, seen: (
        keep_samples(module, script, 1, range(count)))))
    assert words in text, f"{script} with {count} validation samples: no {words!r}\n{text}"
    assert "nan" not in text, f"{script} with {count} validation samples:\n{text}"


@scripts_with_best
def test_an_evaluation_uses_rank_0s_buffers_and_restores_all_modes(script):
    """BatchNorm's averages are those of each rank's samples; a frozen layer stays frozen."""
    def change(module, rank, seen):
        def evaluate(plain, *arguments):
            model = next(item for item in arguments if isinstance(item, nn.Module))
            model[2].eval()
            before = [layer.training for layer in model.modules()]
            results = plain(*arguments)
            restored = before == [layer.training for layer in model.modules()]
            seen.append(("evaluation", restored, model[1].running_mean.clone()))
            return results

        wrap(module, "evaluate", evaluate)

    ranks = run_to_end(script, *flags_of(script), problem="noisy", change=change)
    for one, other in zip(*([event for event in rank.seen if event[0] == "evaluation"]
                            for rank in ranks), strict=True):
        assert one[1], f"{script}: an evaluation changes the modes of layers"
        assert torch.equal(one[2], other[2]), f"{script}: the ranks evaluate with other averages"


# ---- flags, and the scripts' own data, models and optimizers ----
@scripts
def test_all_ranks_use_the_flags_of_rank_0(script):
    """Their launchers may be given others: one for each machine."""
    def change(module, rank, seen):
        sys.argv += ["--lr", "0.5", "--seed", "7", "--epochs", "1"] if rank == 1 else []

    found = run_to_end(script, *flags_of(script), "--seed", 0, change=change)
    same = [str(rank.seen) for rank in found] == [str(rank.seen) for rank in trained(script, 2)]
    assert same, f"{script}: rank 1 was given other flags, and trains otherwise\n{text_of(found)}"


@pytest.mark.parametrize("script, folder", [*[(script, "") for script in DDP_SCRIPTS],
                                            ("cifar10_ddp", "folder")])
def test_its_own_data_and_model_train_the_same_on_one_and_two_processes(script, folder, tmp_path):
    """With its own optimizer and schedule, random crops, shifts and flips.

    Scripts with data sets draw the same random numbers on two processes. Those with tensors do not:
    there, all images are mirrored, and there is no dropout.
    """
    def change(module, rank, seen):
        if SCRIPTS[script].data == "tensors":
            torch.rand = torch.zeros
            F.dropout = lambda x, *_: x

    flags = own_flags(script, folder and tmp_path / folder)
    one, two = (tmp_path / f"{nproc}.pt" for nproc in (1, 2))
    for nproc, path in enumerate((one, two), start=1):
        run_to_end(script, *flags, "--checkpoint", path, nproc=nproc, problem="own", change=change)
    one, two = (torch.load(path)["model"] for path in (one, two))
    errors = {name: (one[name] - two[name]).norm().item() for name in one}
    different = [name for name in one if not errors[name] <= 1e-3 * one[name].norm()]
    assert not different, (
        f"{script}: on one and on two processes, {different} differ: by {errors}")


@scripts
def test_generated_samples_depend_on_the_seed_and_those_to_validate_are_others(script):
    module = load_script(script)

    def inputs_of(seed):
        torch.manual_seed(seed)
        args = module.parse_args([*map(str, SCRIPTS[script].own), "--seed", str(seed)])
        data = module.load_data(args)
        for part in [data] if script == "cpu_ddp" else data:
            pairs = zip(*part) if isinstance(part, (tuple, list)) else part
            yield {tuple(inputs.flatten().tolist()) for inputs, _ in pairs}

    sets, (other, *_) = list(inputs_of(0)), inputs_of(1)
    assert not sets[0] & other, f"{script}: --seed 1 generates samples of --seed 0"
    assert script == "cpu_ddp" or not set.intersection(*sets), (
        f"{script}: generated validation samples are training samples")

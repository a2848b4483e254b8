"""A copy for one's own model and data is made by editing functions above train(), and only there.

Two copies, whose edits are in copy_regression.py and copy_language_model.py.
"""

import re
import shutil
from typing import NamedTuple

import pytest
import torch
import torch.nn as nn
from checkpoints import assert_equal, load_checkpoint
from copies import LAST, changed_lines, make_copy
from scripts import ROOT, SCRIPTS, script_path
from stopped_runs import finish, stop
from torch.optim.optimizer import register_optimizer_step_post_hook

FLAGS = ("--batch-size", 8, "--epochs", 3, "--lr", 0.01, "--log-every", 0, "--checkpoint")
STEPS = 36  # of 16 samples of 192, in 3 epochs


class Copy(NamedTuple):
    original: str  # the script
    path: object
    whole: object  # the checkpoint of an undisturbed run on 2 processes
    stopped: object  # that of a run that is stopped after step 19, of 36
    flags: tuple
    text: str  # what rank 0 has printed in the undisturbed run


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regression")
    return train_copy("synthetic_ddp", "copy_regression.py", [], ("--samples", 192), folder)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language_model")
    unused = ["CNN", "augment"]
    return train_copy("fashionmnist_ddp", "copy_language_model.py", unused, (), folder)


@pytest.fixture(params=["regression", "language_model"])
def copy(request):
    return request.getfixturevalue(request.param)


def train_copy(original, edits, unused, flags, folder):
    """Make a copy, and train it on 2 processes: once undisturbed, and once until step 19."""
    path = folder / "train.py"
    make_copy(original, ROOT / "tests" / edits, unused, path)
    flags += FLAGS
    output = folder / "output.txt"
    finish(path, *flags, folder / "whole", nproc=2, setup=print_to(output))
    stop(path, *flags, folder / "stopped", nproc=2, after=19)
    return Copy(original, path, folder / "whole", folder / "stopped", flags, output.read_text())


def print_to(output):
    """Return a setup for train(): rank 0 prints to this file."""
    def setup(module, rank):
        if rank == 0:
            module.print = lambda message, flush: write_line(output, message)
    return setup


def write_line(path, line):
    with open(path, "a") as file:
        file.write(f"{line}\n")


# --- both copies ---
def test_nothing_below_is_edited(copy):
    original = script_path(copy.original).read_text().split(LAST)[1]
    below = copy.path.read_text().split(LAST)[1]
    assert below == original, "train() and what is below it were edited in the copy"


def test_few_lines_are_edited(copy):
    """55 lines were edited, in eleven places, before such edits stood above train()."""
    new, gone = changed_lines(copy.original, copy.path)
    print(f"{new} lines are new, {gone} are gone")
    assert new <= 40, f"a copy has {new} lines of its own: what else does a user have to write?"


def test_the_copy_is_resumed_bit_for_bit(copy, tmp_path):
    shutil.copy(copy.stopped, tmp_path / "resumed")
    finish(copy.path, *copy.flags, tmp_path / "resumed", nproc=2)
    assert_equal(copy.whole, tmp_path / "resumed")


def test_the_copy_learns(copy):
    losses = [float(loss) for loss in re.findall(r"test loss ([\d.]+)", copy.text)]
    assert len(losses) == 3, f"a test line for each of 3 epochs:\n{copy.text}"
    assert losses[-1] < 0.5 * losses[0], f"the copy does not learn:\n{copy.text}"


# --- the regression: two parameter groups, clipped gradients, another metric ---
class Plain(NamedTuple):
    """A training run by torch alone, in one process."""
    model: object
    rates: list  # of each parameter group, in the last step
    decays: list  # of each parameter group
    norms: list  # of the gradients of each step, before they are clipped
    error: float  # the mean absolute error in the last epoch
    test_error: float


@pytest.fixture(scope="module")
def plain():
    """What the regression is: the model, data and order of the copy, the rest written anew."""
    inputs, prices = prices_data(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    groups = [{"params": [model[0].weight, model[2].weight], "lr": 0.01, "weight_decay": 0.1},
              {"params": [model[0].bias, model[2].bias], "lr": 0.1, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    norms = []
    for epoch in range(3):
        shuffle = torch.Generator().manual_seed(hash((0, epoch)))
        errors = 0.0
        for batch in torch.randperm(192, generator=shuffle).split(16):
            rates = [group["lr"] for group in optimizer.param_groups]
            optimizer.zero_grad()
            output = model(inputs[batch]).flatten()
            nn.functional.mse_loss(output, prices[batch]).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            scheduler.step()
            errors += nn.functional.l1_loss(output, prices[batch], reduction="sum").item()
    test_inputs, test_prices = prices_data(0)
    with torch.no_grad():
        test_error = nn.functional.l1_loss(model(test_inputs).flatten(), test_prices).item()
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return Plain(model, rates, decays, norms, errors / 192, test_error)


def prices_data(seed):
    inputs = torch.rand(192, 8, generator=torch.Generator().manual_seed(seed))
    return inputs, 10 * inputs[:, 0] * inputs[:, 1] + inputs.sum(1)


def test_the_regression_ends_as_by_torch_alone(regression, plain):
    assert max(plain.norms) > 2, f"no gradient is clipped, so this test shows little: {plain.norms}"
    saved = load_checkpoint(regression.whole)["model"]
    for name, parameter in plain.model.state_dict().items():
        difference = (saved[name] - parameter).abs().max().item()
        assert difference < 1e-5, (
            f"{name} differs by {difference:.1e} from a loop by torch alone, with two parameter "
            "groups of different rates and decays, and gradients clipped")


def numbers(pattern, text):
    """Return the last number of each line that has the pattern in front of it."""
    return [float(number) for number in re.findall(rf"{pattern} ([\d.]+)", text)]


def test_lines_print_the_metric_of_the_copy(regression, plain):
    assert "accuracy" not in regression.text, f"METRIC is not accuracy, but:\n{regression.text}"
    assert "houses/s" in regression.text, f"SAMPLES is houses, but:\n{regression.text}"
    logged = numbers("step 36/36  loss [\\d.]+  mean absolute error", regression.text)
    assert logged == [pytest.approx(plain.error, abs=1e-4)], (
        f"the mean absolute error of the last epoch is {plain.error:.4f}, but:\n{regression.text}")
    tested = numbers("test loss [\\d.]+  mean absolute error", regression.text)
    assert tested[-1:] == [pytest.approx(plain.test_error, abs=1e-4)], (
        f"the test set's mean absolute error is {plain.test_error:.4f}, but:\n{regression.text}")


def final(path, option):
    """Return an option of each parameter group in a checkpoint."""
    return [group[option] for group in load_checkpoint(path)["optimizer"]["param_groups"]]


def test_each_group_ends_with_its_own_rate_and_decay(regression, plain, tmp_path):
    rates = final(regression.whole, "lr")
    assert rates == pytest.approx(plain.rates), (
        f"the final rates of two parameter groups are {rates}, by torch alone {plain.rates}")
    decays = final(regression.whole, "weight_decay")
    assert decays == plain.decays, f"the groups' decays are {decays}, not {plain.decays}"

    shutil.copy(regression.stopped, tmp_path / "resumed")
    finish(regression.path, *regression.flags, tmp_path / "resumed", nproc=1)
    rates = final(tmp_path / "resumed", "lr")
    assert rates == pytest.approx(plain.rates), (
        f"resumed, the final rates are {rates}, by torch alone {plain.rates}")


def test_rates_come_from_the_code_and_not_from_the_checkpoint(regression, plain, tmp_path):
    text = regression.path.read_text()
    changed = text.replace('"lr": 10 * args.lr', '"lr": 5 * args.lr')
    assert changed != text, "the copy has no second group with a rate of 10 * args.lr"
    (tmp_path / "train.py").write_text(changed)
    shutil.copy(regression.stopped, tmp_path / "resumed")
    finish(tmp_path / "train.py", *regression.flags, tmp_path / "resumed", nproc=1)
    rates = final(tmp_path / "resumed", "lr")
    assert rates == pytest.approx([plain.rates[0], plain.rates[1] / 2]), (
        f"the second group's peak rate was halved in the code before the resume: {rates} at the "
        f"end, {plain.rates} before")


# --- the comment in build_model on clipping ---
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_commented_lines_clip_gradients(script, tmp_path):
    text = script_path(script).read_text()
    found = re.search(r"    # To clip gradients, after they are averaged:\n((?:    # .*\n)+)", text)
    assert found, f"build_model of {script} has no comment 'To clip gradients' with the code"
    code = found[1].replace("    # ", "    ").replace("1.0)", "1e-3)")
    (tmp_path / "train.py").write_text(text.replace(found[0], code))
    (norms,) = finish(tmp_path / "train.py", SCRIPTS[script].data_flag, 8, "--batch-size", 4,
                      "--epochs", 1, nproc=1, setup=record_norms)
    assert max(norms) == pytest.approx(1e-3, rel=0.01), (
        f"gradients have norms of {norms} in two steps after they were clipped to 0.001 by\n{code}")


def record_norms(module, rank):
    """A setup for train(): it returns a list that gets the norm of the gradients in each step."""
    norms = []

    def after_step(optimizer, *_):
        gradients = [parameter.grad for group in optimizer.param_groups
                     for parameter in group["params"]]
        norms.append(nn.utils.get_total_norm(gradients).item())

    register_optimizer_step_post_hook(after_step)
    return norms

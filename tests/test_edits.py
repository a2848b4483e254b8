"""An ordinary edit of a copy does not go wrong without a word."""

import re

import pytest
import torch
from checkpoints import assert_equal, load_checkpoint
from copies import make_copy
from forked import train_forked, train_to_end, train_until, watch
from recorder import record_small_model, use_small_model
from scripts import CHECKPOINT_SCRIPTS, SCRIPTS, script_path

TEST_SCRIPTS = ["cifar10_ddp", "fashionmnist_ddp"]
WORKERS = {"cifar10_ddp": ("--workers", 1)}


def flags_of(script, *more):
    """Return flags for three steps of 24 samples in each of 4 epochs, on two processes."""
    return (SCRIPTS[script].data_flag, 72, "--batch-size", 12, "--epochs", 4, "--lr", 0.1, *more)


# ---- evaluations ----
def edit_evaluation(script, path, kind):
    """Write a copy that evaluates in another way, to path."""
    call = re.search(r"test_loss, test_accuracy = evaluate\(model, (.*), device\)",
                     script_path(script).read_text())
    skip = "test_loss = test_accuracy = 0.0"
    code = {"every second epoch": f"{skip}\nif epoch % 2:\n    {call[0]}",
            "twice": f"{call[0]}\n{call[0]}",
            "never": skip,
            "with one batch": call[0].replace(call[1], f"[next(iter({call[1]}))]")}[kind]
    return make_copy(script, path, ('instead of "test_loss, test_accuracy = evaluate("', code))


@pytest.fixture(scope="module")
def unedited(tmp_path_factory):
    """The checkpoints of the scripts as they are."""
    folder = tmp_path_factory.mktemp("unedited")
    for script in TEST_SCRIPTS:
        train_to_end(script, *flags_of(script, *WORKERS.get(script, ())), "--checkpoint",
                     folder / script, nproc=2, setup=use_small_model)
    return folder


@pytest.mark.parametrize("kind", ["every second epoch", "twice", "never", "with one batch"])
@pytest.mark.parametrize("script", TEST_SCRIPTS)
def test_a_copy_that_evaluates_in_another_way_trains_on_the_same_samples(script, kind, unedited,
                                                                        tmp_path):
    """It is stopped in its second epoch, too, and resumed."""
    copy = edit_evaluation(script, tmp_path / "train.py", kind)
    flags = flags_of(script, *WORKERS.get(script, ()), "--checkpoint")
    train_to_end(copy, *flags, tmp_path / "whole", nproc=2, setup=use_small_model)
    assert_equal(tmp_path / "whole", unedited / script, f"{script} evaluates {kind}: checkpoint")
    train_until(copy, *flags, tmp_path / "parts", nproc=2, after=5, setup=use_small_model)
    train_to_end(copy, *flags, tmp_path / "parts", nproc=2, setup=use_small_model)
    assert_equal(tmp_path / "parts", unedited / script, f"{script}, {kind}, resumed: checkpoint")


# ---- weights ----
def call_ddps_module(module, rank):
    """DDP does not see it, and exchanges nothing."""
    name = "loss_of" if hasattr(module, "loss_of") else "loss_and_correct"
    loss_function = getattr(module, name)
    setattr(module, name, lambda model, *batch: loss_function(
        getattr(model, "module", model), *batch))


def change_the_last_rank(module, rank):
    """A little: its weights are nearer to the mean of all than it is itself."""
    watch(module, "check_weights", lambda model: next(model.parameters()).data.mul_(
        1.0004 if rank == 3 else 1))


@pytest.mark.parametrize("mistake", [call_ddps_module, change_the_last_rank])
@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_gradients_that_are_not_exchanged_are_an_error(script, mistake, tmp_path):
    """All ranks notice it before rank 0 saves."""
    def setup(module, rank):
        use_small_model(module)
        mistake(module, rank)

    flags = flags_of(script, *SCRIPTS[script].no_children, "--checkpoint", tmp_path / "run.pt")
    end = train_forked(script, *flags, nproc=4, setup=setup)
    for status in end.statuses:
        assert "error: " in str(status) and "not exchanged" in status, (
            f"{script}: gradients are not exchanged: it ends with {end.statuses}\n{end.text}")
    assert not (tmp_path / "run.pt").exists(), f"{script} has saved rank 0's weights\n{end.text}"


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_weights_that_are_not_finite_are_an_error_without_a_checkpoint(script):
    flags = flags_of(script, *SCRIPTS[script].no_children, "--lr", "inf")
    end = train_forked(script, *flags, nproc=2, setup=use_small_model)
    for status in end.statuses:
        assert "error: weights are not finite" in str(status), (
            f"{script}: weights are not finite, and the run ends with {end.statuses}\n{end.text}")


# ---- what is saved ----
AVERAGE = [
    ('before "saved = {"', """
     from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
     average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))"""),
    ('after "saved = {"', 'saved["average"] = average'),
    ('after "optimizer.step()"', "average.update_parameters(model)"),
]


@pytest.mark.parametrize("script", CHECKPOINT_SCRIPTS)
def test_an_average_of_the_weights_is_saved_and_resumed(script, tmp_path):
    copy = make_copy(script, tmp_path / "train.py", *AVERAGE)
    flags = flags_of(script, *SCRIPTS[script].no_children, "--checkpoint")
    train_to_end(copy, *flags, tmp_path / "whole", nproc=2, setup=use_small_model)
    train_until(copy, *flags, tmp_path / "parts", nproc=2, after=5, setup=use_small_model)
    train_to_end(copy, *flags, tmp_path / "parts", nproc=2, setup=use_small_model)
    saved = load_checkpoint(tmp_path / "whole")
    assert "average" in saved, f"the checkpoint has no average, only {list(saved)}"
    assert_equal(tmp_path / "parts", tmp_path / "whole")
    train_until(script, *flags, tmp_path / "other", nproc=2, after=5, setup=use_small_model)
    end = train_forked(copy, *flags, tmp_path / "other", nproc=2, setup=use_small_model)
    assert "no average" in str(end.statuses), (
        f"a checkpoint without the average is resumed: {end.statuses}\n{end.text}")


# ---- data ----
def test_a_random_split_is_equal_in_all_processes_and_both_calls(tmp_path):
    """A copy holds back 24 of 96 samples to test, and does not seed the split."""
    for script in TEST_SCRIPTS:
        def setup(module, rank):
            def load_data(args, train_set):
                order = torch.randperm(96)
                numbers = order[:72] if train_set else order[72:]
                images = numbers.to(torch.uint8).view(-1, 1, 1, 1).repeat(1, 3, 32, 32)
                data = torch.utils.data.TensorDataset(images, numbers % 10)
                data.classes = list("0123456789")
                return data if script == "cifar10_ddp" else data.tensors

            module.load_data = load_data
            return record_small_model(module, rank)

        ranks = train_to_end(script, *flags_of(script, *SCRIPTS[script].no_children), nproc=2,
                             setup=setup).results
        trained = [number for recorder in ranks for step in recorder.steps[:3] for part in step
                   for number in part.numbers()]
        tested = [number for recorder in ranks for part in recorder.evaluations[0]
                  for number in part.numbers()]
        assert sorted(trained + tested) == list(range(96)), (
            f"{script}: a random split differs: it trains on {sorted(trained)}, and tests "
            f"{sorted(tested)}")


class Name(str):
    """Plain for its users, and not for torch.load: as numpy.unique returns them."""


@pytest.mark.parametrize("classes, words", [
    (tuple(map(Name, "0123456789")), ""), (None, "attribute classes"),
    (list(torch.arange(10).numpy()), "setting classes")])
def test_class_names_of_a_copys_data_set(classes, words, tmp_path):
    def setup(module, rank):
        use_small_model(module)
        load_data = module.load_data

        def load_other_data(args, train_set):
            data = load_data(args, train_set)
            if classes:
                data.classes = classes
            else:
                del data.classes
            return data

        module.load_data = load_other_data

    flags = flags_of("cifar10_ddp", "--workers", 0, "--checkpoint", tmp_path / "run.pt")
    for life in ("the first start", "a resume"):
        (status,) = train_forked("cifar10_ddp", *flags, setup=setup).statuses
        if not words:
            assert status == 0, f"class names {classes}: {life} ends with {status!r}"
        else:
            assert "error: " in str(status) and words in status, (
                f"class names {classes}: {life} must name {words!r}, and ends with {status!r}")


def test_lower_epochs_than_done_are_an_error(tmp_path):
    flags = flags_of("cpu_ddp", "--checkpoint", tmp_path / "run.pt")
    train_to_end("cpu_ddp", *flags, setup=use_small_model)
    (status,) = train_forked("cpu_ddp", *flags[:-2], "--epochs", 3, *flags[-2:],
                             setup=use_small_model).statuses
    assert "error: " in str(status) and "--epochs" in status, (
        f"a run of 4 epochs is resumed with --epochs 3, and ends with {status!r}")

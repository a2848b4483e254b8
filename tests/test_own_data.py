"""Own data, models, losses and loops are right, or an error."""

import re
import resource

import pytest
import torch
import torch.nn as nn
from checkpoints import assert_equal
from forked import fork, train_forked, train_to_end, watch
from recorder import FewPixels, change_sets, use_small_model
from scripts import EPOCH_SCRIPTS, SCRIPTS, STEP_SCRIPTS, load_script


def flags_of(script, *more, epochs=4):
    """Return flags for three steps of 24 samples in each epoch, on two processes."""
    return (SCRIPTS[script].data_flag, 72, "--batch-size", 12, "--epochs", epochs, "--lr", 0.1,
            *SCRIPTS[script].no_children, *more)


def assert_error(end, words, mistake):
    """Fail unless each rank ends with an error line that has these words."""
    for status in end.statuses:
        assert "error: " in str(status) and words in status, (
            f"{mistake}: there must be an error line with {words!r}: {end.statuses}\n{end.text}")


# ---- load_data ----


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_the_first_weights_do_not_depend_on_what_load_data_draws(script):
    """Other data, or another split, would otherwise be compared with another start."""
    def weights(draws):
        def setup(module, rank):
            load_data = module.load_data

            def draw_and_load(args):
                torch.rand(draws)
                return load_data(args)

            module.load_data = draw_and_load
            use_small_model(module)
            states = []
            watch(module, "restore", lambda checkpoint, settings, saved, *_: states.append(
                {name: value.clone() for name, value in saved["model"].state_dict().items()}))
            return states

        return train_to_end(script, *flags_of(script, epochs=1), setup=setup).results

    assert_equal(weights(1), weights(0),
                 f"{script}, whose load_data draws one random number: the weights at the start")


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_a_resume_with_other_classes_is_refused_and_leaves_the_file(script, tmp_path):
    """As from a set: one process, whose resume has the same classes in another order."""
    path = tmp_path / "run.pt"

    def setup(module, rank):
        def turn_order(data, train_set):
            if script == "fashionmnist_ddp":
                return data[0], 9 - data[1]
            data.classes = data.classes[::-1]
            return data

        if path.exists():
            change_sets(module, turn_order)
        use_small_model(module)

    train_to_end(script, *flags_of(script, "--checkpoint", path, epochs=1), setup=setup)
    before = path.read_bytes()
    end = train_forked(script, *flags_of(script, "--checkpoint", path, epochs=2), setup=setup)
    assert_error(end, "the checkpoint has other settings", f"{script} resumes with other classes")
    assert path.read_bytes() == before, f"{script} has overwritten a file of other classes"


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_other_numbers_of_samples_on_two_ranks_are_an_error_line(script, tmp_path):
    def setup(module, rank):
        def drop_one(data, train_set):
            if script != "cifar10_ddp":
                return [tensor[:-1] for tensor in data]
            data.tensors = [tensor[:-1] for tensor in data.tensors]
            return data

        if rank == 1:
            change_sets(module, drop_one)
        use_small_model(module)

    path = tmp_path / "run.pt"
    end = train_forked(script, *flags_of(script, "--checkpoint", path, epochs=1), nproc=2,
                       setup=setup)
    assert_error(end, "the processes have different data",
                 f"{script}: rank 1 has a sample less than rank 0")
    assert not path.exists(), f"{script} has trained with a sample less on rank 1"


def test_more_labels_than_inputs_are_an_error():
    """As where rows without a value are dropped on one side: the others are paired wrongly."""
    def setup(module, rank):
        change_sets(module, lambda data, train_set: (data[0][3:], data[1]) if train_set else data)
        use_small_model(module)

    end = train_forked("fashionmnist_ddp", *flags_of("fashionmnist_ddp", epochs=1), setup=setup)
    assert end.statuses != [0], f"three inputs are missing, and it trains\n{end.text}"


@pytest.mark.parametrize("labels", [
    torch.zeros(1000, 512, 512, dtype=torch.uint8),
    torch.arange(10**6).unfold(0, 60, 1)], ids=["masks", "overlapping windows"])
def test_digest_of_large_labels_takes_little_memory(labels):
    """As a tuple of numbers, these masks take 2 GB. As a copy, these windows take 0.5 GB."""
    digest = load_script("fashionmnist_ddp").digest

    def grow(rank):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        digest(labels)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000

    (megabytes,) = fork(1, grow)
    assert megabytes < 50, f"the digest of {tuple(labels.shape)} labels takes {megabytes:.0f} MB"


LABELS = {  # of 4 samples
    "floats": torch.tensor([0.1, 0.2, 0.3, 0.9]),
    "bfloat16": torch.tensor([0.1, 0.2, 0.3, 0.9], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True, True]),
    "floats, some of them missing": torch.tensor([0.1, torch.nan, 0.3, 0.9]),
    "uint8": torch.tensor([3, 2, 1, 0], dtype=torch.uint8),
    "one-hot": torch.eye(4),
    "masks": torch.arange(4).view(4, 1, 1).repeat(1, 28, 28),
}


@pytest.mark.parametrize("kind", LABELS)
def test_digest_of_labels_tells_another_order(kind):
    digest = load_script("fashionmnist_ddp").digest
    labels = LABELS[kind]
    assert digest(labels) == digest(labels.clone()), f"labels that are {kind}: no digest of them"
    turned = labels[[3, 2, 0, 1]]
    assert digest(turned) != digest(labels), f"labels that are {kind}: another order is not noticed"


def test_digest_of_floats_is_equal_where_they_are_computed_in_another_way():
    """Their last digits differ on another machine, or with other threads."""
    digest = load_script("fashionmnist_ddp").digest
    generator = torch.Generator().manual_seed(0)
    for name, labels in (("noise", torch.randn(1000, generator=generator)),
                         ("constant", torch.full((700,), 0.7)),
                         ("images", torch.rand(1000, 28, 28, generator=generator))):
        errors = [1e-7 * torch.randint(-1, 2, labels.shape, generator=generator) for _ in range(9)]
        if name == "constant":  # they are computed alike
            errors = [error.flatten()[0] for error in errors]
        found = {digest(labels * (1 + error)) for error in errors}
        assert len(found) == 1, f"labels of floats ({name}): rounding changes their digest: {found}"


# ---- models ----


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_gradients_that_are_not_exchanged_are_an_error(script, tmp_path):
    """All ranks notice it before rank 0 saves."""
    def setup(module, rank):
        use_small_model(module)
        watch(module, "check_weights", lambda saved: next(saved["model"].parameters()).data.mul_(
            1 + 1e-4 * rank))

    flags = flags_of(script, "--checkpoint", tmp_path / "run.pt")
    end = train_forked(script, *flags, nproc=2, setup=setup)
    for status in end.statuses:
        assert "weights differ by rank" in str(status), (
            f"{script}: the ranks have other weights: it ends with {end.statuses}\n{end.text}")
    assert not (tmp_path / "run.pt").exists(), f"{script} has saved rank 0's weights\n{end.text}"


@pytest.mark.parametrize("script", EPOCH_SCRIPTS)
@pytest.mark.parametrize("change, words", [
    (lambda weights, rank: weights.mul_(1 + 1e-4 * rank), "weights differ by rank"),
    (lambda weights, rank: weights[0].fill_(torch.nan), "NaN or infinity")], ids=["unlike", "nan"])
def test_small_scripts_save_no_weights_that_are_not_finite_or_unlike(script, change, words,
                                                                     tmp_path):
    def setup(module, rank):
        watch(module, "check_model", lambda model: change(next(model.parameters()).data, rank))

    flags = flags_of(script, "--checkpoint", tmp_path / "run.pt")
    end = train_forked(script, *flags, nproc=2, setup=setup)
    assert_error(end, words, f"{script} with weights that are {words}")
    assert not (tmp_path / "run.pt").exists(), f"{script} has saved such weights\n{end.text}"


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_layers_train_whatever_mode_a_model_comes_in(script, mode):
    """But a frozen layer of a model in training mode stays frozen."""
    def setup(module, rank):
        calls = []
        use_small_model(module)
        model = nn.Sequential(FewPixels(), nn.Dropout().eval())
        module.build_model = lambda *_: model if mode == "training" else model.eval()
        watch(module, "loss_and_counts",
              lambda *_: calls.append((model.training, model[1].training)))
        return calls

    (calls,) = train_to_end(script, *flags_of(script, epochs=1), setup=setup).results
    assert calls[0] == (True, mode == "evaluation"), (
        f"{script}: a model comes in {mode} mode: it, a frozen dropout train: {calls[0]}")


# ---- sums ----
@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_sums_of_losses_in_bfloat16_are_exact(script):
    """Each sample's loss is 0.125: bfloat16 has 8 bits, and stops adding 1.5 at 384."""
    def setup(module, rank):
        def loss_of(args, model, images, *_):
            loss = (0 * model(images.float()).sum() + 0.125).bfloat16()
            return loss, len(images) * loss.detach()

        use_small_model(module)
        module.loss_and_counts = loss_of

    end = train_to_end(script, SCRIPTS[script].data_flag, 6400, "--batch-size", 12, "--epochs", 1,
                       "--log-every", 0, *SCRIPTS[script].no_children, setup=setup)
    found = set(re.findall(r"(loss|accuracy) ([\d.]+)", end.text))
    wrong = {(name, value) for name, value in found if value != "0.1250"}
    assert found and not wrong, f"{script}: each loss is 0.1250, and the log has {wrong or 'none'}"


@pytest.mark.parametrize("script", STEP_SCRIPTS)
def test_loss_and_metric_need_not_be_detached(script):
    """Their graphs would be kept for an epoch."""
    def setup(module, rank):
        graphs = []
        use_small_model(module)
        loss_and_counts = module.loss_and_counts
        module.loss_and_counts = lambda *batch: 2 * loss_and_counts(*batch)[:1]  # the loss, twice
        watch(module, "results_of", lambda *sums: graphs.append(
            [total.requires_grad for total in sums[:2]]))
        return graphs

    (graphs,) = train_to_end(script, "--fake-data", 64, "--batch-size", 8, "--epochs", 1,
                             *SCRIPTS[script].no_children, setup=setup).results
    assert graphs == 2 * [[False, False]], (
        f"sums of loss and metric that are not detached keep the graphs of all steps: {graphs}")

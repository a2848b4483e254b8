"""Bad input: a mistake that many make ends in an error line with the remedy, on all ranks.

Any other ends in the error of what refused it. No mistake hangs, and none is a success.
"""

import ast
import os

import pytest
import torch
from checkpoints import load_checkpoint
from copies import make_copy
from forked import train_forked, watch
from recorder import change_sets, first_samples, use_small_model
from scripts import DDP_SCRIPTS, SCRIPTS, load_script, script_path

HAS_DATA_SET = {"mnist_dp": "MNIST", "fashionmnist_ddp": "fashion", "cifar10_ddp": "cifar"}


def flags_of(script, *more):
    """Return flags for 2 epochs of 3 steps without loader processes."""
    return [SCRIPTS[script].data_flag, 48, "--global-batch", 12, "--epochs", 2,
            *SCRIPTS[script].no_children, *more]


def assert_error(end, words, mistake):
    """Fail unless each rank ends with an error line that has these words."""
    for rank, status in enumerate(end.statuses):
        assert "error: " in str(status) and words in status, (
            f"{mistake}: rank {rank} must end in an error line with {words!r}, not with "
            f"{status!r}\n{end.text}")


# ---- flags ----
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_abbreviated_flag_is_an_error(script):
    """job.sh refuses --checkpoint by its name."""
    with pytest.raises(SystemExit):
        load_script(script).parse_args(["--epoch", "1"])
        pytest.fail(f"{script} takes --epoch for --epochs")


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_flag_is_used(script):
    """--timeout was in vain in three scripts."""
    functions = [node for node in ast.parse(script_path(script).read_text()).body
                 if getattr(node, "name", "parse_args") != "parse_args"]
    used = {node.attr for function in functions for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and "args" in (getattr(node.value, "id", ""), getattr(node.value, "attr", ""))}
    unused = vars(load_script(script).parse_args([])).keys() - used - {"checkpoint"}
    assert not unused, f"{script} does not use its flags {sorted(unused)}"


@pytest.mark.parametrize("script, global_batch, nproc, words", [
    *[(script, 100, 1, "--global-batch") for script in DDP_SCRIPTS],
    *[(script, 1, 2, "--global-batch") for script in DDP_SCRIPTS],
    *[(script, 13, 3, "12 or 15") for script in DDP_SCRIPTS if not SCRIPTS[script].any_number]])
def test_a_global_batch_that_does_not_fit_is_an_error_line(script, global_batch, nproc, words):
    """There are 48 samples, and each process needs a share."""
    end = train_forked(script, *flags_of(script), "--global-batch", global_batch, nproc=nproc)
    assert_error(end, words, f"{script}, --global-batch {global_batch} on {nproc} processes")


# ---- folders and data ----
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_folder_that_does_not_exist_is_an_error_line_at_the_start(script, tmp_path):
    path = tmp_path / "absent/run.pt"
    end = train_forked(script, *flags_of(script, "--checkpoint", path))
    assert_error(end, "absent/run.pt", f"{script}: --checkpoint in a folder that does not exist")
    assert "epoch 1/2" not in end.text, f"{script} trains before it says so\n{end.text}"


@pytest.mark.skipif(os.geteuid() != 0, reason="another user requires root")
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_folder_that_cannot_be_written_is_an_error_line(script, tmp_path):
    """Here, another user's."""
    module = load_script(script)
    tmp_path.chmod(0o755)
    os.setresuid(65534, 65534, 0)
    try:
        error = module.load_checkpoint(str(tmp_path / "run.pt"))
    except SystemExit as end:
        error = str(end)
    finally:
        os.setresuid(0, 0, 0)
    assert "error: " in str(error) and "run.pt" in error, f"{script}: {error!r}"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(script, tmp_path):
    """/dev/full is one."""
    path = tmp_path / "run.pt"

    def setup(module, rank):
        def fill(*_):
            if path.exists():
                (tmp_path / "run.pt.tmp").symlink_to("/dev/full")
                (tmp_path / "run.pt.best.tmp").symlink_to("/dev/full")

        use_small_model(module)
        watch(module, "check_model", fill)

    end = train_forked(script, *flags_of(script, "--checkpoint", path), setup=setup)
    assert "No space left" in end.text, f"{script}: a full disk is no error\n{end.text}"
    saved = load_checkpoint(path)["progress"]
    assert 1 in saved.values() or 4 in saved.values(), f"{script}: a full disk: FILE has {saved}"


@pytest.mark.parametrize("script", HAS_DATA_SET)
def test_without_a_network_it_ends_with_an_error(script, tmp_path):
    """The proxy of the tests' environment does not answer."""
    nproc = 1 + SCRIPTS[script].several_processes
    end = train_forked(script, "--data-dir", tmp_path, nproc=nproc)
    assert 0 not in end.statuses, f"{script} without data and network ends well\n{end.text}"
    assert HAS_DATA_SET[script].lower() in end.text.lower(), (
        f"{script}: no word on the data\n{end.text}")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_other_numbers_of_samples_on_two_ranks_are_an_error_line(script):
    """As of a file that is missing on one machine: the ranks would make other steps."""
    def setup(module, rank):
        if rank == 1:
            change_sets(module, lambda data, train_set: first_samples(data, -1))
        use_small_model(module)

    end = train_forked(script, *flags_of(script), nproc=2, setup=setup)
    assert_error(end, "different data", f"{script}: rank 1 has a sample less than rank 0")


# ---- weights ----
@pytest.mark.parametrize("change, words", [
    (lambda weights, rank: weights.mul_(1 + 1e-4 * rank), "weights differ by rank"),
    (lambda weights, rank: weights.view(-1)[0].fill_(torch.nan if rank else 0), "NaN"),
    (lambda weights, rank: weights.view(-1)[0].fill_(torch.inf), "NaN or infinity")],
    ids=["unlike", "nan on one rank", "infinity"])
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_weights_that_are_not_finite_or_differ_by_rank_are_not_saved(script, change, words,
                                                                     tmp_path):
    def setup(module, rank):
        use_small_model(module)
        watch(module, "check_model", lambda model: change(next(model.parameters()).data, rank))

    path = tmp_path / "run.pt"
    end = train_forked(script, *flags_of(script, "--checkpoint", path), nproc=2, setup=setup)
    assert_error(end, words, f"{script} with weights that are {words}")
    assert not path.exists(), f"{script} has saved such weights\n{end.text}"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_model_that_is_called_without_ddp_is_an_error_line(script, tmp_path):
    """Gradients are then not averaged, and the ranks train two models."""
    place = {"cpu_ddp": "loss = loss_of(args, ddp_model"}
    call = place.get(script, "loss, counts = loss_and_counts(args, ddp_model")
    line = next(line.strip() for line in script_path(script).read_text().splitlines()
                if call in line)
    copy = make_copy(script, tmp_path / "train.py", (
        f'instead of "{call}"', line.replace("ddp_model", 'getattr(ddp_model, "module", 0)')))
    path = tmp_path / "run.pt"
    end = train_forked(copy, *flags_of(script, "--checkpoint", path), nproc=2,
                       setup=use_small_model)
    assert_error(end, "weights differ by rank", f"{script}, which calls model for ddp_model")
    assert not path.exists(), f"{script} saves the weights of one rank, without the others' data"


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_buffer_may_be_infinite_and_frozen_weights_have_any_type(script):
    """Only weights that train have to be finite: masks are infinite, quantized weights bytes."""
    def setup(module, rank):
        def build_model(args):
            model = plain_model(args)
            model.register_buffer("mask", torch.tensor(-torch.inf))
            for name, values in (("bytes", torch.zeros(3).byte()), ("mask_weight", model.mask)):
                frozen = torch.nn.Parameter(values, requires_grad=False)
                model.register_parameter(name, frozen)
            return model

        use_small_model(module)
        plain_model = module.build_model
        module.build_model = build_model

    end = train_forked(script, *flags_of(script), setup=setup)
    assert end.statuses == [0], (
        f"{script} refuses infinite masks or frozen bytes: {end.statuses}\n{end.text}")

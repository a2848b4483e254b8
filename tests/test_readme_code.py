"""Python code on the pages does what its page says, on one process and on two."""

import contextlib
import functools
import io
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from copies import make_copy
from harness import flags_of, give_problem, kill_at, own_flags, run, run_to_end, text_of, unequal
from image_folder import write_images
from scripts import BEST_SCRIPTS, ROOT, SCRIPTS, code_blocks, load_script, script_path
from torch.utils.data import default_collate

pytestmark = pytest.mark.slow
# The Python blocks of each page, in order: a name, and the place of its code in a copy of the
# script (see copies.py). Without a place, its functions replace those of the script
BEFORE_RESUME = 'before "    resume(checkpoint"'
BLOCKS = {
    "synthetic_ddp/make-it-yours.md": [
        ("files", ""),
        ("tensors", ""),
        ("split", ""),
        ("class weights", 'before "return y, None"'),
        ("weighted loss", 'instead of "loss = F.cross_entropy("'),
        ("F1 counts", 'instead of "return loss, (logits"'),
        ("F1", ""),
        ("AUC", ""),
        ("language model", ""),
        ("tokens", 'instead of "loss = F.cross_entropy(logits, labels.flatten())"'),
        ("clip", 'before "optimizer.step()"'),
        ("average", BEFORE_RESUME),
        ("compile", BEFORE_RESUME),
        ("TensorBoard", ""),
        ("steps", 'after "scheduler.step()"'),
        ("profile", BEFORE_RESUME),
        ("use", "in a program"),
    ],
    "cifar10_ddp/README.md": [
        ("use images", "in a program"),
        ("own images", ""),
    ],
}
CODE = {name: (place, code) for page, names in BLOCKS.items()
        for (name, place), code in zip(names, code_blocks(ROOT / page, "python"))}
SMALL = ("--global-batch", 16, "--epochs", 3)
SMALL_GPT = ("", CODE["language model"][1].replace("layers=4", "layers=1").replace(
    "dropout=0.1", "dropout=0.0"))
all_scripts = pytest.mark.parametrize("script", BEST_SCRIPTS)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.syspath_prepend(tmp_path)


def copy_with(script, *names):
    """Write my.py, a copy of a script with these blocks, or further edits (place, code)."""
    make_copy(script, "my.py", *[CODE[name] if isinstance(name, str) else name for name in names])


def run_program(code):
    """Run a block that is a program. Return what it prints, and its variables."""
    for name in ("my", "cifar10_ddp"):  # of another test, or of load_script()
        sys.modules.pop(name, None)
    names = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return printed.getvalue(), names


def train(*flags, nproc=2, change=lambda module, rank, seen: None):
    """Train my.py. Return its results of each epoch, texts by name, and what rank 0 has seen."""
    rank = run_to_end("my.py", *flags, nproc=nproc, problem="own", change=change)[0]
    lines = re.findall(r"^epoch \d+/\d+  (?!step)(.*)", rank.text, re.MULTILINE)
    return [dict(result.rsplit(" ", 1) for result in line.split("  ")) for line in lines], rank.seen


def assert_resumes(*flags, kill):
    """my.py resumes exactly, killed at a call of its loss on two processes. Return its results."""
    def change(module, rank, seen):
        kill_at(module, "loss_and_counts", kill)

    epochs, _ = train(*flags, "--checkpoint", "my.pt")
    ranks = run("my.py", *flags, "--checkpoint", "killed.pt", problem="own", change=change)
    assert -9 in [rank.code for rank in ranks], f"it must be killed:\n{text_of(ranks)}"
    train(*flags, "--checkpoint", "killed.pt")
    different = unequal(Path("killed.pt"), Path("my.pt"))
    assert not different, f"killed and resumed, and not killed, these differ: {different}"
    return epochs


def test_each_block_of_code_is_tested():
    for path in [ROOT / "README.md", *ROOT.glob("*/*.md")]:
        expected = len(BLOCKS.get(str(path.relative_to(ROOT)), []))
        found = len(code_blocks(path, "python"))
        assert found == expected, f"{path} has {found} blocks of Python, tests run {expected}"


# ---- make-it-yours: data, and the weights ----
def assert_used_as_in_the_run(epochs, code=CODE["use"][1]):
    """The page's program has the best epoch's validation loss. Return the classes that it prints.

    So it has these weights and validation samples, and evaluates: dropout would change the loss.
    """
    printed, names = run_program(code)
    val_set = names["val_set"]
    if not isinstance(val_set, tuple):
        val_set = default_collate([val_set[index] for index in range(len(val_set))])
    best = max(epochs, key=lambda epoch: float(epoch["val_accuracy"]))
    loss, _ = sys.modules["my"].loss_and_counts(names["args"], names["model"], names["inputs"],
                                                val_set[1])
    assert loss.item() == pytest.approx(float(best["val_loss"]), abs=1e-4), (
        f"by the page's program, the weights have the loss {loss}, in the run {best['val_loss']}")
    return [int(number) for number in re.findall(r"\d+", printed)]


def write_files(folder, count):
    os.mkdir(folder)
    for number in range(count):
        inputs = torch.randn(20)
        torch.save((inputs, inputs[:3].argmax().item()), f"{folder}/{number}.pt")


def test_files_with_a_random_transform_resume_exactly():
    write_files("train", 64)
    write_files("val", 13)
    copy_with("synthetic_ddp", "files")
    assert_resumes(*SMALL, "--workers", 1, kill=7)


def test_a_part_of_the_files_validates_and_the_weights_are_used():
    write_files("train", 64)
    copy_with("synthetic_ddp", "files", "split")
    epochs, _ = train(*SMALL, "--checkpoint", "my.pt")
    assert_used_as_in_the_run(epochs)
    train_set, val_set = load_script("my.py").load_data(None)
    assert sorted([*train_set.indices, *val_set.indices]) == [*range(64)] and len(val_set) == 6, (
        f"of 64 samples, 6 others must validate, not {sorted(val_set.indices)}")
    assert (train_set.dataset.noise, val_set.dataset.noise) == (0.1, 0.0), "transforms are swapped"


def test_tensors_are_learned_and_their_weights_are_used():
    for name, count in (("train.pt", 512), ("val.pt", 200)):
        inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(count))
        torch.save((inputs, inputs[:, :3].argmax(1)), name)
    copy_with("fashionmnist_ddp", "tensors")
    epochs, _ = train(*SMALL, "--lr", 0.02, "--checkpoint", "my.pt")
    inputs = "from my import scale\ninputs = scale(*val_set)[0]"
    classes = assert_used_as_in_the_run(
        epochs, re.sub("^inputs = .*", inputs, CODE["use"][1], flags=re.MULTILINE))
    accuracy = (torch.tensor(classes) == torch.load("val.pt")[1]).double().mean()
    assert accuracy > 0.8, f"the copy does not learn its data: {epochs}"


def test_a_language_model_learns_which_character_is_the_next():
    text = 1200 * "abcde"
    Path("input.txt").write_text(text)
    copy_with("synthetic_ddp", SMALL_GPT)
    epochs, _ = train("--global-batch", 8, "--lr", 0.01, "--epochs", 1, "--checkpoint", "my.pt")
    predicted = "".join("abcde"[number] for number in assert_used_as_in_the_run(epochs))
    assert predicted and text[1:].startswith(predicted), (
        f"after {text[:70]}, the page's program predicts {predicted[:70]}")


@all_scripts
def test_a_run_starts_from_the_best_weights_of_another(script):
    """By the commented line in build_model()."""
    text = script_path(script).read_text()
    line = '# model.load_state_dict(torch.load("FILE.best", map_location="cpu"))'
    assert text.count(line) == 1, f"{script} has no line {line}"
    Path("my.py").write_text(text.replace(line, line.removeprefix("# ")))
    args = load_script(script).parse_args([])
    args.classes = list("0123456789")
    best = load_script(script).build_model(args).state_dict()
    torch.save(best, "FILE.best")
    different = unequal(load_script("my.py").build_model(args).state_dict(), best)
    assert not different, f"{script} starts from other weights than FILE.best has: {different}"


# ---- make-it-yours: loss and metrics ----
@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_a_loss_with_class_weights_is_a_mean_over_the_samples(script):
    """That of a batch is the mean of its shares', although these have other classes."""
    data = ("", "def load_data(args):\n    y = torch.arange(93) % 10\n    return y, None\n")
    copy_with(script, data, "class weights", "weighted loss")
    module = load_script("my.py")
    args = module.parse_args([])
    args.image_size = 10  # of these images, for cifar10_ddp
    module.load_data(args)
    assert args.class_weights == pytest.approx([0.93] * 3 + [93 / 90] * 7), args.class_weights
    images, labels = torch.rand(93, 1, 1, 10), torch.arange(93) // 10  # sorted
    whole, first, second = (
        module.loss_and_counts(args, nn.Flatten(), images[share], labels[share])[0].item()
        for share in (slice(93), slice(33), slice(33, 93)))
    assert whole == pytest.approx((33 * first + 60 * second) / 93, rel=1e-5), (
        f"{script}: the loss of 93 samples is {whole}, of 33 and 60 of them {first} and {second}")


def test_f1_is_the_mean_over_the_classes_and_auc_the_share_of_pairs_in_order():
    copy_with("cifar10_ddp", "F1 counts", "F1", "AUC")
    module = load_script("my.py")
    counts = torch.tensor([[4.0, 6.0, 0.0], [5.0, 5.0, 0.0], [3.0, 4.0, 0.0]])
    expected = (2 * 3 / 9 + 2 * 4 / 11) / 2  # of the two classes that occur
    found = float(module.metrics(counts, 10)["F1"])
    assert found == pytest.approx(expected), f"F1 must be {expected}, not {found}"
    outputs, labels = torch.randint(5, (40,)).float(), torch.arange(40) % 3 % 2
    ones, zeros = outputs[labels == 1].unsqueeze(1), outputs[labels == 0]
    expected = ((ones > zeros).double() + (ones == zeros) / 2).mean().item()
    found = module.auc(outputs, labels)
    assert found == pytest.approx(expected), f"AUC must be {expected}, not {found}"


@pytest.mark.parametrize("samples", [8, 160])
def test_auc_is_that_of_the_samples_of_all_processes(samples):
    """A quarter of them validates: of 8, one of three processes has none."""
    copy_with("synthetic_ddp", "AUC")
    flags = ("--samples", samples, "--seed", 3, "--global-batch", 6, "--epochs", 2)
    one, three = ([epoch["val_AUC"] for epoch in train(*flags, nproc=nproc)[0]]
                  for nproc in (1, 3))
    assert one == three, f"on one process, AUC is {one}, on three {three}"


TOKENS = ("", """
def load_data(args):
    x = torch.randint(5, (80, LENGTH))
    y = x.masked_fill(torch.rand(80, LENGTH) < torch.rand(80, 1), -100)
    return TensorDataset(x[16:], y[16:]), TensorDataset(x[:16], y[:16])
""")


def test_the_loss_of_tokens_is_their_mean_over_the_global_batch():
    """Two processes end as one process with the usual loss, which ignores -100, too."""
    Path("input.txt").write_text("abcde")
    states = []
    for nproc, blocks in ((1, []), (2, ["tokens"])):
        copy_with("synthetic_ddp", SMALL_GPT, TOKENS, *blocks)
        train("--epochs", 2, "--global-batch", 16, "--checkpoint", f"{nproc}.pt", nproc=nproc)
        states.append(torch.load(f"{nproc}.pt")["model"])
    for name, weight in states[0].items():
        assert torch.allclose(weight, states[1][name], atol=1e-3), (
            f"{name} must be {weight}, but by the page's code, it is {states[1][name]}")


# ---- make-it-yours: the loop ----
@all_scripts
def test_blocks_of_the_loop_resume_exactly_together(script):
    copy_with(script, "clip", "average", "F1 counts", "F1")
    epochs = assert_resumes(*own_flags(script), "--epochs", 3, kill=12)
    assert len(epochs) == 3 and all(0 < float(epoch["val_F1"]) <= 1 for epoch in epochs), (
        f"F1 in the log of three epochs: {epochs}")


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@all_scripts
def test_blocks_of_the_loop_clip_average_and_report(script, monkeypatch):
    """On the problem of harness.py, with gradients clipped to 0.01, and a stand-in for TensorBoard.

    One is compiled, without the compiler behind torch.compile, which requires g++.
    """
    def change(module, rank, seen):
        def build_optimizer(args, model, steps):
            def before_step(*_):
                gradients = [weight.grad for weight in model.parameters()]
                seen.append(("norm", nn.utils.get_total_norm(gradients).item()))

            optimizer, scheduler = build(args, model, steps)
            optimizer.register_step_pre_hook(before_step)
            return optimizer, scheduler

        def log_results(args, epoch, results):
            seen.extend(("log", f"{name} {epoch} {results[name]:.4f}") for name in results)
            log(args, epoch, results)

        def summary_writer(folder):
            seen.append(("board", folder))
            return SimpleNamespace(add_scalar=add_scalar, flush=lambda: None)

        def add_scalar(name, value, step):
            seen.append(("board", f"{name} {step} {value:.4f}"))

        give_problem(module, script, seen, noisy=False)
        build, log = module.build_optimizer, module.log_results
        module.build_optimizer, module.log_results = build_optimizer, log_results
        sys.modules["torch.utils.tensorboard"] = SimpleNamespace(SummaryWriter=summary_writer)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = ["compile"] if script == "synthetic_ddp" else []
    clip, steps = ((place, code.replace("1.0", "0.01").replace("100", "10"))
                   for place, code in (CODE["clip"], CODE["steps"]))
    copy_with(script, clip, steps, "average", *compiled, "TensorBoard", "profile")
    more = ("--workers", 0) if SCRIPTS[script].data == "data sets" else ()
    _, seen = train(*flags_of(script), "--epochs", 5, *more, "--checkpoint", "my.pt", change=change)
    norms, weights, logged, board = ([event[1] for event in seen if event[0] == kind]
                                     for kind in ("norm", "step", "log", "board"))
    assert norms == pytest.approx(len(norms) * [0.01], rel=0.01), (
        f"clipped to 0.01, the gradients that are used have the norms {norms}")
    average = weights[0]
    for after_step in weights[1:]:
        average = 0.999 * average + 0.001 * after_step
    found = torch.load("my.pt")["ema"]
    del found["n_averaged"]
    names = [name.removeprefix("module.") for name in found]
    assert list(torch.load("my.pt.best")) == names, f"the average has other names: {names}"
    error = ((flat(found.values()) - average).norm() / (weights[-1] - average).norm()).item()
    assert error < 0.01, f"the saved average is another one, by {error:.3g} of what it averages"
    losses = [line.split()[4] for line in board if line.startswith("loss of rank 0")]
    assert losses == ["10", "20"], f"TensorBoard gets a loss in the steps {losses}"
    found = [line for line in board if not line.startswith("loss of rank 0")]
    assert found == ["runs/my", *logged], f"TensorBoard gets {found}, not {logged}"
    steps = set(re.findall(r"ProfilerStep#(\d+)", Path("trace.json").read_text()))
    assert steps == {str(step) for step in range(7, 17)}, f"the profile has the steps {steps}"


# ---- cifar10_ddp ----
def test_an_own_data_set_has_the_samples_of_the_folder_of_its_images():
    write_images(Path("DIR"), train=12, val=6)
    for folder in ("train", "val"):
        paths = sorted(Path("DIR", folder).glob("*/*"))
        Path(f"{folder}.csv").write_text("".join(f"{path},{path.parent.name}\n" for path in paths))
    copy_with("cifar10_ddp", "own images")
    found = []
    for script, *flags in (("my.py",), ("cifar10_ddp", "--image-folder", "DIR")):
        module = load_script(script)
        args = module.parse_args([*flags, "--image-size", "48"])
        sets = module.load_data(args)
        torch.manual_seed(0)
        found.append({f"{number}/{index}/{part}": value for number, data in enumerate(sets)
                      for index in range(len(data)) for part, value in enumerate(data[index])})
    assert len(found[0]) == 36 and not unequal(*found), f"not the same: {unequal(*found)}"


def test_the_weights_of_images_are_used_as_in_an_evaluation():
    """An image has the same logits, bit for bit."""
    write_images(Path("DIR"))
    flags = ("--image-folder", "DIR", "--model", "shufflenet_v2_x0_5", "--image-size", "48")
    run_to_end("cifar10_ddp", *flags, "--global-batch", 6, "--epochs", 1, "--workers", 0,
               "--checkpoint", "images.pt", nproc=1, problem="own")
    module = load_script("cifar10_ddp")
    args = module.parse_args(flags)
    _, val_set = module.load_data(args)
    model = module.build_model(args).eval()
    model.load_state_dict(torch.load("images.pt.best"))
    images, _ = module.scale(val_set[0][0].unsqueeze(0), None)
    expected = model(module.resize(args, images))
    shutil.copy(val_set.samples[0][0], "image.jpg")
    code = CODE["use images"][1].replace("resnet50", "shufflenet_v2_x0_5").replace("224", "48")
    printed, names = run_program(code)
    found = names["logits"]
    assert torch.equal(found, expected), f"logits are {found}, in the run {expected}"
    name = args.classes[expected.argmax()]
    assert printed == f"{name}\n", f"the page's code prints {printed!r} for {name}"

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
from harness import kill_at, run, run_to_end, text_of, unequal
from image_folder import write_images
from scripts import BEST_SCRIPTS, ROOT, SCRIPTS, code_blocks, load_script, script_path

pytestmark = pytest.mark.slow
# The Python blocks of each page, in order: a name, and the place of its code in a copy of the
# script (see copies.py). Without a place, its functions replace those of the script
BEFORE_RESUME = 'before "    resume(checkpoint"'
BLOCKS = {
    "synthetic_ddp/make-it-yours.md": [
        ("files", ""),
        ("tensors", ""),
        ("split", ""),
        ("class weights", 'before "return fake_images(93"'),
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
FLAGS = {  # for short runs with a small model
    script: (SCRIPTS[script].own[0], 160 if SCRIPTS[script].own[0] == "--samples" else 96, *SMALL,
             *(("--workers", 0) if SCRIPTS[script].saves == "step" else ()))
    for script in BEST_SCRIPTS}
all_scripts = pytest.mark.parametrize("script", BEST_SCRIPTS)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.syspath_prepend(tmp_path)


def copy_with(script, *names):
    """Write my.py, a copy of a script with these blocks, or further edits (place, code)."""
    make_copy(script, "my.py", *[CODE[name] if isinstance(name, str) else name for name in names])


def printed_by(code, names=None):
    """Run a block that is a program. Return what it prints. names gets its variables."""
    for name in ("my", "cifar10_ddp"):  # of another test, or of load_script()
        sys.modules.pop(name, None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {} if names is None else names)
    return printed.getvalue()


def results(text):
    """Return the results of each epoch that a run has printed: dicts of texts by name."""
    lines = re.findall(r"^epoch \d+/\d+  (?!step)(.*)", text, re.MULTILINE)
    return [dict(result.rsplit(" ", 1) for result in line.split("  ")) for line in lines]


def train(*flags, nproc=2, change=lambda module, rank, seen: None):
    """Train my.py. Return the results of its epochs, and what change() has seen on rank 0."""
    rank = run_to_end("my.py", *flags, nproc=nproc, problem="own", change=change)[0]
    return results(rank.text), rank.seen


def assert_resumes(*flags, kill, change=lambda module, rank, seen: None):
    """my.py resumes exactly, killed at a call of its loss on two processes. Return its results."""
    def killed(module, rank, seen):
        change(module, rank, seen)
        kill_at(module, "loss_and_counts", kill)

    epochs, _ = train(*flags, "--checkpoint", "my.pt", change=change)
    ranks = run("my.py", *flags, "--checkpoint", "killed.pt", problem="own", change=killed)
    assert -9 in [rank.code for rank in ranks], f"it must be killed:\n{text_of(ranks)}"
    train(*flags, "--checkpoint", "killed.pt", change=change)
    different = unequal(Path("killed.pt"), Path("my.pt"))
    assert not different, f"killed and resumed, and not killed, these differ: {different}"
    return epochs


def few_pixels(channels):
    """Return a small model of images."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10))


def small(module, rank, seen):
    """Replace the model of a script of images by a small one, and leave out flips and shifts."""
    if hasattr(module, "fake_images"):
        module.build_model = lambda args: few_pixels(3 if hasattr(module, "IMAGENET") else 1)
        module.augment = lambda args, *batch: batch


def test_each_block_of_code_is_tested():
    for path in [ROOT / "README.md", *ROOT.glob("*/*.md")]:
        expected = len(BLOCKS.get(str(path.relative_to(ROOT)), []))
        found = len(code_blocks(path, "python"))
        assert found == expected, f"{path} has {found} blocks of Python, tests run {expected}"


# ---- make-it-yours: data ----
def test_files_with_a_random_transform_resume_exactly_and_their_weights_classify():
    for name, samples in (("train", 64), ("val", 13)):
        os.mkdir(name)
        for number in range(samples):
            inputs = torch.randn(20)
            torch.save((inputs, inputs[:3].argmax().item()), f"{name}/{number}.pt")
    copy_with("synthetic_ddp", "files")
    assert_resumes(*SMALL, "--workers", 1, kill=7)
    classes = re.findall(r"\d+", printed_by(CODE["use"][1]))
    assert len(classes) == 13, f"the page's code prints the classes of 13 samples, not {classes}"
    copy_with("synthetic_ddp", "files", "split")
    train_set, val_set = load_script("my.py").load_data(None)
    assert sorted([*train_set.indices, *val_set.indices]) == [*range(64)] and len(val_set) == 6, (
        f"of 64 samples, 6 others must validate, not {sorted(val_set.indices)}")
    assert (train_set.dataset.noise, val_set.dataset.noise) == (0.1, 0.0), "transforms are swapped"


def test_tensors_are_learned_and_their_weights_classify_as_in_the_run():
    for name, count in (("train.pt", 512), ("val.pt", 200)):
        inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(count))
        torch.save((inputs, inputs[:, :3].argmax(1)), name)
    copy_with("fashionmnist_ddp", "tensors")
    epochs, _ = train(*SMALL, "--lr", 0.02, "--checkpoint", "my.pt")
    best = max(float(epoch["val_accuracy"]) for epoch in epochs)
    assert best > 0.8, f"the copy does not learn its data: {epochs}"
    inputs = "from my import scale\ninputs = scale(*val_set)[0]"
    use = re.sub("^inputs = .*", inputs, CODE["use"][1], flags=re.MULTILINE)
    accuracy = "print((model(inputs).argmax(1) == val_set[1]).double().mean().item())"
    found = float(printed_by(f"{use}\n{accuracy}").split()[-1])
    assert found == pytest.approx(best, abs=1e-4), f"by the page's code {found}, in the run {best}"


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
    labels = ('before "weights = len(y)"', "y = torch.arange(93) % 10")
    data = ("", "def load_data(args):\n    return fake_images(93, (3, 32, 32), args.seed)\n")
    copy_with(script, data, "class weights", labels, "weighted loss")
    module = load_script("my.py")
    args = module.parse_args([])
    module.load_data(args)
    assert args.class_weights == pytest.approx([0.93] * 3 + [93 / 90] * 7), args.class_weights
    images, labels = torch.rand(93, 3, 32, 32), torch.arange(93) // 10  # sorted
    model = few_pixels(3)
    whole, first, second = (
        module.loss_and_counts(args, model, images[share], labels[share])[0].item()
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


AUC_DATA = """
def load_data(args):
    x = torch.randn(100, 10)
    y = (x[:, 0] + torch.randn(100) > 0).long()
    y[:2] = torch.tensor([0, 1])
    samples = 2 if args.bf16 else 40
    return TensorDataset(x[40:], y[40:]), TensorDataset(x[:samples], y[:samples])
"""


@pytest.mark.parametrize("flags", [[], ["--bf16"]])
def test_auc_is_that_of_the_samples_of_all_processes(flags):
    """With --bf16, one of three processes has no validation samples."""
    copy_with("synthetic_ddp", "AUC", ("", AUC_DATA))
    one, three = (train("--global-batch", 12, "--epochs", 2, *flags, nproc=nproc)[0]
                  for nproc in (1, 3))
    assert [epoch["val_AUC"] for epoch in one] == [epoch["val_AUC"] for epoch in three], (
        f"on one process {one}, on three {three}")


def language_model():
    """Return the page's code with one layer and without dropout, as an edit."""
    code = CODE["language model"][1].replace("dropout=0.1", "dropout=0.0")
    assert "layers=4" in code and "dropout=0.0" in code, "the page's model is another one"
    return "", code.replace("layers=4", "layers=1")


def test_a_language_model_learns_its_text_and_its_weights_are_used():
    Path("input.txt").write_text("".join(chr(97 + n * n % 7) for n in range(6000)))
    copy_with("synthetic_ddp", language_model())
    epochs, _ = train("--global-batch", 8, "--lr", 0.01, "--epochs", 3, "--checkpoint", "my.pt")
    assert float(epochs[-1]["val_accuracy"]) > 0.7, f"the text is not learned: {epochs}"
    letters = {int(number) for number in re.findall(r"\d+", printed_by(CODE["use"][1]))}
    assert letters and letters <= {0, 1, 2, 3}, f"of four letters, the page's code prints {letters}"


TOKENS = """
def load_data(args):
    x = torch.randint(5, (80, LENGTH))
    y = x.masked_fill(torch.rand(80, LENGTH) < torch.rand(80, 1), -100)
    return TensorDataset(x[16:], y[16:]), TensorDataset(x[:16], y[:16])
"""


def test_the_loss_of_tokens_is_their_mean_over_the_global_batch():
    """Two processes end as one process with the usual loss, which ignores -100, too."""
    Path("input.txt").write_text("abcde")
    states = []
    for nproc, code in ((1, "loss = F.cross_entropy(logits, labels.flatten())"),
                        (2, CODE["tokens"][1])):
        copy_with("synthetic_ddp", language_model(), ("", TOKENS))
        make_copy("my.py", "my.py", (CODE["tokens"][0], code))
        train("--epochs", 2, "--global-batch", 16, "--checkpoint", f"{nproc}.pt", nproc=nproc)
        states.append(torch.load(f"{nproc}.pt")["model"])
    for name, weight in states[0].items():
        assert torch.allclose(weight, states[1][name], atol=1e-3), (
            f"{name} must be {weight}, but by the page's code, it is {states[1][name]}")


# ---- make-it-yours: the loop ----
@all_scripts
def test_blocks_of_the_loop_resume_exactly_together(script):
    copy_with(script, "clip", "average", "F1 counts", "F1")
    epochs = assert_resumes(*FLAGS[script], kill=13, change=small)
    assert len(epochs) == 3 and all(0 < float(epoch["val_F1"]) <= 1 for epoch in epochs), (
        f"F1 in the log of three epochs: {epochs}")


class Writer:
    """Stands in for SummaryWriter: the package tensorboard is no requirement of the tests."""

    def __init__(self, folder):
        self.path = Path(f"{Path(folder).name}.txt")
        self.path.touch(exist_ok=False)

    def add_scalar(self, name, value, epoch):
        with open(self.path, "a") as file:
            file.write(f"{name} {epoch} {value:.4f}\n")

    def flush(self):
        pass


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@all_scripts
def test_blocks_of_the_loop_clip_average_and_report(script, monkeypatch):
    """One run of two processes. Gradients are clipped to 0.01.

    One is compiled, without the compiler behind torch.compile, which requires g++.
    """
    def see(module, rank, seen):
        def build_optimizer(args, model, steps):
            def before_step(*_):
                norm = flat(weight.grad for weight in model.parameters()).norm().item()
                seen.append(("norm", norm))

            optimizer, scheduler = build(args, model, steps)
            optimizer.register_step_pre_hook(before_step)
            optimizer.register_step_post_hook(
                lambda *_: seen.append(("weights", flat(model.parameters()))))
            return optimizer, scheduler

        def log_results(args, epoch, results):
            seen.extend(("log", f"{name} {epoch} {results[name]:.4f}") for name in results)
            log(args, epoch, results)

        small(module, rank, seen)
        build, log = module.build_optimizer, module.log_results
        module.build_optimizer, module.log_results = build_optimizer, log_results
        sys.modules["torch.utils.tensorboard"] = SimpleNamespace(SummaryWriter=Writer)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = ["compile"] if script == "synthetic_ddp" else []
    clip, steps = ((place, code.replace("1.0", "0.01").replace("100", "10"))
                   for place, code in (CODE["clip"], CODE["steps"]))
    copy_with(script, clip, steps, "average", *compiled, "TensorBoard", "profile")
    _, seen = train(*FLAGS[script], "--checkpoint", "my.pt", change=see)
    norms, weights, logged = ([value for name, value in seen if name == kind]
                              for kind in ("norm", "weights", "log"))
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
    text = Path("my.txt").read_text()
    found = [line for line in text.splitlines() if "rank 0" not in line]
    assert len(logged) > 15 and found == logged, f"TensorBoard gets {found}, not {logged}"
    expected = [str(step) for step in range(10, len(norms) + 1, 10)]
    found = re.findall(r"^loss of rank 0 (\d+) ", text, re.MULTILINE)
    assert found == expected, f"TensorBoard gets a loss in the steps {found}, not {expected}"
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
    model = ("--model", "shufflenet_v2_x0_5", "--image-size", "48")
    folder = ("--image-folder", "DIR", *model)
    run_to_end("cifar10_ddp", *folder, "--global-batch", 6, "--epochs", 1, "--workers", 0,
               "--checkpoint", "images.pt", nproc=1, problem="own")
    code, old = CODE["use images"][1], '"--model", "resnet50", "--image-size", "224"'
    assert old in code, f"the page's code has no {old}"
    shutil.copy("DIR/val/dog/1.jpg", "image.jpg")
    names = {}
    printed = printed_by(code.replace(old, repr(list(model))[1:-1]), names).strip()
    module = load_script("cifar10_ddp")
    args = module.parse_args(folder)
    _, val_set = module.load_data(args)
    (image,) = [image for (path, _), (image, _) in zip(val_set.samples, val_set)
                if path == "DIR/val/dog/1.jpg"]
    model = module.build_model(args)
    model.load_state_dict(torch.load("images.pt.best"))
    images, _ = module.scale(image.unsqueeze(0), None)
    expected = model.eval()(module.resize(args, images))
    found = names["logits"]
    assert torch.equal(found, expected), f"logits are {found}, in the run {expected}"
    assert printed == args.classes[expected.argmax()], f"the page's code prints {printed!r}"

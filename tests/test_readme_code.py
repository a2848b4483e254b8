"""Python code on the pages does what its page says.

A block of make-it-yours is put where the page says, into a copy of each script that it is for. The
copy then trains alike on one process and on two, and resumes exactly.
"""

import contextlib
import functools
import io
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import assert_equal, load_checkpoint
from copies import make_copy
from forked import at_step, kill_after, train_and_kill, train_to_end, watch
from image_folder import write_images
from recorder import FewPixels, flat, use_small_model
from scripts import BEST_SCRIPTS, ROOT, code_blocks, load_script
from torch.optim.optimizer import register_optimizer_step_pre_hook

pytestmark = pytest.mark.slow
MAKE_IT_YOURS = "synthetic_ddp/make-it-yours.md"
CIFAR10 = "cifar10_ddp/README.md"

# The Python blocks of a page, in order: name, and place in a copy of the script. Without a place,
# the block's functions replace those of the script (see copies.py). None: it is no edit
BLOCKS = {
    MAKE_IT_YOURS: [
        ("files", ""),
        ("tensors", ""),
        ("split", 'instead of "return Subset(data, range(split"'),
        ("use", None),
        ("start from", ""),
        ("class weights", 'before "fake_images(args.fake_data, "'),
        ("class weights", 'instead of "loss = F.cross_entropy("'),
        ("F1", 'instead of "return loss, (logits"'),
        ("F1", ""),
        ("language model", ""),
        ("tokens", 'instead of "loss = F.cross_entropy("'),
        ("clip", 'before "optimizer.step()"'),
        ("average", 'before "    resume(checkpoint"'),
        ("compile", 'before "ddp_model = DDP("'),
        ("TensorBoard", 'before "for epoch in range({loop}"'),
        ("TensorBoard", 'after "{end}"'),
        ("profile", 'before "for epoch in range({loop}"'),
    ],
    CIFAR10: [
        ("use", None),
        ("own data set", ""),
    ],
}
# The places that the page describes, in each script
SAVES = "if rank == 0 and args.checkpoint:  # DDP: all have the same weights, one process saves"
PLACES = {
    "synthetic_ddp": {"loop": "progress", "end": SAVES},
    "fashionmnist_ddp": {"loop": "progress", "end": SAVES},
    "cifar10_ddp": {"loop": "max(", "end": 'if score > progress["best_score"]'},
}
FLAGS = {  # for short runs with a small model
    "synthetic_ddp": ("--samples", 160, "--global-batch", 16, "--workers", 0),
    "fashionmnist_ddp": ("--fake-data", 96, "--global-batch", 16),
    "cifar10_ddp": ("--fake-data", 96, "--global-batch", 16, "--workers", 0),
}
all_scripts = pytest.mark.parametrize("script", BEST_SCRIPTS)


def edits(page, script, *names):
    """Return the pairs (place, code) of the blocks with these names, for a copy of a script."""
    blocks = zip(BLOCKS[page], code_blocks(ROOT / page, "python"), strict=True)
    return [(place and re.sub(r"\{(\w+)\}", lambda name: PLACES[script][name[1]], place), code)
            for (name, place), code in blocks if name in names]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.syspath_prepend(tmp_path)


def run_code(code, names=None):
    """Run a block that is no edit, with my.py. Return what it prints. names gets its variables."""
    for name in ("my", "cifar10_ddp"):  # of another test, or of load_script()
        sys.modules.pop(name, None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {} if names is None else names)
    return printed.getvalue()


def small(module, rank):
    """A setup for train_forked(): a small model, without random crops and flips."""
    use_small_model(module, rank)
    module.augment = module.shift_and_flip = lambda images: images.float()


def results(text):
    """Return the results of each epoch that a run has printed: dicts of numbers by name."""
    return [{name: float(number) for name, number in re.findall(r"(\w+) (-?[\d.]+)(?=  )", line)}
            for line in re.findall(r"^epoch \d+/\d+  (?!step).*", text, re.MULTILINE)]


def assert_resumes(copy, *flags, steps, setup=lambda module, rank: None):
    """On two processes, killed after so many steps. Return the results of the undisturbed run."""
    def killed(module, rank):
        setup(module, rank)
        kill_after(steps)

    flags = (*flags, "--epochs", 3, "--checkpoint")
    whole = train_to_end(copy, *flags, "whole.pt", setup=setup, nproc=2)
    train_and_kill(copy, *flags, "stopped.pt", setup=killed, nproc=2)
    train_to_end(copy, *flags, "stopped.pt", setup=setup, nproc=2)
    assert_equal(Path("stopped.pt"), Path("whole.pt"))
    return results(whole.text)


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
    make_copy("synthetic_ddp", "my.py", *edits(MAKE_IT_YOURS, "synthetic_ddp", "files"))
    assert_resumes("my.py", "--global-batch", 16, "--workers", 1, steps=6)
    shutil.copy("whole.pt.best", "my.pt.best")
    ((_, use),) = edits(MAKE_IT_YOURS, "synthetic_ddp", "use")
    classes = re.findall(r"\d+", run_code(use))
    assert len(classes) == 13, f"the page's code prints the classes of 13 samples, not {classes}"


def assert_learned_and_classified(*flags):
    """Train my.py on two processes. By the page's code, its weights are as good as in the run."""
    text = train_to_end("my.py", "--epochs", 3, "--global-batch", 16, "--checkpoint", "my.pt",
                        *flags, nproc=2).text
    best = max(line["val_accuracy"] for line in results(text))
    assert best > 0.8, f"the copy does not learn its data:\n{text}"
    ((_, use),) = edits(MAKE_IT_YOURS, "fashionmnist_ddp", "use")
    use = re.sub("^inputs = .*", "inputs = val_set[0]", use, flags=re.MULTILINE)
    accuracy = "print((model(inputs).argmax(1) == val_set[1]).double().mean().item())"
    found = float(run_code(f"{use}\n{accuracy}").split()[-1])
    assert found == pytest.approx(best, abs=1e-4), f"by the page's code {found}, in the run {best}"


def test_tensors_are_learned_and_their_weights_classify_as_in_the_run():
    for name, count in (("train.pt", 512), ("val.pt", 200)):
        inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(count))
        torch.save((inputs, inputs[:, :3].argmax(1)), name)
    make_copy("fashionmnist_ddp", "my.py", *edits(MAKE_IT_YOURS, "fashionmnist_ddp", "tensors"))
    assert_learned_and_classified("--lr", 0.02)


def test_a_part_of_the_training_data_validates():
    make_copy("synthetic_ddp", "my.py", *edits(MAKE_IT_YOURS, "synthetic_ddp", "split"))
    args = load_script("my.py").parse_args(["--samples", "100"])
    train_set, val_set = load_script("my.py").load_data(args)
    indices = [*train_set.indices, *val_set.indices]
    assert sorted(indices) == list(range(100)) and len(val_set) == 10, (
        f"of 100 samples, 10 others must validate, not {sorted(val_set.indices)}")


@all_scripts
def test_a_run_starts_from_the_best_weights_of_another(script):
    place, definition = {
        "synthetic_ddp": ("return nn.Sequential(nn.Linear(10, 5)",
                          "model = nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 3))\n"),
        "fashionmnist_ddp": ("return CNN().to(", "model = CNN()\n"),
        "cifar10_ddp": ("return model.to(memory_format", ""),
    }[script]
    ((_, code),) = edits(MAKE_IT_YOURS, script, "start from")
    make_copy(script, "my.py", (f'instead of "{place}"', f"{definition}{code}return model"))
    args = load_script(script).parse_args([])
    args.classes = list("0123456789")
    best = load_script(script).build_model(args).state_dict()
    torch.save(best, "my.pt.best")
    assert_equal(dict(load_script("my.py").build_model(args).state_dict()), dict(best), "the model")


# ---- make-it-yours: loss and metrics ----
@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_a_loss_with_class_weights_is_a_mean_over_the_samples(script):
    """That of a batch is the mean of its shares', although these have other classes."""
    weights, loss = edits(MAKE_IT_YOURS, script, "class weights")
    labels = 'y = fake_images(args.fake_data, (1, 1, 1), args.seed)[0][1]'
    make_copy(script, "my.py", weights, ('before "weights = len(y)"', labels), loss)
    module = load_script("my.py")
    module.augment = module.shift_and_flip = lambda images: images.float()
    args = module.parse_args(["--fake-data", "93"])  # of class 9, 9 images; of class 0, 10
    module.load_data(args)
    assert args.class_weights == pytest.approx([0.93] * 3 + [93 / 90] * 7), args.class_weights
    images, labels = torch.randint(256, (93, 3, 32, 32)), torch.arange(93) // 10  # sorted
    model = FewPixels()
    whole, first, second = (
        module.loss_and_counts(args, model, images[share], labels[share])[0].item()
        for share in (slice(93), slice(33), slice(33, 93)))
    assert whole == pytest.approx((33 * first + 60 * second) / 93, rel=1e-5), (
        f"{script}: the loss of 93 samples is {whole}, of 33 and 60 of them {first} and {second}")


def language_model():
    """Return the page's place and code, with one layer and without dropout."""
    ((place, code),) = edits(MAKE_IT_YOURS, "synthetic_ddp", "language model")
    assert "dropout=0.1" in code and "layers=4" in code, "the page's model is another one"
    return place, code.replace("dropout=0.1", "dropout=0.0").replace("layers=4", "layers=1")


def test_a_language_model_learns_its_text():
    text = "".join(chr(97 + number * number % 7) for number in range(6000))
    Path("input.txt").write_text(text)
    make_copy("synthetic_ddp", "my.py", language_model())
    printed = results(train_to_end("my.py", "--global-batch", 8, "--workers", 0, "--lr", 0.01,
                                   "--epochs", 3, nproc=2).text)
    assert printed[-1]["val_accuracy"] > 0.7, f"the model does not learn its text: {printed}"


TOKENS = """
def load_data(args):
    x = torch.randint(5, (80, LENGTH))
    y = x.masked_fill(torch.rand(80, LENGTH) < torch.rand(80, 1), -100)
    return TensorDataset(x[16:], y[16:]), TensorDataset(x[:16], y[:16])
"""


def test_the_loss_of_tokens_is_their_mean_over_the_global_batch():
    """Two processes end as one process with the usual loss, which ignores -100, too."""
    Path("input.txt").write_text("abcde")
    place, usual = language_model()
    ((_, loss),) = edits(MAKE_IT_YOURS, "synthetic_ddp", "tokens")
    tokens = re.sub("( +)loss = F.cross_entropy.*", lambda line: textwrap.indent(loss, line[1]),
                    usual)
    make_copy("synthetic_ddp", "usual.py", (place, usual), ("", TOKENS))
    make_copy("synthetic_ddp", "my.py", (place, tokens), ("", TOKENS))
    flags = ("--epochs", 2, "--global-batch", 16, "--workers", 0, "--checkpoint")
    train_to_end("usual.py", *flags, "usual.pt")
    train_to_end("my.py", *flags, "my.pt", nproc=2)
    expected, found = (load_checkpoint(path)["model"] for path in ("usual.pt", "my.pt"))
    for name, weight in expected.items():
        assert torch.allclose(weight, found[name], atol=1e-3), (
            f"{name} must be {weight}, but by the page's code, it is {found[name]}")


def test_f1_is_the_mean_over_the_classes():
    make_copy("cifar10_ddp", "my.py", *edits(MAKE_IT_YOURS, "cifar10_ddp", "F1"))
    counts = torch.tensor([[4.0, 6.0, 0.0], [5.0, 5.0, 0.0], [3.0, 4.0, 0.0]])
    expected = (2 * 3 / 9 + 2 * 4 / 11) / 2  # of the two classes that occur
    found = float(load_script("my.py").metrics(counts, 10)["F1"])
    assert found == pytest.approx(expected), f"F1 must be {expected}, not {found}"


# ---- make-it-yours: the loop ----
@all_scripts
def test_blocks_of_the_loop_resume_exactly_together(script):
    make_copy(script, "my.py", *edits(MAKE_IT_YOURS, script, "clip", "average", "F1"))
    printed = assert_resumes("my.py", *FLAGS[script], steps=13, setup=small)
    assert len(printed) == 3 and all(0 < line["val_F1"] <= 1 for line in printed), (
        f"F1 in the log of three epochs: {printed}")


class Writer:
    """Stands in for SummaryWriter: the package tensorboard is no requirement of the tests."""

    def __init__(self, folder):
        self.path = Path(folder)

    def add_scalar(self, name, value, epoch):
        with open(f"{self.path.name}.txt", "a") as file:
            file.write(f"{name} {epoch} {value:.4f}\n")

    def flush(self):
        pass


@all_scripts
def test_blocks_of_the_loop_clip_average_and_report(script, monkeypatch):
    """One run of two processes. Gradients are clipped to 0.01.

    One is compiled, without the compiler behind torch.compile, which requires g++.
    """
    def setup(module, rank):
        def see_gradients(*_):
            norms.append(flat(weight.grad for weight in models[0].parameters()).norm().item())

        models, norms, weights = [], [], []
        use_small_model(module)
        sys.modules["torch.utils.tensorboard"] = SimpleNamespace(SummaryWriter=Writer)
        watch(module, "resume", lambda checkpoint, run, saved, _: models.append(saved["model"]))
        register_optimizer_step_pre_hook(see_gradients)
        at_step(lambda _: weights.append(flat(models[0].parameters())))
        return norms, weights

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = ["compile"] if script == "synthetic_ddp" else []
    ((place, clip),) = edits(MAKE_IT_YOURS, script, "clip")
    make_copy(script, "my.py", (place, clip.replace("1.0", "0.01")), *edits(
        MAKE_IT_YOURS, script, "average", *compiled, "TensorBoard", "profile"))
    end = train_to_end("my.py", *FLAGS[script], "--epochs", 3, "--checkpoint", "my.pt", nproc=2,
                       setup=setup)
    printed, (norms, weights) = results(end.text), end.results[0]
    assert norms == pytest.approx(len(norms) * [0.01], rel=0.01), (
        f"clipped to 0.01, the gradients that are used have the norms {norms}")
    average = weights[0]
    for after_step in weights[1:]:
        average = 0.999 * average + 0.001 * after_step
    found = load_checkpoint("my.pt")["ema"]
    del found["n_averaged"]
    names = [name.removeprefix("module.") for name in found]
    assert list(load_checkpoint("my.pt.best")) == names, f"the average has other names: {names}"
    found = flat(found.values())
    error = ((found - average).norm() / (weights[-1] - average).norm()).item()
    assert error < 0.01, f"the saved average is another one, by {error:.3g} of what it averages"
    expected = [f"{name} {epoch} {value:.4f}" for epoch, line in enumerate(printed)
                for name, value in line.items()]
    found = Path("my.txt").read_text().splitlines()
    assert found == expected, f"TensorBoard gets {found}, not {expected}"
    steps = set(re.findall(r"ProfilerStep#(\d+)", Path("trace.json").read_text()))
    assert steps == {str(step) for step in range(7, 17)}, f"the profile has the steps {steps}"


# ---- cifar10_ddp ----
def test_an_own_data_set_has_the_samples_of_the_folder_of_its_images():
    write_images(Path("DIR"), train=12, val=6)
    for folder, file in (("DIR/train", "train.csv"), ("DIR/val", "val.csv")):
        paths = sorted(Path(folder).glob("*/*"))
        Path(file).write_text("".join(f"{path},{path.parent.name}\n" for path in paths))
    make_copy("cifar10_ddp", "my.py", *edits(CIFAR10, "cifar10_ddp", "own data set"))
    model, found = FewPixels(), []
    for script, *flags in (("my.py",), ("cifar10_ddp", "--image-folder", "DIR")):
        module = load_script(script)
        args = module.parse_args([*flags, "--image-size", "48"])
        sets = module.load_data(args)
        torch.manual_seed(0)
        samples = [[data[index] for index in range(len(data))] for data in sets]
        images, labels = zip(*samples[0])
        batch = module.augment(args, *module.scale(torch.stack(images), torch.tensor(labels)))
        loss, _ = module.loss_and_counts(args, model, *batch)
        found.append([[list(sample) for sample in samples[0] + samples[1]], loss])
    assert_equal(*found, "[samples, loss]")


def test_the_weights_of_images_are_used_as_in_an_evaluation():
    """An image has the same logits, bit for bit."""
    write_images(Path("DIR"))
    model = ("--model", "shufflenet_v2_x0_5", "--image-size", "48")
    folder = ("--image-folder", "DIR", *model)
    train_to_end("cifar10_ddp", *folder, "--global-batch", 6, "--epochs", 1, "--workers", 0,
                 "--checkpoint", "images.pt")
    ((_, code),) = edits(CIFAR10, "cifar10_ddp", "use")
    old = '"--model", "resnet50", "--image-size", "224"'
    assert old in code, f"the page's code has no {old}"
    shutil.copy("DIR/val/dog/1.jpg", "image.jpg")
    names = {}
    printed = run_code(code.replace(old, repr(list(model))[1:-1]), names).strip()
    module = load_script("cifar10_ddp")
    args = module.parse_args(folder)
    _, val_set = module.load_data(args)
    (image,) = [image for (path, _), (image, _) in zip(val_set.samples, val_set)
                if path == "DIR/val/dog/1.jpg"]
    model = module.build_model(args)
    model.load_state_dict(torch.load("images.pt.best"))
    images, _ = module.scale(image.unsqueeze(0), None)
    with torch.no_grad():
        expected = model.eval()(module.resize(args, images))
    assert_equal(names["logits"], expected, "logits")
    assert printed == args.classes[expected.argmax()], f"the page's code prints {printed!r}"

"""Code of the pages does what they say, in the scripts where people put it."""

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torchvision
from checkpoints import assert_equal, load_checkpoint
from copies import make_copy
from forked import train_to_end, watch
from image_folder import TINY, write_images
from launchers import Job, clean_environment
from recorder import FewPixels, change_sets, record_small_model, use_small_model
from scripts import ROOT, SCRIPTS, load_script
from test_check_copy import FLAGS as CHECK_FLAGS, check
from test_real_data import fashion_mnist
from torch.optim.optimizer import (register_optimizer_step_post_hook,
                                   register_optimizer_step_pre_hook)

FLAGS = ("--fake-data", 96, "--batch-size", 8, "--epochs")
TEST_LINE = r"epoch (\d)/\d  test loss [\d.]+  accuracy ([\d.]+)"


# The Python blocks of a page, in order: name, and place in a copy of the script (see copies.py).
BEFORE_RESTORE = 'before "step = restore("'
BEFORE_STEP = 'before "optimizer.step()"'
BEFORE_LAST_LINE = 'before "  test {show(test)}"'
AFTER_LAST_LINE = 'after "  test {show(test)}"'
IN_LOSS = 'before "return loss, "'
AT_THE_END = 'after "if rank == 0 and args.checkpoint and step > saved_step"'
CIFAR10 = "cifar10_ddp/README.md"
MAKE_IT_YOURS = "fashionmnist_ddp/make-it-yours.md"
BLOCKS = {
    CIFAR10: [
        ("damaged images", None),
        ("use the weights of images", None),
        ("own data set", None),
        ("write shards", None),
        ("shards", None),
    ],
    MAKE_IT_YOURS: [
        ("own tensors", None),
        ("table", None),
        ("validation set", None),
        ("use the weights of tensors", None),
        ("use the weights of a table", None),
        ("best weights", None),
        ("best weights", BEFORE_RESTORE),
        ("best weights", BEFORE_LAST_LINE),
        ("last test", AT_THE_END),
        ("early stop", AFTER_LAST_LINE),
        ("class weights", 'before "fake_images(args.fake_data"'),
        ("class weights", 'instead of "loss = F.cross_entropy("'),
        ("tokens", 'before "for part in own_parts"'),
        ("tokens", 'instead of "loss = F.cross_entropy("'),
        ("skipped steps", 'instead of "optimizer.step()"'),
        ("compile", 'before "ddp_model = DDP"'),
        ("F1", 'instead of "return loss, (logits"'),
        ("F1", None),
        ("scores", None),
        ("scores", IN_LOSS),
        ("scores", BEFORE_LAST_LINE),
        ("predictions", BEFORE_LAST_LINE),
        ("average", BEFORE_RESTORE),
        ("average", 'after "optimizer.step()"'),
        ("weighted sampling", 'instead of "order = torch.randperm("'),
    ],
    "synthetic_ddp/README.md": [("predict", None), ("own data", None)],  # in test_synthetic_page.py
}
# Blocks of make-it-yours.md that are not in the copy of all others
ELSEWHERE = {"own tensors", "table", "validation set", "use the weights of tensors",
             "use the weights of a table", "class weights", "tokens", "weighted sampling"}
LABELS = 'before "weights = len(y)"', "y = fake_images(args.fake_data, (1, 1, 1), 0)[0][1]"
PAGE = (ROOT / MAKE_IT_YOURS).read_text()
CLIP = BEFORE_STEP, re.search("^norm = .*", PAGE, re.MULTILINE)[0]
both_scripts = pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
one_and_two = pytest.mark.parametrize("nproc", [1, 2])
# What the page says is another one in cifar10_ddp
IN_CIFAR10 = {
    "model, test_batches": "model, test_loader",
    '"fc2."': '"fc."',
    "len(x)": "images",
    "generator=shuffle).to(device)": "generator=shuffle)",
}


def code_blocks(page):
    """Return the Python blocks of a page, a path in the repository."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def edits(page, *names):
    """Return the pairs (place, code) of the blocks with these names on a page."""
    return [(place, code) for (name, place), code in zip(BLOCKS[page], code_blocks(page))
            if name in names]


@pytest.mark.parametrize("folder", [".", "containers", "slurm", "tests", *SCRIPTS])
def test_each_block_of_code_is_tested(folder):
    for path in (ROOT / folder).glob("*.md"):
        page = str(path.relative_to(ROOT))
        found = len(code_blocks(page))
        expected = len(BLOCKS.get(page, []))
        assert found == expected, f"{page} has {found} blocks of code, tests run {expected}"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def copy_with(script, *names, change=lambda code: code, more=()):
    """Write my.py, a copy of a script with these blocks and more edits, and return its flags."""
    page = CIFAR10 if names[0] in dict(BLOCKS[CIFAR10]) else MAKE_IT_YOURS
    blocks = edits(page, *names)
    if script == "cifar10_ddp":
        blocks = [[replace_all(part, IN_CIFAR10) for part in block] for block in blocks]
    make_copy(script, "my.py", *[(place, change(code)) for place, code in blocks], *more)
    return SCRIPTS[script].no_children


def replace_all(text, words):
    for old, new in words.items():
        text = text and text.replace(old, new)
    return text


def run_lines(code):
    """Run a block that is no edit, as at the top of the repository. Return what it prints."""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                             env=clean_environment(PYTHONPATH=ROOT))
    assert process.returncode == 0, f"the page's code fails:\n{process.stderr}"
    return process.stdout


def classes_found(line="", replacement=""):
    """Return the classes that "use the weights of tensors" prints, with a line replaced."""
    ((_, code),) = edits(MAKE_IT_YOURS, "use the weights of tensors")
    if line:
        code, count = re.subn(f"^{line}.*\n", lambda _: replacement, code, flags=re.MULTILINE)
        assert count == 1, f"the page's code has {count} lines {line}"
    printed = run_lines(f"import torch\ntorch.set_printoptions(threshold=10**6)\n{code}")
    return torch.tensor([int(number) for number in re.findall(r"\d+", printed)])


def assert_check_passes(*flags):
    status, text = check("my.py", *map(str, flags))
    assert status == 0, f"a copy with code of the pages: status {status} of its check:\n{text}"


# ---- What the pages print ----
@pytest.mark.parametrize("script, command", [
    ("cpu_ddp", "torchrun --standalone --nproc-per-node=2 cpu_ddp/train.py"),
    ("mnist_dp", "python mnist_dp/train.py --fake-data --epochs 2"),
    ("cifar10_ddp", "torchrun --standalone --nproc-per-node=2 cifar10_ddp/train.py "
                    "--fake-data --batch-size 16 --epochs 2"),
    ("synthetic_ddp", "torchrun --standalone --nproc-per-node=2 synthetic_ddp/train.py")])
def test_a_command_prints_what_its_page_shows(script, command):
    """But for speeds, and for losses and accuracies on CPUs that round otherwise."""
    page = (ROOT / script / "README.md").read_text()
    assert command in re.sub(r" \\\n +", " ", page), f"the page of {script} has no {command}"
    env = clean_environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with Job(["bash", "-c", command], env, ROOT) as job:
        status, text = job.result(timeout=900)
    assert status == 0, f"{command} ends with status {status}:\n{text}"
    shown = re.search(r"^```\n((?:world size|GPUs) .*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    number = r"[\d.,:]+"
    of_a_machine = (r"epoch \S+  step \S+|(?:threads|torch|wait) \S+|"
                    rf"{number} (?:\w+/s|s|left)\b")
    result = rf"(?:loss|accuracy) {number}"
    for line in shown.splitlines():
        pattern = ""
        for part in re.split(rf"({result}|{of_a_machine}|\.\.\.)", line):
            if part == "...":
                pattern += ".*"
            elif re.fullmatch(result, part):
                pattern += f"{part.split()[0]} ({number})"
            elif re.fullmatch(of_a_machine, part):
                pattern += re.sub(number, lambda _: r"\S+", part)
            else:
                pattern += re.escape(part)
        found = re.search(f"^{pattern}$", text, re.MULTILINE)
        assert found, f"{command} prints no line as the page's\n{line}\nbut\n{text}"
        if "images/s  wait" not in line:  # whose step depends on the speed
            expected = [float(value.split()[1]) for value in re.findall(result, line)]
            assert [float(value) for value in found.groups()] == pytest.approx(
                expected, rel=0.1, abs=0.02), f"the page shows\n{line}\nand {command}\n{text}"


# ---- fashionmnist_ddp/make-it-yours.md ----
@both_scripts
def test_blocks_of_the_loop_pass_the_check_together(script, monkeypatch):
    """With a stand-in for the compiler behind torch.compile, which takes minutes."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    copy_with(script, *[name for name in dict(BLOCKS[MAKE_IT_YOURS]) if name not in ELSEWHERE])
    flags = TINY if script == "cifar10_ddp" else ()
    assert_check_passes("--fake-data", *flags)


@both_scripts
def test_blocks_about_classes_and_lines_of_the_text_pass_the_check_together(script):
    """Weights of classes, samples drawn by them, and clipping."""
    copy_with(script, "class weights", "weighted sampling", more=[LABELS, CLIP])
    if script == "cifar10_ddp":
        Path("my.py").write_text(replace_all(Path("my.py").read_text(), {
            "own_parts, parts)": "own_parts, parts, y)",
            "    keys = batch_keys(": "    y = train_set.tensors[1]\n    keys = batch_keys("}))
    assert_check_passes(*CHECK_FLAGS[script])


def test_own_tensors_are_learned_and_their_weights_classify_as_in_the_run():
    for name, count in (("train.pt", 1024), ("test.pt", 200)):
        inputs = torch.randn(count, 20, generator=torch.Generator().manual_seed(count))
        torch.save((inputs, inputs[:, :3].argmax(1)), name)
    copy_with("fashionmnist_ddp", "own tensors")
    flags = ("--batch-size", 16, "--lr", 0.01, "--epochs", 3, "--checkpoint", "my.pt")
    text = train_to_end("my.py", *flags, nproc=2).text
    expected = re.findall(TEST_LINE, text)[-1][1]
    assert float(expected) > 0.8, f"the copy of the page does not learn its tensors:\n{text}"
    accuracy = (classes_found() == torch.load("test.pt")[1]).double().mean().item()
    assert f"{accuracy:.4f}" == expected, (
        f"by the page's code, the accuracy is {accuracy}, but in the run:\n{text}")
    assert_check_passes()


def write_table(path, table):
    rows = ["names", *[",".join(map(str, row)) for row in table.tolist()]]
    Path(path).write_text("\n".join(rows))


def test_a_table_is_learned_and_its_weights_classify():
    """Its columns are of different sizes, and far from 0. The last one is constant."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1100, 20, generator=generator)
    sizes = 10.0 ** (torch.arange(20) % 3)
    columns = sizes * (3 + inputs)
    columns[:, -1] = 0.1
    classes = inputs[:, :3].argmax(1, keepdim=True)
    write_table("table.csv", torch.cat([columns, classes], 1)[:900])
    write_table("new.csv", columns[900:])
    copy_with("fashionmnist_ddp", "own tensors", "table")
    flags = ("--batch-size", 16, "--lr", 0.01, "--epochs", 3, "--checkpoint", "my.pt")
    text = train_to_end("my.py", *flags, nproc=2).text
    accuracy = float(re.findall(TEST_LINE, text)[-1][1])
    assert accuracy > 0.8, f"the copy of the page does not learn its table:\n{text}"
    settings = load_checkpoint("my.pt")["settings"]
    assert settings["mean"][:-1] == pytest.approx((3 * sizes).tolist()[:-1], rel=0.1), (
        f"the checkpoint must have the mean of each column, not {settings['mean']}")
    ((_, code),) = edits(MAKE_IT_YOURS, "use the weights of a table")
    found = classes_found("inputs, labels = ", code)
    accuracy = (found == classes[900:, 0]).double().mean().item()
    assert accuracy > 0.8, f"by the page's code, the accuracy on new lines is {accuracy}"
    assert_check_passes()


def test_the_validation_set_passes_the_check():
    """No image of it is one of the training, in particular."""
    fashion_mnist("data")
    copy_with("fashionmnist_ddp", "validation set")
    assert_check_passes()


def test_a_copy_without_a_test_set_passes_the_check():
    empty = re.search(r"Without a test set, return `(.*?)`", PAGE)[1]
    make_copy("fashionmnist_ddp", "my.py", ('instead of "return fake_images("', f"""
        (x, y), _ = fake_images(args.fake_data, (1, 28, 28), args.seed)
        return (x, y), ({empty})
        """))
    assert_check_passes("--fake-data")


def test_weighted_sampling_draws_each_class_as_often():
    """Of 96 samples, 12 are of class 1, the others of class 0."""
    def setup(module, rank):
        change_sets(module, lambda data, _: (data[0], (torch.arange(len(data[0])) % 8 == 0).long()))
        return record_small_model(module, rank)

    copy_with("fashionmnist_ddp", "weighted sampling")
    ranks = train_to_end("my.py", *FLAGS, 4, nproc=2, setup=setup).results
    drawn = torch.cat([part.batch[1] for recorder in ranks for parts in recorder.steps
                       for part in parts])
    part = drawn.double().mean().item()
    assert part == pytest.approx(0.5, abs=0.1), f"{part:.0%} of the samples are of the rare class"


@one_and_two
@both_scripts
def test_with_class_weights_other_classes_are_not_taken_for_a_rare_one(script, nproc):
    """Of 50 training samples, one is left of class 0, and none of class 9."""
    def setup(module, rank):
        module.CNN = FewPixels
        torchvision.models.get_model = lambda *_, **options: FewPixels()
        fake_images = module.fake_images

        def leave_few(*arguments):
            (images, labels), test_set = fake_images(*arguments)
            kept = (labels != 9) & ((labels != 0) | ((labels == 0).cumsum(0) == 1))
            return (images[kept], labels[kept]), test_set

        module.fake_images = leave_few

    flags = copy_with(script, "class weights", more=[LABELS])
    rate = 0.3 if script == "cifar10_ddp" else 0.05
    if script == "cifar10_ddp":
        flags = (*flags, "--model", "squeezenet1_1", "--image-size", 32)
    text = train_to_end("my.py", "--fake-data", 500, "--epochs", 8, "--global-batch", 32, "--lr",
                        rate, *flags, nproc=nproc, setup=setup).text
    accuracy = float(re.findall(TEST_LINE, text)[-1][1])
    assert accuracy > 0.6, f"8 or 9 of 10 classes can be learned, but the accuracy is\n{text}"


def test_the_loss_of_tokens_is_their_mean_over_the_global_batch():
    """Two processes with two parts each end as one process with the usual loss."""
    usual = "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())"
    tokens = [("", """
        def load_data(args):
            x = torch.randint(5, (80, 6))
            y = x.masked_fill(torch.rand(80, 6) < torch.rand(80, 1), -100)
            return (x[16:], y[16:]), (x[:16], y[:16])


        def build_model(args):
            return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
        """),
        ('instead of "images = augment("', "pass"),
        ('instead of "logits = model("', "logits = model(images)"),
        ('instead of "return loss, (logits"', "return loss, (logits.argmax(2) == labels).sum()")]
    make_copy("fashionmnist_ddp", "usual.py", ('instead of "loss = F.cross_entropy("', usual),
              *tokens)
    copy_with("fashionmnist_ddp", "tokens", more=tokens)
    flags = ("--fake-data", "--epochs", 2, "--global-batch", 16, "--lr", 0.01, "--checkpoint")
    train_to_end("usual.py", *flags, "usual.pt")
    train_to_end("my.py", *flags, "my.pt", "--batch-size", 4, nproc=2)
    expected, found = (load_checkpoint(path)["model"] for path in ("usual.pt", "my.pt"))
    for name, weight in expected.items():
        assert torch.allclose(weight, found[name], atol=1e-4), (
            f"{name} must be {weight}, but by the page's code, it is {found[name]}")
    assert_check_passes("--fake-data", "--batch-size", 4)


@both_scripts
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(script):
    def setup(module, rank):
        use_small_model(module)
        steps = []
        losses = []
        loss_and_counts = module.loss_and_counts

        def nan_in_the_second_step(args, model, *batch):
            losses.append(model.training)
            loss, counts = loss_and_counts(args, model, *batch)
            return loss * (torch.nan if rank == 1 and len(losses) == 2 else 1), counts

        module.loss_and_counts = nan_in_the_second_step
        register_optimizer_step_post_hook(lambda *_: steps.append(len(losses)))
        return steps

    flags = copy_with(script, "skipped steps")
    end = train_to_end("my.py", *FLAGS, 1, *flags, nproc=2, setup=setup)
    assert end.results == 2 * [[1, 3, 4, 5, 6]], (
        f"all ranks must skip the second step alone, but make {end.results}\n{end.text}")


@one_and_two
@both_scripts
def test_gradients_are_clipped(script, nproc):
    """To the norm 0.01, by the line of the page."""
    def setup(module, rank):
        norms = []
        use_small_model(module)
        register_optimizer_step_pre_hook(lambda optimizer, *_: norms.append(torch.cat(
            [weight.grad.flatten() for group in optimizer.param_groups
             for weight in group["params"]]).norm().item()))
        return norms

    place, line = CLIP
    make_copy(script, "my.py", (place, line.replace("1.0", "0.01")))
    flags = (*FLAGS, 1, "--global-batch", 16, *SCRIPTS[script].no_children)
    norms = train_to_end("my.py", *flags, nproc=nproc, setup=setup).results[0]
    assert norms == pytest.approx(6 * [0.01], rel=0.01), (
        f"clipped to 0.01, the gradients that are used have the norms {norms}")


def test_a_compiled_model_is_saved_under_the_names_of_the_original(tmp_path):
    """Without the compiler behind torch.compile, which takes a minute and requires g++."""
    def setup(module, rank):
        torch.compile = functools.partial(torch.compile, backend="eager")  # of this process

    copy_with("fashionmnist_ddp", "compile")
    flags = (*FLAGS, 1, "--checkpoint", tmp_path / "run.pt")
    train_to_end("my.py", *flags, nproc=2, setup=setup)
    names = list(load_checkpoint(tmp_path / "run.pt")["model"])
    original = list(load_script("fashionmnist_ddp").CNN().state_dict())
    assert names == original, f"the checkpoint of the compiled model has other names: {names}"


class Scores:
    """Evaluate to the accuracy that is given for the epoch; its negative is the loss.

    A setup for train_forked(), with the small model.
    """

    def __init__(self, accuracies):
        self.accuracies = accuracies

    def __call__(self, module, rank):
        use_small_model(module)
        steps = []
        states = []  # the weights at each evaluation

        def evaluate(args, model, *_):
            states.append({name: value.clone() for name, value in model.state_dict().items()})
            accuracy = self.accuracies[steps[-1] // 6]
            return {"loss": -accuracy, "accuracy": accuracy}

        watch(module, "learning_rate", lambda args, step, total_steps: steps.append(step))
        module.evaluate = evaluate
        return states


@one_and_two
@both_scripts
@pytest.mark.parametrize("by", ['test["accuracy"]', '-test["loss"]'])
def test_the_best_weights_are_those_of_the_best_epoch(script, nproc, by):
    """By the accuracy and, as the comment says, by the loss. All are worse than 0.

    Rank 0 takes its time to write the file.
    """
    def setup(module, rank):
        replace = os.replace
        os.replace = lambda *paths: (time.sleep(0.3), replace(*paths))
        return Scores(accuracies)(module, rank)

    accuracies, best_epoch = [-0.5, -0.1, -0.3], 1
    flags = copy_with(script, "best weights", "last test", change=lambda code: code.replace(
        'score = test["accuracy"]', f"score = {by}"))
    flags = (*FLAGS, 3, "--global-batch", 16, "--checkpoint", "my.pt", *flags)
    end = train_to_end("my.py", *flags, nproc=nproc, setup=setup)
    best = load_checkpoint("my.pt.best")
    assert_equal(dict(best["model"]), end.results[0][best_epoch], "my.pt.best")
    assert "fake_data" in best["settings"], "my.pt.best has no settings to build its model by"
    for rank, states in enumerate(end.results):
        assert_equal(states[3], states[best_epoch], f"rank {rank} in the last test: its model")


@both_scripts
def test_an_early_stop_comes_after_five_epochs_that_are_not_better(script):
    accuracies = [0.5, 0.9, 0.7, 0.8, 0.9, 0.6, 0.9, 1.0, 1.0]  # the second epoch is the best
    flags = copy_with(script, "best weights", "early stop")
    text = train_to_end("my.py", *FLAGS, 9, *flags, "--checkpoint", "my.pt", nproc=2,
                        setup=Scores(accuracies)).text
    epochs = len(re.findall("test loss", text))
    assert epochs == 7, f"after five epochs that are not better, it must stop, not in {epochs}"


@one_and_two
@both_scripts
def test_f1_and_scores_are_those_of_the_test_images_of_all_ranks(script, nproc):
    """Of images of three classes: a model with ten outputs may choose others, too."""
    def setup(module, rank):
        fake_images = module.fake_images
        module.fake_images = lambda *arguments: [
            (images, labels % 3) for images, labels in fake_images(*arguments)]
        return record_small_model(module, rank)

    log = BEFORE_LAST_LINE, 'log(f"scores {scores[labels == 1, 1].mean():.4f}")'
    flags = copy_with(script, "scores", "F1", more=[log])
    ranks, _, text = train_to_end("my.py", *FLAGS, 2, *flags, nproc=nproc, setup=setup)
    for evaluations, f1, score in zip(zip(*(recorder.evaluations for recorder in ranks)),
                                      re.findall(r"test loss .*F1 ([\d.]+)", text),
                                      re.findall(r"^scores ([\d.]+)$", text, re.MULTILINE),
                                      strict=True):
        parts = sum(evaluations, [])
        outputs = torch.cat([part.outputs for part in parts])
        labels = torch.cat([part.batch[-1] for part in parts])
        found = outputs.argmax(1)
        scores = [(2 * ((found == name) & (labels == name)).sum()
                   / ((found == name).sum() + (labels == name).sum())).item()
                  for name in torch.cat([found, labels]).unique()]
        expected = sum(scores) / len(scores)
        assert float(f1) == pytest.approx(expected, abs=1e-4), f"F1 is {expected}:\n{text}"
        expected = outputs.softmax(1)[labels == 1, 1].mean().item()
        assert float(score) == pytest.approx(expected, abs=1e-4), (
            f"the mean score of class 1 of its images is {expected}:\n{text}")


@both_scripts
def test_predictions_are_in_the_order_of_the_test_set(script):
    """Of the same weights on one, two and three processes."""
    flags = (*FLAGS, 4, *copy_with(script, "scores", "predictions"), "--global-batch", 24, "--lr",
             0.05, "--checkpoint", "run.pt")
    labels = load_script(script).fake_images(96, (3, 32, 32), 0)[1][1]
    for nproc in (1, 2, 3):
        text = train_to_end("my.py", *flags, nproc=nproc, setup=use_small_model).text
        lines = [line.split(",") for line in Path("run.pt.csv").read_text().splitlines()]
        assert [int(index) for index, _ in lines] == list(range(len(labels))), "other indices"
        right = torch.tensor([int(label) for _, label in lines]) == labels
        expected = float(re.findall(TEST_LINE, text)[-1][1])
        assert right.double().mean().item() == pytest.approx(expected, abs=1e-4), (
            f"by the file's order, other predictions are right on {nproc} processes\n{text}")


# ---- cifar10_ddp/README.md ----
def test_all_damaged_images_are_printed():
    write_images(Path("DIR"), train=4, val=4)
    damaged = ["DIR/train/cat/0.png", "DIR/train/dog/1.jpg", "DIR/val/dog/1.jpg"]
    for path in damaged:
        Path(path).write_bytes(Path(path).read_bytes()[:200])
    ((_, code),) = edits(CIFAR10, "damaged images")
    text = run_lines(code)
    found = sorted(re.findall(r"cannot read the image (DIR/\S+): ", text))
    assert found == damaged, f"damaged are {damaged}, but the page's code prints\n{text}"


def test_an_own_data_set_trains_as_the_folder_of_its_images(tmp_path):
    write_images(Path("DIR"), train=12, val=6)
    for folder, file in (("DIR/train", "train.csv"), ("DIR/val", "test.csv")):
        paths = sorted(Path(folder).glob("*/*"))
        Path(file).write_text("".join(f"{path},{path.parent.name}\n" for path in paths))
    flags = ("--model", "shufflenet_v2_x0_5", "--image-size", 48, "--batch-size", 4, "--epochs", 1,
             "--workers", 0, "--checkpoint")
    folder = ("--image-folder", "DIR")
    expected = train_to_end("cifar10_ddp", *folder, *flags, tmp_path / "folder", nproc=2).text
    copy_with("cifar10_ddp", "own data set")
    text = train_to_end("my.py", *flags, tmp_path / "own", nproc=2).text
    assert re.findall(TEST_LINE, text) == re.findall(TEST_LINE, expected), (
        f"tested on the same images, other results:\n{text}\n{expected}")
    own, expected = (load_checkpoint(tmp_path / name)["model"] for name in ("own", "folder"))
    assert_equal(dict(own), dict(expected), "model")
    assert_check_passes(*TINY)


def test_shards_have_the_samples_that_were_written():
    """Files of 40 samples: 96 to train on, 24 to test on."""
    ((_, code),) = edits(CIFAR10, "write shards")
    Path("shards").mkdir()
    sets = load_script("cifar10_ddp").fake_images(96, (3, 32, 32), 0)
    for (images, labels), name in zip(sets, ("train", "test")):
        shard_code = code.replace("10000", "40").replace("train", name)
        exec(shard_code, {"images": images, "labels": labels, "torch": torch})
    sizes = [path.stat().st_size for path in sorted(Path("shards").glob("train-*"))]
    assert len(sizes) == 3 and sizes[2] < 0.6 * sizes[0], (
        f"files of 40, 40 and 16 samples must hold these alone, but have {sizes} bytes")

    make_copy("cifar10_ddp", "my.py", ("", "import glob"), *edits(CIFAR10, "shards"))
    found = load_script("my.py").load_data(None)
    for data, (images, labels) in zip(found, sets, strict=True):
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            assert_equal(list(data[number]), [image, label], f"sample {number} of the shards")
        assert len(data) == len(images), f"the shards have {len(data)} of {len(images)} samples"
    assert_check_passes(*TINY)


MEANS = """
from pathlib import Path
results = []
for label, name in enumerate(args.classes):
    for path in Path("DIR/val", name).iterdir():
        image = transforms(args, train_set=False)(read_image(path, args.image_size))
        logits = model(normalize(image.unsqueeze(0)))[0]
        results.append([-logits.log_softmax(0)[label], logits.argmax() == label])
print(*torch.tensor(results).mean(0).tolist())
"""


def test_the_weights_classify_as_in_the_run(tmp_path):
    """With another model and another image size than those by default."""
    write_images(tmp_path / "DIR", train=24, val=11)
    flags = ("--image-folder", "DIR", "--model", "shufflenet_v2_x0_5", "--image-size", 48,
             "--lr", 2, "--batch-size", 4, "--epochs", 4, "--workers", 0,
             "--checkpoint", "images.pt")
    text = train_to_end("cifar10_ddp", *flags, nproc=2).text
    assert " 24 images in 2 classes " in text, f"it must train on DIR/train\n{text}"
    expected = re.findall(r"test loss ([\d.]+)  accuracy ([\d.]+)", text)[-1]
    shutil.copy("DIR/val/dog/1.jpg", "image.jpg")
    ((_, code),) = edits(CIFAR10, "use the weights of images")
    name, *means = run_lines(code + MEANS).split()
    assert name in ("cat", "dog"), f"the page's code prints the class of the image, not {name}"
    assert list(map(float, means)) == pytest.approx(list(map(float, expected)), abs=2e-4), (
        f"by the page's code, loss and accuracy of DIR/val are {means}, but in the run:\n{text}")

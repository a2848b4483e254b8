"""tests/check_copy.py notices what an edit breaks, and finds nothing wrong in a right copy."""

import contextlib
import hashlib
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import check_copy
import pytest
import scratch
from check_cases import (EVALUATED, EVALUATION, FLAGS, GAN, HELPER, LOSS_CALL, NO_GUARD, RESUMED,
                         SAVED, SCENES, SMALL, VAE, above, in_loss, model)
from copies import make_copy
from scripts import ROOT

slow = pytest.mark.slow
AS_IS = {"cpu_ddp": ([], "2 not checked, 6 ok"), "synthetic_ddp": (["--bf16"], "8 ok"),
         "cifar10_ddp": (FLAGS["cifar10_ddp"], "8 ok")}


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """The interpreters of the check. They import PyTorch once for all tests."""
    with scratch.Servers(tmp_path_factory.mktemp("servers")) as servers:
        yield servers


@pytest.fixture
def check(servers, tmp_path, monkeypatch):
    """Return a function that returns the status and the text of the check. Go to a new folder."""
    def check(*flags):
        monkeypatch.setattr(sys, "argv", ["check_copy.py", "my.py", *flags])
        with contextlib.redirect_stdout(io.StringIO()) as text, \
                tempfile.TemporaryDirectory() as folder:
            status = check_copy.compare(servers, os.path.realpath(folder),
                                        os.path.realpath("my.py"), [*flags])
        return status, text.getvalue()

    monkeypatch.setattr(check_copy, "WAIT", 12)
    monkeypatch.chdir(tmp_path)
    return check


def start_command(*arguments, **variables):
    env = {name: os.environ[name] for name in ("HOME", "PATH", "LANG") if name in os.environ}
    return subprocess.Popen([sys.executable, ROOT / "tests/check_copy.py", *arguments],
                            env={**env, **variables}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def command(*arguments, **variables):
    """Return the exit status and the text of the command, as a user types it."""
    process = start_command(*arguments, **variables)
    text = process.communicate(timeout=300)[0]
    return process.returncode, text


@pytest.mark.parametrize("script", [
    "cpu_ddp", *(pytest.param(script, marks=slow) for script in AS_IS if script != "cpu_ddp")])
def test_a_script_as_it_is_passes(script, tmp_path, tmp_path_factory, monkeypatch):
    flags, last_line = AS_IS[script]
    monkeypatch.chdir(tmp_path)
    make_copy(script, "my.py")
    # As in a pod or a notebook: variables of another job. A path that is too long for sockets
    status, text = command("my.py", *flags, RANK="3", WORLD_SIZE="8", MASTER_ADDR="nowhere",
                           SLURM_JOB_ID="1", PYTHONHASHSEED="0",
                           TMPDIR=str(tmp_path_factory.mktemp("long" * 20)))
    assert status == 0 and text.endswith(f"\n{last_line}\n"), (
        f"{script} as it is does not pass its check, or not by {last_line}: {status}\n{text}")
    assert os.listdir() == ["my.py"], f"the check has written {os.listdir()}"


# ---- Edits that are wrong ----
DATA = "all processes, and all starts, load the same data"
LEAK = "no validation sample is a training sample"
RANKS = "all processes have the same weights at the end"
MEAN = "the loss is a mean over the samples"
STEPS = "one and two processes make the same steps: samples, rates and gradients"
EVALUATIONS = "the same weights have the same validation results on one and two processes"
RESUMES = "a stopped and resumed run ends with the same numbers"

SUMS = 'instead of "return sums.results("val_")"'
# Script, edits, and the line of each promise that is broken
WRONG = {
    "a lost weight, and four more": ("fashionmnist_ddp", [
        above(SMALL), above("""
def load_data(args):
    (images, labels), _ = fake_images(args.fake_data, (1, 28, 28), args.seed)
    return (images, labels), (images[:128], labels[:128])
"""), ('instead of "weight = len(batch[0])"', "weight = 1"),
        (RESUMED, 'progress["of_rank"] = rank'),
        (SUMS, """return {"val_accuracy": float(sums.counts / sums.samples)}"""),
        ('instead of "if rank == 0 and args.checkpoint:"', """
        if rank == 0 and args.checkpoint and epoch == args.epochs - 1:
            states = {name: item.state_dict() for name, item in saved.items()}
            save({**states, "progress": progress, "run": run}, args.checkpoint)""")], [
        f"{LEAK}: 128 of 128 different", f"{RANKS}.*of_rank", f"{STEPS}: these gradients",
        EVALUATIONS, f"{RESUMES}: .*has saved nothing"]),
    "a sum, a barrier of rank 0, and a mode that is not restored": ("fashionmnist_ddp", [
        above(SMALL), in_loss("""
loss = loss + F.dropout(logits, training=model.training).mean()
loss = loss * len(labels)"""),
        (EVALUATED, "model.eval()\nif rank == 0:\n    dist.barrier()"),
        ('instead of "    ddp_model.train()"', "pass")], [
        f"{MEAN}: in evaluation, the loss of 10 samples",
        # The rank that ends first closes the connection of the other
        r"two processes train to the end: (.*\n)+ +rank 0 (waits|ends with an error) in\n"
        r" +line \d+, train\(\): dist.barrier(.*\n)+ +rank 1 (waits|ends with an error) in\n"
        r" +line \d+, ",
        f"{RESUMES}: these differ: losses of step 1"]),
    "no sampler, no eval(), and a resume that begins anew": ("synthetic_ddp", [
        ('instead of "return (DataLoader(train_set, sampler"', """
        return (DataLoader(train_set, shuffle=True, drop_last=True, **options),
                DataLoader(val_share, **options))"""),
        ('instead of "train_loader.sampler.set_epoch("', "pass"),
        ('instead of "    model.eval()"', "pass"),
        above("""
def build_model(args):
    return nn.Sequential(nn.Linear(10, 8), nn.Dropout(), nn.Linear(8, 3))
"""), ('instead of "    resume(checkpoint, run, saved, progress)"', "pass")], [
        f"{STEPS}: one process makes 6 steps", f"{EVALUATIONS}: dropout is active",
        f"{RESUMES}: the resumed run makes all 6 steps"]),
    "an order of a set of strings": ("synthetic_ddp", [above("""
def load_data(args):
    names = list({f"name {number}" for number in range(200)})
    inputs = torch.tensor([[float(hash(name) % 7)] * 10 for name in names])
    data = TensorDataset(inputs, torch.arange(200) % 3)
    return Subset(data, range(150)), Subset(data, range(150, 200))
""")], [DATA]),
    "model.module, and a stop that is forgotten": ("cifar10_ddp", [
        above(SMALL.replace("= model(images)", "= getattr(model, 'module', model)(images)")),
        NO_GUARD, ('instead of "if stop and step + 1 < steps:"', "pass")], [
        RANKS, f"{STEPS}: these gradients", f"{RESUMES}: SIGTERM does not stop"]),
}


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=() if kind.startswith("a lost") else slow) for kind in WRONG])
def test_what_a_wrong_edit_breaks_is_a_fail(check, kind):
    script, edits, promises = WRONG[kind]
    make_copy(script, "my.py", *edits)
    status, text = check(*FLAGS.get(script, []))
    missing = [promise for promise in promises if not re.search(f"^FAIL  {promise}", text, re.M)]
    assert status == 1 and not missing, (
        f"{kind}, in {script}: status {status}, and no FAIL for {missing}:\n{text}")


# Of what the script itself refuses: script, edit, and how its error begins
REFUSALS = {
    "images that load_data() has scaled": ("cifar10_ddp", """
def load_data(args):
    args.classes = list("0123456789")
    sets = fake_images(args.fake_data, (3, 32, 32), args.seed)
    return [TensorDataset(images / 255, labels) for images, labels in sets]
""", r"SystemExit: error: images are torch.float32, not uint8"),
    "a schedule of numpy": ("synthetic_ddp", """
import numpy


def build_optimizer(args, model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, numpy.cos)
""", r".*UnpicklingError: Weights only load failed.*\n +WeightsUnpickler error: .*numpy"),
}


@slow
@pytest.mark.parametrize("kind", REFUSALS)
def test_an_error_of_the_script_is_shown(check, kind):
    script, code, error = REFUSALS[kind]
    make_copy(script, "my.py", above(code))
    status, text = check(*FLAGS.get(script, []))
    assert status == 2 and re.search(f"^ +{error}", text, re.M), (
        f"{kind}: the error of the script is not shown, or not refused: {status}\n{text}")


# ---- The user's files, by the command ----
WRITES = """
import pathlib
import shutil
import torchvision
if rank == 0:
    open("log.csv", "w").write("epoch,loss")
    open("all.log", "a").write("epoch")
    torch.save(model.state_dict(), "last.pt")
    torch.save(model.state_dict(), "large.pt")
    shutil.copyfile("last.pt", "best.pt")
    os.makedirs("checkpoints", exist_ok=True)
    torch.save(model.state_dict(), "checkpoints/new.pt")
    os.replace("checkpoints/new.pt", "checkpoints/last.pt")
    if os.path.exists("old.pt"):
        os.remove("old.pt")
    shutil.rmtree("runs/2", ignore_errors=True)
    (pathlib.Path(__file__).resolve().parent / "beside.txt").write_text("epoch")
    (pathlib.Path("..") / "above.txt").write_text("epoch")
    torchvision.io.write_png(torch.zeros(3, 8, 8, dtype=torch.uint8), "images/0.png")
    os.system("echo >>all.log")
    os.system("cp last.pt cp.pt; rm -rf runs/*")
    os.system("echo epoch >>large.log")
dist.barrier()
model.load_state_dict(torch.load("best.pt"))
"""
FILES = ("folder/log.csv", "folder/all.log", "folder/last.pt", "folder/best.pt", "folder/old.pt",
         "folder/checkpoints/last.pt", "folder/runs/1/log.csv", "folder/runs/2/log.csv",
         "folder/images/0.png", "folder/beside.txt", "folder/cp.pt", "above.txt")


@pytest.fixture
def digests(tmp_path, monkeypatch):
    """Return a function that returns digests of all files. The current folder is folder/."""
    for name in FILES:
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        (tmp_path / name).write_text(f"my {name}")
    for name in ("large.log", "large.pt"):
        (tmp_path / "folder" / name).write_bytes(2_000_000 * b"x")
    monkeypatch.chdir(tmp_path / "folder")
    return lambda: {str(path.relative_to(tmp_path)): hashlib.sha256(path.read_bytes()).hexdigest()
                    for path in tmp_path.rglob("*") if path.is_file()}


def test_a_mirror_has_real_folders_copies_of_small_files_and_links(tmp_path):
    user = tmp_path / "user"
    for folder in ("runs/5", ".git"):
        (user / folder).mkdir(parents=True)
    (user / "small").write_text("small")
    (user / "runs/log").write_text("log")
    (user / "large").write_bytes((scratch.SMALL + 1) * b"x")
    (user / "runs/5/log").write_text("log 5")
    (user / "runs/loop").symlink_to(user)
    (user / "latest").symlink_to("runs/5")
    mirror = scratch.Mirror(str(tmp_path / "mirror"))
    mirror.add(str(user))
    scratch.clone(str(tmp_path / "mirror"), str(tmp_path / "clone"))
    for root in ("mirror", "clone"):
        place = tmp_path / root / str(user)[1:]
        links = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_symlink()}
        assert links == {"large", ".git", "runs/loop", "runs/5"}, f"other links, in {root}: {links}"
        (place / "runs/5/log").write_text(root)
        for name in ("latest/log", "runs/loop/runs/5/log"):
            assert (place / name).read_text() == root, f"{name} in {root} is another file"
    assert (user / "runs/5/log").read_text() == "log 5", "a file of the user has changed"
    assert mirror.copied == 3 and not mirror.changed(), f"{mirror.copied} copies, not 3"


@slow
def test_no_file_of_the_user_changes_but_a_large_one_by_a_program_which_is_said(digests):
    make_copy("fashionmnist_ddp", "my.py", (EVALUATED, WRITES))
    before = digests()
    status, text = command("my.py", "--fake-data")
    after = digests()
    changed = [name for name in before if after.get(name) != before[name]]
    assert changed == ["folder/large.log"] and after.keys() == before.keys(), (
        f"the check changes {changed}, or writes {after.keys() - before.keys()}:\n{text}")
    assert status == 0 and text.endswith("\n8 ok, 1 noted\n"), (
        f"a script that is unedited but for files that it writes: {status}\n{text}")
    assert "links to 2 (large.log, large.pt)" in text, f"what is linked is not named:\n{text}"
    assert re.search(r"note  these linked files have changed during the check.*/large.log", text), (
        f"a linked file has changed without a note: {status}\n{text}")


REFUSED = """
refused = []
for write in (lambda: open("large.log", "a"), lambda: torch.save({}, f"{HERE}/best.pt"),
              lambda: os.remove(f"{HERE}/old.pt"),
              lambda: open(os.path.expanduser("~/new"), "w")):
    try:
        write()
    except PermissionError as error:
        refused.append(os.path.basename(error.filename))
open("large.pt", "a") if len(refused) == 4 else sys.exit(f"only {refused} are refused")
"""


def test_what_python_would_change_elsewhere_is_refused_and_named_at_once(digests):
    """Also beside loader processes, with which an error in the loss has once hung."""
    make_copy("cifar10_ddp", "my.py", above(f"HERE = {os.getcwd()!r}"), above(SMALL),
              in_loss(REFUSED))
    before = digests()
    status, text = command("my.py", "--fake-data", HOME=os.getcwd())
    assert digests() == before, f"the check changes the user's files:\n{text}"
    said = (r"loss_and_counts\(\): open\(.large.pt., .a.\).*\n +PermissionError: "
            rf".*refuses to change .*{re.escape(os.getcwd())}/large.pt")
    assert status == 2 and re.search(said, text), (
        f"a write is not refused, or not named: {status}\n{text}")


# ---- The command ----
@slow
def test_a_stopped_check_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_copy("cifar10_ddp", "my.py", above(SMALL),
               in_loss("open('started', 'w').close()\ntime.sleep(300)"))
    with tempfile.TemporaryDirectory(suffix="[1]") as temporary:
        process = start_command("my.py", "--fake-data", TMPDIR=temporary)
        deadline = time.monotonic() + 60
        while not list(pathlib.Path(temporary).rglob("started")) and time.monotonic() < deadline:
            time.sleep(0.1)
        late = time.monotonic() >= deadline
        process.send_signal(signal.SIGHUP)
        text = process.communicate(timeout=60)[0]
        left = os.listdir(temporary)
    processes = subprocess.run(["ps", "-eo", "pgid,args"], capture_output=True, text=True).stdout
    assert not late, f"the copy has not begun to train in 60 s:\n{text}"
    assert process.returncode == 2 and "interrupted" in text, f"{process.returncode}:\n{text}"
    assert os.listdir() == ["my.py"], f"a stopped check leaves {os.listdir()}"
    assert not left, f"a stopped check leaves {left}"
    assert str(tmp_path) not in processes, f"a stopped check leaves processes:\n{processes}"


def test_what_is_no_copy_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argument, text, expected, reason in (
            ("mine.py", "", 2, "----  not checked: mine.py: there is no such file\n.*\n"),
            ("my.py", "def main():\n    pass", 2, "----  not checked: my.py: .*no copy.*\n.*\n"),
            ("--help", "", 0, re.escape(check_copy.__doc__) + "\n")):
        with open("my.py", "w") as file:
            file.write(text)
        status, said = command(argument)
        assert status == expected and re.fullmatch(reason, said), (
            f"{argument} with {text!r}: {status}\n{said}")


# ---- Edits that are right ----
RIGHT = {
    "detection, with lists, dictionaries and a file": (
        "cifar10_ddp", above(SCENES),
        ('instead of "return [tensor.to(self.device, non_blocking=True)"', "return batch")),
    "a GAN that is evaluated after ten epochs (not compared)": (
        "fashionmnist_ddp", above(GAN), (SAVED, """
        maker = Maker()
        maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-4)
        saved.update(maker=maker, maker_optimizer=maker_optimizer)"""),
        ('after "ddp_model = DDP(model"', """
        args.maker = DDP(maker) if world_size > 1 else maker
        args.maker_optimizer = maker_optimizer"""),
        (EVALUATION, """
        val_results = {}
        if epoch % 10 == 9:
            val_results = evaluate(args, model, own_batches(args, val_set))""")),
    "frozen layers, BatchNorm, dropout, and an average that is evaluated": (
        "cifar10_ddp", above(SMALL), model("""
model.requires_grad_(False)
model = nn.Sequential(model, nn.BatchNorm1d(10).eval(), nn.Linear(10, 10), nn.BatchNorm1d(10),
                      nn.Dropout(), nn.Linear(10, 10))"""), in_loss("""
loss = loss + model(images).square().mean()"""), (SAVED, """
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        saved["average"] = average"""),
        ('after "            train_step("', "average.update_parameters(model)"),
        (EVALUATION, "val_results = evaluate(args, average.module, OnDevice(val_loader, device))")),
    "four tensors of a small table, with dropout, all in one order (2 notes)": (
        "fashionmnist_ddp", above("""
def build_model(args):
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def load_data(args):
    inputs = torch.arange(15)[:, None] // torch.tensor([1, 2, 4]) % 2
    labels = (inputs.sum(1) > 1).long()
    return inputs[:11].float(), labels[:11], inputs[11:].float(), labels[11:]


def scale(inputs, labels):
    return inputs, labels


def augment(args, inputs, labels):
    return inputs + 0.1 * torch.randn(inputs.shape), labels


def loss_and_counts(args, model, inputs, labels, progress=1.0):
    logits = model(inputs)
    loss = F.cross_entropy(logits, labels, label_smoothing=0.1 * progress)
    return loss, (logits.argmax(1) == labels).sum()
"""), (LOSS_CALL, "loss, counts = loss_and_counts(args, ddp_model, *batch, progress=0.5)"),
        ('instead of "train_set, val_set = load_data(args)"', """
        x, y, *val_set = load_data(args)
        train_set = x, y"""),
        ('instead of "shuffle = torch.Generator().manual_seed("',
         "shuffle = torch.Generator().manual_seed(0)")),
    "a VAE of noisy samples (1 note)": ("synthetic_ddp", above(VAE)),
    "MixUp of all parts of a batch in a loader process (not compared)": ("synthetic_ddp", above("""
def mix_up(samples):
    share = torch.rand(())
    inputs, labels = torch.utils.data.default_collate(samples)
    both = inputs, F.one_hot(labels, 3).float()
    return [share * part + (1 - share) * part.roll(1, 0) for part in both]


def loss_and_counts(args, model, inputs, labels):
    logits = model(inputs)
    return F.cross_entropy(logits, labels), logits.sum()
"""), ('instead of "return (DataLoader(train_set, sampler"', """
        val_loader = DataLoader(val_share, **options)
        options["collate_fn"] = mix_up
        return DataLoader(train_set, sampler=sampler, drop_last=True, **options), val_loader""")),
    # What the check has once misjudged
    "random_split, map(), keywords, no default of --lr, a seed by time, a lock, and files": (
        "synthetic_ddp", above("""
import fcntl
import helper


def load_data(args):
    items = [(row, int(row[0] > 0)) for row in torch.randn(500, 10)]
    some = helper.Mapped(items[:60], lambda *item: item)
    return torch.utils.data.random_split(some, [40, 20])[0], helper.Mapped(items[60:])
"""), ('instead of "parser.add_argument("--lr""', 'parser.add_argument("--lr", type=float)'),
        ('instead of "parser.add_argument("--seed""', """
        parser.add_argument("--seed", type=int, default=int(time.time() * 100) % 10000)"""),
        ('instead of "optimizer = torch.optim.Adam("',
         "optimizer = torch.optim.Adam(model.parameters(), lr=args.lr or 0.01)"),
        ('before "train_set, val_set = load_data(args)"', "args.lr = args.lr or 0.01"),
        ('after "train_set, val_set = load_data(args)"', """
        val_set = val_set.map(lambda inputs, label: (2 * inputs, label))
        torch.set_num_interop_threads(1)
        with open("data.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)"""),
        (LOSS_CALL, "loss, counts = loss_and_counts(args, model=ddp_model, inputs=batch[0], "
                    "labels=batch[1])"),
        (EVALUATION, "val_results = evaluate(args, model=ddp_model, "
                     "batches=OnDevice(val_loader, device))\nhelper.write('epoch')"),
        (EVALUATED, "on_training = evaluate(args, model, OnDevice(train_loader, device))")),
}


NOTES = r"\d+ of \d+ different|both epochs have the same order|the evaluation draws random numbers"


@slow
@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_edit_is_no_false_alarm(check, kind):
    script, *edits = RIGHT[kind]
    make_copy(script, "my.py", *edits)
    for name, text in (("rows", bytes(range(100))), ("helper.py", HELPER.encode())):
        with open(name, "wb") as file:
            file.write(text)
    status, text = check(*FLAGS.get(script, []))
    is_compared = not kind.endswith("(not compared)")
    assert status == (0 if is_compared else 3), f"{kind}: nothing is wrong, but {status}:\n{text}"
    first = re.search(r"^(ok|FAIL|note|----|\?\?\?\?)  ", text, re.M)[1]
    assert is_compared or first == "????", f"{kind}: said first is another than this:\n{text}"
    notes = re.findall(f"\nnote  ({NOTES})?", text)
    expected = re.search(r"\((\d) note|$", kind)[1] or 0
    assert len(notes) == int(expected) and all(notes), (
        f"{kind}, and other notes than {NOTES}:\n{text}")

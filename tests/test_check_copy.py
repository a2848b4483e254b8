"""tests/check_copy.py notices what an edit breaks, and finds nothing wrong in a right copy."""

import contextlib
import functools
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import check_copy
import pytest
import torch
import torch._dynamo  # noqa: F401  once: each process would import it with its first optimizer
from copies import make_copy
from scripts import ROOT

FLAGS = {"cifar10_ddp": ["--fake-data", "--model", "shufflenet_v2_x0_5", "--image-size", "32"],
         "fashionmnist_ddp": ["--fake-data"]}
LAST_LINES = {"cpu_ddp": "8 ok, 2 not checked", "synthetic_ddp": "10 ok",
              "fashionmnist_ddp": "11 ok", "cifar10_ddp": "11 ok"}


class Forked:
    """A process of check_copy. It is forked, in place of an interpreter that imports torch."""

    def __init__(self, env):
        reading, self.stdin = multiprocessing.Pipe(duplex=False)
        self.stdin.write = self.stdin.send_bytes
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=self.work, args=(env, reading))
        self.process.start()
        self.kill = self.process.kill
        self.pid = self.process.pid

    def wait(self):
        self.process.join()
        return self.process.exitcode

    @staticmethod
    def work(env, reading):
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(1)
        torch.seed()  # another state in each process, as in a new interpreter
        sys.modules["numpy"].random.seed()
        if env["WORLD_SIZE"] == "1":
            sleep = time.sleep  # a single process waits for no other at its end
            time.sleep = lambda seconds: seconds == 0.5 or sleep(seconds)
        check_copy.process(*json.loads(reading.recv_bytes()))


def check(copy, *flags):
    """Return the exit status and the text of check_copy.py."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setattr(check_copy, "start", Forked)
        patch.setattr(check_copy, "WAIT", 12)
        patch.setattr(sys, "argv", ["check_copy.py", str(copy), *flags])
        check_copy.said.clear()
        check_copy.notes.clear()
        status = check_copy.main()
    return status, text.getvalue()


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("script", LAST_LINES)
def test_a_script_as_it_is_passes(script):
    make_copy(script, "my.py")
    status, text = check("my.py", *FLAGS.get(script, []))
    assert status == 0, f"{script} as it is does not pass its check:\n{text}"
    assert text.endswith(f"\n{LAST_LINES[script]}\n"), (
        f"{script} as it is: not {LAST_LINES[script]}:\n{text}")
    assert os.listdir() == ["my.py"], f"the check has written {os.listdir()}"


# ---- Edits that are wrong ----
SMALL = """
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def features(self, images):
        images = F.adaptive_avg_pool2d(images.float().mean(1, keepdim=True) / 255, 4)
        return self.body(images.flatten(1)).tanh()

    def forward(self, images):
        return self.head(self.features(images))


def build_model(args, *classes):
    return Small()


def build_optimizer(args, model, *global_batch):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def loss_and_counts(args, model, images, labels):
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    counts = (logits.argmax(1) == labels).sum()
    return loss, counts
"""


def above(code):
    return "", code


def in_loss(code, above=""):
    """Return the edit that computes something more before the small model's loss is returned."""
    function = SMALL[SMALL.index("def loss_and_counts"):]
    code = "".join(f"    {line}\n" for line in code.splitlines())
    return "", above + function.replace("    return loss", code + "    return loss")


def model(code):
    """Return the edit that changes the small model after it is built."""
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    return "", f"import numpy\n\n\ndef build_model(args, *classes):\n    model = Small()\n{lines}" \
               "    return model\n"


LEAK = "no test sample is a training sample"
DATA = "all processes, and all starts, load the same data"
ENDS = "two processes train to the end"
MEAN = "the loss is a mean over the samples, and the counts are sums"
STEPS = "one and two processes train on the same samples, at the same rates"
GRADIENTS = "the first gradients are the same on one and two processes"
SAME = "what is saved is the same on all processes"
RANKS = "all processes have the same weights at the end"
WEIGHTS = "the same weights give the same result when they are tested again"
TESTS = "the same weights are tested alike on one and two processes"
STOPS = "SIGTERM stops a run, which saves"
RESUMES = "a stopped and resumed run ends with the same numbers"

# The script's own comparison of the ranks' weights comes first
NO_GUARD = ('instead of "                check_weights(saved)"', "pass")
RESULTS = 'instead of "return results_of(loss_sum, counts, samples)"'
TEST = 'instead of "test = evaluate("'
STEP = 'after "            optimizer.step()"'
SAVED = 'before "step = restore("'
DRAWN = """
def samples(seed, count=400):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (count, 3, 28, 28), generator=generator, dtype=torch.uint8)
    return images, images[:, 0, 0, 0].long() % 10


def named(*sets):
    sets = [TensorDataset(*tensors) for tensors in sets]
    for data in sets:
        data.classes = list("0123456789")
    return sets
"""
SPLIT = DRAWN + """
def load_data(args):
    images, labels = samples(0)
    order = torch.from_numpy(numpy.random.permutation(400))
    return named(*((images[part], labels[part]) for part in (order[:300], order[300:])))
"""
CRITIC = [(SAVED, """
critic = nn.Linear(784, 1)
critic_optimizer = torch.optim.SGD(critic.parameters(), 0.1)"""), (STEP, """
critic_optimizer.zero_grad()
critic(x[indices].flatten(1) / 255).square().mean().backward()
critic_optimizer.step()""")]
WRONG = {  # of copies with the small model
    "fashionmnist_ddp": {
        "a factor in evaluation":
            (MEAN, in_loss("if not model.training:\n    loss = loss / len(labels)")),
        "a metric that is a mean": (MEAN, in_loss("counts = logits.softmax(1).mean()")),
        "model.module": (GRADIENTS, NO_GUARD, ("", SMALL.replace(
            "= model(images)", "= getattr(model, 'module', model)(images)"))),
        "weights of no model": (RESUMES, in_loss("loss = loss * SCALE", """
SCALE = nn.Parameter(torch.ones(()))
"""), above("""
def build_optimizer(args, model):
    return torch.optim.Adam([*model.parameters(), SCALE], lr=3e-3)
""")),
        "a second model without DDP": (f"{ENDS}: they end with an error:", *CRITIC, (SAVED, """
            saved.update(critic=critic, critic_optimizer=critic_optimizer)""")),
        "a second model in nothing": (RANKS, *CRITIC),
        "an average that is put into saved too late": (RESUMES, (STEP, """
            average.update_parameters(model)"""), ('after "step = restore("', """
            saved["average"] = average = torch.optim.swa_utils.AveragedModel(model)""")),
        "a counter":
            (RESUMES, in_loss("COUNT.append(1)\nloss = loss / len(COUNT)", "COUNT = []\n")),
        "BatchNorm trained in an evaluation": (
            WEIGHTS, model("model = nn.Sequential(model, nn.BatchNorm1d(10))"),
            ('instead of "model.eval()"', "pass")),
        "a random evaluation": (WEIGHTS, in_loss("if not model.training:\n"
                                                 "    loss = loss * torch.rand(())")),
        "a rank that leaves the loop":
            (ENDS, ('after "step += 1"', "if rank == 1 and step == 2:\n    break")),
        "a weight decay by the number of processes": (STEPS, above("""
def build_optimizer(args, model, *global_batch):
    return torch.optim.AdamW(model.parameters(), weight_decay=0.01 * dist.get_world_size())
""")),
        "a metric of the share of a rank": (TESTS, (RESULTS, """
            return {**results_of(loss_sum, counts, samples), **metrics(counts, samples)}""")),
        "a second loss without its factor": (GRADIENTS, *CRITIC[:1], (SAVED, """
            ddp_critic = DDP(critic) if world_size > 1 else critic
            saved.update(critic=critic, critic_optimizer=critic_optimizer)"""),
            ('after "samples += len(indices)"',
             "ddp_critic(x[indices].flatten(1) / 255).square().mean().backward()"),
            (STEP, "critic_optimizer.step()\ncritic_optimizer.zero_grad()")),
        "no stop": (STOPS, ('instead of "if stop and step < total_steps:"', "pass"),
                    ('instead of "if rank == 0 and args.checkpoint and (stop or due):"', "pass")),
    },
    "cifar10_ddp": {
        "numpy's split": (DATA, above("import numpy\n" + SPLIT)),
    },
}


@pytest.mark.parametrize("script, kind", [(script, kind) for script in WRONG
                                          for kind in WRONG[script]])
def test_a_wrong_edit_is_noticed(script, kind):
    promise, *edits = WRONG[script][kind]
    small = [above(SMALL)] if script in FLAGS else []
    make_copy(script, "my.py", *small, *edits)
    status, text = check("my.py", *FLAGS.get(script, []))
    assert status == 1 and f"FAIL  {promise}" in text, (
        f"{script} with {kind}: not FAIL, status 1, for {promise!r}, but status {status}:\n{text}")


NOTED = [  # of one copy
    ("20 samples are tested on two processes", ('instead of "test_loader = build_loader("', """
        test_loader = build_loader(args, test_share, device, 4, drop_last=True)""")),
    ("the evaluation draws random numbers, other ones each time", above("""
def build_model(args):
    class Dropout(nn.Module):
        def forward(self, inputs):
            return F.dropout(inputs)
    return nn.Sequential(nn.Linear(10, 5), Dropout(), nn.Linear(5, 3))
""")),
    ("these weights are in no optimizer: 0.weight, 0.bias", (
        'instead of "optimizer = torch.optim.Adam("',
        "optimizer = torch.optim.Adam(model[2].parameters(), lr=args.lr)")),
]


@functools.cache
def said_of_what_may_be_intended():
    make_copy("synthetic_ddp", "my.py", *(edit for _, edit in NOTED))
    return command("my.py")


@pytest.mark.parametrize("note", [note for note, _ in NOTED])
def test_what_may_be_intended_is_noted(note):
    status, text = said_of_what_may_be_intended()
    assert status == 0 and f"note  {note}" in text, f"{note}: {status}\n{text}"


@pytest.mark.parametrize("what, code", [
    ("loss of 10 samples", """
weights = 1 / labels.bincount(minlength=10).clamp(min=1)
loss = F.cross_entropy(logits, labels, weights)"""),
    ("loss of 10 samples", "loss = F.cross_entropy(logits, labels.where(labels > 2, -100))"),
    ("gradient of 10 samples",
     "loss = F.cross_entropy(logits / 1e4, labels.where(labels > 2, -100))"),
    ("test metrics", "counts = len(labels) * labels.unique().count_nonzero()"),
])
def test_what_depends_on_the_division_of_a_batch_is_noted(what, code):
    """Weights by the counts of a batch; ignored labels; the classes of a batch."""
    make_copy("fashionmnist_ddp", "my.py", above(SMALL), in_loss(code))
    status, text = check("my.py", "--fake-data")
    assert status == 0 and re.search(f"note  the {what}", text), (
        f"{what} that depend on the division of a batch are not noted:\n{text}")


def test_the_lines_in_which_ranks_wait_for_each_other_are_printed():
    make_copy("fashionmnist_ddp", "my.py", above(SMALL),
              (STEP, "if rank == 0:\n    dist.barrier()"))
    status, text = check("my.py", "--fake-data")
    assert status == 1, f"a barrier of rank 0 alone: status {status}\n{text}"
    assert re.search(r"rank 0 waits in\n +line \d+, train\(\): dist.barrier\(\)\n", text), (
        f"a barrier of rank 0 alone is not named:\n{text}")
    assert re.search(r"rank 1 waits in\n +line \d+, ", text), (
        f"rank 0 waits in a barrier, and not even a line of rank 1 is named:\n{text}")
    assert "not checked: the rest" not in text, f"no later job was begun, but:\n{text}"


@pytest.mark.parametrize("reason, edit", [
    ("NVIDIA|CUDA", ("", SMALL.replace("model(images)", "model(images.cuda())"))),
    ("SyncBatchNorm", model("model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential("
                            "model, nn.BatchNorm1d(10)))")),
    ("no step", above("def load_data(args):\n    sys.exit(0)")),
    ("SystemExit: wrong", above("def load_data(args):\n    sys.exit('wrong')")),
    ("killed by SIGKILL", in_loss("os.kill(os.getpid(), 9)")),
])
def test_what_cannot_be_checked_is_said(reason, edit):
    make_copy("fashionmnist_ddp", "my.py", above(SMALL), edit)
    status, text = check("my.py", "--fake-data")
    assert status == 2 and re.search(reason, text), (
        f"a copy that cannot run here: status {status}, not 2 with {reason!r}:\n{text}")


@pytest.mark.parametrize("name, new, missing", [
    ("evaluate(", "validate(", TESTS), ("loss_and_counts(", "losses(", MEAN)])
def test_a_renamed_function_is_not_checked_and_the_rest_is(name, new, missing):
    make_copy("fashionmnist_ddp", "my.py", above(SMALL))
    with open("my.py") as file:
        text = file.read().replace(name, new)
    with open("my.py", "w") as file:
        file.write(text)
    status, text = check("my.py", "--fake-data")
    assert status == 0 and f"----  not checked: {missing}" in text, f"{new}: {status}\n{text}"


# ---- The command, as a user types it ----
def start_command(*arguments, folder=None, **variables):
    env = {name: os.environ[name] for name in ("HOME", "PATH", "LANG") if name in os.environ}
    return subprocess.Popen([sys.executable, ROOT / "tests/check_copy.py", *arguments],
                            cwd=folder, env={**env, **variables}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def command(*arguments, **variables):
    """Return the exit status and the text of the command."""
    process = start_command(*arguments, **variables)
    text = process.communicate(timeout=120)[0]
    return process.returncode, text


# As in a pod or a notebook
OTHER_JOB = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "nowhere", "SLURM_JOB_ID": "1",
             "TORCHELASTIC_RUN_ID": "1", "PYTHONHASHSEED": "0"}


BYTES = """
class Label:
    def __init__(self, number):
        self.number = number


class Contents(Dataset):
    classes = list("0123456789")

    def __init__(self, first, last):
        self.numbers = range(first, last)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        return random.Random(number).randbytes(3072), Label(number % 10)


def transforms(args, train_set):
    return lambda content, label: (
        torch.frombuffer(bytearray(content), dtype=torch.uint8).view(3, 32, 32), label.number)


def load_data(args):
    return Contents(0, 400), Contents(400, 500), {"word": 1}
"""
VOCABULARY = ('instead of "train_set, test_set = load_data(args)"',
              "train_set, test_set, vocabulary = load_data(args)")
FAULTY = {  # many mistakes in one copy: that each is named does not depend on the others
    "files, batches and sums": [
        (f"FAIL  {LEAK}.*: 10000 of 10000 different", above("""
def load_data(args):
    images = torch.randint(256, (60000, 1, 4, 4), dtype=torch.uint8)
    labels = images[:, 0, 0, 0].long() % 10
    return (images, labels), (images[:10000], labels[:10000])
""")),
        (f"FAIL  {MEAN}: the loss of 4 samples", in_loss(
            "if model.training:\n    loss = loss * len(labels)")),
        (None, (SAVED, """
            class State(dict):
                def state_dict(self):
                    return dict(self)

                def load_state_dict(self, state):
                    self.update(state)
            saved["state"] = state = State(best=1e9)""")),
        (f"FAIL  {SAME}: these differ: state.best",
         ('after "samples += len(indices)"', "state['best'] = min(state['best'], loss.item())")),
        (f"FAIL  {RESUMES}: the resumed run makes all 6 steps", (
            'instead of "step = restore("', "step = 0")),
        ("note  both processes write best.pt",
         (STEP, 'torch.save(model.state_dict(), "best.pt")'))],
    "ranks and modes": [
        (f"FAIL  {STEPS}", (
            'instead of "own_parts = range(rank,"',
            'own_parts = range(int(os.environ["LOCAL_RANK"]), parts, world_size)')),
        (None, model("model = nn.Sequential(model, nn.BatchNorm1d(10))")),
        (f"FAIL  {RESUMES}: these differ: mode of step 1", (
            STEP, "model.eval()  # an evaluation of one's own")),
        (f"FAIL  {WEIGHTS}", in_loss("loss = loss + F.dropout(logits).mean()"))],
    "sets": [
        (f"FAIL  {LEAK}: 100 of 100 different", above(BYTES.replace("400, 500", "0, 100"))),
        (f"FAIL  {ENDS}: they end with an error:(.*\\n)+.*sort what comes from a set", above("""
Contents.classes = list({f"class {number}" for number in range(10)})
""")),
        (None, VOCABULARY)],
}


@functools.cache
def said_of(kind):
    with tempfile.TemporaryDirectory() as folder:
        script = "cifar10_ddp" if kind == "sets" else "fashionmnist_ddp"
        make_copy(script, f"{folder}/my.py", above(SMALL), *(edit for _, edit in FAULTY[kind]))
        return command("my.py", "--fake-data", folder=folder, **OTHER_JOB)


@pytest.mark.parametrize("kind, line", [(kind, line) for kind in FAULTY for line, _ in FAULTY[kind]
                                        if line])
def test_each_mistake_is_named_by_the_command(kind, line):
    status, text = said_of(kind)
    assert status == 1 and re.search(f"^{line}", text, re.MULTILINE), (
        f"a copy with mistakes in {kind}: status {status}, and not {line!r}:\n{text}")


def test_an_error_after_the_first_training_is_printed():
    make_copy("fashionmnist_ddp", "my.py", above(SMALL), in_loss(
        "if len(labels) > 16:\n    raise RuntimeError('a later job')"))
    status, text = command("my.py", "--fake-data")
    assert status == 2 and re.search(
        r"line \d+, loss_and_counts\(\)(.*\n)+.*RuntimeError: a later job", text), (
        f"an error in an evaluation in a single batch: {status}\n{text}")


EVALUATED = 'before "test {show(test)}"'
WRITES = """
import pathlib
import shutil
if rank == 0:
    open("log.csv", "w").write("epoch,loss")
    open("all.log", "a").write("epoch")
    torch.save(model.state_dict(), "last.pt")
    shutil.copyfile("last.pt", "best.pt")
    os.makedirs("checkpoints", exist_ok=True)
    torch.save(model.state_dict(), "checkpoints/best.pt")
    torch.save(model.state_dict(), "checkpoints/new.pt")
    os.replace("checkpoints/new.pt", "checkpoints/last.pt")
    for name in ("old.pt", "checkpoints/old.pt"):
        if os.path.exists(name):
            os.remove(name)
    shutil.rmtree("runs", ignore_errors=True)
    (pathlib.Path(__file__).resolve().parent / "beside.txt").write_text("epoch")
    (pathlib.Path("..") / "above.txt").write_text("epoch")
    os.system("cp last.pt cp.pt")
dist.barrier()
model.load_state_dict(torch.load("best.pt"))
model.eval()  # an evaluation of one's own
model.train()
"""
FILES = ("folder/log.csv", "folder/all.log", "folder/last.pt", "folder/best.pt", "folder/old.pt",
         "folder/checkpoints/best.pt", "folder/checkpoints/last.pt", "folder/checkpoints/old.pt",
         "folder/runs/1/log.csv", "folder/beside.txt", "folder/cp.pt", "above.txt")


@pytest.fixture
def files_of_the_user(tmp_path, monkeypatch):
    """Return a function that returns what is in each file. The current folder is folder/."""
    for name in FILES:
        os.makedirs(os.path.dirname(tmp_path / name), exist_ok=True)
        (tmp_path / name).write_text(f"my {name}")
    monkeypatch.chdir(tmp_path / "folder")
    return lambda: {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_no_file_of_the_user_changes_when_a_copy_with_bytes_and_objects_passes(files_of_the_user):
    make_copy("cifar10_ddp", "my.py", above(SMALL + BYTES), VOCABULARY, (EVALUATED, WRITES))
    before = files_of_the_user()
    status, text = command("my.py", "--fake-data", **OTHER_JOB)
    assert files_of_the_user() == before, f"the check changes the user's files:\n{text}"
    assert status == 0, f"a copy that writes files beside it: {status}\n{text}"


@pytest.mark.parametrize("write, how, headline", [
    ("torch.save(model.state_dict(), f'{HERE}/best.pt')", command, "a file at an absolute path"),
    ("os.remove(f'{HERE}/best.pt')", check, "a file at an absolute path"),
    ("subprocess.run(['cp', 'my.py', f'{HERE}/best.pt'], check=True)", check, "one process"),
])
def test_an_absolute_path_is_named_and_not_changed(write, how, headline, files_of_the_user):
    make_copy("fashionmnist_ddp", "my.py", above(SMALL),
              above(f"import subprocess\nHERE = {os.getcwd()!r}"), in_loss(write))
    before = files_of_the_user()
    status, text = how("my.py", "--fake-data")
    assert files_of_the_user() == before, f"{write} changes the user's files:\n{text}"
    said = re.search(f"{headline}(.*\n)+.*{os.getcwd()}/best.pt", text)
    assert status == 2 and said, f"{write} is not said to be forbidden: {status}\n{text}"


@pytest.mark.parametrize("edit, line", [
    (in_loss("logits + logits[:, :3]"),
     r"loss_and_counts\(\): logits \+ logits\[:, :3\]\n +RuntimeError: The size"),
    (above("def transforms(args, train_set):\n"
           "    return lambda image, label: (torch.zeros(3, 32, random.randrange(32)), label)"),
     r"train\(\): .*\n +samples of one batch have different shapes\n")])
def test_an_error_beside_loader_processes_is_printed_at_once(edit, line):
    make_copy("cifar10_ddp", "my.py", above(SMALL), edit)
    status, text = command("my.py", "--fake-data")
    assert status == 2 and re.search(line, text), (
        f"an error of a copy with loader processes: {status}, and not {line}\n{text}")


def test_a_stopped_check_leaves_nothing(tmp_path):
    make_copy("cifar10_ddp", "my.py", above(SMALL),
              in_loss("open('started', 'w').close()\ntime.sleep(300)"))
    process = start_command("my.py", "--fake-data", TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/one/**/started")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGHUP)
    text = process.communicate(timeout=60)[0]
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert process.returncode == 2 and "interrupted" in text, f"{process.returncode}:\n{text}"
    assert os.listdir() == ["my.py"], f"a stopped check leaves {os.listdir()}"
    assert str(tmp_path) not in processes, f"a stopped check leaves processes:\n{processes}"


OLD = "parse_args, load_data\ndef train(args):\ndef loss_and_correct(model, images, labels):"


@pytest.mark.parametrize("argument, text, expected, reason", [
    ("mine.py", "", 2, "----  not checked: mine.py: there is no such file\n"),
    ("my.py", "def main():\n    pass", 2, "----  not checked: my.py: .*no copy.*\n"),
    ("my.py", OLD, 2, "----  not checked: my.py: .*an older version.*\n"),
    ("--help", "", 0, re.escape(check_copy.__doc__) + "\n")])
def test_what_is_no_copy_of_this_version_is_refused(argument, text, expected, reason):
    with open("my.py", "w") as file:
        file.write(text)
    status, text = command(argument)
    assert status == expected and re.fullmatch(reason, text), f"{status}\n{text}"


# ---- Edits that are right ----
LSTM = """
class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 12, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, x):
        return self.out(self.lstm(x.unsqueeze(2))[0]).squeeze(2)


def build_model(args):
    return Waves()


def build_optimizer(args, model):
    return torch.optim.LBFGS(model.parameters(), lr=args.lr, max_iter=5)


def load_data(args):
    waves = torch.sin((torch.arange(60) + 80 * torch.rand(97, 1)) / 20)
    return (waves[:70, :-1], waves[:70, 1:]), (waves[70:, :-1], waves[70:, 1:])


def loss_and_counts(args, model, inputs, targets):
    errors = (model(inputs) - targets).square().mean(1)
    return errors.mean(), errors.detach().sum()
"""
CLOSURE = """
results = []

def closure():
    optimizer.zero_grad()
    whole = torch.zeros(2)
    for part in own_parts:
        indices = batch[part::parts]
        ddp_model.require_backward_grad_sync = part == own_parts[-1]
        loss, errors = loss_and_counts(args, ddp_model, x[indices], y[indices])
        (loss * (len(indices) * world_size / global_batch)).backward()
        whole += torch.stack([loss.detach() * len(indices), errors])
    results.append(whole)
    mean = whole[0].clone()
    dist.all_reduce(mean)  # all ranks make the same steps
    return mean / global_batch
"""
VAE = """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(784, 8)
        self.decoder = nn.Linear(4, 784)

    def forward(self, images):
        mean, spread = self.encoder(images.flatten(1)).chunk(2, 1)
        return self.decoder(mean + (spread / 2).exp() * torch.randn_like(mean)), mean, spread


def build_model(args):
    return VAE()


def loss_and_counts(args, model, images, labels):
    images = normalize(images)
    output, mean, spread = model(images)
    loss = F.binary_cross_entropy_with_logits(output, images.flatten(1), reduction="sum")
    loss = loss - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()
    return loss / len(images), loss.detach()
"""
PAIRS = """
import numpy


class Pairs(Dataset):
    classes = ["different", "same"]

    def __init__(self, images, labels):
        self.images = images
        self.of_class = [(labels == number).nonzero().flatten().tolist() for number in range(10)]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        same = numpy.random.rand() < 0.5
        others = self.of_class[(index + (0 if same else random.randrange(1, 10))) % 10]
        return self.images[index], self.images[random.choice(others)], float(same)


class Twins(Small):
    def forward(self, first, second):
        return self.head((self.features(first) - self.features(second)).abs())[:, 0]


def build_model(args, classes):
    return Twins()


def load_data(args):
    return [Pairs(*tensors) for tensors in fake_images(200, (3, 32, 32), random.randrange(1000))]


def transforms(args, train_set):
    return lambda *parts: parts


def loss_and_counts(args, model, first, second, same):
    logits = model(first, second)
    loss = F.binary_cross_entropy_with_logits(logits, same.float())
    return loss, ((logits > 0) == (same > 0.5)).sum()
"""
SCENES = """
class Scenes(Dataset):
    classes = ["background", "square"]

    def __init__(self, count, seed):
        self.file = None
        self.count = count
        self.seed = seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.file = self.file or open("rows", "rb")  # as an archive: a handle in each process
        self.file.seek(index)
        generator = torch.Generator().manual_seed(1000 * self.seed + self.file.read(1)[0])
        size = 24 + 8 * int(torch.randint(3, (), generator=generator))
        boxes = torch.rand(index % 3 + 1, 4, generator=generator) * size
        return torch.rand(3, size, size, generator=generator), {"boxes": boxes}


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm1d(8)
        self.box = nn.Linear(8, 4)

    def forward(self, images, targets=None):
        pooled = torch.stack([self.body(image[None])[0].mean((1, 2)) for image in images])
        boxes = self.box(self.norm(pooled))
        if not self.training:
            return [{"boxes": box[None]} for box in boxes]
        wanted = torch.stack([target["boxes"].mean(0) for target in targets])
        return {"box": (boxes - wanted).abs().mean(), "size": boxes.square().mean()}


def build_model(args, classes):
    return Detector()


def load_data(args):
    return Scenes(100, 1), Scenes(30, 2)


def transforms(args, train_set):
    return lambda *parts: parts


def collate(samples):
    return tuple(zip(*samples))


def loss_and_counts(args, model, images, targets):
    if model.training:
        return sum(model(images, targets).values()), torch.zeros(())
    errors = [(output["boxes"] - target["boxes"]).abs().mean()
              for output, target in zip(model(images), targets)]
    return torch.zeros(()), torch.stack(errors).sum()
"""
LISTS = [(f'instead of "{line}"', "pass") for line in (
    "batch = [tensor.to(device, non_blocking=True) for tensor in batch]",
    "batch = [tensor.to(device) for tensor in batch]")]
BERT = """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.word_head = nn.Linear(16, 50)
        self.next_head = nn.Linear(16, 2)

    def forward(self, words):
        hidden = self.layer(self.words(words))
        return self.word_head(hidden), self.next_head(hidden[:, 0])


def build_model(args):
    return Heads()


def build_optimizer(args, model):
    return torch.optim.AdamW(model.parameters(), lr=2e-5)


def load_data(args):
    words, after = torch.randint(4, 50, (130, 12)), torch.randint(2, (130,))
    return (words[:100], after[:100]), (words[100:], after[100:])


def loss_and_counts(args, model, words, after):
    hidden = torch.rand(words.shape) < 0.3 if model.training else words < 9
    logits, next_logits = model(words.masked_fill(hidden, 3))
    losses = F.cross_entropy(logits.transpose(1, 2), words, reduction="none") * hidden
    loss = (losses.sum(1) / hidden.sum(1).clamp(1)).mean()
    loss = loss + F.cross_entropy(next_logits, after)
    return loss, (next_logits.argmax(1) == after).sum()
"""
GAN = """
class Maker(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 784))

    def forward(self, noise):
        return self.net(noise).sigmoid()


def build_model(args):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 1))


def wrong(logits, wanted):
    return F.binary_cross_entropy_with_logits(logits, wanted.expand_as(logits))


def loss_and_counts(args, model, images, labels):
    logits = model(normalize(images))
    return wrong(logits, torch.ones(1)), (logits > 0).sum()
"""
TURNS = """
for turn, (turns_model, turns_optimizer) in enumerate(((ddp_model, optimizer),
                                                       (ddp_maker, maker_optimizer))):
    turns_optimizer.zero_grad()
    for part in own_parts:
        indices = batch[part::parts]
        torch.manual_seed(hash((args.seed, step, part, turn)))
        turns_model.require_backward_grad_sync = part == own_parts[-1]
        noise = torch.randn(len(indices), 8)
        if turn == 0:
            real = normalize(x[indices]).flatten(1)
            logits = ddp_model(torch.cat([real, maker(noise).detach()]))
            loss = wrong(logits, (torch.arange(len(logits)) < len(real)).float()[:, None])
            loss_sum += len(indices) * loss.detach().double()
            counts += (logits[:len(real)] > 0).sum()
            samples += len(indices)
        else:
            model.requires_grad_(False)
            loss = wrong(model(ddp_maker(noise)), torch.ones(1))
            model.requires_grad_(True)
        (loss * (len(indices) * world_size / global_batch)).backward()
    turns_optimizer.step()
"""
LOW_RANK = """
class LowRank(nn.Linear):
    def __init__(self):
        super().__init__(10, 10)
        self.weight.requires_grad = False
        self.update = nn.Parameter(torch.zeros(10, 10))
        self.merged = False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.update.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, inputs):
        return super().forward(inputs) + (0 if self.merged else inputs @ self.update.T)
"""
GATHERED = """
import torch.distributed.nn


def loss_and_counts(args, model, images, labels):
    vectors = F.normalize(model(images), dim=1)
    others, offset = vectors, 0
    if model.training and dist.get_world_size() > 1:
        others = torch.cat(torch.distributed.nn.all_gather(vectors))
        offset = dist.get_rank() * len(vectors)
    loss = F.cross_entropy(vectors @ others.T, offset + torch.arange(len(vectors)))
    return loss, torch.zeros(())
"""
NO_DOWNLOAD = above("def prepare_data(args):\n    pass")
WORDS = """
import torch


class Words(torch.utils.data.Dataset):
    def __init__(self, first, last):
        self.numbers = range(first, last)
        self.mean = torch.tensor(0.5)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.numbers[index])
        return torch.randn(10, generator=generator), self.numbers[index] % 3


def load_data(args, length):
    return Words(0, 200), Words(200, 250), {"word": 1}, length
"""
RIGHT = {
    "an LSTM with LBFGS": ("fashionmnist_ddp", NO_DOWNLOAD, above(LSTM),
                           ('instead of "for part in own_parts:"', CLOSURE),
                           ('instead of "            optimizer.step()"', """
                            optimizer.step(closure)
                            loss_sum, counts = results[0]
                            samples = len(batch[rank::world_size])""")),
    "a VAE, whose evaluation is seeded": (
        "fashionmnist_ddp", above(VAE), ('before "test = evaluate("', "torch.manual_seed(0)")),
    "siamese pairs, by numpy with a seed for each sample": (
        "cifar10_ddp", above(SMALL + PAIRS), ('before "return self.transform(*self.data["', """
        numpy.random.seed(hash(key) % 2**32)""")),
    "detection, with lists, dictionaries and a file": (
        "cifar10_ddp", above(SCENES), *LISTS, ('instead of "return DataLoader(SeededData("', """
        return DataLoader(SeededData(data, transform), num_workers=args.workers, **batches,
                          collate_fn=collate, worker_init_fn=ignore_signals)""")),
    "a transformer with two heads and a rate of 2e-5": ("fashionmnist_ddp", NO_DOWNLOAD,
                                                        above(BERT)),
    "a GAN, both of whose models are exchanged": (
        "fashionmnist_ddp", above(GAN), (SAVED, """
        maker = Maker()
        maker_optimizer = torch.optim.Adam(maker.parameters(), lr=2e-4)
        saved.update(maker=maker, maker_optimizer=maker_optimizer)"""),
        ('after "ddp_model = DDP("', "ddp_maker = DDP(maker) if world_size > 1 else maker"),
        ('instead of "for part in own_parts:"', TURNS),
        ('instead of "            optimizer.step()"', "pass")),
    "a loss of pairs, gathered from all ranks (noted)":
        ("fashionmnist_ddp", above(SMALL + GATHERED)),
    "buffers, frozen layers, one that eval() merges, a scheduler and a tested average": (
        "fashionmnist_ddp", above(SMALL + LOW_RANK), above("""
def center(module, inputs):
    if module.training:
        module.center.lerp_(inputs[0].detach().mean(0), 0.5)
    return inputs[0] - module.center
"""), model("""
model.requires_grad_(False)
model.body.register_buffer("center", torch.zeros(16))
model.body.register_forward_pre_hook(center)
model = nn.Sequential(model, nn.BatchNorm1d(10).eval(), LowRank(), nn.BatchNorm1d(10),
                      nn.Dropout(), nn.Linear(10, 10))"""), (SAVED, """
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps + 1)
        average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
        saved.update(scheduler=scheduler, average=average)"""),
        ('instead of "for group, peak_rate in"', "pass"),
        (STEP, "scheduler.step()\naverage.update_parameters(model)"),
        (TEST, "test = evaluate(args, average.module, zip(test_x, test_y), device)")),
    "four tensors, a share at once, with dropout, and an evaluation in every tenth epoch": (
        "fashionmnist_ddp", above(SMALL + DRAWN + """
def load_data(args):
    return *samples(0), *samples(1, 90)
"""), ('instead of "(x, y), test_set = load_data(args)"', "x, y, *test_set = load_data(args)"),
        model("model = nn.Sequential(model, nn.Dropout())"),
        ('instead of "for part in own_parts:"', """
        indices = batch[rank::world_size]
        torch.manual_seed(hash((args.seed, step, rank)))
        loss, share_counts = loss_and_counts(args, ddp_model, x[indices], y[indices])
        (loss * (len(indices) * world_size / global_batch)).backward()
        loss_sum += len(indices) * loss.detach().double()
        counts += share_counts
        samples += len(indices)"""), (TEST, """
        test = {}
        if epoch % 10 == 9:
            test = evaluate(args, model, zip(test_x, test_y), device)""")),
    "fewer samples than a batch, of a small table": (
        "fashionmnist_ddp", NO_DOWNLOAD, above("""
def build_model(args):
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def load_data(args):
    inputs = torch.arange(15)[:, None] // torch.tensor([1, 2, 4]) % 2
    labels = (inputs.sum(1) > 1).long()
    return (inputs[:11].float(), labels[:11]), (inputs[11:].float(), labels[11:])


def loss_and_counts(args, model, inputs, labels, progress=1.0):
    logits = model(inputs)
    loss = F.cross_entropy(logits, labels, label_smoothing=0.1 * progress)
    return loss, (logits.argmax(1) == labels).sum()
"""), ('instead of "loss, part_counts = loss_and_counts("', """
        loss, part_counts = loss_and_counts(args, ddp_model, x[indices], y[indices],
                                            progress=step / total_steps)""")),
    "SAM, and data, a vocabulary and a number from a module": (
        "synthetic_ddp", ('instead of "def load_data(args):"', "from words import load_data"),
        ('instead of "train_set, test_set = load_data(args)"', """
        train_set, test_set, vocabulary, length = load_data(args, 20)
        assert (vocabulary, length) == ({"word": 1}, 20)"""), (STEP, """
        with torch.no_grad():
            for weight, move in zip(model.parameters(), moves):
                weight.add_(move)"""), ('before "            optimizer.step()"', """
        moves = [0.01 * weight.grad.sign() for weight in model.parameters()]
        with torch.no_grad():
            for weight, move in zip(model.parameters(), moves):
                weight.sub_(move)
        optimizer.zero_grad()
        loss_and_counts(args, ddp_model, *batch)[0].backward()""")),
    "batches that are dictionaries, as of Hugging Face": ("synthetic_ddp", above("""
import collections


class Batch(collections.UserDict):
    def __len__(self):
        return len(self["labels"])

    def to(self, device, **options):
        return self


def collate(samples):
    inputs, labels = torch.utils.data.default_collate(samples)
    return [Batch(inputs=inputs, labels=labels)]


def build_loader(args, data, device, batch_size, **options):
    return Loader(data, batch_size, num_workers=args.workers, collate_fn=collate, **options)


def loss_and_counts(args, model, batch):
    logits = model(batch["inputs"])
    return F.cross_entropy(logits, batch["labels"]), (logits.argmax(1) == batch["labels"]).sum()
""")),
    "a pair as one argument, and a number": ("fashionmnist_ddp", above(SMALL), above("""
def loss_and_counts(args, model, pair, smoothing):
    images, labels = pair
    logits = model(images)
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    return loss, (logits.argmax(1) == labels).sum()
"""), ('instead of "loss, part_counts = loss_and_counts("', """
        loss, part_counts = loss_and_counts(args, ddp_model, (x[indices], y[indices]), 0.1)"""),
        ('instead of "loss, batch_counts = loss_and_counts("', """
        loss, batch_counts = loss_and_counts(args, model, batch, 0.0)""")),
    "random samples of a data set, dropout and BatchNorm": ("synthetic_ddp", above("""
class Noisy(TensorDataset):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(10), label


def load_data(args):
    inputs, labels = torch.randn(300, 10), torch.arange(300) % 3
    return Noisy(inputs[100:], labels[100:]), TensorDataset(inputs[:100], labels[:100])


def build_model(args):
    return nn.Sequential(nn.Linear(10, 9), nn.BatchNorm1d(9), nn.Dropout(), nn.Linear(9, 3))
""")),
    "no test samples": ("fashionmnist_ddp", above(SMALL + DRAWN + """
def load_data(args):
    return samples(0), samples(1, 0)
""")),
    "as many test images as classes, and blank images in both sets (noted)": (
        "cifar10_ddp", above(SMALL + DRAWN + """
def load_data(args):
    train_set, test_set = named(samples(0), samples(1, 10))
    for data in (train_set, test_set):
        data.tensors[0][:6] = 255
    return train_set, test_set
""")),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_edit_is_no_false_alarm(kind):
    script, *edits = RIGHT[kind]
    make_copy(script, "my.py", *edits)
    with open("rows", "wb") as file:
        file.write(bytes(range(100)))
    with open("words.py", "w") as file:
        file.write(WORDS)
    status, text = check("my.py", *FLAGS.get(script, []))
    assert status == 0, f"{kind}: nothing is wrong, but status {status}:\n{text}"
    assert ("\nnote " in text) == kind.endswith("(noted)"), f"{kind}, and these notes:\n{text}"

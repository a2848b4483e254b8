"""tests/check_copy.py notices what an edit breaks, says where, and finds nothing in a right copy."""

import concurrent.futures
import contextlib
import io
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from typing import NamedTuple

import check_copy
import pytest
import torch
from copies import make_copy
from image_folder import write_images
from scripts import CHECKPOINT_SCRIPTS, ROOT, SCRIPTS

FLAGS = {"cifar10_ddp": ("--fake-data", "128"), "fashionmnist_ddp": ("--fake-data",), "cpu_ddp": ()}


class Forked:
    """A process of check_copy that is forked, in place of an interpreter that imports torch."""

    def __init__(self, arguments, env, log):
        self.process = multiprocessing.get_context("fork").Process(target=self.work,
                                                                   args=(arguments, env, log))
        self.process.start()
        self.kill = self.process.kill

    def work(self, arguments, env, log):
        sys.stdout = sys.stderr = open(log, "w", buffering=1)
        os.dup2(sys.stdout.fileno(), 2)
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(1)
        torch.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        try:
            check_copy.process(*arguments)
        except SystemExit as end:
            print(end)
            os._exit(1)
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def poll(self):
        return self.process.exitcode

    def wait(self):
        self.process.join()

    @property
    def returncode(self):
        return self.process.exitcode


def check(copy, *flags):
    """Return the exit status and the text of check_copy, whose processes are forked."""
    check_copy.start = Forked
    check_copy.WAIT = 6
    check_copy.failed.clear()
    sys.argv = ["check_copy.py", str(copy), *map(str, flags)]
    status = 0
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            check_copy.main()
        except SystemExit as end:
            status = end.code
    return status, text.getvalue()


# ---- Kinds ----
class Kind(NamedTuple):
    """An edit that is wrong, and what check_copy says of it."""
    script: str
    words: str  # of a line that is FAIL
    edits: tuple
    flags: tuple = ()


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


def build_optimizer(args, model, *batch):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def loss_and_correct(model, images, labels):
    logits = model(images)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss, (logits.argmax(1) == labels).sum()
"""
# Below, edits of a copy with this model


def with_loss(lines, result="loss, (logits.argmax(1) == labels).sum()", before="",
              call="model(images)"):
    return ("", f"""
{before}
def loss_and_correct(model, images, labels):
    logits = {call}
    loss = F.cross_entropy(logits, labels, reduction="sum")
{lines}
    return {result}
""")


NO_GUARD = ('instead of "                check_weights(saved)"', "pass")
DRAWN = """
def draw(count, generator):
    images = torch.randint(256, (count, 1, 28, 28), generator=generator, dtype=torch.uint8)
    return images, images[:, 0, 0, 0] % 10
"""
FIRST = "the first gradients are the same"
SUMS = "are sums over samples"
RANKS = "all processes have the same weights"
RESUMED = "a stopped and resumed run ends with the same numbers"
DATA = "load the same data"
ENDS = "two processes train to the end"

F_KINDS = {
    "drawn alike": ("no test sample is a training sample", ("", DRAWN + """
def load_data(args):
    return [draw(count, torch.Generator().manual_seed(args.seed)) for count in (400, 90)]
""")),
    "numpy's split": (ENDS, ("", DRAWN + """
import numpy

def load_data(args):
    x, y = draw(400, torch.Generator().manual_seed(0))
    order = torch.from_numpy(numpy.random.permutation(400))
    return (x[order[:300]], y[order[:300]]), (x[order[300:]], y[order[300:]])
""")),
    "shards by rank": (ENDS, ("", DRAWN + """
def load_data(args):
    x, y = draw(400, torch.Generator().manual_seed(0))
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    return (x[rank:300:world_size], y[rank:300:world_size]), (x[300:], y[300:])
""")),
    "mean": (SUMS, with_loss("    loss = loss / len(labels)")),
    "mean in training": (SUMS, with_loss("    if model.training: loss = loss / len(labels)")),
    "mean in evaluation": ("for any batch size",
                           with_loss("    if not model.training: loss = loss / len(labels)")),
    "mean of the metric": (SUMS, with_loss("", "loss, (logits.argmax(1) == labels).float().mean()")),
    "module": (ENDS, with_loss("", call="getattr(model, 'module', model)(images)")),
    "module, no guard": (FIRST, NO_GUARD, with_loss("", call="getattr(model, 'module', model)(images)")),
    "method": (RANKS, NO_GUARD, with_loss("", call="(plain := getattr(model, 'module', model)).head(plain.features(images))")),
    "late requires_grad": (RANKS, NO_GUARD,
        ("", "def build_model(args):\n    model = Small()\n    model.body.requires_grad_(False)\n    return model"),
        ('after "ddp_model = DDP("', "model.body.requires_grad_(True)")),
    "weights of no model": ("what is optimized", with_loss("    loss = loss * SCALE.exp()", before="SCALE = nn.Parameter(torch.zeros(()))"),
        ("", "def build_optimizer(args, model):\n    return torch.optim.Adam([*model.parameters(), SCALE], lr=3e-3)")),
    "second model": (RANKS, NO_GUARD,
        ('before "step = restore("', 'critic = nn.Linear(784, 1)\ncritic_optimizer = torch.optim.SGD(critic.parameters(), 0.1)\nsaved.update(critic=critic, critic_optimizer=critic_optimizer)'),
        ('after "optimizer.step()"', 'critic_optimizer.zero_grad()\ncritic(x[indices].flatten(1) / 255).square().mean().backward()\ncritic_optimizer.step()')),
    "second optimizer": (RESUMED,
        ("", "def build_optimizer(args, model):\n    return torch.optim.Adam(model.body.parameters(), lr=3e-3)"),
        ('before "step = restore("', 'second = torch.optim.Adam(model.head.parameters(), lr=3e-3)'),
        ('after "optimizer.step()"', 'second.step()\nsecond.zero_grad()')),
    "scheduler": (RESUMED, ('before "step = restore("', 'scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total_steps + 1)'),
        ('instead of "for group, peak_rate in"', "pass"), ('after "optimizer.step()"', "scheduler.step()")),
    "scheduler created after restore": (RESUMED, ('after "step = restore("', 'scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))'),
        ('instead of "for group, peak_rate in"', "pass"), ('after "optimizer.step()"', "scheduler.step()")),
    "EMA": ("and with the same test results", ('before "step = restore("', 'ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))'),
        ('after "optimizer.step()"', "ema.update_parameters(model)"),
        ('instead of "test_loss, test_accuracy = evaluate("', "with autocast:\n    test_loss, test_accuracy = evaluate(ema.module, zip(test_x, test_y), device)")),
    "counter": (RESUMED, with_loss("    if model.training:\n        COUNT.append(1)\n        loss = loss / len(COUNT)", before="COUNT = []")),
    "queue": (RESUMED, with_loss("    if model.training:\n        loss = loss + 0.1 * (logits * sum(QUEUE)).sum()\n        QUEUE.append(logits.detach().mean(0))", before="QUEUE = []")),
    "hidden state": (RESUMED, with_loss("    global HIDDEN\n    if model.training:\n        loss = loss + (HIDDEN * logits).sum()\n        HIDDEN = logits.detach().mean(0)", before="HIDDEN = torch.zeros(10)")),
    "own generator": (RESUMED, with_loss("    if model.training:\n        loss = loss * (1 + torch.rand((), generator=GENERATOR))", before="GENERATOR = torch.Generator().manual_seed(0)")),
    "numpy's noise": (RESUMED, with_loss("    if model.training:\n        loss = loss * (1 + numpy.random.rand())", before="import numpy")),
    "Python's noise": (RESUMED, with_loss("    if model.training:\n        loss = loss * (1 + random.random())")),
    "numpy in build_model": ("begin with the same weights", ("", "import numpy\n\ndef build_model(args):\n    model = Small()\n    model.body.weight.data = torch.from_numpy(numpy.random.randn(16, 16)).float()\n    return model")),
    "numpy in build_model, no parameter": (RESUMED, ("", "import numpy\n\ndef build_model(args):\n    model = Small()\n    model.scale = 1 + numpy.random.rand()\n    return model"),
        with_loss("    loss = loss * getattr(model, 'module', model).scale")),
    "gradient kept": (RESUMED, ('instead of "optimizer.zero_grad()"', "pass")),
    "no eval()": ("calls model.eval()", ("", "def build_model(args):\n    return nn.Sequential(Small(), nn.Dropout())"), ('instead of "model.eval()"', "pass")),
    "no eval(), BatchNorm": ("calls model.eval()", ("", "def build_model(args):\n    return nn.Sequential(Small(), nn.BatchNorm1d(10))"), ('instead of "model.eval()"', "pass")),
    "random evaluation": ("depend on the weights alone", with_loss("    if not model.training:\n        loss = loss * torch.rand(())")),
    "rank leaves": (ENDS, ('after "step += 1"', "if rank == 1 and step == 2:\n    break")),
    "rank skips": (ENDS, ('before "optimizer.zero_grad()"', "if rank == 1 and step == 2:\n    step += 1\n    continue")),
    "barrier of rank 0": (ENDS, ('after "step += 1"', "if rank == 0:\n    dist.barrier()")),
    "unused layer": (ENDS, ("", "def build_model(args):\n    model = Small()\n    model.extra = nn.Linear(3, 3)\n    return model")),
    "local mean": ("for any batch size", ('instead of "return mean_of_all_ranks("', "return [float(loss_sum / count), float(correct_sum / count)]")),
    "other scale": (FIRST, ('instead of "(loss * (world_size / global_batch)).backward()"', "(loss / len(indices)).backward()")),
    "rate by world size": ("learning rate", ("", "def build_optimizer(args, model):\n    return torch.optim.Adam(model.parameters(), lr=3e-3 * dist.get_world_size())")),
    "test set of rank 0 only": ("for any batch size", ('instead of "test_x, test_y = "', "test_x, test_y = (tensor.split(args.batch_size) for tensor in test_set)\nif rank: test_x, test_y = test_x[:1], test_y[:1]")),
}

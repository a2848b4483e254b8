"""Edited copies for test_check_copy.py: how they are made, and edits that several tests use."""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {"cifar10_ddp": ["--fake-data", "--model", "shufflenet_v2_x0_5", "--image-size", "32"],
         "fashionmnist_ddp": ["--fake-data"]}


def write_copy(script, path, *edits):
    """Write an edited copy of a script to path.

    An edit is a pair (place, code). place is 'before "TEXT"', 'after "TEXT"' or 'instead of
    "TEXT"', of the only statement with a line that has TEXT. Without a place, code stands above
    train(), where its definitions replace those of the same name.
    """
    text = (ROOT / script / "train.py").read_text()
    for place, code in edits:
        code = textwrap.dedent(code).strip("\n") + "\n"
        text = edited(text, place or 'before "def train(args):"', code)
    Path(path).write_text(text)


def edited(text, place, code):
    how, words = re.fullmatch(r'(before|after|instead of) "(.*)"', place).groups()
    lines = text.splitlines(keepends=True)
    numbers = [number for number, line in enumerate(lines, 1) if words in line]
    assert len(numbers) == 1, f"an edit is {place}, but lines {numbers} of the script have it"
    around = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)
              and node.lineno <= numbers[0] <= node.end_lineno]
    node = max(around, key=lambda node: node.lineno)
    first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])]) - 1
    last = node.end_lineno
    replaced = {"before": slice(first, first), "after": slice(last, last),
                "instead of": slice(first, last)}
    lines[replaced[how]] = textwrap.indent(code, node.col_offset * " ")
    return "".join(lines)


# ---- A small model, and edits of it ----
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


def build_model(args):
    return Small()


def build_optimizer(args, model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer)


def loss_and_counts(args, model, images, labels):
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    counts = (logits.argmax(1) == labels).sum()
    return loss, counts
"""
SAVED = 'before "progress = {"'
RESUMED = 'after "    resume(checkpoint, run, saved, progress)"'
STEP = 'after "    optimizer.step()"'
EVALUATED = 'after "results.update(val_results)"'
# The script's own comparison of the ranks' weights comes first
NO_GUARD = ('instead of "        check_model(model)"', "pass")


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
    return "", f"def build_model(args):\n    model = Small()\n{lines}    return model\n"

"""Edits for test_check_copy.py: a small model, the places of edits, and what edits it."""

FLAGS = {"cifar10_ddp": ["--fake-data", "--model", "shufflenet_v2_x0_5", "--image-size", "32"],
         "fashionmnist_ddp": ["--fake-data"]}
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

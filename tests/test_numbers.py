"""The printed numbers, recomputed; recipes, settings and launch by their effects."""

import io
import os
import re
import time
from argparse import ArgumentTypeError, Namespace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from helpers import SCRIPTS, load_script, train

IMAGES = ("mnist_dp", "cifar10_ddp", "fashionmnist_ddp")
LINE = re.compile(r"step (\d+)/25  loss ([\d.]+)  (?:accuracy ([\d.]+)  )?(\d+) \w+/s  (\S+) left\n")


def watch(place, name, see):
    """Call see with the arguments of each call of a function, before it."""
    function = getattr(place, name)
    setattr(place, name, lambda *inputs, **how: (see(*inputs), function(*inputs, **how))[1])


@pytest.mark.parametrize("script", SCRIPTS)
def test_printed_numbers(script, tmp_path, capfd):
    """5 epochs of 5 steps of 32 samples on two nodes; a step takes 1 s and 3 s there, and the second's download 1 s."""
    nproc, smoothing = 2 - (script == "mnist_dp"), 0.1 * (script == "fashionmnist_ddp")
    kept = "script seed lr batch_size bf16 " + ("fake_data images" if script in IMAGES else "samples")

    def setup(module, rank):
        steps, saved, begun, rates, seconds = [], {}, {}, [], 2 if nproc == 1 else 1 + 2 * rank
        os.environ["LOCAL_RANK"] = "0"
        module.time = Namespace(perf_counter=lambda: seconds * len(steps), sleep=time.sleep)
        module.build_model = lambda name: (nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(3072, 10)), 32)

        def see(logits, y):  # the loss, the number correct and the number of samples
            logs = logits.detach().double().log_softmax(1)
            losses = (smoothing - 1) * logs.gather(1, y[:, None]) - smoothing * logs.mean(1, keepdim=True)
            steps.append(torch.tensor([losses.sum(), (logs.argmax(1) == y).sum(), len(y)]))

        def save_checkpoint(path, state, step, settings, global_batch):  # keeps what the epoch must print
            saved[step], args = rf"epoch {step // 5}/5", module.parse_args()
            for key in settings:
                with pytest.raises(SystemExit, match=f"another run.*{key} "):
                    module.restore({"file": path, "step": step, "settings": settings | {key: ""}}, settings, state, 25)
            numbers, keys = vars(args) | {"script": script, "images": 164}, kept + " model" * (script == "cifar10_ddp")
            assert settings == {key: numbers[key] for key in keys.split()}
            if script != "cpu_ddp":
                x, y = (module.load_data(args, train_set=False) if script in IMAGES else
                        module.generate_data(args.samples, args.seed, train_set=False))
                x = getattr(module, "preprocess", nn.Identity())(x, *[32] * (script == "cifar10_ddp"))
                right = (state["model"].eval()(x).argmax(1) == y).sum().item()
                state["model"].train()
                saved[step] += rf" .* {right / 41:.4f} \({right}/41\)\n"
        nn.modules.module.register_module_forward_hook(lambda layer, x, y: rates.append(  # of dropout
            (y[x[0] > 0] == 0).double().mean()) if layer.training and isinstance(layer, nn.Dropout) else None)
        watch(F, "mse_loss", lambda x, y: steps.append(torch.tensor([((x - y) ** 2).sum(), 0, len(y)])))
        watch(F, "cross_entropy", see)
        watch(module, "configure_cpu", lambda processes: begun.update(processes=processes))
        if script in IMAGES:
            watch(module, "download", lambda *_: begun.update(download=time.sleep(rank) or time.monotonic()))
            watch(module, "load_data", lambda *_: begun.setdefault("load", time.monotonic()))
        module.save_checkpoint = save_checkpoint
        return steps, saved, begun, rates
    flags = ("--batch-size", 32 // nproc, "--fake-data" if script in IMAGES else "--samples", 164, "--seed", 3, "--lr",
             0.01, "--epochs", 5, "--save-every", 2, "--log-every", 4, "--checkpoint", tmp_path / "run")
    steps, saved, begun, rates = zip(*(seen for seen, *_ in train(script, *flags, nproc=nproc, setup=setup)))
    steps, text, logged = sum(map(torch.stack, steps)), capfd.readouterr().out, [0]
    for step, loss, accuracy, speed, left in LINE.findall(text):
        logged.append(int(step))
        loss_sum, correct, count = steps[(logged[-1] - 1) // 5 * 5:logged[-1]].sum(0).tolist()  # of its epoch
        assert [float(loss), float(accuracy or 0)] == pytest.approx([loss_sum / count, correct / count], abs=2e-4)
        assert speed == "16" and left == str(timedelta(seconds=2 * (25 - logged[-1])))
    assert {*range(5, 26, 5)} < {*logged} and max(b - a for a, b in zip(logged, logged[1:])) == 2
    assert [*map(list, saved)] == [[10, 20, 25], []][:nproc] and all(node["processes"] == 1 for node in begun)
    assert all(re.search(pattern, text) for pattern in saved[0].values()), saved[0]
    if "mnist" in script:
        assert torch.stack(rates[0]).view(25, 2).mean(0).tolist() == pytest.approx([0.25, 0.5], abs=0.03)
    assert script not in IMAGES or min(node["load"] for node in begun) >= max(node["download"] for node in begun)


def test_recipe_of_cifar10():
    """Without gradients, weights shrink by weight decay, with Nesterov's momentum, at the rate of each step."""
    def setup(module, rank):
        weights, model = [], nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False))
        module.build_model, module.preprocess = lambda name: (model, 32), lambda x, size: torch.zeros(len(x), 3072)
        watch(F, "cross_entropy", lambda *_: weights.append(model[1].weight[0, 0].item()))
        return weights
    flags, momentum = ("--lr", 6400, "--batch-size", 4, "--epochs", 5, "--fake-data", 16), 0
    weights = train("cifar10_ddp", *flags, nproc=2, setup=setup)[0][0]
    for step, weight in enumerate(weights[:-1]):
        momentum = 0.9 * momentum + 5e-4 * weight
        rate = 200 * min((step + 1) / 2, (10 - step) / 8)  # 200 = 6400 * 8 / 256
        assert weights[step + 1] == pytest.approx(weight - rate * (5e-4 * weight + 0.9 * momentum), rel=1e-4)


def test_pixels():
    """Black and white are the ends of the range, and the argument is not written to."""
    for script, low, size in ("mnist_dp", 0, []), ("fashionmnist_ddp", 0, []), ("cifar10_ddp", -1, [48]):
        for argument in torch.tensor([0, 255.0]), torch.tensor([0, 255], dtype=torch.uint8):
            images = argument.view(2, 1, 1, 1).repeat(1, 3, 32, 32)
            black, white = load_script(script).preprocess(images, *size)
            assert [*black.unique(), *white.unique()] == [low, 1] and images.max() == 255


def test_measured_steps(capfd):
    """synthetic_ddp --model: with exchange, a step has all ranks' gradients, and takes as long as the slowest."""
    def setup(module, rank):
        sums, seconds = [], [100, 100, 2, 2, 2, 2 + 2 * rank, 3]  # 5 to warm up, with exchange, without
        module.time = Namespace(perf_counter=lambda: sum(seconds[:len(sums)]), sleep=time.sleep)
        watch(torch.optim.SGD, "step", lambda sgd: sums.append(sgd.param_groups[0]["params"][0].grad.sum().item()))
        return sums
    flags = ("--model", "squeezenet1_1", "--image-size", 64, "--batch-size", 2, "--steps", 1)
    (one, *_), (other, *_) = train("synthetic_ddp", *flags, nproc=2, setup=setup)
    assert one[-2] == other[-2] and one[-1] != other[-1]
    assert re.search(r"1.0 images/s  step 4000.0 ms, without exchange 3000.0 ms  communication overhead 25.0 %  "
                     r"gradients 4.9 MB  peak memory of rank 0 (\d,)?\d\d\d MB$", capfd.readouterr().out, re.MULTILINE)


def test_helpers(tmp_path, monkeypatch):
    """nan is no number, the write probe writes nothing; threads, on 8 cores in an interactive shell of four tasks."""
    module, calls = load_script("fashionmnist_ddp"), []
    for text in "nan", "inf":
        with pytest.raises(ArgumentTypeError):
            module.at_least(0.0)(text)
    (tmp_path / "run.tmp").write_text("of another run")
    assert module.load_checkpoint(tmp_path / "run") == {} and (tmp_path / "run.tmp").read_text() == "of another run"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **how: None)
    for processes, omp, slurm, quota, threads in (
            (1, "3", 8, "max", []), (4, "3", 8, "max", []), (1, "1", 8, "max", []), (4, "1", 8, "max", [2]),
            (9, None, 8, "max", [1]), (2, None, 6, "max", [3]), (2, None, 64, "max", [4]), (1, None, 8, "25000", [2])):
        env = {"OMP_NUM_THREADS": omp, "SLURM_CPUS_ON_NODE": slurm, "LOCAL_WORLD_SIZE": processes,
               "SLURM_STEP_NUM_TASKS": 4, "SLURM_PTY_PORT": 1}
        monkeypatch.setattr(os, "environ", {name: str(value) for name, value in env.items() if value})
        module.open, module.ctypes = (lambda path: io.StringIO(f"{quota} 10000")), None
        module.init_group(0, 1, torch.device("cpu"), 60)
        assert module.setup_environment() == (0, 0, 1) and calls == threads, (processes, omp, slurm, quota)
        calls.clear()

"""What the scripts print is what they did, recomputed; recipes, settings, threads and downloads by their effects."""

import argparse
import io
import os
import re
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from helpers import SCRIPTS, fork, load_script, train

GENERATED = ("cpu_ddp", "synthetic_ddp")
NUMBERS = re.compile(r"step (\d+)/25  loss ([\d.]+)  (?:accuracy ([\d.]+)  )?(\d+) \w+/s  (\S+) left\n")


def small_model(name):
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 10)), 32


@pytest.mark.parametrize("script", SCRIPTS)
def test_printed_numbers(script, tmp_path, capfd):
    """A step takes 1 s on rank 0 and 3 s on rank 1. Five epochs of five steps of 32 samples; 4 samples are left."""
    nproc = 1 if script == "mnist_dp" else 2
    smoothing = 0.1 if script == "fashionmnist_ddp" else 0

    def setup(module, rank):
        steps, saved, threads = [], {}, []  # [loss, correct, samples] of each step; images right when saved
        seconds = 2 if nproc == 1 else 1 + 2 * rank
        module.time = argparse.Namespace(perf_counter=lambda: seconds * len(steps), sleep=time.sleep)
        module.open, module.build_model = lambda *_: io.StringIO(), small_model  # no quota
        os.environ.pop("OMP_NUM_THREADS")
        os.environ["LOCAL_WORLD_SIZE"] = str(nproc)
        os.sched_getaffinity, torch.set_num_threads = lambda _: range(6), threads.append
        cross_entropy, mse_loss = F.cross_entropy, F.mse_loss

        def watch_cross_entropy(logits, y, **how):
            logs, place = logits.detach().double().log_softmax(1), torch.arange(len(y))
            loss = (1 - smoothing) * logs[place, y] + smoothing * logs.mean(1)
            steps.append([-loss.sum().item(), sum(a == b for a, b in zip(logs.argmax(1).tolist(), y.tolist())), len(y)])
            return cross_entropy(logits, y, **how)

        def watch_mse(output, y, **how):
            steps.append([(output.detach() - y).double().square().sum().item(), 0, len(y)])
            return mse_loss(output, y, **how)

        def save_checkpoint(path, state, step, **numbers):
            args, saved[step] = module.parse_args(), None
            if script != "cpu_ddp":
                x, y = (module.generate_data(args.samples, args.seed, train_set=False) if script in GENERATED else
                        module.load_data(args, train_set=False))
                x = module.preprocess(*(x, 32)[:1 + (script == "cifar10_ddp")]) if script not in GENERATED else x
                with torch.no_grad():
                    saved[step] = (state["model"].eval()(x).argmax(1) == y).sum().item(), len(y)
                state["model"].train()

        F.cross_entropy, F.mse_loss, module.save_checkpoint = watch_cross_entropy, watch_mse, save_checkpoint
        return steps, saved, threads

    ranks = train(script, "--epochs", 5, "--batch-size", 32 // nproc, "--samples" if script in GENERATED else
                  "--fake-data", 164, "--lr", 0.01, "--save-every", 2, "--log-every", 4, "--checkpoint", tmp_path / "run",
                  nproc=nproc, setup=setup)
    assert all(code == 0 and threads == [6 // nproc] for (_, _, threads), code, _ in ranks)
    steps = [[sum(column) for column in zip(*parts)] for parts in zip(*(rank[0][0] for rank in ranks))]
    text, saved, logged = capfd.readouterr().out, ranks[0][0][1], []
    for step, loss, accuracy, speed, left in NUMBERS.findall(text):
        logged.append(int(step))
        total, correct, count = map(sum, zip(*steps[(logged[-1] - 1) // 5 * 5:logged[-1]]))  # of its epoch
        assert float(loss) == pytest.approx(total / count, abs=2e-4) and speed == "16"
        assert script == "cpu_ddp" or float(accuracy) == pytest.approx(correct / count, abs=1e-4)
        assert left == str(timedelta(seconds=2 * (25 - logged[-1])))
    assert len(steps) == 25 and {*range(5, 26, 5)} < {*logged}
    assert max(b - a for a, b in zip(logged, logged[1:])) == 2
    assert list(saved) == [10, 20, 25] and not any(rank[0][1] for rank in ranks[1:])
    for step, right in saved.items():
        line = re.search(rf"epoch {step // 5}/5  test accuracy ([\d.]+) \((\d+)/(\d+)\)", text)
        assert right is None or right == (int(line[2]), int(line[3])) and right[1] == 41, (right, line)
        assert right is None or float(line[1]) == pytest.approx(right[0] / 41, abs=1e-4)


# --- recipes ---
def test_recipe_of_cifar10():
    """Without gradients, weights shrink by weight decay, with Nesterov's momentum, at the rate of each step."""
    def setup(module, rank):
        weights, model, cross_entropy = [], nn.Sequential(nn.Flatten(), nn.Linear(3072, 10, bias=False)), F.cross_entropy
        module.build_model, module.preprocess = lambda name: (model, 32), lambda images, size: torch.zeros(len(images), 3072)
        F.cross_entropy = lambda *inputs, **how: (weights.append(model[1].weight[0, 0].item()),
                                                  cross_entropy(*inputs, **how))[1]
        return weights

    ranks = train("cifar10_ddp", "--lr", 6400, "--batch-size", 4, "--epochs", 5, "--fake-data", 16, nproc=2, setup=setup)
    for weights, *_ in ranks:
        weight, momentum = weights[0], 0
        for step in range(10):
            assert weights[step] == pytest.approx(weight, rel=1e-4)
            momentum = 0.9 * momentum + 5e-4 * weight
            weight -= 200 * min((step + 1) / 2, (10 - step) / 8) * (5e-4 * weight + 0.9 * momentum)  # 6400 * 8 / 256


@pytest.mark.parametrize("script", ["mnist_dp", "fashionmnist_ddp"])
def test_dropout(script):
    module, rates = load_script(script), []
    model = module.CNN(*[False] * (script == "mnist_dp"))
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.register_forward_hook(lambda _, x, y: rates.append((y[x[0] > 0] == 0).float().mean().item()))
    model(torch.rand(128, 1, 28, 28))
    assert rates == pytest.approx([0.25, 0.5], abs=0.03)


@pytest.mark.parametrize("script, low, size", [("mnist_dp", 0, ()), ("fashionmnist_ddp", 0, ()),
                                               ("cifar10_ddp", -1, (32,)), ("cifar10_ddp", -1, (48,))])
def test_pixels(script, low, size):
    images = torch.tensor([0, 255.0]).view(2, 1, 1, 1).expand(2, 3, 32, 32).contiguous()
    for argument in images, images.byte():
        ends = load_script(script).preprocess(argument, *size)
        assert ends.dtype == torch.float and torch.equal(ends[0].unique(), torch.tensor([low + 0.0]))
        assert torch.equal(ends[1].unique(), torch.tensor([1.0])) and images.max() == 255  # it writes nothing


def test_measure_exchanges():
    """synthetic_ddp --model: gradients are those of all ranks in the steps with exchange alone, after a slow warm-up."""
    def setup(module, rank):
        gradients, seconds, cross_entropy = [], [0], F.cross_entropy
        module.models.get_model = lambda name, weights: nn.Sequential(nn.Flatten(), nn.Linear(192, 1000))
        module.time = argparse.Namespace(perf_counter=lambda: sum(seconds), sleep=time.sleep)
        F.cross_entropy = lambda *inputs: (seconds.append(4 if len(seconds) > 2 else 100), cross_entropy(*inputs))[1]
        torch.optim.optimizer.register_optimizer_step_pre_hook(
            lambda optimizer, *_: gradients.append(optimizer.param_groups[0]["params"][0].grad.clone()))
        return gradients

    (one, *_), (other, *_) = train("synthetic_ddp", "--model", "resnet18", "--image-size", 8, "--batch-size", 2,
                                   "--steps", 1, nproc=2, setup=setup)
    assert [torch.equal(*pair) for pair in zip(one, other)] == [True] * (len(one) - 1) + [False] and len(one) > 3


# --- settings ---
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_setting_belongs_to_the_run(script, tmp_path):
    """--data-dir N is a folder of N images."""
    module, base = load_script(script), ["--epochs", "1", "--batch-size", "20", "--checkpoint", str(tmp_path / "run")]
    changes = {"seed": "--seed 1", "lr": "--lr 0.5", "batch_size": "--batch-size 21", "bf16": "--bf16"}
    if script in GENERATED:
        base, changes["samples"] = [*base, "--samples", "40"], "--samples 41"
    else:
        base, load_data = [*base, "--data-dir", "40"], module.load_data
        changes |= {"images": "--data-dir 41", "fake_data": "--fake-data 40"}
        module.download, module.build_model = lambda *_: None, small_model
        module.load_data = lambda args, train_set: load_data(
            argparse.Namespace(fake_data=args.fake_data or int(args.data_dir), seed=args.seed), train_set)
    if script == "cifar10_ddp":
        changes["model"] = "--model resnet34"

    def outcome(change):
        sys.argv = ["train.py", *base, *change.split()]
        try:
            return module.train(module.parse_args())
        except SystemExit as error:
            return error.code
        finally:
            dist.is_initialized() and dist.destroy_process_group()

    ((first, again, *refusals),) = fork(1, lambda rank: [outcome(change) for change in ("", "", *changes.values())])
    assert first is None and again is None
    for key, message in zip(changes, refusals):
        assert message and "another run" in message and re.findall(r"(\w+) \S+, not", message) == [key], message


@pytest.mark.parametrize("script", SCRIPTS)
def test_not_a_number(script, monkeypatch, capsys):
    for flag in "--lr", "--log-every", "--epochs":
        for value in "nan", "inf":
            monkeypatch.setattr(sys, "argv", ["train.py", flag, value])
            with pytest.raises(SystemExit):
                load_script(script).parse_args()


def test_write_probe_does_not_truncate(tmp_path):
    (tmp_path / "run.tmp").write_text("of another run")
    assert load_script("cpu_ddp").load_checkpoint(str(tmp_path / "run")) == {}
    assert (tmp_path / "run.tmp").read_text() == "of another run"


# --- launch ---
@pytest.mark.parametrize("processes, env, quota, threads", [
    (1, {"OMP_NUM_THREADS": "3"}, "max", []), (4, {"OMP_NUM_THREADS": "3"}, "max", []), (9, {}, "max", [1]),
    (1, {"OMP_NUM_THREADS": "1"}, "max", []), (4, {"OMP_NUM_THREADS": "1"}, "max", [2]), (1, {}, "max", [8]),
    (2, {"SLURM_CPUS_ON_NODE": "6"}, "max", [3]), (2, {"SLURM_CPUS_ON_NODE": "64"}, "max", [4]), (1, {}, "25000", [2])])
def test_threads(processes, env, quota, threads, monkeypatch):
    """On 8 cores. 1 is what torchrun sets for several processes."""
    module, calls = load_script("fashionmnist_ddp"), []
    module.open, module.ctypes = lambda path: io.StringIO(f"{quota} 10000\n"), None
    monkeypatch.setattr(os, "environ", env)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    module.configure_cpu(processes)
    assert calls == threads


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "mnist_dp"])
def test_shell_of_several_tasks_is_one_process(script, monkeypatch):
    step = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[07-08]",
            "SLURM_JOB_ID": "1"}
    for env, outcome in (step, (2, 1, 4)), (step | {"SLURM_PTY_PORT": "4711"}, (0, 0, 1)):
        monkeypatch.setattr(os, "environ", dict(env))
        assert load_script(script).setup_environment() == outcome


@pytest.mark.parametrize("script", ["cifar10_ddp", "fashionmnist_ddp"])
def test_each_node_downloads_before_its_processes_load(script):
    """Ranks 1 and 2 are on a second node, whose download takes a second."""
    def setup(module, rank):
        downloads, loads, load_data = [], [], module.load_data
        os.environ["LOCAL_RANK"] = str(max(0, rank - 1))
        module.build_model = small_model
        module.download = lambda *_: (time.sleep(rank == 1), downloads.append(time.monotonic()))
        module.load_data = lambda *arguments, **how: (loads.append(time.monotonic()), load_data(*arguments, **how))[1]
        return downloads, loads

    ranks = [rank for rank, *_ in train(script, "--fake-data", 12, "--epochs", 1, "--batch-size", 2, nproc=3, setup=setup)]
    assert [len(downloads) for downloads, _ in ranks] == [1, 1, 0]
    assert min(loads[0] for _, loads in ranks) >= ranks[1][0][0]

# SPDX-License-Identifier: MIT-0
"""Check an edited copy of a DDP script of this collection, on CPUs, in about half a minute.

    python check_copy.py my.py [flags of my.py]

The check trains my.py for two epochs on a few of its own samples: on one process, on two, and
stopped and resumed. It compares data, gradients, weights and results, and says what differs.
Start it in the folder in which my.py finds its data.

Your files: my.py works in a temporary folder, which has copies of your files of up to 1 MB (16 MB
in all), and links to larger ones. What changes a copy, or removes a file, changes nothing of yours.
What Python would write to a linked file, to an absolute path or to ~ is refused. A program that
my.py starts, or a library that writes files without Python, can change these: the check only says
afterwards that a linked file has changed. This was tried on Linux.

It does not see: later epochs, other samples, GPUs, whether the model learns; results that rank 0
computes from its share and only logs; files to which all ranks append; the names (module.) in a
file that my.py saves by itself; an optimizer.step() after several batches, each with zero_grad().

Exit status: 0 if all is ok, 1 after a FAIL, 2 if my.py cannot be checked.
"""
import contextlib
import dataclasses
import json
import linecache
import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile

import scratch

TRAINING_SAMPLES, VAL_SAMPLES = 54, 23  # 3 steps of 16 samples in an epoch; 6 are left out
WAIT = 60  # seconds: a process that computes nothing for longer waits for another


@dataclasses.dataclass
class Record:
    """What watch_copy.py has seen in one process of one job. Digests are texts."""
    # Of each step of an optimizer: rates (and its other options), norms of the gradients by name,
    # and of the calls of the loss before it: losses, parts (digests of batches), number of samples,
    # rows (digests of a sample, and of each of its parts), modes (digests of module.training)
    steps: list = dataclasses.field(default_factory=list)
    # Of each call of evaluate(): results, samples (number), draws (states of random numbers, where
    # they are drawn), changes (of buffers), ddp (called with a DDP model that has buffers); in
    # the job "evaluation": results again, and of the whole set in a single batch
    evaluations: list = dataclasses.field(default_factory=list)
    sizes: list = dataclasses.field(default_factory=list)  # of the data sets
    samples: list = dataclasses.field(default_factory=list)  # digests of some, for each data set
    both: dict = None  # how many samples are read, and are in both sets: see in_both()
    loss: dict = None  # see losses_of_parts()
    weights: dict = dataclasses.field(default_factory=dict)  # digests, at the end
    others: dict = dataclasses.field(default_factory=dict)  # digests of the rest of saved, progress
    saved: dict = dataclasses.field(default_factory=dict)  # digests of what the file has
    not_trained: list = dataclasses.field(default_factory=list)  # names of weights
    written: list = dataclasses.field(default_factory=list)  # files of torch.save()
    args: dict = dataclasses.field(default_factory=dict)  # numbers among the copy's settings
    stopped: bool = False  # by SIGTERM
    seconds: float = 0.0


# ---- What is printed ----
said = []  # the first word of each line
notes = []  # to be said last


def say(word, text):
    said.append(word)
    print(f"{word:4}  {text}", flush=True)


def check(promise, good, otherwise):
    """Print whether a promise holds. Return it."""
    say("ok" if good else "FAIL", promise if good else f"{promise}: {otherwise}")
    return good


def skip(promise, reason):
    say("----", f"not checked: {promise}: {reason}")


def show(results, others=()):
    """Return results as text, with enough digits to differ from others."""
    digits = 4 if [f"{result:.4g}" for result in results] != [f"{other:.4g}" for other in others] \
        else 9
    return ", ".join(f"{result:.{digits}g}" for result in results)


def some(names):
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def say_the_rest():
    """Print the notes, and the number of lines of each kind."""
    for text in notes:
        say("note", text)
    if said.count("FAIL") > 1:
        print("      Mend the first FAIL first. It may cause the others.")
    names = {"ok": "ok", "FAIL": "FAIL", "----": "not checked", "note": "noted"}
    if "ok" in said or "FAIL" in said:
        print(", ".join(f"{said.count(word)} {name}" for word, name in names.items()
                        if word in said))


# ---- The promises, in the order in which they are printed ----
SAMPLES = ("Use random numbers of torch or random in transforms, and numpy with a seed for each "
           "sample. Change no sample in place: clone() it")


def check_data(seen):
    """Compare what load_data() returns on two processes, and in several starts."""
    of_all = [(rank.sizes, rank.samples) for name in ("data", "data of two")
              for rank in seen.get(name, [])]
    return check("all processes, and all starts, load the same data",
                 all(samples == of_all[0] for samples in of_all), "they load other samples. Sort "
                 "what comes from a set or a folder, seed what is random (random, numpy, "
                 "pandas, scikit-learn), use no hash() of strings, and load all samples on all "
                 "ranks")


def check_leak(seen):
    """Look for validation samples among the training samples."""
    promise = "no validation sample is a training sample"
    data = seen["data"][0]
    if not data.both:
        skip(promise, "load_data() does not return two sets with samples")
        return
    found, (samples, tests) = data.both, data.sizes[:2]
    (read_samples, read_tests), both, different = found["read"], found["both"], found["different"]
    by_chance = 1 - found["once"] / read_samples  # in a table of few values
    leak = both > 2 and both / different * samples / read_samples > 0.5 + by_chance
    counts = f"{both} of {different} different validation samples are training samples"
    if read_samples < samples or read_tests < tests:
        promise += f" ({read_tests} of {tests} and {read_samples} of {samples} are read)"
    if both and not leak:
        notes.append(f"{counts}. If they are not equal by nature, divide the data before you repeat "
                     "or transform samples")
    elif not leak and different * read_samples < 10 * samples and read_samples < samples:
        skip(promise, "these are too few to say it")
    else:
        check(promise, not leak, f"{counts}. Draw both sets in one call, from one split, and repeat "
              "samples after it")


def check_ends(seen, problems):
    """Say whether two processes train to the end, and what both of them write."""
    end = problems.get("two", "")
    waits = re.search("waits in|has ended|[Cc]onnection|SIGABRT", end)
    errors = re.search(r"^ +(?!Runtime|dist)\w*(Error|SystemExit)", end, re.M)
    ends = check("two processes train to the end", "two" in seen, ("make the same calls of "
                 "torch.distributed on all ranks, in the same order. Move them out of `if rank == "
                 "0`, let all ranks end a loop together, and use all layers on all ranks (a layer "
                 "that is left out at random needs DDP(..., find_unused_parameters=True)):"
                 if waits and not errors else "they end with an error:") + end)
    if ends:
        both = {*seen["two"][0].written} & {*seen["two"][1].written}
        if both:
            notes.append(f"both processes write {some(sorted(map(os.path.basename, both)))}: write "
                         "it below `if rank == 0`")


def check_ranks(seen):
    """Compare weights, and the rest of what is saved, on two processes at their end."""
    first, second = seen["two"]
    different = [name for name, value in first.weights.items()
                 if second.weights.get(name) != value]
    check("all processes have the same weights at the end", not different,
          f"these differ: {some(different)}. Call ddp_model(...) in training, and in the loss "
          "model(...), no method of it; wrap each model in DDP; set requires_grad in build_model")
    different = [name for name, value in first.others.items()
                 if second.others.get(name) != value]
    if different:
        check("what is saved is the same on all processes", False, f"these differ: "
              f"{some(different)}. Compute them from results of all ranks, as evaluate() and "
              "Sums.results() return them")


def check_loss(seen, problems):
    """Look whether loss and counts are a mean and sums. Return it, in evaluation and training."""
    promise = "the loss is a mean over the samples, and the counts are sums"
    found = seen["loss"][0].loss if "loss" in seen else None
    if not found:
        skip(promise, f"a loss of some of 16 samples ends with an error:{problems['loss']}"
             if "loss" in problems else "the loss is not called for 10 samples or more, by its "
             "name, with a model and tensors of a row for each sample")
        return True, True
    training, evaluation = found["training"], found["evaluation"]
    rounding, of_gradients = (2e-2, 0.1) if found["rounds"] else (1e-3, 1e-3)
    in_evaluation = evaluation["draws"] or is_mean(evaluation, rounding)
    exact = not training["draws"] and not training["changes"]  # no dropout, no BatchNorm
    in_training = is_mean(training, rounding) if exact else in_evaluation
    if in_evaluation and found["difference"] > of_gradients:
        in_training = False
    factor = factor_in_loss(found, in_evaluation)
    means = [count for four, four_times in evaluation["repeated"]
             for count, whole in zip(four[1:], four_times[1:])
             if count % 1 and math.isclose(count, whole, rel_tol=1e-3)]
    if factor or means or (in_evaluation and in_training):
        check(promise, not factor and not means,
              f"{factor}. Return a mean over the samples, not a sum, without a factor for their "
              "number" if factor else
              "the counts are means. Return sums over the samples: metrics() divides them")
    else:
        notes.append(what_is_no_mean(found, in_evaluation, in_training, exact))
    return in_evaluation, in_training


def is_mean(found, tolerance):
    ten, three, seven = (loss for loss, *_ in found["parts"])
    return math.isclose((3 * three + 7 * seven) / 10, ten, rel_tol=tolerance, abs_tol=1e-6)


def factor_in_loss(found, mean):
    """Return what shows that the loss is a sum, or divided by the number of samples, or ''."""
    ten, three, seven = (loss for loss, *_ in found["evaluation"]["parts"])
    if not mean:
        if math.isclose(ten, three + seven, rel_tol=1e-3) or math.isclose(
                100 * ten, 9 * three + 49 * seven, rel_tol=1e-3):
            return (f"the loss of 10 samples is {ten:.4g}, and the losses of 3 and 7 of them are "
                    f"{three:.4g} and {seven:.4g}")
        return ""  # it depends on pairs, or on weights: repeated samples say nothing
    for mode in ("training", "evaluation"):
        tolerance = 0.25 if found[mode]["draws"] else 1e-2
        pairs = [(four[0], four_times[0]) for four, four_times in found[mode]["repeated"]]
        for factor in (4, 0.25):
            if all(loss and math.isclose(of_repeated / loss, factor, rel_tol=tolerance)
                   for loss, of_repeated in pairs):
                return ("the loss of 4 samples, and of these samples four times, is "
                        f"{show(pairs[0])}")
    return ""


def what_is_no_mean(found, in_evaluation, in_training, exact):
    ten, three, seven = (loss for loss, *_ in found["evaluation"]["parts"])
    what = (f"the loss of 10 samples is {ten:.4g}, and the mean of the losses of 3 and 7 of them "
            f"is {(3 * three + 7 * seven) / 10:.4g}")
    if in_training:
        return f"in evaluation mode, {what}. So the validation loss depends on the batch size"
    if in_evaluation:
        what = ("the training loss of 10 samples is no mean of the losses of 3 and 7 of them"
                if exact and not is_mean(found["training"], 2e-2) else
                f"the gradient of 10 samples differs by {found['difference']:.2g} of its length "
                "from the mean of the gradients of 3 and 7 of them")
    return (f"{what}. So the training depends on how a batch is divided among the processes. For "
            "class weights or ignored tokens, see make-it-yours. Gather pairs from all ranks. "
            "Compute no statistics of a batch. Look for shapes that broadcast: (N, 1) and (N,)")


def check_steps(seen, problems, mean):
    """Compare the steps of one and two processes: their number, samples, rates and gradients."""
    promise = "one and two processes make the same steps: samples, rates and gradients"
    one, (first, second) = seen["one"][0].steps, (rank.steps for rank in seen["two"])
    say_the_order(one)
    sizes = [sum(step["number"]) for step in (one[0], first[0], second[0])]
    if len(one) != len(first) or sizes[0] != sizes[1] + sizes[2]:
        check(promise, False, f"one process makes {len(one)} steps, the first of {sizes[0]} "
              f"samples; two make {len(first)}, of {sizes[1]} + {sizes[2]} samples. Divide each "
              "batch among the processes: a share of the samples for each rank (by "
              "DistributedSampler, in place of shuffle=True), and global_batch / world_size of it")
        return
    same_samples = compare_samples(one, first, second)
    if same_samples is False:
        check(promise, False, "the samples differ. Let the order depend on seed and epoch alone, "
              f"and the share on the rank, not the local rank. {SAMPLES}")
        return
    rates = [(rate, other) for step, step_of_two in zip(one, first)
             for rate, other in zip(step["rates"], step_of_two["rates"])]
    if not all(math.isclose(*pair, rel_tol=1e-3) for pair in rates):
        check(promise, False, "rates or other options of the optimizer differ. Compute them from "
              "the global batch, and call a scheduler's step() on all ranks")
        return
    different = compare_gradients(seen, mean)
    if isinstance(different, str):
        skip(promise, f"samples and rates are the same, but {different}")
    elif different and same_samples is None:
        skip(promise, "random transforms or padding differ, and so do the gradients")
    elif different and not mean:
        skip(promise, "samples and rates are the same. The loss is no mean over the samples")
    elif different and (seen["loss"][0].loss or {} if "loss" in seen else {}).get(
            "evaluation", {}).get("draws"):
        skip(promise, "samples and rates are the same. The loss draws random numbers in eval()")
    else:
        check(promise, not different, f"these gradients differ: {some([*different])}. "
              f"{remedy_of_gradients([*different.values()])}")


def say_the_order(steps):
    """Note if the two epochs have the same order. In random transforms, labels show it."""
    rows = [step["rows"] for step in steps]
    epochs = [[row for step in part for row in step]
              for part in (rows[:len(rows) // 2], rows[len(rows) // 2:])]
    for place in range(min(map(len, epochs[0] + epochs[1]), default=0)):
        orders = [[row[place] for row in epoch] for epoch in epochs]
        if orders[0] == orders[1] and len({*orders[0]}) > 2:
            notes.append("both epochs have the same order of samples: call sampler.set_epoch(epoch) "
                         "before each, or shuffle with a seed of the epoch")
            return


def compare_samples(one, first, second):
    """Return whether each step has the same samples on one and two processes. None: unknown.

    Random transforms may differ: then some part of the samples, as their labels, is the same.
    """
    def samples(*steps):
        rows = [row for step in steps for row in step["rows"]]
        return rows or [[part] for step in steps for part in step["parts"]]  # of graphs

    alone = [samples(step) for step in one]
    of_both = [samples(*steps) for steps in zip(first, second)]

    def same(place):
        of_one, of_two = ([sorted(row[place] for row in step if place < len(row))
                           for step in steps] for steps in (alone, of_both))
        return of_one == of_two and (place == 0 or len({*of_one[0]}) > 2)

    if not any(alone):
        return None
    if same(0):
        return True
    if any(map(same, range(1, len(alone[0][0]) if alone[0] else 0))):
        return None
    return False if any(step["rows"] for step in one) else None


def compare_gradients(seen, mean):
    """Return the ratios of norms that differ, by name. A text: they cannot be compared.

    First as they are in training, then in evaluation mode: without dropout and BatchNorm.
    """
    tolerance = 2e-2 if rounds(seen) else 1e-3
    ratios = {}
    for names in (("one", "two"), ("gradients", "gradients of two")):
        norms, others = {}, {}
        for name, found in zip(names, (norms, others)):
            for step in seen[name][0].steps if name in seen else ():
                for weight, norm in step["norms"].items():
                    found.setdefault(weight, norm)
        if not any(norms.values()):
            continue
        least = 1e-4 * math.hypot(*norms.values()) / math.sqrt(len(norms))  # or rounding
        ratios = {name: others.get(name, 0.0) / value if value else math.inf
                  for name, value in norms.items()
                  if abs(value - others.get(name, math.inf)) > tolerance * max(value, least)}
        if not ratios:
            return {}
    return ratios or "the optimizer computes the gradients itself, or a gradient is not seen"


def remedy_of_gradients(ratios):
    if ratios and abs(ratios[0] - 1) > 0.1 and all(
            math.isclose(ratio, ratios[0], rel_tol=1e-2) for ratio in ratios):
        return (f"On two processes, they are {ratios[0]:.3g} times as large. Multiply each loss by "
                "len(batch[0]) * world_size / global_batch before backward() (in synthetic_ddp, by "
                "nothing)")
    return ("Call ddp_model(...) in training, and in the loss model(...), no method of it; call "
            "zero_grad() once, before the parts, and clip after the last part; compute class "
            "weights and statistics from all samples, not from a rank's share; use random numbers "
            "of torch in the loss and in build_model, not of numpy or random; keep no state in "
            "attributes or globals")


def check_evaluation(seen, mean):
    """Compare the validation results of the same weights: again, in one batch, on two processes."""
    promise = "the same weights have the same validation results on one and two processes"
    found = {name: ranks[0].evaluations[0] for name, ranks in seen.items()
             if ranks[0].evaluations and ranks[0].evaluations[0]["results"]}
    if not {"one", "evaluation", "evaluation of two"} <= {*found}:
        if "one" not in found:
            skip(promise, "no evaluate() is called in the first two epochs, or there are no samples")
        return
    say_what_is_evaluated(seen, found["one"])
    evaluation = found["evaluation"]
    results, again, whole = (evaluation[name] for name in ("results", "again", "whole"))
    if again != results or evaluation["changes"]:
        changes = "it changes the model. " if evaluation["changes"] else ""
        check("the same weights give the same result when they are evaluated again", False,
              f"{show(results, again)}, then {show(again, results)}. {changes}Call model.eval() in "
              "evaluate(); augment images, and mix samples, only if model.training; give F.dropout "
              "training=self.training; add up no results of earlier evaluations")
        return
    if evaluation["draws"]:
        skip(promise, "the evaluation draws random numbers")
        draws = [draw for other in seen["one"][0].evaluations for draw in other["draws"]]
        if len({*draws}) == len(draws):
            notes.append("the evaluation draws random numbers, other ones each time: give "
                         "F.dropout training=self.training, or call torch.manual_seed(0) before "
                         "evaluate()")
        return
    alike = len(results) * [True]
    if whole and not rounds(seen):  # rounding decides which of two scores is the higher
        alike = [math.isclose(*pair, rel_tol=2e-3, abs_tol=1e-9) for pair in zip(results, whole)]
        if not all(alike if mean else alike[1:]):  # the loss has a note of its own
            notes.append("the validation results depend on the batch size: "
                         f"{show(results, whole)}, and {show(whole, results)} in a single batch. "
                         "Return counts as sums over the samples, not as means. Compute F1, a "
                         "correlation or a rank from counts or outputs of all samples")
    alike[0] = alike[0] and mean
    on_two = found["evaluation of two"]["results"]
    pairs = [pair for pair, good in zip(zip(on_two, results), alike) if good]
    if not pairs:
        skip(promise, "the results depend on the batch size")
        return
    tolerance = 2e-2 if rounds(seen) else 2e-3
    check(promise, all(math.isclose(*pair, rel_tol=tolerance, abs_tol=1e-6) for pair in pairs),
          f"{show(on_two, results)} on two, {show(results, on_two)} on one. Evaluate each sample "
          "once: let each rank take its share, without drop_last, and return the results of the "
          "sums over all ranks")


def say_what_is_evaluated(seen, evaluation):
    """Note another number of samples than there are, and a call with the DDP model."""
    sizes = seen["data"][0].sizes
    wanted = VAL_SAMPLES if len(sizes) > 1 and sizes[1] else 0
    for name, processes in (("one", "one process"), ("two", "two processes")):
        counts = [sum(rank["samples"] for rank in ranks) for ranks in
                  zip(*(rank.evaluations for rank in seen.get(name, [])))]
        if wanted and counts and any(counts) and wanted not in counts:
            notes.append(f"{counts[0]} samples are evaluated on {processes}, where the validation "
                         f"set has {wanted}")
    if "two" in seen and any(found["ddp"] for found in seen["two"][0].evaluations):
        notes.append("evaluate() is called with the DDP model, which exchanges its buffers for each "
                     "batch: with unequal numbers of batches, the ranks wait for each other. Call "
                     "it with model")


WHOLE_STEPS = ("If a step() takes several batches, let it end in their epoch, and save after it "
               "alone")
# What is compared in the first step after a resume, in this order, and the remedy
AFTER_A_RESUME = {
    "rates": ("rate", "Put the scheduler into saved, before resume() is called"),
    "modes": ("mode", "Call model.train() after an evaluation of your own"),
    "number": ("number of samples", WHOLE_STEPS),
    "rows": ("samples", f"{SAMPLES}. {WHOLE_STEPS}"),
    "losses": ("loss", "Put all models into saved, and counters into progress, before resume() is "
               "called, and load no other weights after it. Use random numbers of torch. Keep no "
               "state in attributes or globals: register a queue as a buffer of a model, and begin "
               "a hidden state with zeros"),
    "norms": ("gradient", "Call optimizer.zero_grad() before each step. clone() a gradient that "
              "you keep"),
}


def check_resume(seen, problems, has_saved):
    """Compare a run that is stopped in its second epoch, and resumed, with one that is not."""
    promise = "a stopped and resumed run ends with the same numbers"
    one = seen["one"][0]
    if not one.saved:
        skip(promise, "nothing is saved in the file of --checkpoint")
        return
    if "stopped" in seen and not seen["stopped"][0].stopped:
        if len(one.steps) < 5:
            skip(promise, f"two epochs have only {len(one.steps)} steps")
        else:
            check(promise, False, "SIGTERM does not stop the run, although it is received")
        return
    if not has_saved:
        check(promise, False, "a run that is stopped in its second epoch has saved nothing. Save "
              f"after each epoch{problems.get('stopped', '')}")
        return
    if "resumed" not in seen:
        check(promise, False, f"the resumed run does not end{problems['resumed']}")
        return
    resumed = seen["resumed"][0]
    if len(resumed.steps) >= len(one.steps):
        check(promise, False, f"the resumed run makes all {len(one.steps)} steps again. Load the "
              "file of --checkpoint by resume(), count in progress, and let errors end the run")
        return
    first, remedy = first_difference(one, resumed, seen.get("stopped"))
    before, after = ({**job.weights, **job.saved} for job in (one, resumed))
    different = [place for place in before if before[place] != after.get(place)]
    results = [[evaluation["results"] for evaluation in job.evaluations[-1:]]
               for job in (one, resumed)]
    different += ["validation results"] * (results[0] != results[1])
    check(promise, not different, f"these differ: {some(first + different)}. {remedy}")


def first_difference(one, resumed, stopped):
    """Return what differs first after a resume (a list of one text, or none), and the remedy."""
    made = len(stopped[0].steps) + len(resumed.steps) if stopped else len(one.steps)
    if made != len(one.steps):  # other steps are compared
        return [f"the numbers of steps ({made}, not {len(one.steps)})"], WHOLE_STEPS
    steps = zip(one.steps[len(one.steps) - len(resumed.steps):], resumed.steps)
    for number, (before, after) in enumerate(steps, 1):
        for key, (name, remedy) in AFTER_A_RESUME.items():
            if before[key] != after[key]:
                if number > 1:
                    remedy = ("Put what must survive a stop into saved or progress, before "
                              "resume() is called: models, optimizers, averages, counters")
                return [f"{name} of step {number} after the resume"], remedy
    return [], ("Put what must survive a stop into saved or progress, before resume() is called: "
                "models, optimizers, averages, counters")


def rounds(seen):
    """Return whether the copy computes in bfloat16 or float16."""
    found = seen["loss"][0].loss if "loss" in seen else None
    return found["rounds"] if found else "--bf16" in sys.argv


# ---- The command ----
class Servers:
    """Two interpreters that train copies (watch_copy.py): as on two machines, of a rank each."""

    def __init__(self):
        others = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "SLURM_", "PMI",
                  "OMPI_", "PET_", "TORCHELASTIC_", "GLOO_", "PYTHONHASHSEED")  # of another job
        env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        env.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", WANDB_MODE="disabled",
                   PYTHONDONTWRITEBYTECODE="1",
                   TORCH_DISTRIBUTED_DEBUG="INFO")  # names the parameters that have no gradient
        command = [sys.executable, os.path.join(os.path.dirname(os.path.realpath(__file__)),
                                                "watch_copy.py")]
        self.processes = [subprocess.Popen(command, env=env, stdin=subprocess.PIPE, text=True,
                                           stdout=subprocess.PIPE, start_new_session=True)
                          for _ in range(2)]

    def do(self, jobs, **common):
        """Do the jobs (orders), and return their records and how the others ended, by name."""
        waiting = [[], []]
        for job in jobs:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            for rank in range(job["size"]):
                number = rank if job["size"] > 1 else job.get("server", 0)
                order = {**common, "checkpoint": job["root"], "stop": 0, "args": {}, **job,
                         "rank": rank, "port": port}
                self.processes[number].stdin.write(json.dumps(order) + "\n")
                waiting[number].append((job["name"], rank))
            for process in self.processes:
                process.stdin.flush()
        statuses = {}
        for process, names in zip(self.processes, waiting):
            for name in names:
                statuses[name] = json.loads(process.stdout.readline() or "-9")
        return read_records(jobs, statuses, common["folder"], common["path"])

    def end(self):
        for process in self.processes:
            process.terminate()  # it ends what it has started
            process.wait()


def read_records(jobs, statuses, folder, path):
    seen, problems = {}, {}
    for job in jobs:
        names = [f"{folder}/{job['name']}-{rank}" for rank in range(job["size"])]
        files = [pathlib.Path(f"{name}.json") for name in names]
        if all(file.exists() for file in files):
            seen[job["name"]] = [Record(**json.loads(file.read_text())) for file in files]
            continue
        ends = [how_it_ended(path, statuses[job["name"], rank], f"{name}.log")
                for rank, name in enumerate(names)]
        problems[job["name"]] = "".join(f"\n      rank {rank} {end}"
                                        for rank, end in enumerate(ends))
    return seen, problems


def how_it_ended(path, status, log):
    """Return how a process has ended, and in which lines of the copy."""
    text = pathlib.Path(log).read_text(errors="replace") if os.path.exists(log) else ""
    if status == 0:
        return "has ended"
    waits = "Timeout (" in text  # faulthandler's word
    stack = text.rpartition("(most recent call")[2]
    if "\nOriginal Traceback" in text:  # of a loader process, behind that of this process
        stack = re.split("^Traceback", text, flags=re.MULTILINE)[-1]
    if status == "limit":
        return "takes too long"
    if status < 0 and not waits:
        name = signal.Signals(-status).name
        return f"was killed by {name}" + (": is there too little memory?" if name == "SIGKILL"
                                          else f" after:\n        {text.strip()[-300:]}")
    errors = re.findall(r"^(?:[\w.]+Error|SystemExit|error|Parameters which).*|^\S+: error: .*",
                        text if "SystemExit" in stack else stack, re.M)
    frames = re.findall(rf'File ".*{re.escape(path)}", line (\d+)(?:,? in (\w+))?', stack)
    lines = ["waits in" if waits else "ends with an error in"]
    for number, name in [frame for frame in frames if frame[1]] or frames[-1:]:
        place = f"line {number}, {name}()" if name else f"line {number}"
        lines.append(f"{place}: {linecache.getline(path, int(number)).strip()}")
    if "in collate_tensor_fn" in stack:
        lines.append("samples of one batch have different shapes")
    lines += [] if waits else errors[-2:] or stack.splitlines()[-3:]
    return "\n        ".join(line[:400] for line in lines)


def main():
    """Return the exit status."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0 if sys.argv[1:] else 2
    path = os.path.realpath(sys.argv[1])
    reason = why_not(path)
    if reason:
        skip(sys.argv[1], reason)
        return 2
    try:
        with contextlib.ExitStack() as ends:
            folder = ends.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            servers = Servers()
            ends.callback(servers.end)
            return compare(servers, os.path.realpath(folder), path, sys.argv[2:])
    except KeyboardInterrupt:
        skip("the rest", "interrupted")
        return 2


def why_not(path):
    """Return why a file is no copy of a script of this version, or ''."""
    if not os.path.isfile(path):
        return "there is no such file"
    text = pathlib.Path(path).read_text(errors="replace")
    for name in ("parse_args", "load_data", "train"):
        if not re.search(rf"\b{name}\b", text):
            return (f"it has no function {name}, so it is no copy of a DDP script of this "
                    "collection")
    if re.search(r"def (loss_and_correct|results_of|restore|check_weights)\(", text) and \
            "progress" not in text:
        return "it is a copy of an older version: use the check_copy.py of its version"
    return ""


def compare(servers, folder, path, flags):
    """Train, print what holds and what differs, and return the exit status."""
    said.clear()
    notes.clear()
    mirror, common = make_mirror(folder, path, flags)
    seen, problems = train_copies(servers, folder, common)
    if seen:
        print_promises(seen, problems, os.path.exists(f"{folder}/stopped.pt"))
    changed = mirror.changed()
    if changed:
        notes.append("these linked files have changed during the check, by a program, or by a "
                     f"library that writes without Python: {some(changed)}")
    say_the_rest()
    return 2 if not seen else 1 if "FAIL" in said else 2 if "broken" in problems else 0


def make_mirror(folder, path, flags):
    """Mirror the user's folders, say it, and return the Mirror and what all orders have."""
    here, beside = os.getcwd(), os.path.dirname(path)
    mirror = scratch.Mirror(f"{folder}/base")
    mirror.add(here)
    if not f"{beside}/".startswith(f"{here}/"):
        mirror.add(beside)
    others = scratch.Mirror(f"{folder}/base", most=2000)
    others.add(os.path.dirname(here), levels=1)
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    homes = {"TORCH_HOME": f"{cache}/torch", "HF_HOME": f"{cache}/huggingface"}
    homes = {name: os.path.realpath(os.environ.get(name, place)) for name, place in homes.items()}
    for place in filter(os.path.isdir, homes.values()):
        others.add(place)
    names = [os.path.relpath(path) for path in mirror.linked]
    links = f"and links to {len(names)} ({some(names)})" if names else "and no links"
    print(f"""\
Training {sys.argv[1]} on CPUs, at first on one process: two epochs of 3 steps of 16 samples, of
{TRAINING_SAMPLES} training samples, and of {VAL_SAMPLES} validation samples if there are any.
It works in a temporary folder, with copies of {mirror.copied} of your files {links}. Python
cannot change what is linked, at an absolute path or in ~; programs that it starts, and libraries
that write without Python, can.""", flush=True)
    return mirror, {"folder": folder, "path": path, "here": here, "flags": flags, "homes": homes}


def train_copies(servers, folder, common):
    """Return what was seen in each job, and how the others ended. No job: it cannot be checked."""
    def job(kind, name, size=1, **more):
        root = more.get("root", name)
        if not os.path.exists(f"{folder}/{root}"):
            scratch.clone(f"{folder}/base", f"{folder}/{root}")
        return {"kind": kind, "name": name, "size": size, "root": root, **more}

    first = {**common, "wait": 900, "limit": 1800}
    seen, problems = servers.do([job("Preparation", "preparation", root="base")], **first)
    if not problems:
        seen, problems = servers.do([job("Training", "one"), job("Data", "data", server=1)],
                                    **first)
    for name in [*problems]:
        reason = ("it would change a file at an absolute path, in ~, or one that is linked"
                  if scratch.REFUSED in problems[name] else
                  "SyncBatchNorm needs GPUs: check with BatchNorm"
                  if "SyncBatchNorm" in problems[name] else
                  f"one process does not train to the end on a CPU, with {TRAINING_SAMPLES} samples")
        skip("anything", f"{reason}:{problems[name]}")
        return {}, {}
    one = seen["one"][0]
    if not one.steps:
        skip("anything", "train() has made no step of an optimizer")
        return {}, {}
    print(f"Now on two processes, and stopped and resumed: about {7 * one.seconds:.0f} s more (if "
          f"the processes wait for each other, {WAIT} s more).", flush=True)
    steps = len(one.steps)
    stop = min(steps * 2 // 3, steps - 2)
    jobs = [job("Training", "two", 2), job("Data", "data of two", 2),
            job("Gradients", "gradients of two", 2),
            job("Loss", "loss"), job("Gradients", "gradients"),
            job("Stop", "stopped", server=1, stop=stop if stop > steps // 2 else steps // 2 + 1),
            job("Training", "resumed", server=1, root="stopped")]
    if one.evaluations:
        jobs[3:3] = [job("Evaluation", "evaluation of two", 2)]
        jobs.append(job("Evaluation", "evaluation"))
    wait = WAIT + one.seconds
    others, problems = servers.do(jobs, **common, wait=wait, limit=4 * wait, args=one.args)
    return {**seen, **others}, problems


def print_promises(seen, problems, has_saved):
    if not check_data(seen):
        skip("the rest", "it would differ, too")
        return
    check_leak(seen)
    check_ends(seen, problems)
    if "two" in seen:
        check_ranks(seen)
    in_evaluation, in_training = check_loss(seen, problems)
    if "two" in seen:
        check_steps(seen, problems, in_training)
    check_evaluation(seen, in_evaluation)
    check_resume(seen, problems, has_saved)
    names = seen["one"][0].not_trained
    if names:
        notes.append(f"these weights are in no optimizer: {some(names)}. If this is intended, set "
                     "requires_grad to False in build_model")
    broken = [name for name in ("data of two", "evaluation", "evaluation of two")
              if name in problems]
    if broken:
        skip("the rest", f"{broken[0]} ends with an error:{problems[broken[0]]}")
        problems["broken"] = True


if __name__ == "__main__":
    sys.exit(main())

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
computes from its share and only logs; files that all ranks write; the names (module.) in a
file that my.py saves by itself; an optimizer.step() after several batches, each with zero_grad().

Exit status: 0 if all is ok, 1 after a FAIL, 2 if my.py cannot be checked.
"""
import collections
import contextlib
import math
import os
import pathlib
import re
import signal
import sys
import tempfile

import scratch

TRAINING_SAMPLES, VAL_SAMPLES = 54, 23  # 3 steps of 16 samples in an epoch; 6 are left out
WAIT = 60  # seconds: a process that computes nothing for longer waits for another


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
            # Paths of sockets of loader processes (44 more characters here) have 103 at most
            short = "/tmp" if len(os.path.realpath(tempfile.gettempdir())) > 59 else None
            folder = ends.enter_context(tempfile.TemporaryDirectory(dir=short,
                                                                    ignore_cleanup_errors=True))
            servers = scratch.Servers(folder)
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
        if name not in text:
            return f"it has no {name}, so it is no copy of a DDP script of this collection"
    if re.search(r"def (loss_and_correct|results_of|restore|check_weights)\(", text):
        return "it is a copy of an older version: use the check_copy.py of its version"
    return ""


def compare(servers, folder, path, flags):
    """Train, print what holds and what differs, and return the exit status."""
    said.clear()
    notes.clear()
    mirror, common = make_mirror(folder, path, flags)
    seen, problems = train_copies(servers, folder, common)
    if seen and check_data(seen, problems):
        for promise in (check_leak, check_ends, check_ranks, check_loss, check_steps,
                        check_evaluation, check_resume):
            promise(seen, problems)
    changed = mirror.changed()
    if changed:
        notes.append("these linked files have changed during the check, by a program, or by a "
                     f"library that writes without Python: {some(changed)}")
    say_the_rest()
    return 1 if "FAIL" in said else 0 if "ok" in said else 2


# ---- The training ----
def make_mirror(folder, path, flags):
    """Mirror the user's folders, say it, and return the Mirror and what all orders have."""
    mirror, folders = scratch.mirror_folders(folder, os.path.dirname(path))
    names = [os.path.relpath(path) for path in mirror.linked]
    links = f"and links to {len(names)} ({some(names)})" if names else "and no links"
    print(f"""\
Training {sys.argv[1]} on CPUs, at first on one process: two epochs of 3 steps of 16 samples, of
{TRAINING_SAMPLES} training samples, and of {VAL_SAMPLES} validation samples if there are any.
It works in a temporary folder, with copies of {mirror.copied} of your files {links}. What Python
would write to a link, to an absolute path or to ~ is refused. A program that it starts, or a
library that writes without Python, can change these.""", flush=True)
    return mirror, {**folders, "folder": folder, "path": path, "flags": flags,
                    "samples": [TRAINING_SAMPLES, VAL_SAMPLES]}


def train_copies(servers, folder, common):
    """Return what is seen in each job (a Record of watch_copy.py for each rank), by its name.

    Return also how the other jobs ended. No job: the copy cannot be checked.
    """
    def job(kind, name, size=1, **more):
        root = more.get("root", name)
        if not os.path.exists(f"{folder}/{root}"):
            scratch.clone(f"{folder}/base", f"{folder}/{root}")
        return {"kind": kind, "name": name, "size": size, "root": root, **more}

    def do(*jobs, **limits):
        return servers.do(jobs, **common, **limits)

    first = {"wait": 900, "limit": 1800}
    seen, problems = do(job("Preparation", "preparation", root="base"), **first)
    if not problems:
        common["args"] = seen["preparation"][0].args
        seen, problems = do(job("Training", "one"), job("Data", "data", server=1), **first)
    for end in problems.values():
        reason = ("it would change a file at an absolute path, in ~, or one that is linked. Open "
                  "data for reading alone, and write to new files at relative paths"
                  if scratch.REFUSED in end else
                  f"one process cannot train to the end (on a CPU, {TRAINING_SAMPLES} samples)")
        skip("anything", f"{reason}:{end}")
        return {}, {}
    one = seen["one"][0]
    if not one.steps:
        skip("anything", "train() has made no step of an optimizer")
        return {}, {}
    print(f"Now on two processes, and stopped and resumed: about {6 * one.seconds:.0f} s more (if "
          f"the processes wait for each other, {WAIT} s more).", flush=True)
    steps = len(one.steps)
    stop = max(min(steps * 2 // 3, steps - 2), steps // 2 + 1)  # in the second epoch
    wait = WAIT + one.seconds
    others, problems = do(
        job("Training", "two", 2), job("Data", "data of two", 2),
        job("Gradients", "gradients of two", 2), job("Loss", "loss"), job("Gradients", "gradients"),
        job("Stop", "stopped", server=1, stop=stop),
        job("Training", "resumed", server=1, root="stopped"), wait=wait, limit=4 * wait)
    return {**seen, **others}, problems


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


def some(names):
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def say_the_rest():
    """Print the notes, and the number of lines of each kind."""
    for text in notes:
        say("note", text)
    if said.count("FAIL") > 1:
        print("      Mend the first FAIL first. It may cause the others.")
    names = {"ok": "ok", "FAIL": "FAIL", "----": "not checked", "note": "noted"}
    print(", ".join(f"{said.count(word)} {name}" for word, name in names.items() if word in said))


# ---- The promises, in the order in which they are printed ----
SAMPLES = ("Use random numbers of torch or random in transforms, and numpy with a seed for each "
           "sample. Change no sample in place: clone() it")
CALLS = "Call ddp_model(...) in training, and in the loss model(...), no method of it"


def check_data(seen, problems):
    """Compare what load_data() returns in three processes. Return whether it is the same."""
    promise = "all processes, and all starts, load the same data"
    of_all = [[(part["size"], part["samples"]) for part in rank.data]
              for rank in seen["data"] + seen.get("data of two", [])]
    if len(of_all) < 3 or not of_all[0]:
        skip(promise, problems.get("data of two", "load_data() returns no data set, no tensors"))
        return True
    same = check(promise, of_all[0] == of_all[1] == of_all[2],
                 "they load other samples. Sort what comes from a set or a folder, seed what is "
                 "random (random, numpy, pandas, scikit-learn), use no hash() of strings, and load "
                 "all samples on all ranks")
    if not same:
        skip("the rest", "it would differ, too")
    return same


def check_leak(seen, problems):
    """Look for validation samples among the training samples."""
    promise = "no validation sample is a training sample"
    sets = [part for part in seen["data"][0].data if part["size"]][:2]
    if len(sets) < 2:
        skip(promise, "load_data() does not return two sets with samples")
        return
    training, validation = (part["read"] for part in sets)
    different, samples = {*validation}, sets[0]["size"]
    both = different & {*training}
    of_all = len(both) / len(different) * samples / len(training)
    once = [*collections.Counter(training).values()].count(1)
    by_chance = 1 - once / len(training)  # in a table of few values
    counts = f"{len(both)} of {len(different)} different validation samples are training samples"
    if len(training) < samples or len(validation) < sets[1]["size"]:
        promise += (f" ({len(validation)} of {sets[1]['size']} and {len(training)} of {samples} "
                    "are read)")
    if len(both) > 2 and of_all > 0.5 + by_chance:
        check(promise, False, f"{counts}. Draw both sets in one call, from one split, and repeat "
              "samples after it")
    elif both:
        notes.append(f"{counts}. If they are not equal by nature, divide the data before you "
                     "repeat or transform samples")
    else:
        check(promise, True, "")


def check_ends(seen, problems):
    """Say whether two processes train to the end."""
    end = problems.get("two", "")
    remedy = ("make the same calls of torch.distributed on all ranks, none below `if rank == 0`, "
              "let all end a loop together, and use all layers (one that is left out at random "
              "needs DDP(..., find_unused_parameters=True)):"
              if re.search("waits in|has ended|[Cc]onnection", end) else "they end with an error:")
    check("two processes train to the end", "two" in seen, remedy + end)


def check_ranks(seen, problems):
    """Compare weights, and the rest of what is saved, on two processes at their end."""
    if "two" in seen:
        first, second = (rank.state for rank in seen["two"])
        different = [name for name in first if first[name] != second.get(name)]
        check("all processes have the same weights at the end, and save the same", not different,
              f"these differ: {some(different)}. {CALLS}; wrap each model in DDP; set "
              "requires_grad in build_model; compute what you save from results of all ranks")


def check_loss(seen, problems):
    """Look whether the loss is a mean, by the losses of 10 samples, of 3 and 7 of them."""
    promise = "the loss is a mean over the samples"
    found = seen["loss"][0].loss if "loss" in seen else {}
    sums = [loss["losses"] for loss in found.values() if is_sum(*loss["losses"], loss["varies"])]
    no_mean = modes_without_mean(seen)
    if not found:
        skip(promise, problems.get("loss", "it is not called for 10 samples or more, by its name, "
                                   "with a model and tensors of a row for each sample"))
    elif sums:
        ten, three, seven = sums[0]
        check(promise, False, f"the loss of 10 samples is {ten:.4g}, and the losses of 3 and 7 of "
              f"them are {three:.4g} and {seven:.4g}. Return a mean over the samples, not a sum, "
              "without a factor for their number")
    elif no_mean:
        ten, three, seven = found[no_mean[0]]["losses"]
        notes.append(f"in {no_mean[0]}, the loss of 10 samples is {ten:.4g}, and the mean of the "
                     f"losses of 3 and 7 of them is {(3 * three + 7 * seven) / 10:.4g}. So it "
                     "depends on how a batch is divided among the processes. For class weights, "
                     'use reduction="none" and .mean(); for ignored tokens, see synthetic_ddp/'
                     "make-it-yours.md; for a loss of pairs, gather them from all ranks; compute "
                     "no statistics of a batch; look for shapes that broadcast: (N, 1) and (N,)")
    elif found["evaluation"]["varies"]:
        skip(promise, "it draws random numbers in eval()")
    else:
        check(promise, True, "")


def is_sum(ten, three, seven, varies):
    """Return whether a loss is a sum, or a mean that is divided by the number of samples."""
    tolerance = 1e-2 if varies else 1e-3
    return ten and (math.isclose(ten, three + seven, rel_tol=tolerance)
                    or math.isclose(100 * ten, 9 * three + 49 * seven, rel_tol=tolerance))


def modes_without_mean(seen):
    """Return in which modes the loss is no mean over the samples, as far as this is known."""
    found = seen["loss"][0].loss if "loss" in seen else {}
    modes = []
    for mode, loss in found.items():
        ten, three, seven = loss["losses"]
        if not loss["varies"] and not math.isclose((3 * three + 7 * seven) / 10, ten,
                                                   rel_tol=tolerance_of(seen), abs_tol=1e-6):
            modes.append(mode)
    return modes


def tolerance_of(seen):
    """Return the relative difference that rounding makes."""
    return 2e-2 if seen["one"][0].rounds else 1e-3


def check_steps(seen, problems):
    """Compare the steps of one and two processes: their number, samples, rates and gradients."""
    if "two" not in seen:
        return
    promise = "one and two processes make the same steps: samples, rates and gradients"
    one, first, second = seen["one"][0].steps, seen["two"][0].steps, seen["two"][1].steps
    say_the_order(one)
    sizes = [len(steps[0]["rows"]) if steps else 0 for steps in (one, first, second)]
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
    if not all(math.isclose(*pair, rel_tol=1e-3) for steps in zip(one, first)
               for pair in zip(*(step["rates"] for step in steps))):
        check(promise, False, "rates or other options of the optimizer differ. Compute them from "
              "the global batch, and call a scheduler's step() on all ranks")
        return
    different, unknown = compare_gradients(seen)
    if different and not unknown:
        unknown = ("random transforms or padding differ" if same_samples is None else
                   "the loss is no mean over the samples" if modes_without_mean(seen) else
                   "the loss draws random numbers in eval()" if "loss" in seen
                   and seen["loss"][0].loss["evaluation"]["varies"] else "")
    if unknown:
        skip(promise, f"of the gradients: {unknown}")
    else:
        check(promise, not different, f"these gradients differ: {some([*different])}. "
              f"{remedy_of_gradients([*different.values()])}")


def say_the_order(steps):
    """Note if the two epochs have the same order. In random transforms, labels show it."""
    rows = [[row for step in part for row in step["rows"]]
            for part in (steps[:len(steps) // 2], steps[len(steps) // 2:])]
    for place in range(min(map(len, rows[0] + rows[1]), default=0)):
        orders = [[row[place] for row in epoch] for epoch in rows]
        if orders[0] == orders[1] and len({*orders[0]}) > 1:
            notes.append("both epochs have the same order of samples: call "
                         "sampler.set_epoch(epoch) before each, or shuffle by a seed of the epoch")
            return


def compare_samples(one, first, second):
    """Return whether each step has the same samples on one and two processes. None: unknown.

    Random transforms may differ: then some part of the samples, as their labels, is the same.
    """
    alone = [step["rows"] for step in one]
    of_both = [step["rows"] + other["rows"] for step, other in zip(first, second)]
    width = min((len(row) for step in alone + of_both for row in step), default=0)
    for place in range(width):
        of_one, of_two = ([sorted(row[place] for row in step) for step in steps]
                          for steps in (alone, of_both))
        if of_one == of_two and (place == 0 or len({*of_one[0]}) > 1):
            return True if place == 0 else None
    shapes = {str(shape) for step in one + first + second for shape in step["shapes"]}
    return False if width and len(shapes) == 1 else None  # of padded samples, they differ


def compare_gradients(seen):
    """Return the ratios of norms that differ, by name, and why they cannot be compared, or ''.

    First as they are in training, then in evaluation mode: without dropout and BatchNorm.
    """
    for names, unknown in ((("one", "two"), "the optimizer computes them itself"),
                           (("gradients", "gradients of two"), "the model has none in eval()")):
        norms, others = (first_norms(seen[name][0].steps) if name in seen else {}
                         for name in names)
        if not any(norms.values()) or not others:
            return {}, unknown
        least = 1e-4 * math.hypot(*norms.values()) / math.sqrt(len(norms))  # or rounding
        ratios = {place[0]: others.get(place, 0.0) / value if value else math.inf
                  for place, value in norms.items()
                  if abs(value - others.get(place, math.inf)) >
                  tolerance_of(seen) * max(value, least)}
        if not ratios:
            break
    return ratios, ""


def first_norms(steps):
    """Return the norms of gradients in their first two steps, by (name, 0 or 1).

    By chance, the shares of one step may be alike.
    """
    norms = {}
    for step in steps:
        for name, norm in step["norms"].items():
            number = 1 if (name, 0) in norms else 0
            norms.setdefault((name, number), norm)
    return norms


def remedy_of_gradients(ratios):
    if ratios and abs(ratios[0] - 1) > 0.1 and all(
            math.isclose(ratio, ratios[0], rel_tol=1e-2) for ratio in ratios):
        return (f"On two processes, they are {ratios[0]:.3g} times as large. Multiply each loss by "
                "len(batch[0]) * world_size / global_batch before backward() (in synthetic_ddp, by "
                "nothing)")
    return (f"{CALLS}; call zero_grad() once, before the parts, and clip after the last; compute "
            "class weights and statistics from all samples; draw random numbers of torch in the "
            "loss and in build_model, not of numpy or random; keep no state in attributes")


def check_evaluation(seen, problems):
    """Compare the validation results of the same weights on one and two processes."""
    promise = "the same weights have the same validation results on one and two processes"
    found = [seen[name][0].evaluations[:1] for name in ("one", "two") if name in seen]
    if not all(found) or not found[0][0]["results"]:
        skip(promise, "no evaluate() is called in two epochs, or there are no samples")
        return
    if "two" not in seen:
        return
    [one], [two] = found
    mean = "evaluation" not in modes_without_mean(seen)
    pairs = [*zip(two["results"], one["results"])][not mean:]  # the loss has a note of its own
    same = all(math.isclose(*pair, rel_tol=2 * tolerance_of(seen), abs_tol=1e-6)
               or str(pair[0]) == str(pair[1]) for pair in pairs)  # NaN is not equal to NaN
    if one["dropout"]:
        check(promise, False, "dropout is active. Call model.eval() in evaluate()")
    elif one["draws"]:
        skip(promise, "the evaluation draws random numbers. Unless it must, give F.dropout "
             "training=self.training, and augment images only if model.training")
    elif not mean and not (same and pairs):
        skip(promise, "the loss is no mean over the samples: what each rank computes depends on "
             "its batches")
    else:
        on_two, on_one = (", ".join(f"{number:.6g}" for number in found["results"])
                          for found in (two, one))
        check(promise, same, f"{on_two} on two, {on_one} on one. Evaluate each sample once: let "
              "each rank take its share, without drop_last, and return the results of the sums "
              "over all ranks. Return counts as sums, not as means of a batch. Call "
              "model.eval(). Draw no random numbers for these samples. "
              "Compute F1, a correlation, class weights and statistics from counts or outputs of "
              "all samples, not from a batch or a rank's share")


def check_resume(seen, problems):
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
    if "resumed" not in seen:
        check(promise, False, f"the resumed run does not end{problems['resumed']}")
        return
    resumed = seen["resumed"][0]
    if not resumed.found_file:
        check(promise, False, "a run that is stopped in its second epoch has saved nothing. Save "
              f"after each epoch{problems.get('stopped', '')}")
        return
    if len(resumed.steps) >= len(one.steps):
        check(promise, False, f"the resumed run makes all {len(one.steps)} steps again. Load the "
              "file of --checkpoint by resume(), count in progress, and let errors end the run")
        return
    steps = zip(one.steps[len(one.steps) - len(resumed.steps):], resumed.steps)
    different = [f"{name} of step {number} after the resume"
                 for number, (before, after) in enumerate(steps, 1)
                 for name in ("rates", "rows", "losses", "norms") if before[name] != after[name]]
    different = different[:1] + [name for name in one.state
                                 if one.state[name] != resumed.state.get(name)]
    results = [str([found["results"] for found in job.evaluations[-1:]]) for job in (one, resumed)]
    different += ["validation results"] * (results[0] != results[1])
    check(promise, not different, f"these differ: {some(different)}. Put what must survive a stop "
          "into saved or progress, before resume() is called: models, optimizers, schedulers, "
          "averages, counters; register a queue as a buffer. Load no other weights after it. Call "
          "model.train() after an evaluation of your own, and zero_grad() before each step. "
          f"{SAMPLES}")


if __name__ == "__main__":
    sys.exit(main())

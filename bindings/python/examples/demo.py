#!/usr/bin/env python3
"""A real language model generates from kivi caches; every preset is compared with full precision.

Prints, and draws to PNGs and one HTML page: the answers to a few chat prompts and how far they agree with
full precision, perplexity and divergence on a public-domain text decoded token by token, bytes of the
cache, speed of the attention, and the errors of the four pairs of axes on the model's own K, V and Q.
"""

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import kivi
import numpy as np

import axis_table
import command_line
import report
from candidates import BASELINE, QUERY_AWARE, Candidate, bits_per_element, open_caches
from engine.decode import generate, score_windows
from engine.gguf_file import ModelError, ModelFile
from engine.llama import Llama
from engine.tokenizer import load_tokenizer
from progress import Progress

CANDIDATES = [BASELINE, Candidate("kivi4"), Candidate("k4v2"), QUERY_AWARE, Candidate("k3v2"),
              Candidate("kivi2-sink"), Candidate("kivi2-paper")]
TEXT = Path(__file__).parent / "data" / "northanger-abbey.txt"
SOURCE = "Jane Austen, Northanger Abbey (1817), chapters 1 to 6"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    windows: int        # of text, decoded side by side
    window_tokens: int
    scored_from: int    # first scored position of a window
    calibration: int    # tokens for the moments of query-aware rounding
    excerpt: int        # tokens of the text in each chat prompt
    answer: int         # tokens generated
    probe_tokens: int
    probe_queries: int
    probe_every: int    # every so many layers


FULL = Size(4, 2048, 256, 2048, 560, 128, 2048, 128, 1)
QUICK = Size(2, 640, 256, 512, 300, 48, 768, 64, 6)


def main():
    arguments = command_line.demo()
    size, begin = QUICK if arguments.quick else FULL, time.monotonic()
    try:
        print(f"reading {arguments.model}", file=sys.stderr)
        file = ModelFile(arguments.model)
        model, tokenizer = Llama(file), load_tokenizer(file)
        tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        windows = cut_windows(tokens, size, tokenizer.start, file)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    calibration = tokens[-size.calibration:]

    answers = answer_prompts(model, tokenizer, tokens, calibration, size, arguments.device)
    scores, measured, steps = read_text(model, windows, calibration, size, arguments.device)
    progress = Progress("comparing axes", 16 * len(range(0, model.shape.layers, size.probe_every)))
    activations = axis_table.capture(model, windows[0][:size.probe_tokens], size.probe_queries)[::size.probe_every]
    axes = axis_table.measure(activations, progress.advance)
    result = {
        "about": about(file, size, arguments.device),
        "presets": [preset_row(c, scores, measured[c.label], answers) for c in CANDIDATES],
        "step_us": {"context": steps["context"], **{c.label: steps[c.label] for c in CANDIDATES}},
        "answers": answers,
        "axes": [asdict(row) for row in axes],
        "orderings": [asdict(ordering) for ordering in axis_table.orderings(axes, activations)],
        "seconds": round(time.monotonic() - begin),
    }
    (out / "demo.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report.as_text(result))
    report.draw(result, out)
    report.write_html(result, out)
    print(f"\n{result['seconds']} s; pictures and page: {out / 'demo.html'}")
    return 0


def cut_windows(tokens, size, start, file):
    """Windows from the beginning of the text; its end is kept for calibration."""
    length = min(size.window_tokens, file.shape.context) - len(start)
    needed = size.windows * length + size.calibration
    if needed > len(tokens):
        raise ModelError(f"{file.path}: its tokenizer makes {len(tokens)} tokens of the text, {needed} are needed.")
    return [start + tokens[i * length:(i + 1) * length] for i in range(size.windows)]


def questions(tokenizer, tokens, size):
    """Chat prompts of different lengths about different parts of the text: the question, and token ids."""
    asked = [  # question, length and place of the passage as shares
        ("Continue this story with a new scene in which Catherine writes a letter to her sister.", 1.0, 0.0),
        ("Summarise this passage in five sentences.", 0.8, 0.35),
        ("Explain to a child what this passage is about.", 0.7, 0.6),
    ]
    found = []
    for question, length, place in asked:
        count = int(length * size.excerpt)
        begin = int(place * (len(tokens) - count))
        passage = tokenizer.decode(tokens[begin:begin + count]).strip()
        found.append((question, tokenizer.chat(f"{passage}\n\n{question}")))
    return found


def answer_prompts(model, tokenizer, tokens, calibration, size, device):
    """For each prompt: the question, and for each candidate the text and the share of agreeing tokens."""
    asked = questions(tokenizer, tokens, size)
    prompts = [ids for _, ids in asked]
    capacity = max(map(len, prompts)) + size.answer
    caches = open_caches(CANDIDATES, model, 2 * len(prompts), capacity, calibration, device=device)
    progress = Progress("generating", size.answer)
    found = generate(model, caches, prompts, size.answer, tokenizer.stops, progress.advance)
    reference = found[BASELINE.label]
    return [{
        "question": question,
        "prompt_tokens": len(prompts[i]),
        "texts": {label: tokenizer.decode(answers[i].tokens).strip() for label, answers in found.items()},
        "same_until": {label: same_until(answers[i].tokens, reference[i].tokens) for label, answers in found.items()},
        "tokens": len(reference[i].agreement),
        "agreeing": {label: sum(answers[i].agreement) for label, answers in found.items()},
    } for i, (question, _) in enumerate(asked)]


def same_until(tokens, reference):
    """Tokens before the first that differs."""
    pairs = zip(tokens, reference)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(reference)))


def read_text(model, windows, calibration, size, device):
    """Scores by label, what was measured of each cache, and microseconds of attention a token by context."""
    capacity = max(map(len, windows))
    caches = open_caches(CANDIDATES, model, len(windows), capacity, calibration, device=device)
    progress, clocks = Progress("reading the text", capacity - 1), []

    def advance():
        clocks.append([cache.attend_seconds for cache in caches.values()])
        progress.advance()

    scores = score_windows(model, caches, windows, size.scored_from, advance)
    # Lower quartiles of 32 stretches of the window: steps in which the machine did something else do not count.
    every = len(clocks) // 32
    spent = np.diff(clocks, axis=0, prepend=0)[:32 * every].reshape(32, every, -1)
    microseconds = 1e6 * np.quantile(spent, 0.25, axis=1) / len(windows)
    steps = {"context": [i * every + every // 2 for i in range(32)]}
    measured = {}
    for label, cache, column in zip(caches, caches.values(), microseconds.T):
        steps[label] = column.round(1).tolist()
        measured[label] = {
            "bits_per_element": bits_per_element(cache.cache),
            "live_bytes": cache.cache.statistics().live_bytes,
            "attend_tokens_per_second": 1e6 / column.mean(),
        }
    return scores, measured, steps


def preset_row(candidate, scores, measured, answers):
    label = candidate.label
    return {
        "preset": label,
        **measured,
        "perplexity": scores[label].perplexity,
        "kl": scores[label].kl,
        "top1": scores[label].top1,
        "agreement": sum(a["agreeing"][label] for a in answers) / sum(a["tokens"] for a in answers),
    }


def about(file, size, device):
    return {
        "model": Path(file.path).stem,
        "text": SOURCE,
        "windows": size.windows,
        "window_tokens": min(size.window_tokens, file.shape.context),
        "scored_from": size.scored_from,
        "probe": {"tokens": size.probe_tokens, "queries": size.probe_queries, "every": size.probe_every,
                  "layers": file.shape.layers, "bits": axis_table.BITS, "group": axis_table.GROUP,
                  "sink": axis_table.SINK, "recent": axis_table.RECENT},
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{cpu_name()}, {os.cpu_count()} cores",
        "gpu": next(d.name for d in kivi.devices() if d.device == "cuda") if device == "cuda" else "",
        "build": f"kivi {kivi.version()}: {kivi.build_info()}",
        "commit": commit() or "unknown",
    }


def commit():
    describe = ["git", "-C", Path(__file__).parent, "describe", "--always", "--dirty"]
    try:
        return subprocess.run(describe, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        return ""


def cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Perplexity and divergence of storage presets on given windows of token ids, through the library.

The windows are decoded token by token, all of them and all presets side by side, on a real model. The file
of windows is JSON: `windows`, a list of lists of token ids, and `calibration`, token ids of other text for
query-aware rounding. One JSON object a preset is written, one a line:

  preset, moments, k_hadamard   what was measured
  bits_per_element              of a packed token, scales and mins included, mean over K and V
  ppl_f16, ppl                  perplexity with fp16 keys and values, and with the preset
  kl, top1                      KL(fp16 || preset) of the next-token distribution in nats; share of the
                                positions where the most likely token is the same
"""

import argparse
import json
import sys

import kivi

from candidates import BASELINE, Candidate, bits_per_element, open_caches
from engine.decode import score_windows
from engine.gguf_file import ModelError, ModelFile
from engine.llama import Llama
from progress import Progress

CANDIDATES = [
    BASELINE,
    Candidate("kivi2-paper"),
    Candidate("kivi2-sink"),
    Candidate("k3v2"),
    Candidate("k3v2", name="k3v2 rotated keys, query-aware", rotate_keys=True, moments=True),
    Candidate("kivi4"),
    Candidate("k4v2"),
    Candidate("kivi2-sink", name="K4 V2 g32, windows 32/96/32",
              k=kivi.Spec(4, "channel", 32), v=kivi.Spec(2, "token", 32)),
]
SCORED_FROM = 256  # positions before it have too little context to tell presets apart


def main():
    arguments = parse()
    try:
        file = ModelFile(arguments.model)
        windows, calibration = read_windows(arguments.windows)
        model = Llama(file)
    except (ModelError, WindowsError) as error:
        print(error, file=sys.stderr)
        return 2
    windows = windows[:arguments.limit]
    capacity = max(map(len, windows))
    progress = Progress("decoding", capacity - 1)
    caches = open_caches(CANDIDATES, model, len(windows), capacity, calibration)
    scores = score_windows(model, caches, windows, SCORED_FROM, progress.advance)
    baseline = scores[BASELINE.label]
    with open(arguments.json, "w", encoding="utf-8") as out:
        for candidate in CANDIDATES:
            score = scores[candidate.label]
            row = {
                "preset": candidate.label if candidate.k else candidate.preset,
                "moments": candidate.moments,
                "k_hadamard": caches[candidate.label].cache.config.layers[0].k.transform == "hadamard",
                "bits_per_element": round(bits_per_element(caches[candidate.label].cache), 4),
                "ppl_f16": round(baseline.perplexity, 4),
                "ppl": round(score.perplexity, 4),
                "kl": round(score.kl, 6),
                "top1": round(score.top1, 4),
            }
            out.write(json.dumps(row) + "\n")
            print(f"{candidate.label:32s} {row['bits_per_element']:6.2f} bits  ppl {row['ppl']:8.3f} "
                  f"({100 * (row['ppl'] / row['ppl_f16'] - 1):+6.2f} %)  KL {row['kl']:.4f}  "
                  f"top-1 {100 * row['top1']:.1f} %")
    return 0


class WindowsError(Exception):
    """The file of windows cannot be used; one sentence."""


def read_windows(path):
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        windows, calibration = content["windows"], content["calibration"]
    except OSError as error:
        raise WindowsError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise WindowsError(f"{path}: is not a JSON object with 'windows' and 'calibration' ({error}).") from error
    shortest = min(map(len, windows), default=0)
    if shortest < SCORED_FROM + 2:
        raise WindowsError(f"{path}: windows need at least {SCORED_FROM + 2} tokens, the shortest has {shortest}.")
    return windows, calibration


def parse():
    parser = argparse.ArgumentParser(prog="script/quality", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a GGUF file of the Llama or Qwen2 family")
    parser.add_argument("--windows", required=True, help="windows of token ids, JSON")
    parser.add_argument("--json", required=True, help="file for the results, JSON Lines")
    parser.add_argument("--limit", type=int, help="use only the first so many windows")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

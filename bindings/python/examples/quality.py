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

import json
import sys

import kivi

import command_line
from candidates import BASELINE, QUERY_AWARE, Candidate, bits_per_element, open_caches
from command_line import SCORED_FROM
from engine.decode import score_windows
from engine.gguf_file import ModelError, ModelFile
from engine.llama import Llama
from progress import Progress

CANDIDATES = [
    BASELINE,
    Candidate("kivi2-paper"),
    Candidate("kivi2-sink"),
    Candidate("k3v2"),
    QUERY_AWARE,
    Candidate("kivi4"),
    Candidate("k4v2"),
    Candidate("kivi2-sink", name="K4 V2 g32, windows 32/96/32",
              k=kivi.Spec(4, "channel", 32), v=kivi.Spec(2, "token", 32)),
]


def main():
    arguments = command_line.quality()
    given = arguments.windows
    try:
        model = Llama(ModelFile(arguments.model))
        check_vocabulary(given, model)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    windows = given.windows[:arguments.limit]
    capacity = max(map(len, windows))
    progress = Progress("decoding", capacity - 1)
    caches = open_caches(CANDIDATES, model, len(windows), capacity, given.calibration)
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


def check_vocabulary(given, model):
    known, largest = len(model.embedding), max(map(max, [*given.windows, given.calibration]))
    if largest >= known:
        raise ModelError(f"{given.path}: holds the token id {largest}, but the model's ids end at {known - 1}.")


if __name__ == "__main__":
    sys.exit(main())

"""The arguments of demo.py and quality.py, and the files that they name.

Needs Python alone, so that the scripts check a command line before they set anything up:

    python3 command_line.py demo|quality ARGUMENTS...    says nothing if they can be used
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import List, NamedTuple

SCORED_FROM = 256  # positions of a window before it have too little context to tell presets apart


class Windows(NamedTuple):
    """A file of windows: token ids to be scored, and token ids of other text for the moments."""

    path: str
    windows: List[List[int]]
    calibration: List[int]


def demo(words=None, model_needed=True):
    parser = Parser("demo", "A real language model generates from 2- to 4-bit caches.", model_needed)
    parser.add_argument("--quick", action="store_true", help="less of everything, at most three minutes")
    parser.add_argument("--out", required=True, type=output_folder, help="folder for the pictures and the page")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the caches live")
    return parser.parse_args(words)


def quality(words=None, model_needed=True):
    parser = Parser("quality", "Perplexity and divergence of the presets on windows of token ids.", model_needed)
    parser.add_argument("--windows", required=True, type=read_windows, help="windows of token ids, JSON")
    parser.add_argument("--json", required=True, type=output_file, help="file for the results, JSON Lines")
    parser.add_argument("--limit", type=count, help="use only the first so many windows")
    return parser.parse_args(words)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the list of all arguments."""

    def __init__(self, name, what, model_needed):
        super().__init__(prog=name, description=what, allow_abbrev=False)
        self.add_argument("--model", required=model_needed, type=model_file,
                          help="a GGUF file of the Llama or Qwen2 family")

    def parse_args(self, words=None):
        found, unknown = self.parse_known_args(words)
        if unknown:
            known = [action.option_strings[-1] for action in self._actions]
            self.error(f"unknown argument '{unknown[0]}'; there are {', '.join(known)}")
        return found

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


# Types of arguments. argparse writes "argument --name: " before the sentence.

def refuse(sentence):
    raise argparse.ArgumentTypeError(sentence)


def model_file(path):
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                refuse(f"'{path}' is not a GGUF file")
    except OSError as error:
        refuse(f"'{path}' cannot be read ({error.strerror}); a GGUF file is expected")
    return path


def output_folder(path):
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        refuse(f"'{path}' cannot be a folder, because '{place}' is a file")
    if not os.access(place, os.W_OK):
        refuse(f"'{path}' cannot be written: no permission in '{place}'")
    return path


def output_file(path):
    place = Path(path).absolute()
    if place.is_dir():
        refuse(f"'{path}' is a folder; a file is expected")
    if not place.parent.is_dir():
        refuse(f"'{path}' cannot be written: there is no folder '{place.parent}'")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        refuse(f"'{path}' cannot be written: no permission")
    return path


def count(text):
    if not text.isdecimal() or int(text) == 0:
        refuse(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def read_windows(path):
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        refuse(f"'{path}' cannot be read ({error.strerror}); a JSON file of windows is expected")
    except ValueError as error:
        refuse(f"'{path}' is not JSON ({error})")
    if not isinstance(content, dict) or not {"windows", "calibration"} <= content.keys():
        refuse(f"'{path}' is not a JSON object with 'windows' and 'calibration'")
    windows, calibration = content["windows"], content["calibration"]
    if not isinstance(windows, list) or not windows or not all(map(is_tokens, [*windows, calibration])):
        refuse(f"'{path}': 'windows' must be lists of token ids, and 'calibration' a list of them")
    shortest = min(map(len, windows))
    if shortest < SCORED_FROM + 2:
        refuse(f"'{path}': windows need at least {SCORED_FROM + 2} tokens, the shortest has {shortest}")
    return Windows(path, windows, calibration)


def is_tokens(value):
    return isinstance(value, list) and bool(value) and all(isinstance(token, int) and token >= 0 for token in value)


if __name__ == "__main__":
    {"demo": demo, "quality": quality}[sys.argv[1]](sys.argv[2:], model_needed=False)

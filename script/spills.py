"""Registers and spills of the CUDA kernels, from the output of all builds of a folder with -Xptxas=-v.

Prints one line a kernel that spills. A kernel that attends to pages of the fast order, or packs them, must not spill: exit
code 1. What was compiled more than once counts as it was compiled last.
"""

import argparse
import re
import subprocess
import sys


FAST = "decode", "prefill", "pack", "step"  # in names of kernels


def kernels(log):
    """Yields (name, bytes of spill stores and loads, registers)."""
    name, spilled = None, 0
    for line in log:
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match.group(1)
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match.group(1)) + int(match.group(2))
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            yield name, spilled, int(match.group(1))
            name = None


def readable(name):
    """The kernel's name as written in the sources, without its arguments."""
    text = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
    return re.sub(r"\(anonymous namespace\)::|kivi::cuda::|_GLOBAL__\w+::", "", text).split("(")[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("log", type=argparse.FileType())
    with parser.parse_args().log as file:
        found = {name: (spilled, registers) for name, spilled, registers in kernels(file)}
    if not found:
        sys.exit("no kernels in the output of the build")
    failed = False
    for name, (spilled, registers) in found.items():
        if spilled == 0:
            continue
        fast = any(part in name for part in FAST)
        failed = failed or fast
        print(f"{readable(name)}: {registers} registers, {spilled} bytes of spills{', not allowed' if fast else ''}")
    print(f"{len(found)} kernels, most registers {max(registers for _, registers in found.values())}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""Fails unless every program in the README stands, as it is, in a file that the tests build and run.

A program is a fenced block of C, C++, Python or Rust. The line before it names its file:
    <!-- bindings/c/examples/decode_loop.c -->
"""
import argparse
import pathlib
import re
import sys

LANGUAGES = {"c": ".c", "cpp": ".cpp", "python": ".py", "rust": ".rs"}
QUICK_STARTS = {"c", "python", "rust"}


def main():
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    root = pathlib.Path(__file__).resolve().parent.parent
    if not (root / "README.md").is_file():
        sys.exit("README.md is missing")
    readme = (root / "README.md").read_text(encoding="utf-8")
    wrong, seen = [], set()
    for block in re.finditer(r"(?:<!-- (\S+) -->\n)?```(\w+)\n(.*?)^```$", readme, re.M | re.S):
        name, language, text = block.groups()
        if language not in LANGUAGES:
            continue
        seen.add(language)
        line = readme.count("\n", 0, block.start(2)) + 1
        if not name or not (root / name).is_file() or not name.endswith(LANGUAGES[language]):
            wrong.append(f"README.md:{line}: the {language} block names no such file ({name})")
        elif (root / name).read_text(encoding="utf-8") != text:
            wrong.append(f"README.md:{line}: the block differs from {name}")
        else:
            print(f"{name}: verbatim")
    wrong += [f"README.md: no quick start in {language}" for language in sorted(QUICK_STARTS - seen)]
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()

"""What the wheel holds: one library file beside the extension, which finds it there, and little to load."""

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import kivi
from kivi import _native

PACKAGE = Path(kivi.__file__).parent
HEADER = Path(__file__).parents[3] / "include/kivi/kivi.h"
ALLOWED = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux[\w-]*)\.so\.\d+")


def dynamic(path, tag):
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    text = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", text)


def library():
    found = list(PACKAGE.glob("libkivi*"))
    assert len(found) == 1 and not found[0].is_symlink()
    return found[0]


def test_the_library_is_one_file_named_by_its_soname():
    assert dynamic(library(), "SONAME") == [library().name]


def test_the_extension_finds_the_library_beside_itself():
    assert dynamic(_native.__file__, "RUNPATH") == ["$ORIGIN"]
    assert library().name in dynamic(_native.__file__, "NEEDED")


def test_nothing_else_is_needed():
    needed = dynamic(library(), "NEEDED") + dynamic(_native.__file__, "NEEDED")
    assert all(ALLOWED.fullmatch(name) or name == library().name for name in needed), needed


def test_the_version_is_that_of_the_header():
    macros = dict(re.findall(r"#define KIVI_VERSION_(\w+) (\d+)", HEADER.read_text()))
    assert kivi.__version__ == "{MAJOR}.{MINOR}.{PATCH}".format(**macros)
    assert metadata.version("kivi") == kivi.__version__

"""The build backend: scikit-build-core, but a source distribution carries the C++ sources of the repository.

In the repository the C++ tree is two folders up. A source distribution holds it as libkivi/, put there in
a copy of the package folder, so the tree itself stays as it is.
"""

import os
import shutil
import tempfile
from pathlib import Path

from scikit_build_core.build import *  # noqa: F403  every other hook is passed on
from scikit_build_core.build import build_sdist as _build_sdist

NEEDED = ("CMakeLists.txt", "cmake", "core", "include")


def build_sdist(sdist_directory, config_settings=None):
    package = Path.cwd()
    sdist_directory = str(Path(sdist_directory).resolve())
    if (package / "libkivi").exists():  # made from a source distribution already
        return _build_sdist(sdist_directory, config_settings)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kivi"
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("build", "dist", "__pycache__", ".*"))
        for name in NEEDED:
            source, target = package.parents[1] / name, copy / "libkivi" / name
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        settings = copy / "pyproject.toml"
        settings.write_text(settings.read_text().replace('"../../include', '"libkivi/include'))
        os.chdir(copy)
        try:
            return _build_sdist(sdist_directory, config_settings)
        finally:
            os.chdir(package)

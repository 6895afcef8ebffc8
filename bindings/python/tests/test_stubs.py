"""The committed _native.pyi against the built module: same names, same parameters, same defaults."""

import ast
import re
from pathlib import Path

import pytest

import kivi
from kivi import _native

STUB = ast.parse((Path(kivi.__file__).parent / "_native.pyi").read_text())
TYPES_OF_THE_STUB = {"SupportsDLPack", "Array", "Integers", "Blob", "Path"}
STUB_NAMES = {node.name: node for node in STUB.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}


def public(thing):
    return {name for name in vars(thing) if not name.startswith("_")}


def parameters(arguments):
    """(name, default as source or None, keyword only) of each parameter after self."""
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [(a, d, False) for a, d in zip(positional, defaults)]
    pairs += [(a, d, True) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return [(a.arg, d and ast.unparse(d), only) for a, d, only in pairs if a.arg != "self"]


def built_parameters(function):
    """The same, from the signature line that the compiled function carries."""
    line = function.__doc__.splitlines()[0]
    line = re.sub(r"(\w+): [^,=()\[\]]+(\[[^\]]*\])?(?: *\| *[\w.]+)*", r"\1", line.split(" -> ")[0])
    return parameters(ast.parse(f"def {line}: pass").body[0].args)


def test_the_package_ships_its_types():
    assert (Path(kivi.__file__).parent / "py.typed").exists()


def test_names_agree():
    assert set(STUB_NAMES) - TYPES_OF_THE_STUB == public(_native)


CLASSES = [n for n, node in STUB_NAMES.items() if isinstance(node, ast.ClassDef) and n not in TYPES_OF_THE_STUB]


@pytest.mark.parametrize("name", CLASSES)
def test_members_agree(name):
    members = set()
    for node in STUB_NAMES[name].body:
        members.add(node.target.id if isinstance(node, ast.AnnAssign) else node.name)
    assert {m for m in members if not m.startswith("_")} == public(getattr(_native, name))


@pytest.mark.parametrize("name", [n for n in CLASSES if n.endswith("Error")])
def test_bases_agree(name):
    stub = [ast.unparse(base) for base in STUB_NAMES[name].bases]
    assert stub == [base.__name__ for base in getattr(_native, name).__bases__]


FUNCTIONS = [(None, node) for node in STUB.body if isinstance(node, ast.FunctionDef)]
FUNCTIONS += [("Cache", n) for n in STUB_NAMES["Cache"].body if isinstance(n, ast.FunctionDef) and not n.decorator_list]


@pytest.mark.parametrize("owner,node", FUNCTIONS, ids=lambda x: getattr(x, "name", x))
def test_parameters_agree(owner, node):
    function = getattr(getattr(_native, owner) if owner else _native, node.name)
    assert parameters(node.args) == built_parameters(function)


def test_everything_public_is_documented():
    for name in kivi.__all__:
        thing = getattr(kivi, name)
        assert thing.__doc__, name
        if not isinstance(thing, type) or issubclass(thing, Exception):
            continue
        for member in public(thing) | set(getattr(thing, "__dataclass_fields__", ())):
            attribute = getattr(thing, member, None)  # a field of a dataclass may have no default
            documented = attribute.__doc__ if callable(attribute) or isinstance(attribute, property) else None
            assert documented or re.search(rf"\b{member}\b", thing.__doc__), f"{name}.{member}"

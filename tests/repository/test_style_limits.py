"""Limits of size and naming that the code of `core` keeps, counted from its source.

They follow from a comparison with FSDP2, vLLM and others: files of few nouns and classes that a reader can hold at once.
One limit is for all of `core`: a method name has one meaning, so few names have several signatures. The others are for
the files of the third form of `core` (`NEW_FILES`), which replace older files that are over them. A pattern that matches
no file yet is no failure.
"""

from __future__ import annotations

import ast
import collections
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "core"
NEW_FILES = (
    "plan/schedule*.py",
    "device/pool*.py",
    "stores/*.py",
    "streaming/run.py",
    "streaming/run_*.py",
)

# Method names with this many signatures or more: as many as there are now. The goal is 10.
SIGNATURES, MOST_NAMES = 3, 55

FILE_LINES = 400
METHODS, ATTRIBUTES, PARAMETERS, IMPORTS = 15, 10, 5, 8
# `enter` and `leave` of a unit run at each crossing.
CROSSING_FUNCTIONS, CROSSING_LINES = {"enter", "leave"}, 14

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions_of(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def methods_of(one: ast.ClassDef) -> list[Function]:
    return [node for node in one.body if isinstance(node, Function)]


def parameters(function: Function) -> tuple[str, ...]:
    """The names of the parameters in order, without `self` and `cls`."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    return (*names, *([f"**{given.kwarg.arg}"] if given.kwarg else []))


def is_record(one: ast.ClassDef) -> bool:
    """Whether the class is a frozen dataclass, a NamedTuple or an enumeration, whose fields are its whole content."""
    frozen = any("frozen=True" in ast.unparse(decorator) for decorator in one.decorator_list)
    bases = {ast.unparse(base).rpartition(".")[2] for base in one.bases}
    return frozen or bool(bases & {"NamedTuple", "Enum", "IntEnum", "Flag"})


def attributes_of(one: ast.ClassDef) -> set[str]:
    """The names that the class declares or that its methods set on `self`."""
    found = {
        node.target.id
        for node in one.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(one):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
    return found


def own_imports(tree: ast.AST) -> set[str]:
    """The files of the own package that a file imports from, those under TYPE_CHECKING and in functions included."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = "." * node.level
            # `from . import a, b` names two files, `from .a import b, c` names one.
            found |= {start + node.module} if node.module else {start + alias.name for alias in node.names}
    return found


def code_lines(source: str, function: Function) -> int:
    """The lines of a function's body that are neither blank, comments nor its docstring."""
    kept = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kept:
            lines |= set(range(token.start[0], token.end[0] + 1))
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    return len(lines & set(range(body[0].lineno, function.end_lineno + 1)))


def over_limits(source: str) -> Iterator[str]:
    """Yield what of a file is over a limit, in words."""
    tree = ast.parse(source)
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{lines} lines, at most {FILE_LINES}"
    if len(own_imports(tree)) > IMPORTS:
        yield f"{len(own_imports(tree))} imports of the own package, at most {IMPORTS}: {sorted(own_imports(tree))}"
    for one in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if len(methods_of(one)) > METHODS:
            yield f"{one.name} has {len(methods_of(one))} methods, at most {METHODS}"
        if not is_record(one) and len(attributes_of(one)) > ATTRIBUTES:
            yield f"{one.name} has {len(attributes_of(one))} attributes, at most {ATTRIBUTES}"
    for function in functions_of(tree):
        # A constructor takes what the attributes are, and their limit holds for it.
        if function.name != "__init__" and len(parameters(function)) > PARAMETERS:
            yield f"{function.name} has {len(parameters(function))} parameters, at most {PARAMETERS}"
        if function.name in CROSSING_FUNCTIONS and code_lines(source, function) > CROSSING_LINES:
            yield f"{function.name} has {code_lines(source, function)} code lines, at most {CROSSING_LINES}"


def signatures(sources: list[str]) -> dict[str, set[tuple[str, ...]]]:
    """The signatures of each method name. Special methods do not count: Python gives them their parameters."""
    found: dict[str, set[tuple[str, ...]]] = collections.defaultdict(set)
    for source in sources:
        for one in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
            for method in methods_of(one):
                if not method.name.startswith("__"):
                    found[method.name].add(parameters(method))
    return found


def test_few_method_names_have_several_signatures():
    found = signatures([path.read_text("utf-8") for path in CORE.rglob("*.py")])
    many = {name: kinds for name, kinds in found.items() if len(kinds) >= SIGNATURES}
    assert len(many) <= MOST_NAMES, (
        "Name a method by its object (`drop_unit`, not `drop`): one more name has three signatures. All such names: "
        + ", ".join(sorted(many))
    )


def test_new_files_keep_the_limits():
    found = [
        f"core/{path.relative_to(CORE).as_posix()}: {words}"
        for pattern in NEW_FILES
        for path in sorted(CORE.glob(pattern))
        for words in over_limits(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


# ---- the counters, on made sources


def class_of(*members: str) -> str:
    return "class Pool:\n" + "".join(f"    {member}\n" for member in members)


def setting(*names: str) -> str:
    return class_of("def __init__(self):", *(f"    self.{name} = 0" for name in names))


TEN = [f"name_{number}" for number in range(10)]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("\n" * 401, "401 lines"),
        ("".join(f"from .f{n} import a\n" for n in range(9)), "9 imports"),
        ("from . import a, b, c, d, e, f, g, h, i\n", "9 imports"),
        (class_of(*(f"def m{n}(self): ..." for n in range(16))), "Pool has 16 methods"),
        (setting(*TEN, "more"), "Pool has 11 attributes"),
        (setting(*TEN).replace("class Pool:", "class Pool:\n    more: int = 0"), "Pool has 11 attributes"),
        ("def fetch(a, b, c, d, *, e, f): ...\n", "fetch has 6 parameters"),
        (class_of("def fetch(self, a, b, c, d, e, *more): ..."), "fetch has 6 parameters"),
        (class_of("def enter(self):", *["    a = 1"] * 15), "enter has 15 code lines"),
        (class_of("def leave(self):", "    a = (", *["    1,"] * 13, "    )"), "leave has 15 code lines"),
    ],
)
def test_the_counter_finds_what_is_over_a_limit(source, words):
    (found,) = over_limits(source)
    assert found.startswith(words)


@pytest.mark.parametrize(
    "source",
    [
        "\n" * 400,
        "".join(f"from .f{n} import a, b\n" for n in range(8)) + "import torch\nfrom torch import nn\n",
        class_of(*(f"def m{n}(self): ..." for n in range(15))),
        setting(*TEN, *TEN),
        "@dataclass(frozen=True)\n" + class_of(*(f"{name}: int" for name in (*TEN, "more"))),
        class_of("def __init__(self, a, b, c, d, e, f): ...", "def fetch(self, a, b, c, d, e): ..."),
        class_of("def enter(self):", '    """One', "", '    two."""', *["    a = 1", "    # why", ""] * 14),
        class_of("def keep(self):", *["    a = 1"] * 40),
    ],
)
def test_the_counter_lets_pass_what_is_within(source):
    assert list(over_limits(source)) == []


def test_signatures_are_the_names_of_parameters_in_order():
    first = class_of("def drop(self, unit): ...", "def __init__(self, a): ...")
    same = class_of("def drop(self, unit: int) -> None: ...")
    assert signatures([first, same]) == {"drop": {("unit",)}}
    others = [class_of(f"def drop(self{more}): ...") for more in ("", ", unit, *, now", ", *unit")]
    assert len(signatures([first, *others])["drop"]) == 4

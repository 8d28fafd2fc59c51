"""The style is checked, not asked for: sizes, leftovers, calls, docstrings, what documents mention."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("agent/gridagent", "gridctl")
CODE = (*SHIPPED, "tests", "benchmarks")
TEXTS = ("agent", "gridctl", "tests", "benchmarks", "docs", "recordings", ".ci")
TEXT_ENDINGS = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".yaml", ".yml", ".sh", ".tcss", ""}

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60

# Put together here, so that this file does not find itself.
LEFTOVERS = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME"]) + r")\b")
FOREIGN = re.compile(
    "|".join(
        re.escape(left + right)
        for left, right in [
            ("/wo", "rk/"),
            ("/ro", "ot/"),
            ("/opt/", "pypi"),
            (".lib", "rary/"),
            ("sha", "red/"),
            ("py", "pi.org"),
            ("python", "hosted.org"),
            ("deb.", "debian.org"),
            ("registry.", "npmjs"),
        ]
    )
)
PICKLING_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
PICKLING_CALLS = re.compile(
    r"^(torch\.(load|save)|.*\.(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?)$"
)
SUPPRESSIONS = re.compile(r"#\s*(type: ignore(?!\[)|noqa(?!: [A-Z]))")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def text_files() -> list[Path]:
    inside = [path for folder in TEXTS for path in (ROOT / folder).rglob("*") if path.is_file()]
    above = [path for path in ROOT.iterdir() if path.is_file()]
    return sorted(p for p in inside + above if p.suffix in TEXT_ENDINGS and "__pycache__" not in p.parts)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def sleeps_outside_loops(node: ast.AST, in_loop: bool = False) -> Iterator[int]:
    """Lines of calls of `time.sleep` that are no pause between two looks at a condition."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep"} and not in_loop:
        yield node.lineno
    in_loop = in_loop or isinstance(node, ast.While | ast.For)
    for child in ast.iter_child_nodes(node):
        yield from sleeps_outside_loops(child, in_loop)


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


def test_the_checks_look_at_something() -> None:
    assert len(python_files(*SHIPPED)) > 5
    assert ROOT / "pyproject.toml" in text_files()


@pytest.mark.parametrize("path", python_files(*CODE), ids=name)
def test_a_file_stays_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= FILE_LINES_MAX


@pytest.mark.parametrize("path", python_files(*CODE), ids=name)
def test_a_function_stays_small(path: Path) -> None:
    sizes = {
        f"{f.name}:{f.lineno}": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions(parsed(path))
    }
    assert {where: lines for where, lines in sizes.items() if lines > FUNCTION_LINES_MAX} == {}


@pytest.mark.parametrize("path", text_files(), ids=name)
def test_no_leftovers_and_nothing_of_this_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = list(enumerate(text.splitlines(), 1))
    assert [f"{n}: {line}" for n, line in lines if LEFTOVERS.search(line) or FOREIGN.search(line)] == []


@pytest.mark.parametrize("path", python_files(*SHIPPED), ids=name)
def test_nothing_is_pickled(path: Path) -> None:
    tree = parsed(path)
    imports = [
        f"{n}: {module}" for n, module in imported_modules(tree) if module.split(".")[0] in PICKLING_MODULES
    ]
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert imports == []
    assert [call for call in calls if PICKLING_CALLS.match(call)] == []


#: Training scripts pace their steps; they wait for nothing.
JOBS = ROOT / "tests/real/jobs"


@pytest.mark.parametrize("path", [p for p in python_files("tests") if JOBS not in p.parents], ids=name)
def test_no_test_waits_blindly(path: Path) -> None:
    assert list(sleeps_outside_loops(parsed(path))) == []


@pytest.mark.parametrize("path", python_files(*CODE), ids=name)
def test_a_suppression_names_what_it_suppresses(path: Path) -> None:
    assert [line for line in path.read_text(encoding="utf-8").splitlines() if SUPPRESSIONS.search(line)] == []


@pytest.mark.parametrize("path", python_files(*SHIPPED), ids=name)
def test_public_names_have_docstrings(path: Path) -> None:
    tree = parsed(path)
    bare = [] if ast.get_docstring(tree) or not tree.body else ["the module itself"]
    for node in tree.body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if public and not node.name.startswith("_") and not ast.get_docstring(node):
            bare.append(f"{node.name}:{node.lineno}")
    assert bare == []


def test_every_environment_variable_is_documented() -> None:
    documents = "\n".join(
        p.read_text(encoding="utf-8") for p in [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    )
    pattern = re.compile(r"\b(?:GRIDCTL|GRIDAGENT)_[A-Z][A-Z_]*[A-Z]\b")
    used = {
        found
        for path in python_files(*SHIPPED)
        for found in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert sorted(used - set(pattern.findall(documents))) == []

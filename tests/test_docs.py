"""The README and docs/ say what is so: every Python block runs, every link leads somewhere, the site builds.

What a page may say to its test, in HTML comments that a reader does not see:

* ``<!-- needs: ray -->``, once: the blocks of the page run with a Ray.
* ``<!-- setup``, lines of Python, ``-->``: run before the block that follows, such as to make a table.
* ``<!-- raises: NameOfError -->`` right above a block: it has to end with that error.
* ``<!-- output -->`` between a block and a ```` ```text ```` block: what the first one prints, with ``...`` for
  what varies. Warnings and the error count as printed. A block without it has to be silent.
* ```` ```console ```` blocks hold commands of the package after ``$ `` and what they print; under
  ``<!-- exit: CODE -->`` if they fail.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lance_ray_stream.cli import main
from lance_ray_stream.cli.arguments import PROGRAM

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Ray prints what its node manager says whenever it comes, into whatever runs at that moment.
RAYLET_LINE = re.compile(r"^.*\(raylet\).*\n", re.MULTILINE)
NEEDS_RAY = "<!-- needs: ray -->"
PARTS = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|(?:^<!-- exit: (?P<exit>\d+) -->\n)?^```console\n(?P<console>.*?)^```$"
    r"|(?:^<!-- raises: (?P<raises>\w+) -->\n)?"
    r"^```python\n(?P<code>.*?)^```$"
    r"(?:\n<!-- output -->\n```text\n(?P<output>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
# What PARTS has to find: a block in another form would be left out without a word.
MARKS = re.compile(r"^[ \t]*(?:<!-- (?:setup|raises|output|exit)|[`~]{3,}[^\w\n]*(?:py|console)).*$", re.MULTILINE)
LINKS = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One piece of Python on a page."""

    code: str
    line: int  # of the page, from 1
    raises: str | None
    output: str


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page, in order."""
    parts = list(PARTS.finditer(text))
    unread = [mark for mark in MARKS.finditer(text) if not any(p.start() <= mark.start() < p.end() for p in parts)]
    assert not unread, f"not in a form that is tested: {[mark.group().strip() for mark in unread]}"
    blocks = []
    for part in parts:
        group = next(name for name in ("setup", "console", "code") if part[name] is not None)
        line = text.count("\n", 0, part.start(group)) + 1
        code, output = part[group], part["output"] or ""
        if group == "console":
            code, output = commands_of(code, exit_code=int(part["exit"] or 0))
        blocks.append(Block(code=code, line=line, raises=part["raises"], output=output))
    return blocks


def commands_of(console: str, *, exit_code: int) -> tuple[str, str]:
    """The commands of a console block as Python, and all that they print."""
    lines = console.splitlines(keepends=True)
    commands = [shlex.split(line[2:]) for line in lines if line.startswith("$ ")]
    assert commands, f"no command in {console!r}"
    assert all(name == PROGRAM for name, *_ in commands), f"only {PROGRAM} is run"
    code = "\n".join(f"run_command({argv!r}, exit_code={exit_code})" for _, *argv in commands)
    return code, "".join(line for line in lines if not line.startswith("$ "))


def run_command(argv: list[str], *, exit_code: int) -> None:
    """Run a command of the package in this process; its errors are printed like the rest."""
    with contextlib.redirect_stderr(sys.stdout):
        try:
            found = main(argv)
        except SystemExit as exit:  # of --version and --help
            found = int(exit.code or 0)
    assert found == exit_code, f"{argv}: exit code {found} instead of {exit_code}"


def run_page(text: str, path: str | Path) -> None:
    """Run the blocks of a page in one namespace and compare what each prints with what the page says."""
    # Not "__main__": Ray then pickles the functions of the page by value.
    namespace: dict[str, Any] = {"__name__": "documentation_page", "run_command": run_command}
    for block in blocks_of(text):
        printed = run_block(block, path, namespace)
        same = doctest.OutputChecker().check_output(
            block.output, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
        assert same, f"{path}:{block.line}: the page says\n{block.output}\nand the block printed\n{printed}"


def run_block(block: Block, path: str | Path, namespace: dict[str, Any]) -> str:
    """What a block prints, then its warnings, then the error that it was meant to raise."""
    # Empty lines put the block at its place in the page, so that a traceback shows the page's lines.
    code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
    printed, error = io.StringIO(), None
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        try:
            exec(code, namespace)
        except Exception as raised:
            # By all its classes: Ray raises a task's error as a RayTaskError that is an instance of it too.
            if block.raises not in [kind.__name__ for kind in type(raised).__mro__]:
                raise
            error = raised
    assert error is not None or block.raises is None, f"{path}:{block.line}: no {block.raises} was raised"
    for warning in caught:
        if warning.filename == str(path):
            printed.write(f"{warning.category.__name__}: {warning.message}\n")
    if error is not None:
        printed.write(f"{block.raises}: {error}\n")
    return RAYLET_LINE.sub("", printed.getvalue())


def needs_ray(page: Path) -> bool:
    return NEEDS_RAY in page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    """``guarantees/order`` for a page in a folder: two folders have an ``index``."""
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


@pytest.mark.timeout(500)  # the README trains: half a minute, minutes on a machine that is busy
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name_of(page), marks=[pytest.mark.ray] * needs_ray(page)) for page in PAGES]
)
def test_blocks_run(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    if needs_ray(page):
        request.getfixturevalue("ray_cluster")
    before = ray.is_initialized()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.train.constants.DEFAULT_STORAGE_PATH", str(tmp_path / "ray_results"))
    run_page(page.read_text(encoding="utf-8"), page)
    assert ray.is_initialized() == before, f"a block started Ray: the page has to say {NEEDS_RAY}"


PAGE = """
```python
x = 1
```
<!-- setup
y = 2
-->
```python
print(x + y)
```
<!-- output -->
```text
3
```
<!-- raises: ZeroDivisionError -->
```python
x / 0
```
<!-- output -->
```text
ZeroDivisionError: ... by zero
```
```console
$ lance-ray-stream layout 2 --format csv
world_size,splits_per_rank,reader_workers
1,2,"[1, 2]"
2,1,[1]
$ lance-ray-stream --version
lance-ray-stream ...
```
<!-- exit: 2 -->
```console
$ lance-ray-stream layout 0
lance-ray-stream: error: ...
```
"""


def test_the_runner_accepts_a_right_page() -> None:
    assert [block.line for block in blocks_of(PAGE)] == [3, 6, 9, 17, 24, 33]
    run_page(PAGE, "page.md")


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ("x = 1", "x = ", SyntaxError),
        ("x = 1", "x = nowhere", NameError),
        ("x = 1", "print('not said')", AssertionError),
        ("x = 1", "import warnings; warnings.warn('not said', stacklevel=1); x = 1", AssertionError),
        ("y = 2", "y = 3", AssertionError),
        ("y = 2", "y = nowhere", NameError),
        ("\n3\n", "\n4\n", AssertionError),
        ("x / 0", "x / 1", AssertionError),
        ("raises: ZeroDivisionError", "raises: Exception", AssertionError),  # the output says another name
        ("x / 0", "x / nowhere", NameError),
        ("by zero", "by one", AssertionError),
        ("```python\nx = 1", "```py\nx = 1", AssertionError),
        ("```python\nx = 1\n```", "- text\n  ```python\n  x = 1\n  ```", AssertionError),
        ("<!-- output -->\n```text\n3", "<!-- output -->\n\n```text\n3", AssertionError),
        ("<!-- raises: ZeroDivisionError -->\n", "<!-- raises: ZeroDivisionError -->\n\n", AssertionError),
        ("1,2,", "1,3,", AssertionError),
        ("$ lance-ray-stream layout 2", "$ lance-ray-stream layout 0", AssertionError),
        ("$ lance-ray-stream layout 2", "$ ls", AssertionError),
        ("$ lance-ray-stream layout 2", "lance-ray-stream layout 2", AssertionError),
        ("exit: 2", "exit: 1", AssertionError),
        ("<!-- exit: 2 -->\n", "", AssertionError),
        ("<!-- exit: 2 -->\n", "<!-- exit: 2 -->\n\n", AssertionError),
        ("```console\n$ lance-ray-stream layout 2", "```console title\n$ lance-ray-stream layout 2", AssertionError),
    ],
)
def test_the_runner_refuses_a_broken_page(right: str, wrong: str, error: type[Exception]) -> None:
    assert right in PAGE
    with pytest.raises(error):
        run_page(PAGE.replace(right, wrong, 1), "page.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    """Links between pages and to files; mkdocs checks the anchors."""
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    targets = {link.partition("#")[0] for link in LINKS.findall(text) if not link.startswith(("http://", "https://"))}
    dead = sorted(target for target in targets if target and not (page.parent / target).exists())
    assert not dead


def build_site(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # Without --quiet, which would hide the warnings from --strict.
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},  # news about mkdocs, none about this site
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds(tmp_path: Path) -> None:
    """Warnings are errors: dead links and anchors, missing pages, names that the API reference does not find."""
    done = build_site(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for member in ("load_state_dict", "gradient_weight"):  # its own, and one of a base class
        assert f"lance_ray_stream.StreamIterator.{member}" in reference


@pytest.mark.parametrize("broken", ["[x](nowhere.md)", "[x](checkpoints.md#nowhere)", "::: lance_ray_stream.nowhere"])
def test_a_broken_site_does_not_build(broken: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "lance_ray_stream").symlink_to(ROOT / "lance_ray_stream")
    with (tmp_path / "docs" / "limits.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{broken}\n")
    done = build_site(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere" in done.stderr

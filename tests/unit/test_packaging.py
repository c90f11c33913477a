"""The package matches pyproject.toml, starts without torch, and imports only in the allowed direction."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import refitd
from refitd_cli import control, daemon
from refitd_cli.group import EXTRAS

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"refitd": ROOT / "refitd", "refitd_cli": ROOT / "cli"}

# folders without code, which setuptools counts as packages, too
SHIPPED = {
    "refitd_cli.shipped." + ".".join(path.relative_to(ROOT).parts)
    for top in ("docs", "configs")
    for path in (ROOT / top, *(ROOT / top).rglob("*"))
    if path.is_dir() and path.name != "__pycache__"
}

BASE = {"text", "dtypes", "errors", "states", "events", "caches", "files"}
PROCESSES = ("coordinator", "daemon", "worker", "client")


def packages() -> set[str]:
    """Every folder below refitd/ and cli/ that holds Python, as the package it is installed as."""
    found = set()
    for name, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            found.add(".".join((name, *path.parent.relative_to(folder).parts)))
    return found


def modules() -> set[str]:
    return {p.stem for p in FOLDERS["refitd"].iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}


def imports(package: str) -> set[str]:
    """The modules and packages in refitd that the modules of `package` import; names that it exports are none."""
    path = FOLDERS["refitd"] / package
    found = set()
    for file in path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name.split(".")[1] for name in names if name.startswith("refitd.")}
    return found & modules()


def loaded_after(statement: str) -> set[str]:
    """The modules a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    return set(ran.stdout.split())


def test_listed_packages_are_the_folders():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages() | SHIPPED


def test_every_package_has_an_init_file():
    for package in packages():
        name, *rest = package.split(".")
        assert (FOLDERS[name].joinpath(*rest) / "__init__.py").is_file(), package


@pytest.mark.parametrize("script", ["refitd", "refitctl"])
def test_console_script_resolves_and_is_installed(script):
    module, _, attribute = PROJECT["project"]["scripts"][script].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
    ran = subprocess.run(
        [Path(sys.executable).parent / script, "--version"], check=True, capture_output=True, text=True
    )
    assert PROJECT["project"]["version"] in ran.stdout


def test_constraints_pin_torch_and_every_direct_dependency():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pinned["torch"] == "2.13.0"
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["otel"], *extras["test"], *extras["dev"]]
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in wanted} - {"refitd"}
    assert names <= pinned.keys()


def test_what_is_installed_already_stays():
    extras = PROJECT["project"]["optional-dependencies"]
    for requirement in [*PROJECT["project"]["dependencies"], *extras["torch"], *extras["otel"]]:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", requirement), f"{requirement} would replace what vLLM or Megatron pins"
    assert not any(requirement.startswith("torch") for requirement in PROJECT["project"]["dependencies"])


def test_what_a_command_lacks_comes_with_an_extra():
    assert set(EXTRAS.values()) <= PROJECT["project"]["optional-dependencies"].keys()


def test_the_page_on_installing_lists_the_extras():
    table = (ROOT / "docs/operate.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    names = [row.split("|")[1] for row in table.splitlines()[2:]]
    assert set(re.findall(r"`(\w+)`", " ".join(names))) == PROJECT["project"]["optional-dependencies"].keys() - {
        "test",
        "dev",
    }


def test_no_extra_holds_both_nvshmem_wheels():
    for name, requirements in PROJECT["project"]["optional-dependencies"].items():
        text = " ".join(requirements)
        assert not ("cu12" in text and "cu13" in text), name


@pytest.mark.parametrize(
    "statement",
    [
        "import refitd",
        "import refitd.config",
        "import refitd.daemon",
        "import refitd.coordinator",
        "import refitd.client",
        "import refitd.testing",
        "import refitd_cli.control, refitd_cli.daemon",
        "from refitd_cli.commands import swap, status, plan, doctor, demo, serve",
        "from refitd_cli.commands.doctor import backends; list(backends())",
    ],
)
def test_torch_is_not_loaded_by(statement):
    assert "torch" not in loaded_after(statement)


@pytest.mark.parametrize("package", ["describe", "offline", "plan"])
def test_pure_package_loads_neither_sockets_nor_torch(package):
    modules = sorted(
        ".".join(("refitd", *path.relative_to(FOLDERS["refitd"]).with_suffix("").parts))
        for path in (FOLDERS["refitd"] / package).glob("*.py")
    )
    assert not {"torch", "zmq", "socket"} & loaded_after("import " + ", ".join(modules))


def import_table() -> dict[str, set[str]]:
    """Read the table of docs/design.md: the imports of each package below refitd, in order."""
    rows = re.findall(
        r"^\| `refitd/(\w+)(?:\.py)?` \|[^|]*\| ([^|]*) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE
    )
    return {package: set() if listed in ("-", "nothing") else set(listed.split(", ")) for package, listed in rows}


def test_the_table_of_imports_names_every_package():
    assert set(import_table()) == modules() - {"__init__"}


@pytest.mark.parametrize("package", import_table())
def test_a_package_imports_what_its_row_lists_and_all_of_it_stands_above(package):
    table = import_table()
    above = list(table)[: list(table).index(package)]
    assert table[package] == imports(package) - BASE - {package}
    assert table[package] <= set(above), "it stands below"
    if package in BASE:
        assert imports(package) <= BASE & set(above)


ADAPTERS = sorted((FOLDERS["refitd"] / "adapters").rglob("*.py"))


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.relative_to(FOLDERS["refitd"]).as_posix())
def test_an_adapter_imports_what_refitd_exports_or_another_adapter_and_is_short(path):
    text = path.read_text()
    assert len(text.splitlines()) < 400
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                private = [n.name for n in names if n.name.startswith("refitd.")]
                assert all(name.startswith("refitd.adapters.") for name in private), private
            case ast.ImportFrom(module="refitd", names=names):
                assert {n.name for n in names} <= set(refitd.__all__)
            case ast.ImportFrom(module=module, level=level):
                assert not level, "a relative import"
                assert not module.startswith("refitd.") or module.startswith("refitd.adapters"), module


def test_no_process_imports_another():
    for package in PROCESSES:
        assert not imports(package) & set(PROCESSES) - {package}, package


def test_library_does_not_import_its_command_line():
    for path in FOLDERS["refitd"].rglob("*.py"):
        assert not re.search(r"^\s*(?:from|import) refitd_cli", path.read_text(), re.MULTILINE), path


def test_what_helps_tests_needs_pytest_for_its_fixtures_only():
    assert "pytest" not in loaded_after("import refitd.testing, refitd.testing.oracle")


def test_image_copies_files_that_exist():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source.split('/')[0]}" in ignored, source


@pytest.mark.parametrize("path", [*sorted((ROOT / "scripts").iterdir()), ROOT / ".ci/run"], ids=lambda path: path.name)
def test_scripts_are_posix_sh_and_what_is_started_stops_at_the_first_error(path):
    text = path.read_text()
    if not text.startswith("#!/usr/bin/env python3"):
        subprocess.run(["sh", "-n", path], check=True)
    if text.startswith("#!/bin/sh"):
        assert path.stat().st_mode & 0o111
        assert "\nset -eu\n" in text
    else:
        assert text.startswith(("#!/usr/bin/env python3", "# Sourced by "))


FOLDERS_OF_PAGES = ("", "docs", "docs/decisions", "examples/copy_service")
DOCUMENTS = sorted(path.relative_to(ROOT) for folder in FOLDERS_OF_PAGES for path in (ROOT / folder).glob("*.md"))


def anchors(text: str) -> set[str]:
    """Return the anchors of a Markdown file: its headings, as GitHub names them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_of_a_document_lead_to_files_and_headings(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / document).parent / name if name else ROOT / document
        assert path.exists(), target
        assert not anchor or anchor in anchors(path.read_text()), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_code_in_a_document_parses_and_uses_what_refitd_exports(document):
    text = (ROOT / document).read_text()
    for block in blocks(text, "python"):
        for node in ast.walk(ast.parse(block)):
            match node:
                case ast.Attribute(value=ast.Name(id="refitd"), attr=name):
                    assert hasattr(refitd, name), name
                case ast.ImportFrom(module="refitd", names=names):
                    assert all(hasattr(refitd, alias.name) for alias in names), ast.unparse(node)
    for block in blocks(text, "toml"):
        keys = tomllib.loads(block)
        known = tomllib.loads((ROOT / "configs/laptop.toml").read_text())
        if keys.keys() <= known.keys():  # manifests.md has files of other kinds
            for table, values in keys.items():
                assert values.keys() <= known[table].keys(), block


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_in_a_document_are_commands_with_these_options(document):
    text = (ROOT / document).read_text()
    shell = "".join(blocks(text, "sh"))
    for program, group in (("refitctl", control), ("refitd", daemon)):
        for command, rest in re.findall(rf"^{program} ([\w-]+)(.*)$", shell, re.MULTILINE):
            assert command in group.COMMANDS, f"{program} {command}"
            loaded = group.main.get_command(click.Context(group.main), command)
            if isinstance(loaded, click.Group):
                loaded = loaded.get_command(click.Context(loaded), rest.split()[0])
                assert loaded is not None, f"{program} {command}{rest}"
            options = {option for parameter in loaded.params for option in parameter.opts}
            for option in re.findall(r"(?<!\S)--[\w-]+", rest.split(" #")[0]):
                assert option in options, f"{program} {command} {option}"
    for script in re.findall(r"\bscripts/[\w-]+", text):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_source_files_that_a_document_names_exist(document):
    found = [
        path.as_posix()
        for folder in ("refitd", "cli", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    # a path in another project is written with that project's folders
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", (ROOT / document).read_text())
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in found)] == []


def test_pages_that_code_names_exist():
    folders = ("refitd", "cli", "configs", "scripts", "tests", "benchmarks", "examples")
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()):
        if path.suffix not in (".py", ".toml", ".yaml", ".yml", ".sh", ".service", ".md", ""):
            continue
        for name, anchor in re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", path.read_text(errors="ignore")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name}"
            assert not anchor or anchor in anchors((ROOT / name).read_text()), (
                f"{path.relative_to(ROOT)}: {name}#{anchor}"
            )


def functions(path: Path) -> set[str]:
    """The functions of a file, with the classes that they are in."""
    found = set()
    waiting = [("", node) for node in ast.parse(path.read_text()).body]
    while waiting:
        within, node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(within + node.name)
            waiting += [(f"{within}{node.name}.", inner) for inner in node.body]
    return found


def test_functions_on_the_page_of_one_swap_exist():
    rows = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", (ROOT / "docs/one-swap.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    missing = [f"{file}: {name}" for file, name in rows if name not in functions(FOLDERS["refitd"] / file)]
    assert missing == []


def test_documents_are_all_in_the_index():
    index = (ROOT / "docs/README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"]({path.name})" in index, path.name


def test_license_is_the_one_that_the_metadata_names_and_is_shipped():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert PROJECT["project"]["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text

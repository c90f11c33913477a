"""The package is what pyproject.toml says, starts without torch, and imports only along the arrow."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from refitd_cli import control, daemon

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"refitd": ROOT / "refitd", "refitd_cli": ROOT / "cli"}

# What may import what: along describe -> plan -> execute -> commit, with the processes on top.
VALUES = {"errors", "dtypes", "describe"}
PURE = {
    "errors": set(),
    "dtypes": {"errors"},
    "config": {"errors"},
    "describe": VALUES,
    "manifest": VALUES | {"manifest"},
    "plan": VALUES | {"plan"},
}
PROCESSES = ("coordinator", "daemon", "worker", "client")


def packages() -> set[str]:
    """Every folder below refitd/ and cli/ that holds Python, as the package it is installed as."""
    found = set()
    for name, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            found.add(".".join((name, *path.parent.relative_to(folder).parts)))
    return found


class WithoutTypeChecking(ast.NodeTransformer):
    """Takes `if TYPE_CHECKING:` out of a syntax tree."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


def imports(package: str) -> set[str]:
    """The first names below refitd that the modules of `package` import, except for type checkers."""
    path = FOLDERS["refitd"] / package
    found = set()
    for file in path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]:
        for node in ast.walk(WithoutTypeChecking().visit(ast.parse(file.read_text()))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name.split(".")[1] for name in names if name.startswith("refitd.")}
    return found


def loaded_after(statement: str) -> set[str]:
    """The modules a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    return set(ran.stdout.split())


def test_listed_packages_are_the_folders():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages()


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
    wanted = [*PROJECT["project"]["dependencies"], *extras["test"], *extras["dev"]]
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in wanted} - {"refitd"}
    assert names <= pinned.keys()


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
        "import refitd_cli.control, refitd_cli.daemon",
        "from refitd_cli.commands import swap, status, watch, models, plan, abort, doctor, demo, serve, coordinator",
        "from refitd_cli import checks; list(checks.backends())",
    ],
)
def test_torch_is_not_loaded_by(statement):
    assert "torch" not in loaded_after(statement)


@pytest.mark.parametrize("package", ["describe", "manifest", "plan"])
def test_pure_package_loads_neither_sockets_nor_torch(package):
    modules = sorted(
        ".".join(("refitd", *path.relative_to(FOLDERS["refitd"]).with_suffix("").parts))
        for path in (FOLDERS["refitd"] / package).glob("*.py")
    )
    assert not {"torch", "zmq", "socket"} & loaded_after("import " + ", ".join(modules))


@pytest.mark.parametrize("package", PURE)
def test_pure_package_imports_only_what_comes_before_it(package):
    assert imports(package) <= PURE[package]


@pytest.mark.parametrize("package", ["commit", "execute", "buffers", "copy_services", "protocol"])
def test_processes_are_assembled_at_the_edge(package):
    assert not imports(package) & {*PROCESSES, "config"}


def test_no_process_imports_another():
    for package in PROCESSES:
        assert not imports(package) & set(PROCESSES) - {package}, package


def test_library_does_not_import_its_command_line():
    for path in FOLDERS["refitd"].rglob("*.py"):
        assert "refitd_cli" not in path.read_text(), path


def test_image_copies_files_that_exist():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source.split('/')[0]}" in ignored, source


@pytest.mark.parametrize("script", ["demo", "test", "check", "bench", "faults", "fuzz", "env"])
def test_script_is_posix_sh(script):
    subprocess.run(["sh", "-n", ROOT / "scripts" / script], check=True)


@pytest.mark.parametrize(
    "script",
    ["scripts/demo", "scripts/test", "scripts/check", "scripts/bench", "scripts/faults", "scripts/fuzz", ".ci/run"],
)
def test_script_is_executable_and_stops_at_the_first_error(script):
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert "\nset -eu\n" in path.read_text()


def test_readme_links_lead_to_files_and_its_python_parses():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        ast.parse(block)


def test_readme_commands_are_commands():
    text = (ROOT / "README.md").read_text()
    shell = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    for program, listed in (("refitctl", control.COMMANDS), ("refitd", daemon.COMMANDS)):
        for command in re.findall(rf"^{program} (\w+)", shell, re.MULTILINE):
            assert command in listed, f"{program} {command}"
    for script in re.findall(r"\bscripts/[\w-]+", text):
        assert (ROOT / script).exists(), script

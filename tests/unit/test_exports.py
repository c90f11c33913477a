"""The exports of `refitd`, their types, and the tree of errors."""

from __future__ import annotations

import os
import pickle
import re
import sys
from pathlib import Path

import msgspec
import pytest

import refitd
import refitd.copy_services
from refitd.errors import RefitdError, _all_errors, from_code
from refitd.protocol.base import Decoder, encode
from refitd.protocol.reports import SwapReport
from tests.support import programs

USER = """\
from typing import assert_type

from torch import nn

import refitd


def trainer(client: refitd.Client, module: nn.Module) -> refitd.Source:
    return client.register_source("policy", module)


def engine(client: refitd.Client, module: nn.Module) -> refitd.SwapReport:
    target: refitd.Target = client.register_target("policy", module, replica="a")
    assert_type(target.poll(), int | None)
    report = client.swap("policy", 3)
    assert_type(report.outcome, refitd.SwapOutcome)
    assert_type([member.state for member in report.members], list[refitd.MemberState])
    return report


def refit(trainer: nn.Module, engine: nn.Module, backend: refitd.RefitBackendName) -> refitd.ExchangeResult:
    plan: refitd.ReshardPlan = refitd.build_centralized_reshard_plan(trainer, engine)
    refitd.execute_reshard_plan(plan, trainer, engine, refitd.get_or_create_service(backend))  # not agreed on
    assert_type(refitd.__version__, str)
    return refitd.swap_model_weights(trainer, engine, "smtp")  # no backend


refitd.nothing
"""


@pytest.mark.parametrize("name", refitd.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(refitd, name) is not None
    assert name in dir(refitd)


def test_a_name_that_is_not_exported_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = refitd.nothing


@pytest.mark.timeout(600)
def test_mypy_strict_sees_the_types_of_what_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "user.py").write_text(USER)
    # torch is no part of this and takes minutes to read
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\n[mypy-torch.*,numpy.*,zmq.*]\nfollow_imports = skip\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"]
    env = {**os.environ, "MYPYPATH": str(Path(refitd.__file__).parents[1])}
    ran = programs.run(command, cwd=tmp_path, env=env)
    wrong = {f"user.py:{number}": line for number, line in enumerate(USER.splitlines(), 1)}
    found = [wrong[place] for place in re.findall(r"^(user\.py:\d+): error", ran.stdout, re.MULTILINE)]
    expected = [line for line in USER.splitlines() if "# n" in line or line == "refitd.nothing"]
    assert found == expected, ran.stdout + ran.stderr


def test_enums_are_their_strings_in_json_and_on_the_wire() -> None:
    report = SwapReport("s", "m", 1, refitd.SwapOutcome.DECIDED)
    assert msgspec.json.decode(msgspec.json.encode(report))["outcome"] == "decided"
    _, found = Decoder[SwapReport](SwapReport).decode(encode(0, report))
    assert found == report and found.outcome is refitd.SwapOutcome.DECIDED and f"{found.outcome}" == "decided"
    assert encode(0, report) == encode(0, SwapReport("s", "m", 1, "decided"))


# --- Errors are sent between processes as (code, message) and decoded to their original types. ----------


assert refitd.copy_services  # its errors belong to the tree


@pytest.mark.parametrize("kind", _all_errors())
def test_every_error_comes_back_as_itself(kind: type[RefitdError]) -> None:
    error = from_code(kind.code, "what happened")
    assert type(error).code == kind.code
    assert str(error) == "what happened"


def test_an_unknown_code_is_still_an_error_of_ours() -> None:
    assert type(from_code("from-the-future", "x")) is RefitdError


@pytest.mark.parametrize(
    "error",
    [
        refitd.PlanError(["a", "b"]),
        refitd.RefitFailed("late", {"e0": "why"}),
        refitd.SwapFailed("late", {"e0": "why"}, SwapReport("s", "m", 1, refitd.SwapOutcome.ABORTED)),
    ],
)
def test_an_error_can_be_pickled(error: RefitdError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))

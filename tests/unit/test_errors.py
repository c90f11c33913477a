"""Errors travel between processes as (code, message) and come back as what they were."""

from __future__ import annotations

import pytest

import refitd.copy_services.base
from refitd.errors import RefitdError, _all_errors, from_code

assert refitd.copy_services.base  # its errors belong to the tree


@pytest.mark.parametrize("kind", _all_errors())
def test_every_error_comes_back_as_itself(kind: type[RefitdError]) -> None:
    error = from_code(kind.code, "what happened")
    assert type(error).code == kind.code
    assert str(error) == "what happened"


def test_an_unknown_code_is_still_an_error_of_ours() -> None:
    assert type(from_code("from-the-future", "x")) is RefitdError

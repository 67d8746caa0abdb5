"""Selections of parameters: some for `make test`, the others for `make test-thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(step: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of which each `step`-th is for `make test`; the others are thorough.

    Parameters
    ----------
    values : iterable
        A tuple is the values of several parameters.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.thorough] if n % step else [],
        )
        for n, value in enumerate(values)
    ]

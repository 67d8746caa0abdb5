"""Modules that are hidden from imports in processes of our own."""

from __future__ import annotations

import subprocess
import sys

HIDDEN = """
import sys
from scanloom.engine.machine.lean_imports import leave_out_unused_modules
leave_out_unused_modules()
leave_out_unused_modules()
try:
    import pandas
except ModuleNotFoundError as error:
    assert error.name == "pandas"
else:
    raise SystemExit("pandas was imported")
import torch._dynamo
import pyarrow
assert pyarrow.table({"a": [1, None]}).column("a").to_pylist() == [1, None]
"""

NETWORKS = """
import importlib
from scanloom.cards.networks import NETWORKS
from scanloom.engine.machine.lean_imports import (
    leave_out_unused_modules, without_optional_imports
)
leave_out_unused_modules()
with without_optional_imports():
    for name, allowed in NETWORKS.items():
        assert getattr(importlib.import_module(allowed.module), name)
"""

EARLIER = """
import json, sys
import pandas
from scanloom.engine.machine.lean_imports import leave_out_unused_modules
leave_out_unused_modules()
import pandas.api.types
assert pandas.DataFrame({"a": [1]})["a"].sum() == 1
"""


NANOSECONDS = """
from scanloom.engine.machine.lean_imports import bring_back_pandas, leave_out_unused_modules
leave_out_unused_modules()
bring_back_pandas()
import pyarrow
times = pyarrow.array([1_704_067_200_123_456_789], pyarrow.timestamp("ns"))
assert times.to_pylist()[0].nanosecond == 789
"""


def run(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)


def test_pandas_is_hidden_and_neither_pyarrow_nor_torchs_compiler_needs_it() -> None:
    run(HIDDEN)


def test_every_network_can_be_imported_without_the_modules_that_are_left_out() -> None:
    run(NETWORKS)


def test_what_was_imported_before_stays_usable() -> None:
    run(EARLIER)


def test_a_table_with_nanoseconds_can_be_read_once_pandas_is_back() -> None:
    run(NANOSECONDS)

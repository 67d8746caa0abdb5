"""Options objects: closed lists of words, and the parameters of the command line."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

from scanloom.cli.commands.segment import segment
from scanloom.core import ComputeOptions, Outputs, ReadOptions
from scanloom.core.options import check_choices, take
from scanloom.engine.segment import SegmentOptions, segment_options


@pytest.mark.parametrize("kind", [ReadOptions, Outputs, ComputeOptions])
def test_each_option_has_a_description_and_a_parameter_of_the_command_line(kind: type) -> None:
    parameters = inspect.signature(segment).parameters
    for option in fields(kind):
        assert option.metadata["description"]
        assert option.name in parameters
        if option.name not in ("also", "structures"):  # lists are given as text
            assert parameters[option.name].default == option.default


@pytest.mark.parametrize(
    "options",
    [
        ReadOptions(gaps="fill"),  # type: ignore[arg-type]
        ReadOptions(modality="ct"),  # type: ignore[arg-type]
        ComputeOptions(precision="double"),  # type: ignore[arg-type]
    ],
)
def test_a_word_that_is_not_listed_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        check_choices(options)
    check_choices(type(options)())


def test_an_unknown_optional_writer_is_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"also must be of .*'image'.*, got 'picture'"):
        Outputs(also=("masks", "picture"))


def test_flat_values_find_their_objects() -> None:
    made = segment_options(models=("m",), out="out", gaps="interpolate", precision="half", phase=2)
    read, compute = ReadOptions(gaps="interpolate"), ComputeOptions("half")
    assert made == SegmentOptions(("m",), "out", phase=2, read=read, compute=compute)  # type: ignore[arg-type]
    outputs = Outputs(also=("masks",))
    assert segment_options(models=(), out="out", outputs=outputs).outputs == outputs
    with pytest.raises(TypeError, match="gap"):
        segment_options(models=(), out="out", gap="interpolate")
    assert take(ReadOptions, {"nan": "padding", "precision": "half"}) == ReadOptions(nan="padding")

"""Expressions of a config are worked out as MONAI does, and nothing is ever run."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scanloom.convert.files import find_file
from scanloom.convert.monai.bundle import read_arrays
from scanloom.convert.monai.config import MAX_CHARS, MAX_LENGTH, Component, Config, Name
from scanloom.core import ScanError

ENTRIES: dict[str, Any] = {
    "root": ".",
    "high": True,
    "sizes": [96, 64, 32],
    "nested": {"a": {"b": [10, 20]}, "flag": False},
    "names": {"spleen": 1, "background": 0},
    "n": 3,
    "alias": "@n",
    "path": "$@root + '/models/' + 'model.pt'",
    "item": "@nested#a#b#1",
    "colons": "@nested::a::b::0",
    "in_expression": "$@nested#a#b#0 + @n",
    "subscript": "$@nested['a']['b'][1]",
    "length": "$len(@names) + @n",
    "chosen": "$[1.5, 1.5, 1.5] if @high else [3.0, 3.0, 3.0]",
    "other": "$'a' if @nested#flag else 'b'",
    "joined": "$@sizes + [@n] + list(range(2))",
    "arithmetic": "$-(@n * 2 - 1) / 4 + 7 // 2",
    "inverse": "$not @high",
    "nothing": "$None",
    "mapping": "${'a': [@n, 'x'], 'b': {'c': 1.5}}",
    "count": "$len(@sizes)",
    "deep": {"list": ["@alias", {"key": "$@n + 1"}]},
}
VALUES = [key for key in ENTRIES if key not in ("root", "high")]


def config(entries: dict[str, Any]) -> Config:
    folder = Path("/nowhere")
    finders = partial(read_arrays, folder), partial(find_file, folder)
    return Config(entries, lambda target: ("transform", target), *finders)


def code(expression: Any, **entries: Any) -> str:
    with pytest.raises(ScanError) as caught:
        config({**entries, "it": expression}).get("it")
    return caught.value.code


@pytest.fixture(scope="module")
def monai_parser() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bundle = pytest.importorskip("monai.bundle")
    return bundle.ConfigParser


@pytest.mark.parametrize("key", VALUES)
def test_value_is_that_of_monais_parser(key: str, monai_parser: Any) -> None:
    """The small interpreter gives the values that Python gives to MONAI."""
    theirs = monai_parser(config=dict(ENTRIES)).get_parsed_content(key)

    assert config(ENTRIES).get(key) == theirs


def test_names_are_names_and_keys_are_words() -> None:
    """A dtype is only its name; MONAI's common keys are the words they stand for."""
    entries = {"d": "$torch.float32", "n": "$np.int16", "k": "$monai.utils.CommonKeys.PRED"}

    values = config(entries)

    assert values.get("d") == Name("float32")
    assert values.get("n") == Name("int16")
    assert values.get("k") == "pred"


def test_device_decides_nothing() -> None:
    """Expressions that depend on the machine have no value, so no card can depend on it."""
    entries = {
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "pixdim": "$1.5 if torch.cuda.is_available() else 3.0",
    }

    assert isinstance(config(entries).get("device"), Name)
    assert isinstance(config(entries).get("pixdim"), Name)


def test_component_is_a_description() -> None:
    """A target gives its name and arguments; moved to a device it is the same one."""
    entries = {
        "net": {"_target_": "UNet", "size": "@n", "_desc_": "words"},
        "moved": "$@net.to('cpu')",
        "n": 4,
    }
    values = config(entries)

    assert isinstance(values.get("net"), Component)
    assert values.get("net").args == {"size": 4}
    assert values.get("moved") is values.get("net")


def test_disabled_component_is_left_out() -> None:
    """The content of a disabled component is not read, as in MONAI."""
    off = {"_target_": "x", "_disabled_": "True", "arg": "$__import__('os')"}

    assert config({"steps": [off, 1]}).get("steps") == [1]


def test_only_requested_entries_are_read() -> None:
    """Hostile entries elsewhere are never looked at."""
    entries = {"imports": ["$import os"], "run": ["$os.system('x')"], "n": 1}

    assert config(entries).get("n") == 1


UNSAFE = [
    "$import os",
    "$from os import system",
    "$__import__('os').system('touch x')",
    "$os.system('x')",
    "$open('x', 'w')",
    "$eval('1')",
    "$print",
    "$().__class__.__bases__[0].__subclasses__()",
    "$'a'.join(['b'])",
    "$@n.__class__",
    "$@n.to('cpu')",
    "$(lambda: 1)()",
    "$lambda x: x",
    "$[i for i in @sizes]",
    "${i: 1 for i in @sizes}",
    "$f'{@n}'",
    "$(y := 1)",
    "$torch.load('/x.pt')",
    "$os.path.exists('../x.pt')",
    "$torch.hub.load('a', 'b')",
    "$setattr(torch, 'x', 1)",
    "$len(open('x'))",
    "$[1, 2][len(__import__('os').listdir())]",
    "$1 if True else __import__('os')",
]


@pytest.mark.parametrize("expression", UNSAFE)
def test_code_is_refused_as_unsafe(expression: str) -> None:
    assert code(expression, n=1, sizes=[1]) == "MODEL_UNSAFE"


UNSUPPORTED = [
    "$1 < 2",
    "$@n and @n",
    "$@sizes[0:1]",
    "$2 ** 9",
    "$1 @ 2",
    "$~1",
    "$[*@sizes]",
    "${**@names}",
    "$b'x'",
    "$1j",
    "$...",
    "$",
    "$1 +",
    "$1; 2",
    "$x = 1",
    "$@n + 'a'",
    "$'a' * 9",
    "$1 / 0",
    "$@sizes[9]",
    "$@names['x']",
    "$range(1, 2, 0)",
    f"$list(range({MAX_LENGTH + 1}))",
    "$1e308 * 10 // 1e-308 // 0",
    "$'@n'",
    "$_reference_0",
    "%@n",
    "@##n",
    "$" + "-" * 60 + "1",
    "$" + "(" * 250 + "1" + ")" * 250,
    "$" + "1+" * 300 + "1",
    "$'\x00'",
]


@pytest.mark.parametrize("expression", UNSUPPORTED)
def test_other_forms_are_refused_as_unsupported(expression: str) -> None:
    assert code(expression, n=1, sizes=[1], names={"a": 1}) == "MODEL_UNSUPPORTED"


def test_refusal_quotes_the_expression_but_never_all_of_a_long_one() -> None:
    long = "$" + "x" * (MAX_CHARS * 10)
    for expression, quoted in (("$evil()", "$evil()"), (long, "xxx...")):
        with pytest.raises(ScanError) as caught:
            config({"it": expression}).get("it")
        assert quoted in caught.value.detail
        assert len(caught.value.detail) < 300


@pytest.mark.parametrize(
    ("entries", "code"),
    [
        ({"it": "@missing"}, "MODEL_DAMAGED"),
        ({"it": "@a#b", "a": {}}, "MODEL_DAMAGED"),
        ({"it": "@a#9", "a": [1]}, "MODEL_DAMAGED"),
        ({"it": "@it"}, "MODEL_DAMAGED"),
        ({"it": "@a", "a": "$@it"}, "MODEL_DAMAGED"),
        ({"it": {"a": "@it"}}, "MODEL_DAMAGED"),
        ({"it": {"_target_": "UNet", "_requires_": "$os.system('x')"}}, "MODEL_UNSUPPORTED"),
        ({"it": {"_target_": "UNet", "_mode_": "debug"}}, "MODEL_UNSUPPORTED"),
        ({"it": {"_target_": "$__import__('os')", "_mode_": "callable"}}, "MODEL_UNSUPPORTED"),
        ({"it": {"_target_": 3}}, "MODEL_DAMAGED"),
        ({"it": b"bytes"}, "MODEL_UNSUPPORTED"),
    ],
)
def test_broken_entries_are_refused(entries: dict[str, Any], code: str) -> None:
    with pytest.raises(ScanError) as caught:
        config(entries).get("it")
    assert caught.value.code == code


def test_unbounded_growth_is_refused() -> None:
    """Doubling a list or a text again and again, or lists in lists, costs no time, no memory."""
    doubled: dict[str, Any] = {"l0": [1], "t0": "a"}
    for n in range(15):
        doubled[f"l{n + 1}"] = f"$@l{n} + @l{n}"
        doubled[f"t{n + 1}"] = f"$@t{n} + @t{n}"
    shared: dict[str, Any] = {"it": {"a": [[[]]]}}
    inner = shared["it"]["a"]
    for _ in range(100):
        inner = [inner, inner]
    shared["it"]["a"] = inner
    loop: list[Any] = []
    loop.append(loop)

    assert len(config(doubled).get("l13")) == 2**13
    assert code("@l15", **doubled) == "MODEL_UNSUPPORTED"
    assert code("@t15", **doubled) == "MODEL_UNSUPPORTED"
    assert code("@it2", it2=shared) == "MODEL_UNSUPPORTED"
    assert code("@loop", loop=loop) == "MODEL_UNSUPPORTED"
    assert code("@wide", wide=[0] * 60_000) == "MODEL_UNSUPPORTED"


_SEEN: list[str] = []
_WATCH = [False]
_FORBIDDEN = ("import", "exec", "open", "os.system", "subprocess.Popen", "socket.connect")


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _WATCH[0] and event in _FORBIDDEN:
        _SEEN.append(event)


sys.addaudithook(_watch)

TOKEN_LIST = """
@n @sizes @names#a @missing torch . os system __import__ __class__ ( ) [ ] { } , : + - * / // ** %
; = := if else not and lambda x for in len list range import 'a' "b" 1 0 2.5 None True f' ... $
torch.device torch.float32 CommonKeys.IMAGE .to(
"""
TOKENS = st.sampled_from([*TOKEN_LIST.split(), "\x00", "\n"])


@given(st.one_of(st.lists(TOKENS, max_size=25).map(" ".join), st.text(max_size=60)))
@settings(max_examples=600)
@example("[[[[1]]]]*9")
@example("len(" * 60 + ")" * 60)
def test_any_text_gives_a_value_or_a_refusal_and_runs_nothing(text: str) -> None:
    """Python's own audit hook is the witness: no import, no exec, no file, no process."""
    entries = {"n": 1, "sizes": [1, 2], "names": {"a": "b"}, "it": "$" + text}
    _SEEN.clear()
    _WATCH[0] = True
    try:
        result = config(entries).get("it")
    except ScanError as exc:
        result = exc.code
    finally:
        _WATCH[0] = False
    assert _SEEN == []
    assert result is None or isinstance(result, bool | int | float | str | list | dict | Name)

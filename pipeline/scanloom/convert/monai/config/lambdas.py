"""Decode functions of a config from their syntax trees; they are never run."""

from __future__ import annotations

import ast

from scanloom.convert.monai.config.values import Priorities, Unchanged


def decode_lambda(node: ast.Lambda) -> Priorities | Unchanged | None:
    """Return the meaning of a function of one argument, None if it is not of a known form.

    Known forms are ``torch.where(x[[c]] > 0, n, ...)``, nested in the last argument and with 0 in
    the innermost, and ``torch.nan_to_num(x, nan=...)``: labels are never NaN.
    """
    match node.args:
        case ast.arguments(
            posonlyargs=[],
            args=[ast.arg(arg=variable)],
            vararg=None,
            kwonlyargs=[],
            kwarg=None,
            defaults=[],
        ):
            pass
        case _:
            return None
    match node.body:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="torch"), attr="nan_to_num"),
            args=[ast.Name(id=name)],
            keywords=[ast.keyword(arg="nan", value=ast.Constant())],
        ) if name == variable:
            return Unchanged()
    regions = _regions(node.body, variable)
    return Priorities(tuple(regions)) if regions else None


def _regions(body: ast.expr, variable: str) -> list[tuple[int, int]] | None:
    """Return channels and numbers of nested ``torch.where``, None for another form."""
    regions: list[tuple[int, int]] = []
    while True:
        match body:
            case ast.Constant(value=int() as value) if value == 0 and type(value) is int:
                return regions
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr="where"),
                args=[
                    ast.Compare(
                        left=ast.Subscript(
                            value=ast.Name(id=name),
                            slice=ast.List(elts=[ast.Constant(value=int() as channel)]),
                        ),
                        ops=[ast.Gt()],
                        comparators=[ast.Constant(value=0)],
                    ),
                    ast.Constant(value=int() as number),
                    body,
                ],
                keywords=[],
            ) if name == variable and type(channel) is int and type(number) is int and number > 0:
                regions.append((channel, number))
            case _:
                return None

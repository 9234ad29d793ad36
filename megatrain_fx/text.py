"""The text form of schedules: one line an operation; parsing gives back an equal schedule."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from megatrain_fx.errors import ScheduleParseError
from megatrain_fx.ir import Lane, Op, Operation, View

_NAME = re.compile(r"^(?:[\w.]+|<[\w.]+>)$")
_BUFFER_LINE = re.compile(r"^(?P<name>[\w.]+)\s+(?P<bytes>\d+) bytes$")
_OPERATION_LINE = re.compile(
    r"^%(?P<index>\d+)\s+= (?P<op>\w+)\s+(?P<lane>\w+)(?:\s+(?P<body>.*?))??"
    r"(?:\s+after (?P<after>(?:prev )?%\d+(?:, (?:prev )?%\d+)*))?$"
)
_BODY = re.compile(
    r"^(?:stage\.(?P<stage>\d+)\s*)?(?:T(?P<template>\d+)\s*)?(?P<reads>.*?)(?:\s*-> (?P<writes>.*?))?"
    r"(?:\s*\((?P<view>weights\.[^)]*)\))?$"
)
_VIEW = re.compile(r"^(?P<region>weights\.\d+)\+(?P<offset>\d+) (?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]$")
_ALIGNED_BODY = 56
_Token = TypeVar("_Token", Op, Lane)


def format_operation(index: int, operation: Operation, width: int = 1) -> str:
    """One line, for example ``%4 = forward compute stage.0 T0 slot.0, input.0 -> h0.0 after %2``."""
    number = f"%{index}".ljust(width + 1)
    head = f"{number} = {operation.op.value:<10}  {operation.lane.value:<9}"
    body = _format_body(operation)
    after = ", ".join((*(f"%{i}" for i in operation.after), *(f"prev %{i}" for i in operation.after_previous)))
    if after:
        return f"{head}  {body:<{_ALIGNED_BODY}}  after {after}"
    return f"{head}  {body}".rstrip()


def _format_body(operation: Operation) -> str:
    parts = []
    if operation.stage is not None:
        parts.append(f"stage.{operation.stage}")
    if operation.template is not None:
        parts.append(f"T{operation.template}")
    if operation.reads:
        parts.append(", ".join(operation.reads))
    if operation.writes:
        parts.append("-> " + ", ".join(operation.writes))
    if operation.view is not None:
        parts.append(f"({operation.view})")
    return " ".join(parts)


def format_schedule(operations: Sequence[Operation], buffers: Mapping[str, int], marks: Mapping[int, str]) -> str:
    """The whole text; ``marks`` puts a remark below the lines of some operations (used by errors)."""
    name_width = max((len(name) for name in buffers), default=0)
    lines = [f"{name:<{name_width}}  {size} bytes" for name, size in buffers.items()]
    if lines:
        lines.append("")
    width = len(str(max(len(operations) - 1, 0)))
    for index, operation in enumerate(operations):
        lines.append(format_operation(index, operation, width))
        if index in marks:
            lines.append(f"{'':>{width + 1}}   ^ {marks[index]}")
    return "\n".join(lines)


def parse_schedule(text: str) -> tuple[tuple[Operation, ...], dict[str, int]]:
    """Operations and buffers of a text.

    Raises:
        ScheduleParseError: a line is neither a buffer nor an operation, names an unknown op or lane, is misnumbered, or
            declares a buffer again.
    """
    operations: list[Operation] = []
    buffers: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        if declared := _BUFFER_LINE.match(line):
            if declared["name"] in buffers:
                raise ScheduleParseError(f"line {number} declares {declared['name']} again: declare each buffer once")
            buffers[declared["name"]] = int(declared["bytes"])
        else:
            operations.append(_parse_operation(line, number, expected_index=len(operations)))
    return tuple(operations), buffers


def _parse_operation(line: str, number: int, expected_index: int) -> Operation:
    match = _OPERATION_LINE.match(line)
    if match is None:
        raise ScheduleParseError(
            f"line {number} is not an operation: {line!r}. Expected '%<index> = <op> <lane> ... [after %<index>, ...]'"
        )
    if int(match["index"]) != expected_index:
        raise ScheduleParseError(
            f"line {number} is numbered %{match['index']}, but it is operation %{expected_index}: number lines in order"
        )
    body = _BODY.match(match["body"] or "")
    if body is None:
        raise ScheduleParseError(f"line {number}: cannot read the operands {match['body']!r}")
    return Operation(
        op=_token(Op, match["op"], number),
        lane=_token(Lane, match["lane"], number),
        stage=_integer(body["stage"]),
        template=_integer(body["template"]),
        reads=_names(body["reads"], number),
        writes=_names(body["writes"], number),
        after=_indices(match["after"], "%"),
        after_previous=_indices(match["after"], "prev %"),
        view=_parse_view(body["view"], number),
    )


def _token(kind: type[_Token], token: str, number: int) -> _Token:
    try:
        return kind(token)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise ScheduleParseError(f"line {number}: unknown {kind.__name__.lower()} {token!r}. Known: {known}") from None


def _parse_view(text: str | None, number: int) -> View | None:
    if text is None:
        return None
    match = _VIEW.match(text)
    if match is None:
        raise ScheduleParseError(
            f"line {number}: cannot read the view {text!r}. Expected 'weights.<k>+<offset> <dtype>[<sizes>]'"
        )
    shape = tuple(int(size) for size in match["shape"].split(",") if size.strip())
    return View(match["region"], int(match["offset"]), shape, match["dtype"])


def _indices(text: str | None, prefix: str) -> tuple[int, ...]:
    """Those dependencies of a list that have a prefix."""
    parts = [part.strip() for part in (text or "").split(",")]
    return tuple(int(part.removeprefix(prefix)) for part in parts if part.startswith(prefix))


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text)


def _names(text: str | None, number: int) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        if not _NAME.match(name):
            raise ScheduleParseError(
                f"line {number}: {name!r} is not the name of a buffer. Expected '<buffer>, ... -> <buffer>, ...' and "
                f"'after %<index>, ...'"
            )
    return names

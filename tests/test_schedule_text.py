"""The text form: every schedule parses back to an equal one, and every text that is not a schedule is refused."""

from __future__ import annotations

from textwrap import fill

import pytest
from expecttest import assert_expected_inline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megatrain_fx as megatrain
from megatrain_fx.ir import Lane, Op, Operation, View
from megatrain_fx.schedule import Schedule
from megatrain_fx.text import format_operation
from models import EXAMPLES, Example
from schedule_edits import changed, removed
from synthetic_facts import chain_schedule
from traced_examples import traced


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_schedules_of_real_models_parse_back(example: Example) -> None:
    for schedule in traced(example.name).schedules().values():
        assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_every_intermediate_schedule_parses_back(example: Example) -> None:
    for _, schedule in traced(example.name).program.history:
        assert Schedule.parse(str(schedule)) == schedule


def names(*stems: str) -> st.SearchStrategy[str]:
    return st.builds("{}.{}".format, st.sampled_from(stems), st.integers(0, 999))


BUFFERS = names(
    "slot", "weights", "gradients", "input", "checkpoint", "tape", "slab.use1", "h2", "grad.h1", "grad.input"
)
SIDED = st.builds("{}.{}".format, names("slab"), st.sampled_from(["device", "host"]))
PARAMETERS = st.builds("<{}>".format, names("layers", "norm.weight", "_head"))
OPERANDS = st.lists(BUFFERS | SIDED | PARAMETERS, max_size=4).map(tuple)
VIEWS = st.builds(
    View,
    region=names("weights"),
    offset=st.integers(0, 2**40),
    shape=st.lists(st.integers(0, 2**20), max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "complex64", "int64", "bool"]),
)
OPERATIONS = st.builds(
    Operation,
    op=st.sampled_from(Op),
    lane=st.sampled_from(Lane),
    stage=st.none() | st.integers(0, 10**4),
    template=st.none() | st.integers(0, 10**4),
    reads=OPERANDS,
    writes=OPERANDS,
    after=st.lists(st.integers(0, 10**5), max_size=3).map(tuple),
    view=st.none() | VIEWS,
)
SIZES = st.dictionaries(BUFFERS | SIDED, st.integers(0, 2**50), max_size=4).map(lambda sizes: tuple(sizes.items()))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(Schedule, st.lists(OPERATIONS, max_size=12).map(tuple), SIZES))
def test_any_operations_parse_back(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_one_line() -> None:
    operation = Operation(
        Op.LOAD,
        Lane.COMPUTE,
        stage=3,
        reads=("slot.1",),
        writes=("<norm.weight>",),
        after=(2, 5),
        view=View("weights.3", 64, (), "bfloat16"),
    )
    line = format_operation(7, operation)
    assert_expected_inline(
        line,
        """%7 = load        compute    stage.3 slot.1 -> <norm.weight> (weights.3+64 bfloat16[])  after %2, %5""",
    )
    assert Schedule.parse("\n".join(f"%{i} = release h2d" for i in range(7)) + "\n" + line).operations[7] == operation


def test_blank_lines_comments_and_spacing_do_not_matter() -> None:
    schedule = chain_schedule()
    loose = [f"\n   {' '.join(line.split())}   # {line}" for line in str(schedule).splitlines() if line]
    assert Schedule.parse("# a schedule\n" + "\n".join(loose)) == schedule


def test_a_remark_stands_below_its_operation() -> None:
    schedule = chain_schedule()
    lines = schedule.text({3: "look here"}).splitlines()
    remark = lines.index("      ^ look here")
    assert lines[remark - 1].startswith("%3 ")
    assert [line for line in lines if "look here" not in line] == str(schedule).splitlines()


def test_an_empty_text_is_an_empty_schedule() -> None:
    assert Schedule.parse("") == Schedule(())
    assert str(Schedule(())) == ""


def test_a_diff_ignores_numbers() -> None:
    schedule = chain_schedule(training=False)
    shorter = removed(schedule, 0)
    assert schedule.diff(schedule) == ""
    assert_expected_inline(
        "\n".join(line for line in schedule.diff(shorter).splitlines() if line[0] in "+-"),
        """\
--- before
+++ after
-prefetch h2d weights.0 -> slot.0""",
    )


def parse_error(text: str) -> str:
    with pytest.raises(megatrain.ScheduleParseError) as caught:
        Schedule.parse(text)
    assert isinstance(caught.value, megatrain.ScheduleError)
    assert isinstance(caught.value, ValueError)
    return fill(str(caught.value), 100)


def test_an_unknown_op_is_refused() -> None:
    assert_expected_inline(
        parse_error("slot.0 8 bytes\n\n%0 = teleport h2d slot.0"),
        """\
line 3: unknown op 'teleport'. Known: prefetch, load, checkpoint, forward, select, yield, recompute,
backward, evacuate, accumulate, norm, clip, update, release""",
    )


def test_an_unknown_lane_is_refused() -> None:
    assert_expected_inline(
        parse_error("%0 = prefetch d2d weights.0 -> slot.0"),
        """line 1: unknown lane 'd2d'. Known: compute, h2d, d2h, host, optimizer""",
    )


def test_a_wrong_number_is_refused() -> None:
    assert_expected_inline(
        parse_error("%0 = release compute slot.0\n%2 = release compute slot.1"),
        """line 2 is numbered %2, but it is operation %1: number lines in order""",
    )


def test_a_line_that_is_no_operation_is_refused() -> None:
    assert_expected_inline(
        parse_error("\nprefetch weights.0 into slot.0"),
        """\
line 2 is not an operation: 'prefetch weights.0 into slot.0'. Expected '%<index> = <op> <lane> ...
[after %<index>, ...]'""",
    )


def test_a_size_that_is_no_number_is_refused() -> None:
    assert_expected_inline(
        parse_error("slot.0 many bytes"),
        """\
line 1 is not an operation: 'slot.0 many bytes'. Expected '%<index> = <op> <lane> ... [after
%<index>, ...]'""",
    )


def test_a_dependency_that_is_no_number_is_refused() -> None:
    assert_expected_inline(
        parse_error("%0 = prefetch h2d weights.0 -> slot.0 after %x"),
        """\
line 1: 'slot.0 after %x' is not the name of a buffer. Expected '<buffer>, ... -> <buffer>, ...' and
'after %<index>, ...'""",
    )


def test_a_view_that_cannot_be_read_is_refused() -> None:
    assert_expected_inline(
        parse_error("%0 = load compute stage.0 slot.0 -> <w> (weights.0 float32)"),
        """line 1: cannot read the view 'weights.0 float32'. Expected 'weights.<k>+<offset> <dtype>[<sizes>]'""",
    )


def test_a_buffer_declared_twice_is_refused() -> None:
    assert_expected_inline(
        parse_error("slot.0 8 bytes\nslot.0 16 bytes"), """line 2 declares slot.0 again: declare each buffer once"""
    )


def test_operands_that_are_no_names_are_refused() -> None:
    assert_expected_inline(
        parse_error("%0 = prefetch h2d weights.0 => slot.0"),
        """\
line 1: 'weights.0 => slot.0' is not the name of a buffer. Expected '<buffer>, ... -> <buffer>, ...'
and 'after %<index>, ...'""",
    )


def test_a_cycle_parses_but_does_not_verify() -> None:
    schedule = chain_schedule(training=False)
    text = str(changed(schedule, 0, after=(2,)))
    with pytest.raises(megatrain.ScheduleError) as caught:
        Schedule.parse(text).verify()
    assert_expected_inline(
        fill(str(caught.value).splitlines()[0], 100),
        """\
operation %0: deadlock: it waits for %2, which is issued later, so lanes would wait for each other
for ever (a cycle); an operation may depend only on earlier ones""",
    )

"""Part of the specification: a region is named whole, or in two parts that a select has told apart."""

from megatrain_fx.ir import BufferKind, Op, Operation, Rows, is_hosted, kind_of, number_of, rows_of, whole
from megatrain_fx.schedule import Schedule

_WHOLE = ({Rows.ALL}, {Rows.CHOSEN, Rows.REST})


class RowRules:
    """Parts of a region are disjoint only if they are named alike everywhere, after the rows have been selected.

    That a stage reads and trains no rows of the region but those of its ``select`` is what the op asserts.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._uses = {(o.stage, number_of(o.view.region)) for o in schedule if o.view is not None}
        self._split = {number_of(o.writes[0]) for o in schedule if o.op is Op.SELECT}
        self._selected: set[int] = set()

    def step(self, operation: Operation) -> str | None:
        """What is wrong with an operation at this point, or None. Its operands are of the right kinds."""
        if operation.op is Op.SELECT:
            return self._select(operation)
        for name in (*operation.reads, *operation.writes):
            if is_hosted(name) and (broken := self._check_name(name)):
                return broken
        if operation.op is Op.PREFETCH:
            return _check_parts(operation, operation.reads, _WHOLE)
        if operation.op is Op.ACCUMULATE:
            return _check_parts(operation, operation.writes, (*_WHOLE, {Rows.CHOSEN})) or _check_selection(operation)
        return _check_update(operation) or _check_selection(operation) if operation.op is Op.UPDATE else None

    def _select(self, operation: Operation) -> str | None:
        region = number_of(operation.writes[0])
        if region in self._selected:
            return f"{operation.writes[0]} is selected twice"
        if (operation.stage, region) not in self._uses:
            return f"stage.{operation.stage} loads nothing from weights.{region}, so it looks up no rows of it"
        if len(operation.reads) != 1:
            return "select reads the one value that holds the numbers of the rows"
        self._selected.add(region)
        return None

    def _check_name(self, name: str) -> str | None:
        try:
            rows = rows_of(name)
        except ValueError:
            return f"{name} is no part of {whole(name)}; parts are {whole(name)}.rows and {whole(name)}.rest"
        region = number_of(name)
        if rows is Rows.ALL:
            parts = f"{name}.rows and {name}.rest"
            return (
                f"{name} overlaps {parts}, which rows.{region} tells apart: name these" if self._splits(name) else None
            )
        return None if self._splits(name) else f"no select writes rows.{region}, which {name} needs"

    def _splits(self, name: str) -> bool:
        return number_of(name) in self._split


def _check_parts(operation: Operation, names: tuple[str, ...], allowed: tuple[set[Rows], ...]) -> str | None:
    hosted = [name for name in names if is_hosted(name)]
    regions = {number_of(name) for name in hosted}
    if len(regions) > 1 or {rows_of(name) for name in hosted} not in allowed:
        return f"{operation.op} cannot take {' and '.join(hosted)} at once, nor a part of a region that it needs whole"
    return None


def _check_update(operation: Operation) -> str | None:
    gradients = next(name for name in operation.reads if kind_of(name) is BufferKind.GRADIENTS)
    if rows_of(gradients) is not rows_of(operation.writes[0]):
        return f"{operation.writes[0]} cannot be updated with {gradients}, the gradients of other rows"
    return None


def _check_selection(operation: Operation) -> str | None:
    """An operation on one part reads the rows of its region, and no other does."""
    hosted = [name for name in (*operation.reads, *operation.writes) if is_hosted(name)]
    read = [name for name in operation.reads if kind_of(name) is BufferKind.ROWS]
    partial = {rows_of(name) for name in hosted} not in _WHOLE
    expected = [f"rows.{number_of(hosted[0])}"] if partial else []
    if read != expected:
        found = ", ".join(read) or "no rows"
        return f"{operation.op} of {hosted[0]} reads {found}; let it read {', '.join(expected) or 'none'}"
    return None

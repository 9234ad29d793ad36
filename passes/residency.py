"""How many buffers of which size serve a sequence of uses, and which one each use gets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SIZE_RATIO = 2


@dataclass(frozen=True)
class Use:
    """One stage at work: the contents (by number) that it needs on the device at the same time."""

    contents: tuple[int, ...]


def size_classes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Class of every content: those within a factor of two of the largest of their class share buffers."""
    order = sorted(range(len(sizes)), key=lambda content: -sizes[content])
    classes = [0] * len(sizes)
    current, largest = -1, 0
    for content in order:
        if current < 0 or sizes[content] * _SIZE_RATIO <= largest:
            current, largest = current + 1, sizes[content]
        classes[content] = current
    return tuple(classes)


def buffers_needed(uses: Sequence[Use], classes: Sequence[int], window: int) -> dict[int, int]:
    """Per class, the most distinct contents that any ``window`` neighbouring uses need.

    So layers get ``window`` buffers, and a matrix that is needed only at the two ends of a model gets one.
    """
    needed: dict[int, int] = {}
    for start in range(max(len(uses) - window, 0) + 1):
        contents = {content for use in uses[start : start + window] for content in use.contents}
        for kind in {classes[content] for content in contents}:
            count = sum(1 for content in contents if classes[content] == kind)
            needed[kind] = max(needed.get(kind, 0), count)
    return needed


@dataclass
class _Buffer:
    number: int
    content: int | None = None
    last_use: int = -1


def assign(uses: Sequence[Use], classes: Sequence[int], counts: dict[int, int]) -> list[dict[int, tuple[int, bool]]]:
    """For every use, its contents' buffer numbers, and whether the content is still there from an earlier use.

    The buffer whose content is needed again latest is replaced (Belady 1966, optimal for a known future); of several
    that are never needed again, the one that has been idle longest, so that the copy can start earliest.
    """
    next_uses = _next_uses(uses)
    pools: dict[int, list[_Buffer]] = {}
    for kind in sorted(counts):
        begin = sum(len(pool) for pool in pools.values())
        pools[kind] = [_Buffer(begin + i) for i in range(counts[kind])]
    result = []
    for time, use in enumerate(uses):
        places: dict[int, tuple[int, bool]] = {}
        for content in use.contents:
            pool = pools[classes[content]]
            held = next((buffer for buffer in pool if buffer.content == content), None)
            buffer = held or _victim(pool, use, time, next_uses)
            buffer.content, buffer.last_use = content, time
            places[content] = (buffer.number, held is not None)
        result.append(places)
    return result


def _victim(pool: list[_Buffer], use: Use, time: int, next_uses: list[dict[int, int]]) -> _Buffer:
    def cost(buffer: _Buffer) -> tuple[float, int]:
        next_use = math.inf if buffer.content is None else next_uses[time].get(buffer.content, math.inf)
        return (-next_use, buffer.last_use)

    return min((buffer for buffer in pool if buffer.content not in use.contents), key=cost)


def _next_uses(uses: Sequence[Use]) -> list[dict[int, int]]:
    """For every time, when each content is used next (this time included); contents without a next use are absent."""
    result: list[dict[int, int]] = [{} for _ in uses]
    upcoming: dict[int, int] = {}
    for time in reversed(range(len(uses))):
        upcoming.update(dict.fromkeys(uses[time].contents, time))
        result[time] = dict(upcoming)
    return result

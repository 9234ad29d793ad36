"""The programs of one model, found by the signature of a call."""

from collections import defaultdict
from collections.abc import Hashable

from megatrain_fx.program import Program
from megatrain_fx.signature import InputSignature


class ProgramCache:
    """Programs by signature. The first shape of a call is captured as it is, the second one with symbolic sizes."""

    def __init__(self) -> None:
        self._exact: dict[InputSignature, Program] = {}
        self._by_kind: defaultdict[Hashable, list[Program]] = defaultdict(list)

    def find(self, signature: InputSignature) -> Program | None:
        """The program that serves a call, if there is one."""
        program = self._exact.get(signature)
        if program is None:
            for candidate in self._by_kind.get(signature.without_sizes(), ()):
                if candidate.capture.accepts(signature):
                    self._exact[signature] = program = candidate
                    break
        return program

    def knows_kind(self, signature: InputSignature) -> bool:
        """Whether a call was seen before that differs from this one only in sizes."""
        return signature.without_sizes() in self._by_kind

    def add(self, signature: InputSignature, program: Program) -> None:
        """Keep a new program."""
        self._exact[signature] = program
        self._by_kind[signature.without_sizes()].append(program)

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))

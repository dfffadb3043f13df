"""Statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class BatchType:
    """How a batch is written."""

    UNLOGGED = 1


@dataclass
class BoundStatement:
    """A prepared statement with its values; its partition's key, as a server would route it."""

    prepared: PreparedStatement
    values: Sequence[Any]

    @property
    def routing_key(self) -> bytes:
        return repr(self.values[: len(self.prepared.partition)]).encode()


@dataclass
class PreparedStatement:
    """A statement that the server knows."""

    cql: str
    partition: tuple[str, ...]
    consistency_level: int = 0
    serial_consistency_level: int = 0

    def bind(self, values: Sequence[Any]) -> BoundStatement:
        assert len(values) == self.cql.count("?"), self.cql
        assert self.consistency_level and self.serial_consistency_level
        return BoundStatement(self, values)


@dataclass
class BatchStatement:
    """Statements that are applied together, of one partition each."""

    batch_type: int
    consistency_level: int = 0
    statements: list[BoundStatement] = field(default_factory=list)

    def add(self, statement: BoundStatement) -> None:
        assert self.batch_type == BatchType.UNLOGGED
        self.statements.append(statement)
        assert len({s.routing_key for s in self.statements}) == 1, "a batch is of one partition"

"""A model described in a worker: what is known of it crosses to the driver, which need not import its libraries."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from gristmill.models import kinds
from gristmill.models.contract import ModelInfo
from gristmill.process.messages import Emit, Item, Outcome
from gristmill.process.startup import thread_variables
from gristmill.values import dataclass


@dataclass(frozen=True)
class DescribeStages:
    """What an engine ships to describe a model for the columns of a source."""

    spec: Any
    schema: pa.Schema | None

    def environment(self, index: int) -> Mapping[str, str]:
        return thread_variables(1)

    def open(self, name: str, emit: Emit) -> Describer:
        return Describer(self, name)


class Describer:
    """The worker of `DescribeStages`. Its outcome is a ModelInfo, or None where only the driver can say it: the model
    has code of the user's, which is compared there, or something was logged, for which loggers are set up there.
    """

    def __init__(self, stages: DescribeStages, name: str) -> None:
        self._stages = stages
        self._name = name

    def work(self, items: Iterator[Item], emit: Emit) -> None:
        for item in items:
            emit(Outcome(self._name, item.key, self._described()))

    def stop(self) -> None:
        """Nothing to drop: the process ends."""

    def _described(self) -> ModelInfo | None:
        logged = _Logged()
        logging.getLogger().addHandler(logged)
        info = kinds.describe(self._stages.spec, self._stages.schema)
        return None if info.code or logged.some else info


class _Logged(logging.Handler):
    """Whether anything was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.some = False

    def emit(self, record: logging.LogRecord) -> None:
        self.some = True

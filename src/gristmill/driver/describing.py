"""What is known of a model before it is loaded: asked of a fork, if that has the model's libraries imported already and
this process has not. It then takes no import of them, which for scikit-learn is seconds of a core that workers want.
"""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa

from gristmill.engines.interpreter import SPARES
from gristmill.engines.registry import open_engine
from gristmill.job.options import EngineSpec
from gristmill.models import kinds
from gristmill.models.contract import ModelInfo
from gristmill.process.messages import DONE, Item, Outcome, Printed, Signal
from gristmill.process.startup import import_path
from gristmill.worker.describing import DescribeStages


def described(spec: Any, schema: pa.Schema | None, engine: EngineSpec) -> ModelInfo:
    """See ModelKind.describe; raises what it raises. Whatever goes wrong in a fork is done again here, so that errors,
    warnings and what the user's code prints are those of this process.
    """
    if _elsewhere(spec, engine) and (info := _by_fork(spec, schema)) is not None:
        return info
    return kinds.describe(spec, schema)


def _elsewhere(spec: Any, engine: EngineSpec) -> bool:
    imports = getattr(spec, "imports", ())
    if not kinds.loads_to_describe(spec) or not imports or imports[0] in sys.modules:
        return False
    local = engine.name == EngineSpec.name and engine.workers != 0
    return local and SPARES.forks(import_path(), imports)


def _by_fork(spec: Any, schema: pa.Schema | None) -> ModelInfo | None:
    """None if there was no answer, or something besides."""
    info, alone = None, True
    for event in open_engine(EngineSpec(workers=1), 1, import_path()).run(DescribeStages(spec, schema), _Once()):
        alone = alone and not isinstance(event, Printed)
        if isinstance(event, Outcome):
            info = event.value if event.error is None else None
    return info if alone else None


class _Once:
    """A feed of one item, which is not tried again."""

    def __init__(self) -> None:
        self._items = [Item("describe", None)]

    def take(self, worker: str) -> Item | Signal:
        return self._items.pop() if self._items else DONE

    def wanted(self) -> int:
        return len(self._items)

"""`remote_parallel_map`: a function over inputs, on many workers."""

from __future__ import annotations

import inspect
import itertools
import operator
import os
import warnings
from collections.abc import Iterable, Sized
from typing import Any

from gristmill.engines.registry import engine_kind
from gristmill.errors import BadJob, GristmillWarning
from gristmill.job.keywords import check_names, named
from gristmill.job.options import ENGINE, ENGINES, EngineSpec, default_engine
from gristmill.parallel import placing
from gristmill.parallel.mapping import Mapping, mapped
from gristmill.process.startup import starting

LONGEST = 1e9  # seconds: clocks cannot count much longer, so a longer timeout, or inf, means none


@named("remote_parallel_map")
def remote_parallel_map(
    function_: Any,
    inputs: Iterable[Any],
    func_cpu: Any = "dynamic",
    func_ram: Any = "dynamic",
    func_gpu: str | int | None = None,
    image: str | None = None,
    grow: bool = False,
    max_parallelism: int | None = None,
    detach: bool = False,
    generator: bool = False,
    spinner: bool = True,
    region: str | None = None,
    disk_gb: float | None = None,
    *,
    ordered: bool = False,
    return_exceptions: bool = False,
    retries: int = 0,
    timeout: float | None = None,
    checkpoint: str | None = None,
    engine: Any = None,
) -> Any:
    """Call `function_` once for each input, on many workers. Returns a list of results, in order of completion.

    A tuple is unpacked into arguments, everything else is one argument. The function may be any callable of a script, a
    notebook or a REPL; it stays in its worker between calls, with whatever it stores on itself. What it prints appears
    here. Inputs may be endless: they are read only as far ahead as is needed.

    - `func_cpu` cores, `func_ram` GB and one `func_gpu` ("A100") are what one call needs (0: no GPU), `max_parallelism`
      bounds the calls at once. More than the machine has means one call at a time; a GPU that is not there is an error.
      For calls that mostly wait, `func_cpu=0.1` puts ten on a core; a `max_parallelism` above the cores means as many.
    - `generator=True` begins at once, and yields results as calls finish. A slow consumer slows the workers; leaving
      early ends them.
    - `ordered=True`: in the order of the inputs. `return_exceptions=True`: exceptions are results.
    - `retries`: further tries for an input whose call raises or whose worker dies. `timeout`: seconds a call may take.
    - `checkpoint`: a folder in which finished results are kept, under the function's code and the input; a later call
      with the same folder does not compute them again.
    - `detach=True` returns a `Detached` handle at once, to be iterated over or asked; the map continues without this
      process.
    - `engine`: "local", "ray", or `gm.ray(…)`; by default the environment variable GRISTMILL_ENGINE, else "local".
      `image`, `grow`, `region` and `disk_gb` are for engines that can use them.

    Raises the first exception of a call with its own type, the worker's traceback as its cause, a note with its input
    and that input's number as `input_index`; the other calls are cancelled. An input whose worker dies is WorkerLost,
    raised after the other inputs have finished. RemoteError stands for what cannot be pickled; CallTimeout for a call
    that took too long.
    """
    starting("a map")
    spec = _engine(engine)
    _check(function_, inputs, retries, timeout)
    request = placing.Request(func_cpu, func_ram, func_gpu, max_parallelism)
    kind: Any = engine_kind(spec)
    if not kind.here:
        spec = placing.per_call(kind, request, image, spec)
        place = placing.on_a_cluster(request, spec, grow)
    else:
        if image is not None and image not in _said:
            _said.add(image)
            text = f"image={image!r} is not used: calls run on this machine, in this environment"
            warnings.warn(text, GristmillWarning, stacklevel=2)
        place = placing.on_this_machine(request)
    for note in place.notes:
        warnings.warn(note, GristmillWarning, stacklevel=2)
    if isinstance(inputs, Sized) and operator.length_hint(inputs, 1) == 0 and not detach:
        rest = iter(inputs)  # a length is only a hint, even if it is 0
        first = list(itertools.islice(rest, 1))
        if not first:
            return iter(()) if generator else []
        inputs = itertools.chain(first, rest)
    how = Mapping(
        spec,
        place.workers,
        place.threads,
        place.gpus,
        ordered,
        bool(return_exceptions),
        retries,
        None if timeout is None or timeout > LONGEST else float(timeout),
        checkpoint,
        spinner,
    )
    if detach:
        from gristmill.parallel.detached import start

        return start(function_, inputs, how)
    found = mapped(function_, inputs, how)
    return found if generator else list(found)


_said: set[str] = set()  # images that were already reported as unused


def map(function: Any, inputs: Iterable[Any], *, ordered: bool = True, **options: Any) -> Any:
    """`remote_parallel_map` with results in the order of the inputs, like the built-in function of this name. Options
    are passed by name.
    """
    known = inspect.signature(remote_parallel_map).parameters
    check_names("map", options, [name for name in known if name not in ("function_", "inputs")])
    return remote_parallel_map(function, inputs, ordered=ordered, **options)


@named("detached")
def detached(id: str) -> Any:
    """The handle of a detached map, by its id, from any process: `status()`, `results()`, `cancel()`. Raises BadJob if
    no map has that id.
    """
    from gristmill.parallel.detached import Detached

    return Detached(id)


def _engine(engine: Any) -> EngineSpec:
    if isinstance(engine, EngineSpec):
        spec = engine
    elif isinstance(engine, str):
        spec = EngineSpec(engine)
    elif engine is None:
        spec = EngineSpec(default_engine(os.environ))
    else:
        raise BadJob(f"engine is {engine!r}: give 'local', 'ray' or gm.ray(…)")
    if not _maps(spec.name):
        where = f" (the environment variable {ENGINE}): give engine=" if engine is None else ""
        raise BadJob(f"engine {spec.name!r}{where}: a map runs on {' or '.join(filter(_maps, ENGINES.names))}")
    return spec


def _maps(name: str) -> bool:
    """Whether an engine can run a map: its workers are on this machine, or it can size each call's worker."""
    kind = ENGINES.get(name)
    return kind.here or hasattr(kind, "per_call")


def _check(function: Any, inputs: Any, retries: Any, timeout: Any) -> None:
    if not callable(function):
        raise BadJob(f"{function!r} cannot be called: give a function")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise BadJob(
            f"{getattr(function, '__name__', function)} is async: give a plain function (it may call asyncio.run)"
        )
    if not isinstance(inputs, Iterable):
        raise BadJob(f"inputs is {type(inputs).__name__}: give a list or another iterable")
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise BadJob(f"retries is {retries!r}: give a whole number of at least 0")
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0
    if timeout is not None and not number:
        raise BadJob(f"timeout is {timeout!r}: give seconds above 0")

"""The Ray cluster: connecting to it or starting one, its resources, what a worker takes of them, and why it
must wait.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from gristmill.engines.contract import Room
from gristmill.errors import BadJob, MissingExtra
from gristmill.job.accelerators import COMMON, meant
from gristmill.job.options import RayOptions

_TYPE = "accelerator_type:"  # prefix of Ray's resource names for GPU types


@contextlib.contextmanager
def connected(options: RayOptions, cpus: int | None) -> Iterator[tuple[Any, bool]]:
    """Ray, connected, and whether the connection is our own: the caller's if there is one, else to the cluster of
    `options` or, with `cpus`, to a local one that lasts as long as the connection. Raises BadJob if there is no
    cluster.
    """
    try:
        import ray
    except ModuleNotFoundError as e:
        raise MissingExtra("engine ray needs ray, which is not installed: pip install 'gristmill[ray]'") from e
    if ray.is_initialized():
        yield ray, False
        return
    with _signals_kept():
        _connect(ray, options, cpus)
    try:
        yield ray, True
    finally:
        ray.shutdown()


def _connect(ray: Any, options: RayOptions, cpus: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}  # user code's prints come as events
    if cpus is not None and options.runtime_env:
        quiet["runtime_env"] = dict(options.runtime_env)
    try:
        if options.address != "local":
            _knock(options.address)
            ray.init(address=options.address or "auto", **quiet)
            return
    except OSError as e:
        if options.address is not None or cpus is None:
            where = options.address or "auto"
            raise BadJob(
                f"engine ray: no cluster at address {where!r} ({e}); without an address, one is started"
            ) from e
    ray.init(address="local", num_cpus=max(cpus or 1, os.cpu_count() or 1), include_dashboard=False, **quiet)


def _knock(address: str | None) -> None:
    """Raises OSError if nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=10.0).close()


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the run's own SIGTERM handler, which connecting replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def room(options: RayOptions) -> Room | None:
    """What the cluster has now; None if there is none yet: then a local one will be started on this machine."""
    if options.address == "local":
        return None
    try:
        with connected(options, None) as (ray, _):
            nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    except BadJob:
        if options.address is not None:
            raise
        return None
    there = {name: amount for node in nodes for name, amount in node.items()}
    on_cpus, on_gpus = (sum(_fit(needs(options, gpu, there), node) for node in nodes) for gpu in (False, True))
    if options.split:  # preparing takes cores, too
        cores = sum(node.get("CPU", 0.0) for node in nodes)
        both = int(cores / (options.cpus_per_worker + options.preparers_per_worker))
        on_cpus, on_gpus = min(on_cpus, both), min(on_gpus, both)
    asked = options.gpus_per_worker
    return Room(
        "the Ray cluster",
        max(1, on_cpus),
        0 if asked == 0 else max(on_gpus, 1 if asked else 0),  # a cluster that grows may have none yet
        max(1, int(options.cpus_per_worker)),
        grows=True,
    )


def _fit(needs: Mapping[str, float], node: Mapping[str, float]) -> int:
    return int(min(node.get(name, 0.0) / amount for name, amount in needs.items() if amount))


def needs(options: RayOptions, gpu: bool, there: Mapping[str, float]) -> dict[str, float]:
    """What one worker takes, by Ray's names; `there` is what the cluster has. Raises BadJob for an unknown GPU type."""
    gpus = options.gpus_per_worker if options.gpus_per_worker is not None else float(gpu)
    wanted = {
        "CPU": options.cpus_per_worker,
        "GPU": gpus,
        "memory": options.memory_per_worker or 0,
        **options.resources,
    }
    if options.accelerator_type:
        wanted[_TYPE + _gpu_type(options.accelerator_type, there)] = 0.001  # the amount that Ray itself uses
    return {name: amount for name, amount in wanted.items() if amount or name == "CPU"}


def _gpu_type(asked: str, there: Mapping[str, float]) -> str:
    """The cluster's name for a GPU type, else Ray's: with any other name Ray would silently wait for ever."""
    from ray.util import accelerators

    here = gpu_types(there)
    known = [v for k, v in vars(accelerators).items() if k.isupper() and isinstance(v, str)]
    found = meant(asked, here) or meant(asked, known) or meant(asked, COMMON)
    if found is None:
        near = ", ".join(difflib.get_close_matches(asked.upper(), [*here, *known, *COMMON], 3, 0.5))
        hint = f"near are {near}; " if near else ""
        raise BadJob(
            f"engine ray: {asked!r} is not a known type of GPU: {hint}the cluster has {', '.join(here) or 'none'}. "
            f"Request a type of your own with resources={{'{_TYPE}{asked}': 0.001}}"
        )
    return found


def gpu_types(resources: Mapping[str, float]) -> list[str]:
    """The types of GPUs among the resources of a cluster or a node."""
    return sorted(name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE))


def shortage(
    needs: Mapping[str, float], workers: int, lacking: int, total: Mapping[str, float], free: Mapping[str, float]
) -> str:
    """Why `lacking` of at least `workers` workers have no place, in words."""
    for name, amount in needs.items():
        if amount * workers > total.get(name, 0.0):
            have = _amount(name, total.get(name, 0.0))
            if name.startswith(_TYPE):
                have = ", ".join(gpu_types(total)) or have
            return f"waiting for {_amount(name, amount * workers)}, the cluster has {have}"
    for name, amount in needs.items():
        if amount * lacking > free.get(name, 0.0):
            have = f"{_amount(name, free.get(name, 0.0))} of {_amount(name, total[name])}"
            return f"waiting for {_amount(name, amount * lacking)}, the cluster has {have} free"
    return f"waiting for the cluster to start {lacking} of {workers} workers"


def _amount(name: str, amount: float) -> str:
    if name.startswith(_TYPE):
        return f"a node with {name.partition(':')[2]}" if amount else "none"
    if name == "memory":
        return f"{amount / (1 << 30):.3g} GB of memory"
    plural = "s" if name in ("CPU", "GPU") and amount != 1 else ""
    return f"{amount:g} {name}{plural}"

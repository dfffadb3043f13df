"""What a worker records about the code that it runs: what it loaded and wrote, and values unlike the planned ones."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gristmill.commit import generation as generations
from gristmill.errors import PlanChanged
from gristmill.process.messages import Emit, Printed
from gristmill.worker.recipe import Recipe, Task

if TYPE_CHECKING:
    from gristmill.fingerprint.loadedmodules import Loaded


def warn_of_values(recipe: Recipe, name: str, emit: Emit) -> None:
    """Warn of values in the user's modules that differ from those at planning time; see `pins.unlike`."""
    from gristmill.fingerprint.pins import unlike

    for text in unlike(recipe.held, recipe.pins) if recipe.held else ():
        emit(Printed(name, text, "warning"))


def note_loaded(loaded: Loaded, recipe: Recipe, task: Task) -> None:
    """Note, before a shard is committed, what code loaded as it ran. Raises PlanChanged if another worker, or a run
    that this one adds to, loaded a different version.
    """
    if not (found := loaded.look()):
        return
    from gristmill.fingerprint.loadedmodules import contradicted
    from gristmill.fingerprint.pins import AGAIN, changed_meanwhile

    folder, accepted = task.folder, ", or --accept-code-change (accept_code_change=True) to score the dead rows with it"

    def refuse_others() -> None:
        noted = {entry: set(tellings) for entry, tellings in recipe.loaded.items()}
        for entry, tellings in generations.loaded(folder, recipe.files).items():
            noted.setdefault(entry, set()).update(tellings)
        for entry, told in found.items():
            noted.setdefault(entry, set()).add(told)
        for entry, told in found.items():
            if other := contradicted(entry, told, noted):
                way = AGAIN + (accepted if task.only is not None else "")
                raise changed_meanwhile(f"{other}, which the code loads as it runs,", way)

    refuse_others()
    path = generations.note_loaded(recipe.files, folder, found)
    try:
        refuse_others()  # of two that note different versions at once, at least one sees the other
    except PlanChanged:
        recipe.files.remove(path)
        raise
    loaded.noted(found)


def note_written(loaded: Loaded, recipe: Recipe, folder: str) -> None:
    """Note what the code wrote after its last shard was committed, while closing."""
    found = loaded.written()
    with contextlib.suppress(OSError):  # the file may then not count as the code's own
        if found and recipe.files.names(folder):
            generations.note_loaded(recipe.files, folder, found)

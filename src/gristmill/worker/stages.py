"""What an engine ships to the workers of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gristmill.process.messages import Emit, Item
from gristmill.process.startup import thread_variables
from gristmill.values import dataclass
from gristmill.worker.heap import collect_rarely, keep_freed, use_jemalloc
from gristmill.worker.recipe import LEAST_BEGUN, Recipe, most_begun

if TYPE_CHECKING:
    from gristmill.worker.pipeline import ShardWorker

LEAST_AHEAD = 4  # shards that a worker holds besides the one whose rows it waits for, if these are asked for row by row


@dataclass(frozen=True)
class ShardStages:
    """What an engine ships: the recipe, opened in each worker. `threads` are the cores that one worker may use,
    `beside` the number of step processes below each.
    """

    recipe: Recipe
    threads: int = 1
    gpus: tuple[str, ...] = ()
    timed: bool = True
    beside: int = 0

    @property
    def ahead(self) -> int:
        """As in Stages: one in each step process; of models that answer row by row, as many as have rows in flight, or
        are answered in bulk.
        """
        at_once, bulk = self.recipe.place.at_once, self.recipe.place.bulk
        begun = max(LEAST_AHEAD, most_begun(at_once) // LEAST_BEGUN) if at_once else 0
        begun = max(1, bulk - 1) if bulk else begun
        return max(1, self.beside, begun)

    def environment(self, index: int) -> Mapping[str, str]:
        """Thread counts and the one GPU of worker `index`, for libraries that read them on loading."""
        # Beside a GPU the cores have nothing else to do; on a CPU tokens are made by cores that the model would use.
        several = "true" if self.recipe.place.gpu and self.threads > 1 else "false"
        more = {"ARROW_IO_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": several}
        variables = {**thread_variables(self.threads), **more}
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus[index % len(self.gpus)]
        return variables

    def open(self, name: str, emit: Emit) -> ShardWorker:
        # A driver ships these stages and opens none, so it does without what does the work.
        from gristmill.worker.notes import warn_of_values
        from gristmill.worker.pipeline import ShardWorker

        if self.timed:
            use_jemalloc()
            keep_freed()
            if self.recipe.place.at_once:
                collect_rarely()
        worker = ShardWorker(self, name)
        warn_of_values(self.recipe, name, emit)
        return worker

    def first(self) -> Any:
        """Stages of workers that only read, run steps and tokenise."""
        from gristmill.worker.firststage import PrepareStages

        return PrepareStages(self)

    def apart(self, item: Item) -> bool:
        """Whether the first stage may run elsewhere: not for careful attempts, whose notes tell what killed the
        process, nor for the probe, which is short.
        """
        return item.value.kind == "score" and not item.value.careful

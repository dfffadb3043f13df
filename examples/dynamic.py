"""Many callers, few model calls: a text classifier behind 64 threads and 200 coroutines that know of no batch.

    python examples/dynamic.py MODEL_FOLDER        a Hugging Face sequence classifier, for example models/sentiment

Each caller gives one text and gets one label; the model sees padded batches of up to 32, and a batch never waits longer
than 5 ms for company.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gristmill import inference


class Classifier:
    """Labels texts. Each instance has a queue of its own, which goes away with it."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def label(self, text: str) -> str:
        """For threads."""
        return self._named(self.logits(self._features(text)))

    async def alabel(self, text: str) -> str:
        """For coroutines."""
        return self._named(await self.logits.acall(self._features(text)))

    @inference.dynamically(batch_size=32, timeout_ms=5, retry_alone=True)
    def logits(self, features: dict[str, Any]) -> Any:
        """Tensors of many callers, padded to one length; a row of logits for each."""
        import torch

        with torch.inference_mode():
            return self.model(**features).logits

    def _features(self, text: str) -> Any:
        return self.tokenizer(text, truncation=True, return_tensors="pt")

    def _named(self, logits: Any) -> str:
        return str(self.model.config.id2label[int(logits[0].argmax())])


TEXTS = ["A moving story, beautifully told.", "Two hours that I will not get back.", "Funny.", "Dull, long, and loud."]


async def ask_all(classifier: Classifier, texts: list[str]) -> list[str]:
    """All of them at once, on one event loop."""
    return list(await asyncio.gather(*(classifier.alabel(text) for text in texts)))


def main(folder: str) -> None:
    """Both kinds of callers, and what the queue has to say about them."""
    classifier = Classifier(folder)
    with ThreadPoolExecutor(64) as pool:
        labels = list(pool.map(classifier.label, TEXTS * 64))
    assert labels == asyncio.run(ask_all(classifier, TEXTS * 50))[:200] + labels[200:]
    for text, label in zip(TEXTS, labels, strict=False):
        print(f"{label:8} {text}")
    stats = classifier.logits.stats
    print(f"{stats.total_processed} texts in {stats.total_batches} calls of the model: {dict(stats.batch_sizes)}")


if __name__ == "__main__":
    main(sys.argv[1])

"""The messages that a row is asked with: from templates, examples and images, or as a function of the user's says."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Mapping
from typing import Any

from gristmill.errors import BadModel
from gristmill.job.prompts import Prompt, text_of
from gristmill.models.template import Template
from gristmill.process.ownership import own
from gristmill.process.startup import UserCode
from gristmill.process.targets import import_target

IMAGES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}  # by their first bytes


class Conversation:
    """What a prompt sends for a row. `columns` are those it names; with `whole` it may read any; `taken`: see
    Template. Raises BadModel for templates and examples that are none, and MissingExtra.
    """

    def __init__(self, spec: Prompt, answers: tuple[str, ...]) -> None:
        self._prompt = None if spec.prompt is None else _template(spec.prompt, "prompt")
        self._system = None if spec.system is None else _template(spec.system, "system")
        self._images = spec.images or ()
        self._function = spec.messages
        self._calling = threading.Lock()  # what it gave is owned before it is called again, in whichever thread
        if isinstance(self._function, str):
            self._function = import_target(self._function)
        templates = [template for template in (self._prompt, self._system) if template is not None]
        self.whole = self._function is not None or any(template.whole for template in templates)
        named = [column for template in templates for column in template.columns]
        self.taken = frozenset[str]().union(*(template.taken for template in templates))
        self.columns = tuple(dict.fromkeys((*named, *self._images)))
        self._examples = [m for example in examples_of(spec) for m in self._answered(example, spec, answers)]

    def of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages for a row, as the chat form has them. Raises what templates and functions raise, and ValueError
        for what is no image, or no messages.
        """
        if self._function is not None:
            with self._calling, UserCode():
                return _messages(self._function(own(dict(row))))
        return [*self._opening(row), *self._examples, self._asked(row)]

    def _opening(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [] if self._system is None else [{"role": "system", "content": self._system.of(row)}]

    def _asked(self, row: Mapping[str, Any]) -> dict[str, Any]:
        assert self._prompt is not None
        text = self._prompt.of(row)
        images = [_image(row[name], name) for name in self._images if row.get(name) is not None]
        return {"role": "user", "content": [{"type": "text", "text": text}, *images] if images else text}

    def _answered(self, example: Mapping[str, Any], spec: Prompt, answers: tuple[str, ...]) -> list[dict[str, Any]]:
        """An example, as a question and its answer."""
        for name in (*answers, *(n for n in self.columns if n not in self._images)):
            if name not in example:
                raise BadModel(
                    f"examples have one without {name!r}: it has {', '.join(map(str, example)) or 'nothing'}"
                )
        if spec.returns is None:
            said = str(example[answers[0]])
        else:
            said = json.dumps({name: example[name] for name in answers}, ensure_ascii=False)
        try:
            asked = self._asked(example)
        except Exception as e:
            raise BadModel(f"examples have one that cannot be put into the prompt: {e}: {str(example)[:200]}") from e
        return [asked, {"role": "assistant", "content": said}]


def text_in(messages: list[dict[str, Any]]) -> str:
    """What the last message asks, as text; an image shows as a word."""
    return _text(messages[-1]["content"]) if messages else ""


def letters(messages: list[dict[str, Any]]) -> int:
    """Characters of all messages, without images."""
    return sum(len(_text(m["content"])) for m in messages)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part["text"]) if "text" in part else f"<{part.get('type')}>" for part in content or ())


def _template(text: str, what: str) -> Template:
    return Template(text_of(text, what), what)


def examples_of(spec: Prompt) -> list[Mapping[str, Any]]:
    """The examples, read from their file if they are in one. Raises BadModel."""
    if not isinstance(spec.examples, str):
        return list(spec.examples or ())
    found: list[Mapping[str, Any]] = []
    for number, line in enumerate(text_of(spec.examples, "examples").removeprefix("\ufeff").split("\n"), 1):
        if line.strip():
            try:
                example = json.loads(line)
            except ValueError as e:
                raise BadModel(f"examples {spec.examples}, line {number}: not JSON: {e}") from e
            if not isinstance(example, dict):
                raise BadModel(f"examples {spec.examples}, line {number}: not an object with the columns of a row")
            found.append(example)
    return found


def _messages(found: Any) -> list[dict[str, Any]]:
    """What a user's function gave, if these are messages, as they are sent: it may use its lists and dicts again for
    the next row, while this one is asked, or asked once more. Raises ValueError.
    """
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if not isinstance(found, (list, tuple)) or not found:
        raise ValueError(f"messages gave {type(found).__name__}: give a text, or a list of {{'role': …, 'content': …}}")
    for message in found:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f"messages gave {str(message)[:100]!r}: each has a role and a content")
    try:
        sent: list[dict[str, Any]] = json.loads(json.dumps([dict(message) for message in found]))
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(f"messages gave what cannot be sent as JSON ({e}): {str(found)[:100]}") from e
    return sent


def _image(value: Any, name: str) -> dict[str, Any]:
    """An image as a part of a message: from its bytes, or from its address."""
    if isinstance(value, str):
        if not value.startswith(("http://", "https://", "data:image/")):
            raise ValueError(f"column {name!r} is {value[:60]!r}: an image is given as its bytes, or as http(s)://…")
        return {"type": "image_url", "image_url": {"url": value}}
    kind = "webp" if value[:4] == b"RIFF" and value[8:12] == b"WEBP" else None
    kind = kind or next((kind for begin, kind in IMAGES.items() if value.startswith(begin)), None)
    if kind is None:
        raise ValueError(f"column {name!r} holds {value[:8]!r}…: not a PNG, JPEG, GIF or WebP image")
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(value).decode()}"}}

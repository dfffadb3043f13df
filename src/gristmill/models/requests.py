"""Requests as rows, as a model: each is sent as it is, and its answer is a line of a batch's output."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from gristmill.errors import BadModel, GristmillError, RunFailed
from gristmill.job.requests import Requests
from gristmill.job.secret import scrub_values, secrets_in
from gristmill.models.askers import LoadedAsker, loaded
from gristmill.models.asking import LETTERS, asks, estimated, reached
from gristmill.models.bill import Answer, Bill
from gristmill.models.columns import check_text
from gristmill.models.contract import ModelInfo, Place
from gristmill.models.llmfiles import is_here
from gristmill.models.paid import Paid, endpoint_of, provided_of
from gristmill.models.replies import MESSAGES, NOBODY, REPLIES, Refused, Unanswered
from gristmill.models.usual import most_tokens

COLUMNS = ("custom_id", "method", "url", "body")
INVALID = "invalid"  # what is wrong with a line that is no request, if the source has it
URLS = {**{f"/v1/{path}": path for path in REPLIES if path != MESSAGES}, "/score": "score", "/rerank": "rerank"}
STRANGE = 20  # requests of which the endpoint knows, or answers, none: it is not about these requests
_GONE = re.compile(r"not exist|not found|no such|unknown|not have access|not available", re.IGNORECASE)
_OUTPUTS = pa.schema([(name, pa.string()) for name in ("id", "response", "error")])


def resolve(spec: Requests) -> Requests:
    """The spec with its endpoint and its key, which the workers' machines may lack. Raises BadModel for a path: the
    requests would go to the default endpoint, while a model on this machine is meant.
    """
    if spec.base_url is None and is_here(spec.llm):
        raise BadModel(
            f"llm {spec.llm} is a path, and requests are sent to an endpoint: run the model on this machine with "
            "`gristmill prompt` or `gristmill score`, or serve it and give base_url, the address that has it"
        )
    return reached(spec)


def describe(spec: Requests, schema: pa.Schema | None) -> ModelInfo:
    """See ModelKind. No request is made."""
    for column in COLUMNS:
        check_text(schema, column, spec.name)
    told = schema is not None and INVALID in schema.names
    return ModelInfo(
        spec.name,
        (*COLUMNS, INVALID) if told else COLUMNS,
        tuple(_OUTPUTS.names),
        _OUTPUTS,
        keeps_columns=True,
        on_gpu=False,
        at_once=spec.most,
        bulk=spec.batches,
        asks=asks(spec),
    )


def estimate(spec: Requests, rows: pa.Table) -> dict[str, float]:
    """See ModelKind. Lines that are no requests are left out."""
    sizes = []
    for row in rows.to_pylist():
        try:
            body = _request(row, spec.llm)[1]
        except Invalid:
            continue
        sizes.append((len(row["body"]), most_tokens(body)))
    return estimated(spec, sizes)


def open_model(spec: Requests, place: Place) -> LoadedAsker:
    """The model, as a function of one row that sends its request."""
    return loaded(Sender, reached(spec), place, None, _OUTPUTS, LoadedAsker)


class Invalid(Exception):
    """A request that is not sent, and the status that it would have been answered with."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


class Sender:
    """Sends the request of one row at a time; called for many at once, in one event loop."""

    def __init__(self, spec: Requests, share: float, at_once: int, limit: float) -> None:
        self._model, self._secrets = spec.llm, tuple(secrets_in(spec))
        # What is not there (404) is a request's own matter: an endpoint may have chat, and no embeddings.
        nobody = {status: what for status, what in NOBODY.items() if status != 404}
        self._endpoint = endpoint_of(spec, share, at_once, limit, nobody)
        self.paid = Paid(spec, share, self._endpoint)
        self.provided = provided_of(spec, self.paid, limit)
        self._answers = self._strange = 0
        self._names_model = re.compile(rf"\bmodel\W+{re.escape(spec.llm)}(?!\w)", re.IGNORECASE)

    async def __call__(self, row: Mapping[str, Any]) -> Answer:
        name, bill = f"gristmill-{uuid.uuid4().hex}", Bill(row)
        try:
            path, body = _request(row, self._model)
            reply = await self.paid.ask(body, len(json.dumps(body)) / LETTERS, bill, path)
            reply = scrub_values(reply, self._secrets)  # all of it is written, whatever an endpoint repeats
        except (GristmillError, asyncio.CancelledError):
            bill.unfinished()
            raise
        except Invalid as e:
            return self._failed(name, "invalid_request", str(e), _response(e.status, name, None))
        except Refused as e:
            self._doubt(e)
            return self._failed(name, "refused", str(e), _response(e.status, name, e.reply), bill)
        except Unanswered as e:
            return self._failed(name, "unanswered", str(e), None, bill)
        except (ArithmeticError, TypeError, ValueError, LookupError, RecursionError) as e:  # whatever a body may hold
            return self._failed(name, "invalid_request", f"{type(e).__name__}: {e}", _response(400, name, None))
        self._answers += 1
        given = reply.get("id")
        named = given if isinstance(given, str) else name
        answer = Answer(id=name, response=_response(200, named, reply), error=None)
        answer.used = bill.used
        return answer

    def request(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any], float] | None:
        """See provided.Asks."""
        try:
            path, body = _request(row, self._model)
            return path, body, len(row["body"]) / LETTERS
        except (Invalid, ArithmeticError, TypeError, ValueError, LookupError, RecursionError):  # told for the row
            return None

    async def aclose(self) -> None:
        """Close the connections."""
        if self.provided is not None:
            await self.provided.close()
        await self.paid.aclose()

    def _failed(self, name: str, code: str, why: str, response: str | None, bill: Bill | None = None) -> Answer:
        answer = Answer(id=name, response=response, error=_json({"code": code, "message": why}))
        answer.used = {**({} if bill is None else bill.used), "refused": 1.0}
        return answer

    def _doubt(self, refused: Refused) -> None:
        """Stops if what is not there is the model, or everything."""
        if refused.status != 404:
            return
        self._strange += 1
        gone = self._names_model.search(str(refused)) and _GONE.search(str(refused))
        if not gone and (self._answers or self._strange < STRANGE):
            return
        if not self._answers:
            self.paid.stop(BadModel(f"the endpoint refuses the address or the model: {refused}"))
        self.paid.stop(RunFailed(f"the endpoint refuses the model now: {refused}; what is answered is kept: run again"))


def _request(row: Mapping[str, Any], model: str) -> tuple[str, dict[str, Any]]:
    """The path of a row's request and its body. Raises Invalid."""
    if (why := row.get(INVALID)) is not None:
        raise Invalid(why)
    custom_id, method, url, text = (row[name] for name in COLUMNS)
    if custom_id is None:
        raise Invalid("there is no custom_id")
    if method != "POST":
        raise Invalid(f"method is {method}: it must be POST")
    if url not in URLS:
        raise Invalid(f"url is {url}: it must be one of {', '.join(URLS)}")
    try:
        body = json.loads(text or "")
    except (ValueError, RecursionError) as e:
        raise Invalid(f"body is not JSON: {e}") from None
    if not isinstance(body, dict):
        raise Invalid("body is not an object")
    if body.get("stream"):
        raise Invalid("stream is set: the answers of a batch are not streamed")
    if (other := body.get("model")) not in (None, "", model):
        raise Invalid(f"the model {other!r} is not that of this run, {model!r}", 404)
    return URLS[url], {**body, "model": model}


def _response(status: int, name: str, body: Any) -> str:
    return _json({"status_code": status, "request_id": name, "body": body})


def _json(value: Any) -> str:
    """JSON as UTF-8 can hold it; numbers that JSON lacks, which servers written in Python may send, are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return _json(json.loads(json.dumps(value), parse_constant=lambda _: None))
    return text

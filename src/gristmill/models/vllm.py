"""A language model on this machine, through vLLM's engine, asked as an endpoint is: requests and replies in OpenAI's
chat form. The engine, which is in processes of its own, decides what is computed together.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import queue
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from gristmill.errors import BadModel, GristmillError, RunFailed, did_you_mean
from gristmill.models.ending import Ending
from gristmill.models.endpoint import Payer
from gristmill.models.generator import FIELDS as COMMON
from gristmill.models.generator import MAX_TOKENS, cache_bytes, whole_text
from gristmill.models.llmfiles import LlmFiles
from gristmill.models.replies import CHAT, Refused
from gristmill.process.extras import require
from gristmill.process.spawning import spawning_mortals

AT_ONCE = 1024  # prompts that are handed to the engine, if nobody says how many: it takes what its memory has room for
# Tokens of an answer from one sign of life to the next. Each costs Python's time for each request.
SIGN = 16
LOOK = 1.0  # seconds between looks whether the engine's process is there
END = 1.0  # seconds that the engine's processes have to end by themselves, before they are killed

# Fields of a request besides those that are options; all but the last have the same names in vLLM's SamplingParams.
FIELDS = (*COMMON, "bad_words", "logit_bias", "include_stop_str_in_output", "chat_template_kwargs")


class VllmGenerator:
    """A loaded model, with a thread in which its engine is asked. `most` requests are computed at a time (None: as vLLM
    has it for this machine). `engine` are arguments of the engine, `choice` the only property of a schema whose answer
    is that text alone. Loading takes minutes.
    """

    def __init__(
        self, files: LlmFiles, *, threads: int, most: int | None, request: Mapping[str, Any],
        engine: Mapping[str, Any], choice: str,
    ) -> None:  # fmt: skip
        self._files = files
        self._choice = choice
        self._numbers = itertools.count()
        self._flying = 0
        self.ending = Ending()
        self._asking: set[asyncio.Task[dict[str, Any]]] = set()
        self.alive: Callable[[], None] = lambda: None  # called whenever the engine got on
        self._folder = tempfile.mkdtemp(prefix="gristmill-vllm-")
        opened: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # The engine's processes end with the thread that starts them.
        self._thread = threading.Thread(
            target=self._run, args=(opened, threads, most, engine), name="gristmill-vllm", daemon=True
        )
        self._thread.start()
        if (error := opened.get()) is not None:
            self._thread.join()
            raise error
        try:
            self._sampling({**request, "max_tokens": 1}, "", 1)
        except Refused as e:
            self._end()
            raise BadModel(f"request {dict(request)}: {e}") from e

    @property
    def trouble(self) -> str:
        """What keeps answers away: nothing, it computes."""
        return ""

    @property
    def most_flying(self) -> int:
        """See Asked."""
        return 0

    @property
    def put_off(self) -> int:
        """See Asked."""
        return 0

    @property
    def news(self) -> list[str]:
        """See Asked."""
        return []

    @property
    def flying(self) -> int:
        """Requests in flight."""
        return self._flying

    async def ask(
        self, body: Mapping[str, Any], tokens: float, path: str = CHAT, payer: Payer | None = None
    ) -> dict[str, Any]:
        """The answer to a request in OpenAI's chat form, which is the only `path`. Raises Refused for a prompt that
        the model cannot take, and RunFailed if the engine broke.
        """
        self.ending.go_on()
        prompt, params = self._request(body)
        self._flying += 1
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._answer(prompt, params), self._loop))
        finally:
            self._flying -= 1

    def resumed(self) -> None:
        """A model on this machine is there, or cannot be loaded."""

    def share_in(self, run: str) -> None:
        """See paid.Asked: there are no limits."""

    def stop(self, error: GristmillError) -> NoReturn:
        """No more requests, for this reason, which is raised."""
        self.ending.stop(error)

    async def close(self) -> None:
        """Drop what is in flight, and end the engine's processes, which gives their memory back."""
        await asyncio.get_running_loop().run_in_executor(None, self._end)

    def _end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    # ------------------------------------------------ the engine's thread

    def _run(
        self, opened: queue.SimpleQueue[BaseException | None], threads: int, most: int | None, engine: Mapping[str, Any]
    ) -> None:
        try:
            asyncio.run(self._serve(opened, threads, most, engine))
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(
        self, opened: queue.SimpleQueue[BaseException | None], threads: int, most: int | None, engine: Mapping[str, Any]
    ) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        try:
            with _environment(self._variables(threads)), spawning_mortals():
                self._engine = self._opened(threads, most, engine)
        except BaseException as e:
            opened.put(e)
            return
        opened.put(None)
        try:
            await self._watched()
            await self._dropped()
        finally:
            self._engine.shutdown(timeout=END)
            # Errors may hold it until the interpreter ends, when it would shut down once more, and could not.
            self._engine.shutdown = lambda: None
            self._engine = None

    async def _watched(self) -> None:
        """Wait for the end. Requests in flight at an engine whose process was killed would wait for ever."""
        while not self._ending.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), LOOK)
            if self._engine.errored and self.ending.error is None:
                self.ending.error = self._broken("its process was ended")
                await self._dropped()

    async def _dropped(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    def _broken(self, why: str) -> RunFailed:
        return RunFailed(f"vLLM's engine ended: {self._said() or why}; what is answered is kept: run again")

    def _variables(self, threads: int) -> dict[str, str]:
        """The environment of vLLM's processes, where it does not say otherwise: errors go to a file of ours, from which
        the cause of an end is told, all cores of a CPU are used, and nothing is reported to vLLM's makers.
        """
        log = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"plain": {"format": "%(message)s"}},
            "handlers": {
                "errors": {
                    "class": "logging.FileHandler", "level": "ERROR", "formatter": "plain", "delay": True,
                    "filename": self._errors,
                }
            },
            "loggers": {"vllm": {"handlers": ["errors"], "level": "ERROR", "propagate": False}},
        }  # fmt: skip
        Path(self._folder, "logging.json").write_text(json.dumps(log))
        told = os.environ.keys() & {"VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH"}
        return {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it leaves a core to itself, and workers get the same ones
            "OMP_NUM_THREADS": str(threads),
            **({} if told else {"VLLM_LOGGING_CONFIG_PATH": os.path.join(self._folder, "logging.json")}),
        }

    @property
    def _errors(self) -> str:
        return os.path.join(self._folder, "errors")

    def _opened(self, threads: int, most: int | None, engine: Mapping[str, Any]) -> Any:
        vllm = require("vllm", "vllm", "a language model on this machine")
        from vllm.config import StructuredOutputsConfig
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        known = {field.name for field in dataclasses.fields(vllm.AsyncEngineArgs)}
        for name in engine:
            if name not in known:
                hint = did_you_mean(name, sorted(known)) or ": see its documentation"
                raise BadModel(f"vllm has {name!r}, which vLLM's engine does not take{hint}")
        given: dict[str, Any] = {
            "enable_prefix_caching": True, "stream_interval": SIGN, "disable_log_stats": True,
            "use_tqdm_on_load": False, **({} if most is None else {"max_num_seqs": most}),
        }  # fmt: skip
        if current_platform.is_cpu():
            given["kv_cache_memory_bytes"] = cache_bytes(threads)
        else:
            given["tensor_parallel_size"] = len(_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))) or 1
        try:
            # Small models fall into writing blanks for ever where a grammar lets them.
            compact = {"backend": "guidance", "disable_any_whitespace": True}
            held = StructuredOutputsConfig(**{**compact, **engine.get("structured_outputs_config", {})})
            usual = {name: value for name, value in given.items() if name in known}
            args = vllm.AsyncEngineArgs(
                str(self._files.opened), **{**usual, **engine, "structured_outputs_config": held}
            )
            found = AsyncLLM.from_engine_args(args)
        except Exception as e:  # whatever vLLM and the libraries below it raise for a model
            raise BadModel(f"llm {self._files.opened}: vLLM cannot load it: {self._said() or _told(e)}") from e
        self._params, self._structured = vllm.SamplingParams, vllm.sampling_params.StructuredOutputsParams
        self._tokenizer = found.get_tokenizer()
        self._context = int(found.model_config.max_model_len)
        return found

    def _said(self) -> str:
        """What was wrong first, as vLLM's processes have it."""
        try:
            return _first_error(Path(self._errors).read_text(errors="replace"))
        except OSError:  # nothing was, or it was printed as somebody else wants it
            return ""

    # ------------------------------------------------ requests

    def _request(self, body: Mapping[str, Any]) -> tuple[list[int], Any]:
        """The tokens of a request's prompt, and how they are answered. Raises Refused."""
        try:
            text, tokens = self._prompt(body["messages"], body.get("chat_template_kwargs") or {})
        except Exception as e:  # what a template raises: jinja2's errors, TypeError, …
            raise Refused(f"the model's chat template: {type(e).__name__}: {e}") from e
        if not tokens:
            raise Refused("the prompt is empty")
        if len(tokens) >= self._context:
            raise Refused(f"the prompt has {len(tokens)} tokens, and the model's context is {self._context}")
        return tokens, self._sampling(body, text, len(tokens))

    def _prompt(self, messages: list[dict[str, Any]], more: Mapping[str, Any]) -> tuple[str, list[int]]:
        """A conversation as the model's template has it, and its tokens."""
        if getattr(self._tokenizer, "chat_template", None):
            text = str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
            )
            return text, self._tokenizer.encode(text, add_special_tokens=False)
        text = whole_text(messages)
        return text, self._tokenizer.encode(text)

    def _sampling(self, body: Mapping[str, Any], text: str, count: int) -> Any:
        """vLLM's SamplingParams for a request. Raises Refused."""
        temperature = body.get("temperature") or 0.0
        given = {name: body[name] for name in FIELDS if name in body and name != "chat_template_kwargs"}
        if temperature > 0:
            given["top_p"] = 1.0 if body.get("top_p") is None else body["top_p"]
            if "seed" in given:  # of each prompt another one, and the same whatever rows are beside it
                given["seed"] = (int(given["seed"]) + zlib.crc32(text.encode())) % (1 << 31)
        try:
            return self._params(
                temperature=temperature,
                max_tokens=min(int(body.get("max_tokens") or MAX_TOKENS), self._context - count),
                logprobs=0 if body.get("logprobs") else None,  # of the tokens of the answer alone
                structured_outputs=self._held_to(body.get("response_format")),
                **given,
            )
        except Exception as e:  # TypeError, ValueError, and what vLLM has of its own
            raise Refused(str(e)) from e

    def _held_to(self, form: Mapping[str, Any] | None) -> Any:
        if form is None:
            return None
        schema = form["json_schema"]["schema"]
        only = schema.get("properties", {})
        if list(only) == [self._choice] and "enum" in only[self._choice]:
            return self._structured(choice=list(only[self._choice]["enum"]))
        return self._structured(json=schema)

    async def _answer(self, tokens: list[int], params: Any) -> dict[str, Any]:
        """A reply to a prompt, in the engine's loop."""
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        last = None
        try:
            name = f"gristmill-{next(self._numbers)}"
            async for found in self._engine.generate(TokensPrompt(prompt_token_ids=tokens), params, name):
                self.alive()
                last = found
        except asyncio.CancelledError:
            if self.ending.error is None or self._ending.is_set():
                raise
            raise self.ending.error from None
        except EngineDeadError as e:
            self.ending.error = self.ending.error or self._broken("its process was ended")
            raise self.ending.error from e
        except Exception as e:  # a request that vLLM does not take
            raise Refused(f"vLLM: {e.__cause__ or e}") from e
        output = None if last is None or not last.outputs else last.outputs[0]
        if output is None or output.finish_reason not in ("stop", "length"):
            why = "no output" if output is None else output.finish_reason
            raise Refused(f"vLLM ended the request without an answer ({why})")
        return _reply(output, len(tokens))


def _reply(output: Any, given: int) -> dict[str, Any]:
    made = len(output.token_ids)
    choice: dict[str, Any] = {
        "message": {"role": "assistant", "content": output.text}, "finish_reason": output.finish_reason
    }  # fmt: skip
    if output.logprobs is not None:
        pairs = zip(output.token_ids, output.logprobs, strict=False)
        choice["logprobs"] = {
            "content": [{"token": at[token].decoded_token or "", "logprob": at[token].logprob} for token, at in pairs]
        }
    usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
    return {"choices": [choice], "usage": usage}


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _devices(visible: str | None) -> list[str]:
    return [device for device in (visible or "").split(",") if device.strip()]


def _first_error(log: str) -> str:
    """The last line of the first traceback in a log, without what is before the exception's name."""
    lines = [line.strip() for line in log.splitlines()]
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            for told in lines[number + 1 :]:
                name, colon, _ = told.partition(": ")
                if colon and name.replace(".", "").replace("_", "").isalnum() and name[:1].isalpha():
                    return told[:1000]
    return next((line for line in lines if line), "")[:1000]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These variables of the environment, where it has none of these names, for a while."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)

"""`embed`, `classify`, `predict`, `prompt`, `score`, `run-batch` and `apply`: a job typed as a command."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from gristmill.cli import common as words
from gristmill.cli.execute import perform
from gristmill.cli.flags import Flag, changes, delivered_to, listed, options
from gristmill.cli.helptext import Command
from gristmill.errors import BadJob, BadSource
from gristmill.job.job import JobSpec, Sink, Source
from gristmill.job.options import EngineSpec, default_engine
from gristmill.job.prompts import Prompt
from gristmill.job.requests import Requests, batch_ends
from gristmill.job.scores import Score
from gristmill.job.specs import (
    Call,
    FunctionModel,
    ModelSpec,
    TextClassifier,
    TextEmbedder,
    saved_model,
)
from gristmill.jobfile.overlay import changes_of, overlaid, overlay

F = TypeVar("F", bound=Callable[..., Any])


def _sources(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """A single name is taken for the sink: only the person knows which of the two is missing."""
    if not value and not ctx.resilient_parsing:
        raise click.UsageError("missing SOURCE or SINK: name the rows, then the folder for the answers", ctx)
    return value


SOURCES = click.argument("source", nargs=-1, metavar="SOURCE...", callback=_sources)
SINK = click.argument("sink", metavar="SINK")


def _model(command: F) -> F:
    about = "A model's folder or its hub id (embed: or its name at --base-url)"
    return words.option("--model", "model_path", group="Model", required=True, metavar="PATH_OR_ID", help=about)(
        command
    )


EMBED = """
gristmill embed 'reviews/*.parquet' emb/ --text text --model models/minilm
gristmill embed docs.jsonl.gz emb/ --text body --model models/minilm --keep id --where "lang = 'en'"
gristmill embed reviews/ emb/ --text text --model models/minilm --preview 5
gristmill embed reviews/ emb/ --text text --model text-embedding-3-small --base-url https://api.openai.com/v1
gristmill embed users.parquet emb/ --text bio --model models/minilm --keep user_id --update --key user_id
gristmill embed reviews/ emb/ --text text --model models/minilm --save job.yaml
"""


@click.command(cls=Command, examples=EMBED)
@SOURCES
@SINK
@_model
@options(words.EMBED, required=["model.text"])
@options(words.COMMON)
@words.verbs
@words.sets
@words.showing
def embed(**given: Any) -> int:
    """Turn the text in a column into vectors, written as the column `embedding` of the folder SINK.

    With --base-url the vectors are those of an endpoint, whose key is in OPENAI_API_KEY.

    SOURCE is a file, a folder or a glob, or several of them. Every row ends in SINK, or in its dead letters.
    """
    return _performed("embed", given)


CLASSIFY = """
gristmill classify reviews/ labels/ --text text --model models/sentiment
gristmill classify reviews/ labels/ --text text --model models/sentiment --all-scores --keep id
gristmill classify reviews/ labels/ --text text --model models/sentiment --on-null skip --preview 10
"""


@click.command(cls=Command, examples=CLASSIFY)
@SOURCES
@SINK
@_model
@options(words.CLASSIFY, required=["model.text"])
@options(words.COMMON)
@words.verbs
@words.sets
@words.showing
def classify(**given: Any) -> int:
    """Label the text in a column: adds `label` and `score` to the folder SINK, with --all-scores also `scores`.

    SOURCE is a file, a folder or a glob, or several of them. Every row ends in SINK, or in its dead letters.
    """
    return _performed("classify", given)


PREDICT = """
gristmill predict customers.parquet scores/ --model churn.skops --method predict_proba --keep customer_id
gristmill predict customers.parquet scores/ --model risk.onnx --features age,spend
gristmill predict rows/ scores/ --model net.pt --features x,y --preview 5
gristmill predict rows.csv scores/ --model model.joblib --allow-pickle --sha256 9f86d081884c…
"""


@click.command(cls=Command, examples=PREDICT)
@SOURCES
@SINK
@words.option(
    "--model",
    "model_path",
    group="Model",
    required=True,
    metavar="FILE",
    help="A saved estimator (.skops, .joblib, .pkl), ONNX graph (.onnx) or TorchScript model (.pt, .pth)",
)
@options(words.PREDICT)
@options(words.COMMON)
@words.verbs
@words.sets
@words.showing
def predict(**given: Any) -> int:
    """Run a saved model over feature columns: adds its predictions to the rows of the folder SINK.

    Without --features, the columns are those that the model was fitted with, or that the graph's inputs name.
    """
    return _performed("predict", given)


PROMPT = """
gristmill prompt reviews/ liked/ --prompt 'Is it friendly? {{ text }}' --choices yes,no --model gpt-4.1-mini
gristmill prompt reviews/ facts/ --prompt @facts.txt --returns film=string --model qwen3 --base-url http://gpu:8000/v1
gristmill prompt reviews/ short/ --prompt 'In five words: {{ text }}' --model qwen3 --max-tokens 30 --preview 5
gristmill prompt reviews/ short/ --prompt @short.txt --model qwen3 --requests-per-minute 500 --examples @few.jsonl
gristmill prompt reviews/ short/ --messages ask.py:messages --model qwen3 --concurrency 100
gristmill prompt reviews/ short/ --prompt 'In five words: {{ text }}' --model models/smollm2.gguf --max-tokens 30
"""


@click.command(cls=Command, examples=PROMPT)
@SOURCES
@SINK
@words.option("--prompt", group="Model", usual=True, metavar="TEMPLATE|@FILE",
              help="The prompt: a Jinja template over the row's columns, as {{ text }}, or a file of it")  # fmt: skip
@words.option("--model", "model_path", group="Model", required=True, metavar="NAME|PATH",
              help="The language model: its name at the endpoint, or a folder or .gguf file")  # fmt: skip
@options(words.PROMPT)
@options(words.COMMON)
@words.verbs
@words.sets
@words.showing
def prompt(**given: Any) -> int:
    """Ask a language model a prompt for each row: adds its answers to the rows of the folder SINK.

    The endpoint speaks OpenAI's chat form; its key is in OPENAI_API_KEY. Many rows are in flight at a time. What may
    succeed later is sent again; a row that is refused is a dead letter; a wrong key or model stops the job. A model
    that is a folder for OpenVINO or a .gguf file answers on this machine's CPU.
    """
    return _performed("prompt", given)


SCORE = """
gristmill score questions/ scores/ --prompt '{{ question }} Answer: ' --continuations yes,no --model smollm2.gguf
gristmill score pairs.parquet scores/ --prompt '{{ context }}' --continuations-from answers --model models/qwen3-ov/
gristmill score pairs.parquet scores/ --prompt @p.txt --continuations yes,no --model q --base-url http://gpu:8000/v1
"""


@click.command(cls=Command, examples=SCORE)
@SOURCES
@SINK
@words.option("--prompt", group="Model", required=True, metavar="TEMPLATE|@FILE",
              help="What the continuations follow: a Jinja template over the row's columns, or its file")  # fmt: skip
@words.option("--model", "model_path", group="Model", required=True, metavar="PATH|NAME",
              help="A base model: a folder for OpenVINO or a .gguf file, or its name at --base-url")  # fmt: skip
@options(words.SCORE)
@options(words.COMMON)
@words.verbs
@words.sets
@words.showing
def score(**given: Any) -> int:
    """Tell how likely a language model finds given texts after a prompt: adds `score` and `score_tokens`.

    The score is the log-probability in nats, summed over the tokens; of several continuations it is a list, and
    `score_best` is the likeliest. The texts follow the prompt as they are: end it with a blank if words are to be
    apart. An endpoint must have completions with echo and logprobs, as vLLM's.
    """
    return _performed("score", given)


RUN_BATCH = """
gristmill run-batch -i requests.jsonl -o answers.jsonl --model qwen3 --base-url http://gpu:8000/v1
gristmill run-batch -i requests.jsonl -o answers.jsonl --model gpt-4.1-mini --requests-per-minute 500
gristmill run-batch -i requests.jsonl.gz -o answers/ --model qwen3 --base-url http://a:8000/v1,http://b:8000/v1
gristmill run-batch -i requests.jsonl -o answers.jsonl --model qwen3 --preview 3
"""


@click.command("run-batch", cls=Command, examples=RUN_BATCH)
@words.option("-i", "--input-file", group="Source", required=True, metavar="FILE",
              help="The requests, one per line: {custom_id, method, url, body}")  # fmt: skip
@words.option("-o", "--output-file", group="Output", required=True, metavar="FILE|FOLDER",
              help="One line for each, in their order: a file named .jsonl, or a folder or an address")  # fmt: skip
@words.option("--model", "model_path", group="Model", required=True, metavar="NAME",
              help="The model, as its endpoint names it; a request that names another is refused")  # fmt: skip
@options(words.REQUESTS)
@options(words.BATCH)
@words.verbs
@words.sets
@words.showing
def run_batch(**given: Any) -> int:
    """Send every request of a file in OpenAI's batch form, and write what became of each, in the same order.

    Takes the files of vLLM's run-batch and of OpenAI's batches, for /v1/chat/completions, completions, embeddings,
    responses, score and rerank. A line that is no request, or that is refused, has its line with an error; a wrong key
    or model stops the job. After a kill the same command sends only what has no answer.
    """
    return _performed("run-batch", given)


APPLY = """
gristmill apply rows.parquet scores/ --fn scoring:score --keep id
gristmill apply rows/ scores/ --fn score.py:Scorer --arg threshold=0.3 --arg weights=model.bin
gristmill apply rows.csv scores/ --fn scoring:score --batch-format pandas --returns score=float32
gristmill apply rows.parquet scores/ --fn scoring:score --preview 5
"""


@click.command(cls=Command, examples=APPLY)
@SOURCES
@SINK
@words.option("--fn", group="Model", required=True, metavar="MODULE:NAME|FILE.py:NAME",
              help="Your function on a batch, or a class that every worker builds once")  # fmt: skip
@options(words.APPLY)
@options(words.COMMON)
@words.verbs
@words.sets
@words.showing
def apply(**given: Any) -> int:
    """Run your own function, or class, on every batch of rows; the output row is what it returns, plus --keep.

    It is given a dict of numpy arrays (or what --batch-format says) and returns one row for each row it was given. The
    current folder is importable. --arg values are JSON if they are valid JSON, else text.
    """
    return _performed("apply", given)


def _performed(command: str, given: Mapping[str, Any]) -> int:
    """Run what was typed. An error about sources of which there are several says which name was taken for what."""
    try:
        return perform(described(command, given), given)
    except BadSource as e:
        if len(given.get("source", ())) > 1:
            e.args = (f"{e}\n{_taken(given['sink'])}", *e.args[1:])  # a line of its own: long ones are cut
        raise


def _taken(sink: str) -> str:
    return (
        f"Of several names all but the last are sources, and the last, {sink}, is the sink: if that is no name of a "
        "folder, give values of one flag with commas (--keep a,b)"
    )


def described(command: str, given: Mapping[str, Any]) -> JobSpec:
    """The job that was typed. Raises BadJob if its parts do not fit together."""
    from gristmill.jobfile.jobfile import check_names

    model, flags = _model_typed(command, given)
    ends = _ends(command, given)
    if ends["source"].uri == ("-",):
        raise BadJob("-: standard input cannot be read again, which resuming needs: write it to a file first")
    typed = [*changes((*flags, *words.COMMON), given), *changes_of(given["sets"])]
    ends["sink"] = overlaid(ends["sink"], "sink", typed)
    spec = JobSpec(
        **ends,
        model=model,
        engine=EngineSpec(default_engine(os.environ)),
    )
    spec = overlay(spec, [change for change in typed if change.path[0] != "sink" or not change.path[1:]])
    if spec.sink is not None and (name := spec.sink.format) is not None:
        from gristmill.sinks.formats import SINKS
        from gristmill.sources import formats as sources

        if name not in SINKS and name in sources.SOURCES:
            raise BadJob(
                f"--format {name}: it is the format of the sink: {', '.join(SINKS.names[:-1])} or {SINKS.names[-1]}; "
                f"to read a source in this format, use --source-format {name}"
            )
    spec = delivered_to(spec, given)
    check_names(spec)
    return spec


def _ends(command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Where rows come from and go."""
    if command == "run-batch":
        return batch_ends(given["input_file"], given["output_file"])
    sources, sink = given["source"], given["sink"]
    ends = {"source": Source(uri=sources), "sink": Sink(sink)}
    first, last = sources[0], sources[-1]
    if os.path.exists(first) and not os.path.exists(last) and not set(last) & set("*?[{:") and first != last:
        from gristmill.sources.patterns import nearby

        raise BadJob(f"{last}: no such file or folder; {nearby(last)}. {_taken(sink)}")
    return ends


def _model_typed(command: str, given: Mapping[str, Any]) -> tuple[ModelSpec, tuple[Flag, ...]]:
    if command == "embed":
        return TextEmbedder(given["model_path"], given["at_model__text"]), words.EMBED
    if command == "classify":
        return TextClassifier(given["model_path"], given["at_model__text"]), words.CLASSIFY
    if command == "predict":
        from gristmill.models.registrations import file_of

        return saved_model(given["model_path"], file_of(given["model_path"])), words.PREDICT
    if command == "prompt":
        return Prompt(given["prompt"], given["model_path"], messages=given["at_model__messages"]), words.PROMPT
    if command == "score":
        texts, column = listed(given["at_model__continuations"]) or None, given["at_model__continuations_from"]
        return Score(given["prompt"], given["model_path"], texts, column), words.SCORE
    if command == "run-batch":
        return Requests(given["model_path"]), words.REQUESTS
    return FunctionModel(Call(given["fn"])), words.APPLY

"""What each field of a job means, in one line: the help of the command line's flags and the JSON Schema of job files.

Keys are `section.field` as a job file writes them; `job` is the file's top level.
"""

from __future__ import annotations

ABOUT: dict[str, str] = {
    "job.vars": "Variables, used as ${name} anywhere below, in a text as written; --var name=value sets one for a run",
    "job.source": "Where rows come from: a path, a list of paths, or a mapping with uri and options",
    "job.steps": "CPU steps before the model, in order",
    "job.model": "What scores the rows: one of embed, classify, onnx, torchscript, sklearn or call, and its options",
    "job.post": "Steps after the model, given the columns that were read and its answers; they keep the row count",
    "job.sink": "Where the answers go: a folder, or a mapping with uri and options",
    "job.on_null": "What becomes of a row whose model input is null: a dead letter, left out, or given to the model "
    "(a text model reads it as empty text). Of a function's columns it is about those that takes= declares not null "
    "(default: dead)",
    "job.on_nan": "What becomes of a row whose answer is NaN or infinite: a dead letter, or kept",
    "job.on_new_files": "What a later run does when the source has new files: refuse, or append them",
    "job.running": "How the job runs; nothing here changes what is computed for a row beyond the last bits",
    "job.gates": "What must hold before anything is published, beyond the exact accounting that is always on",
    "job.audit": "MODULE:NAME of a function, or several, that may refuse the staged result before it is published: "
    "each is given an object with counts, dataset(), paths, schema, and raises or returns something false",
    "job.engine": "What runs the job: local, ray or spark, with the engine's own options",
    "job.profiles": "Named changes to this job, chosen with --profile; each is a part of a job, merged over it",
    # -- source
    "source.uri": "Files, folders or globs, relative to the current folder; or URIs that pyarrow or fsspec opens",
    "source.format": "How the source is read: parquet, jsonl, csv, text or binary (default: by its suffix)",
    "source.columns": "Read only these columns",
    "source.where": "Only rows for which this SQL condition holds, for example \"lang = 'en'\"",
    "source.limit": "Only the first N rows for which the condition holds",
    "source.sample": "Only N rows, drawn at random with the seed",
    "source.seed": "The seed of the sample",
    "source.types": "Column types of text formats, where they cannot be told: {price: float64}",
    "source.on_bad_file": "What a file that cannot be read does: fails the job, or is skipped and counted (rows of a "
    "Parquet file that turn out to be damaged as it is read are dead letters then)",
    "source.options": "Options of the format, for example {delimiter: ';'}",
    "source.options.delimiter": "What separates the fields of CSV files: one character, or tab (default: a comma, or "
    "else what the header shows)",
    "source.storage": "Options of the file system, for example {region: eu-west-1}",
    # -- sink
    "sink.uri": "The folder that the answers are published in, relative to the current folder, or a URI",
    "sink.format": "What is written: parquet (default), jsonl or npy",
    "sink.keep": "Source columns carried over (default: all but the model's text; none for functions)",
    "sink.drop": "Columns left out of the output row, whatever made them: source, model or steps",
    "sink.row_id": "Write a stable id of each row into this column; with key it is unique only where the key is",
    "sink.key": "The columns that the row id is made from; no two rows should have the same "
    "(default: the row's place in the source)",
    "sink.partition_by": "Write hive folders by these columns",
    "sink.merge": "One file in place of the parts, in the order of the source; each append adds another",
    "sink.model_version": "Write the model's digest into this column",
    "sink.overwrite": "Allow a folder that holds other files",
    "sink.evolve": "Let rows that are added to a result widen its types and add columns, null for the others",
    "sink.dead_payload": "The most bytes of a dead row's content that are kept with it (0: none)",
    "sink.options": "Options of the format, for example {compression: zstd}",
    "sink.storage": "Options of the file system",
    # -- models
    "model.embed": "A sentence-transformers folder or a hub id",
    "model.classify": "A Hugging Face sequence classifier: a folder or a hub id",
    "model.onnx": "An ONNX file over feature columns",
    "model.torchscript": "A TorchScript file over feature columns",
    "model.sklearn": "A saved scikit-learn estimator (skops; joblib or pickle with allow_pickle and sha256)",
    "model.call": "Your function on a batch, or a class built once per worker, as MODULE:NAME",
    "model.text": "The column that holds the text",
    "model.output": "The name of the result column",
    "model.prompt": "Text put before every text",
    "model.prompt_name": "One of the model folder's own prompts",
    "model.pooling": "How token vectors become one: mean, cls, max, … (default: as the folder says)",
    "model.normalize": "Scale vectors to length 1 (default: as the folder says)",
    "model.truncate_dim": "Keep only the first N dimensions, after what the folder does: vectors that it "
    "makes of length 1 are shorter then, unless normalize is given",
    "model.max_length": "Cut texts after N tokens (default: as the folder says)",
    "model.backend": "What computes: torch, onnx, or auto",
    "model.dtype": "The precision: float32, bfloat16, float16, int8, or auto, which never changes it",
    "model.device": "Where: cpu, cuda, cuda:0, mps, or auto",
    "model.trust_remote_code": "Let the model's folder run its own code",
    "model.sha256": "The digest that the model's files must have",
    "model.all_scores": "Also write the scores of all labels",
    "model.features": "The feature columns, in the model's order",
    "model.inputs": "Graph inputs and the columns that feed them",
    "model.outputs": "Graph outputs and the columns that they become",
    "model.method": "predict, predict_proba, decision_function or transform",
    "model.allow_pickle": "Allow a file that can run code when it is loaded; needs sha256",
    "model.args": "Arguments of the function, or of the class when it is built",
    "model.batch_format": "What it is given: a dict of arrays, a list of dicts, or a table",
    "model.takes": "Columns it reads and their types, for example {x: float32 not null}; it is given these alone",
    "model.returns": "Output columns and their types, for example {score: float32}",
    # -- steps
    "step.map": "A function on a batch that keeps the row count, as MODULE:NAME",
    "step.flat_map": "A function that makes one row many: it gets a dict, returns a list of dicts; MODULE:NAME",
    "step.filter": "An SQL condition, or MODULE:NAME of a function that gives one bool a row",
    "step.args": "Arguments of the function, or of the class when it is built",
    "step.takes": "Columns it reads and their types, for example {text: string not null}; it is given these alone",
    "step.batch_format": "What it is given: a dict of arrays, a list of dicts, or a table",
    # -- running, gates, engine
    "running.batch_tokens": "Padded tokens a model call, or auto",
    "running.batch_rows": "Rows a model call, or auto: functions begin with 1,024 and get more while calls are quick",
    "running.shard_rows": "Rows a shard: the unit of work, retry and commit; or auto",
    "running.window_bytes": "Bytes of rows held together, to be ordered by length",
    "running.batch_timeout": "Seconds that a model call may always take; it may also take 20 times the slowest seen",
    "running.worker_memory": "Bytes at which a worker is replaced by a fresh one",
    "running.log": "Also write JSON log lines to this file",
    "gates.min_ok": "The least share of rows that must be scored; one dead row is always allowed, unless it is 1",
    "gates.warn_failed": "The share of dead rows that is worth a warning",
    "gates.allow_empty": "Let a source without rows succeed",
    "engine.name": "local, ray or spark",
    "engine.workers": "Worker processes: a number, auto, or least and most; 0 runs in the calling process",
    "engine.gpus": "GPUs in all: a number, or auto",
    "engine.threads": "CPU threads a worker: a number, or auto",
    "engine.steps_workers": "processes for reading, steps and tokenising beside each worker; 0: the worker does it",
}


def about(section: str, field: str) -> str:
    """The line for a field; raises KeyError where there is none, so that a new field cannot go without."""
    return ABOUT[f"{section}.{field}"]

"""What options are called elsewhere (Ray Data, Spark, sentence-transformers, OpenAI, pandas, schedulers), and here."""

from __future__ import annotations

from collections.abc import Iterable

_PARALLEL = "worker n_workers num_workers max_workers n_jobs jobs processes num_processes num_proc nproc num_actors"
_PARALLEL += " parallelism parallel pool_size concurrency max_concurrency"

# Our name, then those that it has elsewhere. One name may stand in several lines: the first of ours counts that the
# place has where it was given.
_NAMES = {
    "workers": _PARALLEL,
    "max_parallelism": f"{_PARALLEL} workers",
    "concurrency": "max_concurrency concurrent max_concurrent concurrent_requests max_concurrent_requests"
    " parallel_requests in_flight max_in_flight num_concurrent",
    "at_once": f"{_PARALLEL} max_parallel",
    "batch_rows": "batch batchsize batch_size bs chunk_size chunksize rows_per_batch max_batch_size minibatch"
    " per_device_batch_size max_records_per_batch",
    "batch_tokens": "max_num_batched_tokens max_batched_tokens tokens_per_batch",
    "batch_timeout": "call_timeout timeout timeout_s row_timeout max_time",
    "timeout": "request_timeout timeout_s timeout_seconds",
    "gpus": "gpu n_gpus num_gpus n_gpu device_count",
    "gpus_per_worker": "gpus_per_task num_gpus n_gpus gpus",
    "cpus_per_worker": "num_cpus n_cpus cpus cpu cores",
    "func_cpu": "num_cpus n_cpus cpus cpu cores",
    "func_gpu": "num_gpus n_gpus gpus gpu",
    "func_ram": "memory ram mem",
    "threads": "num_threads n_threads omp_num_threads intra_op_num_threads num_cpus n_cpus cpus cores",
    "min_ok": "min_okay min_success success_rate min_success_rate min_ok_rate min_ok_ratio ok_ratio min_okays"
    " max_errors max_error_rate error_rate max_errored_blocks max_failures max_failed failure_threshold max_dead"
    " max_failed_rows error_threshold tolerance",
    "allow_empty": "empty_ok ignore_empty allow_no_rows",
    "restart": "force rerun recompute from_scratch fresh reset clean redo no_resume overwrite_result ignore_existing",
    "overwrite": "force exist_ok",
    "append": "incremental only_new add_new new_only",
    "update": "incremental upsert changed_only merge_into",
    "dedupe": "dedup deduplicate de_duplicate distinct unique drop_duplicates",
    "base_url": "api_base base endpoint api_url openai_api_base openai_base_url openai_url server_url host url",
    "max_cost": "budget max_budget cost_limit max_spend spend_limit cost budget_usd max_price",
    "price": "prices pricing cost_per_token",
    "requests_per_minute": "rpm rate_limit max_rpm requests_per_min max_requests_per_minute",
    "tokens_per_minute": "tpm max_tpm tokens_per_min max_tokens_per_minute",
    "max_tokens": "max_new_tokens max_completion_tokens max_output_tokens num_predict max_length",
    "system": "system_prompt system_message instructions system_instruction",
    "prompt": "template prompt_template question user_prompt",
    "examples": "few_shot fewshot shots",
    "returns": "response_format json_schema output_schema result_schema return_type return_dtype result_type schema",
    "choices": "enum guided_choice classes allowed labels",
    "keep_usage": "usage return_usage",
    "request": "extra_body sampling_params generation_config model_kwargs",
    "batch_api": "use_batch batch_mode",
    "cache": "cache_dir cache_folder",
    "max_length": "max_seq_length max_seq_len max_len truncation max_tokens",
    "truncate_dim": "dim dims output_dimension embedding_dim",
    "dimensions": "dim dims output_dimension embedding_dim",
    "normalize": "normalize_embeddings normalise norm",
    "text": "text_column text_col text_field input_column column sentences document",
    "model": "model_name model_id model_path model_name_or_path weights checkpoint",
    "llm": "model_name model_id deployment engine",
    "dtype": "precision torch_dtype quantize quantization",
    "fn": "func function udf callable",
    "args": "fn_kwargs fn_args fn_constructor_kwargs fn_constructor_args kwargs init_args params",
    "arg": "args fn_kwargs fn_args fn_constructor_kwargs kwargs param params",
    "keep": "keep_columns passthrough pass_through carry carry_over copy_columns id id_column id_col ids",
    "columns": "usecols select input_columns use_columns",
    "where": "filter predicate condition sql",
    "limit": "head n nrows n_rows num_rows max_rows take top first",
    "sample": "fraction frac subsample",
    "seed": "random_state random_seed",
    "types": "dtypes column_types schema dtype",
    "on_bad_file": "ignore_corrupt_files on_bad_files bad_files skip_bad_files skip_corrupt",
    "on_null": "na null dropna skip_null skipna ignore_null",
    "partition_by": "partitionby partition_cols partition_on partition partitioned_by partitions",
    "sort_by": "sort order_by orderby order sortby",
    "files": "num_files n_files max_files num_partitions",
    "merge": "single_file coalesce one_file",
    "key": "keys primary_key pk unique_key id_column id_col key_columns join_on on",
    "mode": "write_mode save_mode savemode if_exists disposition",
    "delete": "delete_missing purge prune",
    "to": "uri url target destination dest path address table store",
    "uri": "path paths url location folder dir directory to input inputs input_path data dataset output out output_dir"
    " output_path output_folder out_dir outdir dest destination target",
    "source": "input inputs data dataset input_path input_data src read from",
    "sink": "output out output_dir output_path output_folder out_dir outdir dest destination target write_to save_to",
    "output": "output_column out_column output_name column_name",
    "steps": "preprocess preprocessing preprocessor transforms transform map",
    "post": "postprocess postprocessing postprocessor",
    "engine": "runner executor cluster ray_address",
    "deliver": "deliveries destinations stores publish export",
    "alerts": "alert notify notifications on_failure webhook slack email",
    "alert": "alerts notify webhook slack email",
    "deadline": "sla due finish_by",
    "timezone": "tz time_zone zone",
    "cron": "crontab every interval at when time",
    "after": "depends_on depends needs upstream",
    "catch_up": "catchup backfill",
    "retries": "retry max_retries num_retries n_retries attempts max_attempts tries",
    "backoff": "retry_delay retry_wait retry_interval delay",
    "progress": "progress_bar show_progress_bar show_progress tqdm",
    "observer": "progress quiet silent verbose progress_bar show_progress_bar show_progress callback callbacks tqdm",
    "log": "log_file logfile",
    "preview": "dry_run dryrun test try show",
    "delimiter": "sep separator field_separator",
    "listen": "port bind serve http ui",
    "ordered": "keep_order preserve_order in_order",
    "return_exceptions": "ignore_errors raise_on_error on_error",
    "checkpoint": "cache checkpoint_dir resume",
    "detach": "background wait nowait",
}  # fmt: skip

_KEYS = "the key is read from the environment: export OPENAI_API_KEY=… (ANTHROPIC_API_KEY for Anthropic's own form)"
_AGAIN = (
    "a request is sent again by itself until batch_timeout is over, dead rows are scored again by gristmill retry-dead,"
    " and schedule: {retries: …} says how often gristmill up starts a failed job again"
)

# What to say where no option of ours does it, or none that the place has.
_SAID = (
    ("api_key openai_api_key anthropic_api_key api_token openai_key apikey", _KEYS),
    (_NAMES["retries"] + " retries", _AGAIN),
    ("encoding charset codec", "only UTF-8 is read: iconv -f cp1252 -t utf-8 FILE converts another file"),
    (_NAMES["min_ok"], "the share of rows that has to be scored is gates: {min_ok: 0.99} (gates={'min_ok': 0.99})"),
    (_NAMES["sink"], "the folder for the answers comes after that of the rows: SOURCE SINK"),
    (_NAMES["source"], "the rows come first, then the folder for the answers: SOURCE SINK"),
    ("on_error skip_errors ignore_errors", "rows that fail are dead letters; gates: {min_ok: 0.99}"),
    (_NAMES["preview"], "job.preview(5), or --preview 5, scores a few rows and writes nothing"),
    ("quiet silent no_progress", "--progress off, or GRISTMILL_PROGRESS=off, prints the result alone"),
    ("verbose", "--progress lines prints each step, and --log FILE notes them"),
    ("dedupe " + _NAMES["dedupe"], "it is an option of prompt, score, run-batch and, with base_url, of embed"),
    ("resume continue", "a run goes on where it was stopped without being told"),
)  # fmt: skip


def _normal(name: str) -> str:
    return name.lstrip("-").replace("-", "_").casefold()


def meant(name: str, known: Iterable[str]) -> str | None:
    """Which of the `known` options is called `name` elsewhere, or is its plural or singular; None if none is. Flags are
    known as flags (`--keep`).
    """
    asked = _normal(name)
    ours = {_normal(one): one for one in known}
    if number := next((ours[one] for one in (f"{asked}s", asked.removesuffix("s")) if one in ours), None):
        return number
    return next((ours[one] for one, theirs in _NAMES.items() if one in ours and asked in theirs.split()), None)


def said(name: str) -> str | None:
    """What to do instead, if no option does what is called `name` elsewhere."""
    return next((text for names, text in _SAID if _normal(name) in names.split()), None)

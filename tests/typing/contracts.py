"""Every engine, format and model kind held against its contract by mypy; a test says that none is left out."""

from gristmill.engines.contract import EngineKind, Sized
from gristmill.engines.local import Local
from gristmill.engines.ray import Ray
from gristmill.engines.spark import Spark
from gristmill.job.prompts import Prompt
from gristmill.job.requests import Requests
from gristmill.job.scores import Score
from gristmill.job.specs import (
    FunctionModel,
    ModelSpec,
    OnnxModel,
    SklearnModel,
    TextClassifier,
    TextEmbedder,
    TextSpec,
    TorchScriptModel,
)
from gristmill.models import (
    embeddings,
    function,
    onnx_model,
    prompt,
    requests,
    score,
    sklearn,
    text_classifier,
    text_embedder,
    torchscript,
)
from gristmill.models.askers import LoadedAsker
from gristmill.models.contract import ModelKind, RowModel, Transformer
from gristmill.models.embeddings import LoadedEmbeddings
from gristmill.models.rowfunction import LoadedRows
from gristmill.sinks.contract import SinkFormat
from gristmill.sinks.jsonl import JsonlSink
from gristmill.sinks.npy import NpySink
from gristmill.sinks.openaibatch import OpenAIBatchSink
from gristmill.sinks.ordered import Ordered
from gristmill.sinks.parquet import ParquetSink
from gristmill.sinks.partition import Partitioned
from gristmill.snapshots import datasets, delta, duckdb, iceberg, kafka, lance, postgres, spark, sqlalchemy, sqlite
from gristmill.snapshots.contract import SnapshotKind
from gristmill.sources.contract import SourceFormat
from gristmill.sources.csv import CsvSource, TsvSource
from gristmill.sources.hive import Hive
from gristmill.sources.jsonl import JsonlSource
from gristmill.sources.kafka import KafkaSource
from gristmill.sources.openaibatch import OpenAIBatchSource
from gristmill.sources.parquet import ParquetSource
from gristmill.sources.text import BinarySource, TextSource
from gristmill.stores.cassandra import Cassandra
from gristmill.stores.contract import StoreKind
from gristmill.stores.delta import Delta
from gristmill.stores.duckdb import DuckDB
from gristmill.stores.faiss import Faiss
from gristmill.stores.iceberg import Iceberg
from gristmill.stores.lance import Lance
from gristmill.stores.lmdb import Lmdb
from gristmill.stores.postgres import Postgres
from gristmill.stores.qdrant import Qdrant
from gristmill.stores.redis import Redis
from gristmill.stores.spark import Spark as SparkTables
from gristmill.stores.sqlite import SQLite
from gristmill.stores.usearch import USearch

SOURCES: tuple[type[SourceFormat], ...] = (
    *(ParquetSource, JsonlSource, OpenAIBatchSource, CsvSource, TsvSource, TextSource, BinarySource),
    KafkaSource,
)
SINKS: tuple[type[SinkFormat], ...] = (ParquetSink, JsonlSink, NpySink, OpenAIBatchSink)
ENGINES: tuple[EngineKind, ...] = (Local, Ray, Spark)
STORES: tuple[type[StoreKind], ...] = (
    *(DuckDB, SQLite, Lmdb, Postgres, Redis, USearch, Faiss, Qdrant),
    *(Delta, Iceberg, Lance),
    *(Cassandra, SparkTables),
)
SNAPSHOTS: tuple[type[SnapshotKind], ...] = (
    *(delta.Delta, iceberg.Iceberg, lance.Lance, datasets.Datasets, postgres.Postgres, duckdb.DuckDB, sqlite.SQLite),
    *(sqlalchemy.SQLAlchemy, kafka.Kafka, spark.Spark),
)
MAPS: tuple[Sized, ...] = (Ray,)
TEXTS: tuple[type[TextSpec], ...] = (TextEmbedder, TextClassifier)
MODELS: tuple[type[ModelSpec], ...] = (
    *TEXTS,
    OnnxModel,
    TorchScriptModel,
    SklearnModel,
    Prompt,
    Score,
    Requests,
    FunctionModel,
)
TRANSFORMERS: tuple[Transformer, ...] = (text_embedder, text_classifier)
KINDS: tuple[ModelKind, ...] = (*TRANSFORMERS, onnx_model, torchscript, sklearn, prompt, score, requests, function)
VECTORS: ModelKind = embeddings  # of text_embedder's specs, if they name an endpoint
ROWS: tuple[type[RowModel], ...] = (LoadedRows, LoadedAsker, LoadedEmbeddings)


def wrapped(source: SourceFormat, sink: SinkFormat) -> tuple[SourceFormat, SinkFormat]:
    """What stands for others is what these are."""
    return Hive(source), Partitioned(Ordered(sink, ("id",)), ("day",))

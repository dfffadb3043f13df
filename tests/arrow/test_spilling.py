"""DuckDB connections of a run's own."""

from __future__ import annotations

import subprocess
import sys

SHOWN = """
import duckdb, json
from gristmill.arrow.spilling import spilling
import pyarrow as pa
from gristmill.sources.where import SqlWhere
asked = "SELECT current_setting('enable_progress_bar')"
found = [duckdb.connect().execute(asked).fetchone()[0]]
with spilling("256MB") as connection:
    found.append(connection.execute(asked).fetchone()[0])
found.append(SqlWhere("x > 1", pa.schema({"x": "int64"}))._db().execute(asked).fetchone()[0])
print(json.dumps(found))
"""


def test_no_bar_of_duckdb_is_among_what_a_program_prints() -> None:
    """DuckDB shows one for what takes over two seconds where Python runs no script, as in a notebook."""
    told = subprocess.run([sys.executable, "-c", SHOWN], capture_output=True, text=True, check=True).stdout
    assert told == "[true, false, false]\n"

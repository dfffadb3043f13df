"""Importing this module makes pyarrow look for pandas now. It does so once a process, when it is first given values of
Python or numpy, and if pandas is installed its import takes longer than a small job.
"""

import contextlib
from importlib.util import find_spec

import pyarrow as pa

# numexpr, which pandas imports, starts threads, which the forks of a fork server would lack.
if find_spec("numexpr") is None:
    with contextlib.suppress(Exception):  # a pandas that cannot be imported is told by who needs it
        pa.array([0])

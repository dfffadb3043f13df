"""A driver that looks like cassandra-driver, in front of a file of SQLite instead of a server: as far as
`gristmill.stores.cassandra` uses it. It takes the CQL of that module, and refuses what a server would refuse: reading
without a partition's key, a table that is not there.
"""


class DriverException(Exception):
    """What all errors of the driver are."""


class InvalidRequest(DriverException):
    """A statement that the server does not take."""


class AuthenticationFailed(DriverException):
    """A user that the server does not know."""


class ConsistencyLevel:
    """How many replicas answer."""

    LOCAL_QUORUM, LOCAL_SERIAL = 6, 9

"""Every error this package raises on purpose.

Each message says what was asked, what is wrong with it, and what would work. All of them are
``ValueError`` (the request is wrong) or ``RuntimeError`` (the world is not as the request needs it), so
that callers need not import this module to catch them. Every class takes one message, which keeps it
intact when Ray carries it from a task to the caller.
"""


class InvalidArgumentError(ValueError):
    """An argument has a wrong type or an impossible value; nothing was read."""


class LayoutError(ValueError):
    """Splits, ranks, reader workers and batch sizes do not fit together."""


class NotEnoughRowsError(ValueError):
    """The table, after the filter, has fewer rows than splits: a split would be empty."""


class UnsupportedColumnError(ValueError):
    """A column cannot be read, or cannot become a tensor."""


class UnsupportedOperatorError(ValueError):
    """A dataset operator cannot keep one row per row in order, so positions would be wrong."""


class StateError(ValueError):
    """A state is malformed: not a state of this package or of LanceDB's ``StreamingDataset``."""


class StateMismatchError(ValueError):
    """A state belongs to another stream; the message lists every difference."""


class TableNotFoundError(RuntimeError):
    """The table cannot be opened."""


class VersionNotFoundError(RuntimeError):
    """The pinned version of the table no longer exists, or never did."""


class ProtectionError(RuntimeError):
    """A version cannot be protected from clean-up, or its protection cannot be listed or removed."""


class MissingRowsError(RuntimeError):
    """The pinned version no longer delivers rows that the plan names."""


class ReadError(RuntimeError):
    """The storage of the table failed while rows were read, also after retries."""


class PlanError(RuntimeError):
    """The plan of an epoch cannot be built."""


class RowCountChangedError(RuntimeError):
    """A transform returned another number of rows than it was given."""


class StreamUsageError(RuntimeError):
    """A stream was used outside the order or place in which it works."""

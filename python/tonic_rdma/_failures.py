"""Exceptions of arrays, buffers, channels and groups. The native part raises them."""


class TensorError(RuntimeError):
    """An operation on arrays between processes failed.

    Wrong arguments raise ValueError instead, and too little memory MemoryError.
    `kind` says in a word what a program decides by, such as "gone", "busy", "name_taken", "no_rdma" or
    "not_permitted".
    """

    kind: str

    def __init__(self, message: str, kind: str = "other") -> None:
        super().__init__(message)
        self.kind = kind


class Gone(TensorError):
    """The lease of a remote buffer has ended: closed, its time over, or all its readers served."""


class Revoked(TensorError):
    """The owner of a remote buffer has revoked it."""


class Restarted(TensorError):
    """The owner of a remote buffer is another process than the one that shared it, or another pool."""


class PeerLost(TensorError):
    """The peer's process ended, or its machine can't be reached any more."""


class TensorTimeout(TensorError, TimeoutError):
    """The peer did not answer in time."""


class CollectiveError(RuntimeError):
    """An operation of a group failed. Wrong arguments are ValueErrors, and no memory a MemoryError.

    `kind` says in a word what a program decides by, such as "rank_lost", "deadline", "mismatch", "revoked" or
    "excluded". `rank` is the rank that the error is about, and `lost_rank` the rank whose loss ended the
    operation, if one is lost.
    """

    kind: str
    rank: int | None
    lost_rank: int | None

    def __init__(
        self, message: str, kind: str = "other", rank: int | None = None, lost_rank: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.rank = rank
        self.lost_rank = lost_rank


class RankLost(CollectiveError):
    """The process of rank `lost_rank` has ended, or the connection to it has.

    `shrink` makes a group of the others. Later operations of this group raise it too, with the kind "revoked".
    """

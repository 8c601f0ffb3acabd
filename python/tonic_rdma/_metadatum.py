"""One pair of metadata. A module of its own, because the native part imports it."""

from typing import NamedTuple


class Metadatum(NamedTuple):
    """A key and its value: `bytes` if the key ends in `-bin`, else `str`."""

    key: str
    value: str | bytes

from collections.abc import Iterable
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.internal.containers import RepeatedScalarFieldContainer
from google.protobuf.message import Message

DESCRIPTOR: FileDescriptor

class RemoteBuffer(Message):
    owner: str
    generation: int
    id: int
    length: int
    token: bytes
    dtype: str
    shape: RepeatedScalarFieldContainer[int]
    xxh3: int
    def __init__(
        self,
        *,
        owner: str = ...,
        generation: int = ...,
        id: int = ...,
        length: int = ...,
        token: bytes = ...,
        dtype: str = ...,
        shape: Iterable[int] = ...,
        xxh3: int = ...,
    ) -> None: ...

def __getattr__(name: str) -> Any: ...  # what only a program with a client of its own needs

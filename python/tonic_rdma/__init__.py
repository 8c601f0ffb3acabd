"""gRPC over RDMA for Python: channels and servers of grpcio's API, and arrays that other processes read in place.

Generated stubs, servicers, interceptors and credentials stay as they are. Only the line that makes the channel or the
server changes: `tonic_rdma.insecure_channel("localhost:50051")` for `grpc.insecure_channel("localhost:50051")`.
"""

import os

from tonic_rdma import _native

# A child of fork has none of the threads that the native part started.
os.register_at_fork(after_in_child=_native.after_fork_in_child)

from tonic_rdma import aio, tensors
from tonic_rdma._arrays import MemoryStatistics, asarray, empty, memory_statistics, zeros
from tonic_rdma._buffers import (
    BufferClient,
    BufferPool,
    ReaderSecret,
    RemoteBuffer,
    fetch_all,
    fetch_all_async,
    share,
)
from tonic_rdma._channel import insecure_channel, secure_channel
from tonic_rdma._collective import CollectiveStatistics, Communicator
from tonic_rdma._failures import (
    CollectiveError,
    Gone,
    PeerLost,
    RankLost,
    Restarted,
    Revoked,
    TensorError,
    TensorTimeout,
)
from tonic_rdma._handlers import ssl_server_credentials
from tonic_rdma._native import Array, Operation
from tonic_rdma._server import server

__version__ = _native.__version__

__all__ = [
    "Array",
    "BufferClient",
    "BufferPool",
    "CollectiveError",
    "CollectiveStatistics",
    "Communicator",
    "Gone",
    "MemoryStatistics",
    "Operation",
    "PeerLost",
    "RankLost",
    "ReaderSecret",
    "RemoteBuffer",
    "Restarted",
    "Revoked",
    "TensorError",
    "TensorTimeout",
    "__version__",
    "aio",
    "asarray",
    "empty",
    "fetch_all",
    "fetch_all_async",
    "insecure_channel",
    "memory_statistics",
    "secure_channel",
    "server",
    "share",
    "ssl_server_credentials",
    "tensors",
    "zeros",
]

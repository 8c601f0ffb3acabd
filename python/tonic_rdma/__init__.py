"""gRPC over RDMA for Python: the channels and servers of grpcio's API, over the transport of tonic-rdma."""

import os

from tonic_rdma import _native

# A child of fork has none of the threads that the native part started.
os.register_at_fork(after_in_child=_native.after_fork_in_child)

__version__ = _native.__version__

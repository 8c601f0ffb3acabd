"""Puts tonic_rdma's channels and servers in the place of grpc's. It runs first in each Python process that has this
folder in PYTHONPATH, so also in the processes that tests start.
"""

import os
import traceback

try:
    import grpc
    import grpc.aio

    import tonic_rdma
    import tonic_rdma.aio

    for name in ("insecure_channel", "secure_channel", "server", "ssl_server_credentials"):
        setattr(grpc, name, getattr(tonic_rdma, name))
    for name in ("insecure_channel", "secure_channel", "server"):
        setattr(grpc.aio, name, getattr(tonic_rdma.aio, name))
except BaseException:
    # Python would go on, with grpcio.
    traceback.print_exc()
    os._exit(1)

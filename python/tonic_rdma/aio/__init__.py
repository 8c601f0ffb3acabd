"""grpc.aio's API over this package's transport."""

from ._channel import insecure_channel, secure_channel
from ._server import server

__all__ = ["insecure_channel", "secure_channel", "server"]

"""grpc.aio's API over this package's transport."""

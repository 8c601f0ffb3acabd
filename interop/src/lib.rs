//! Checks against stock gRPC peers.

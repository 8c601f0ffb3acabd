//! Code generated from the protos of `interop/proto`.
#![allow(missing_docs, unreachable_pub, dead_code, clippy::all, reason = "generated")]

/// gRPC's own test services.
pub(crate) mod testing {
    tonic::include_proto!("grpc.testing");
}

/// Calls whose payloads are checked.
pub(crate) mod checked {
    tonic::include_proto!("tonic_rdma.interop.v1");
}

/// All of them as descriptors, for server reflection.
pub(crate) const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

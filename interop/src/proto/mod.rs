//! Code generated from the protos of `interop/proto`.
#![allow(missing_docs, unreachable_pub, unnameable_types, dead_code, clippy::all, reason = "generated")]

/// gRPC's own test services.
pub(crate) mod testing {
    include!("grpc.testing.rs");
}

/// Our service, which checks payloads.
pub(crate) mod checked {
    include!("tonic_rdma.interop.v1.rs");
}

/// Descriptors of all protos, for server reflection.
pub(crate) const DESCRIPTORS: &[u8] = include_bytes!("descriptors.bin");

//! Generated code for the protos in the folder above.
#![forbid(unsafe_code)]
#![allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]

/// The descriptors of these protos, for gRPC's reflection service.
pub const DESCRIPTORS: &[u8] = include_bytes!("descriptors.bin");

/// The service of the examples.
pub mod greeter {
    include!("tonic_rdma.greeter.v1.rs");
}

/// The service of the example `image-service`.
pub mod image {
    include!("tonic_rdma.image.v1.rs");
}

/// The service of the example `kv-blocks`.
pub mod kv {
    include!("tonic_rdma.kv.v1.rs");
}

/// The service of the modes by reference of `tonic-rdma compare`.
pub mod reference {
    include!("tonic_rdma.reference.v1.rs");
}

/// The service of a tensor device, for tests that call one directly.
pub use tonic_rdma_tensor::unstable::proto as tensor_device;

/// The service that `tonic-rdma compare` controls the receiver of its tensor modes with.
pub mod placement {
    include!("tonic_rdma.placement.v1.rs");
}

/// The other service behind `tonic-rdma compare`: messages of several buffers, payloads in answers, and turns.
pub mod tensors {
    include!("tonic_rdma.tensors.v1.rs");
}

/// The service behind `tonic-rdma compare` and the soak tests.
pub mod transfer {
    include!("tonic_rdma.transfer.v1.rs");
}

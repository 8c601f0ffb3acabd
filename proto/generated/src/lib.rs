//! Generated code for the protos in the folder above.
#![allow(missing_docs, unreachable_pub, clippy::all, reason = "generated code")]

/// What all protos say, as gRPC's reflection service takes it.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The service of the examples.
pub mod greeter {
    tonic::include_proto!("tonic_rdma.greeter.v1");
}

/// The service behind `tonic-rdma parameter-server`.
pub mod parameters {
    tonic::include_proto!("tonic_rdma.parameters.v1");
}

/// The service of a tensor device, for who speaks to one by hand.
pub mod tensor_device {
    tonic::include_proto!("tonic_rdma.tensor.v1");
}

/// The service by which `tonic-rdma compare` controls the receiver of its tensor modes.
pub mod placement {
    tonic::include_proto!("tonic_rdma.placement.v1");
}

/// The service behind `tonic-rdma compare --workload`.
pub mod tensors {
    tonic::include_proto!("tonic_rdma.tensors.v1");
}

/// The service behind `tonic-rdma compare` and the soak tests.
pub mod transfer {
    tonic::include_proto!("tonic_rdma.transfer.v1");
}

//! The formats that tensor devices exchange, byte by byte: frames of requests and their answers, and the
//! metadata of a tensor.

pub mod tensor_frame;
pub mod tensor_metadata;

use tonic_rdma_verbs::unstable::Versions;

/// The versions that this side speaks of the service by which devices open links.
///
/// | version | what is new |
/// |---|---|
/// | 4 | the write of a named tensor announces itself, by immediate data; its frames and its write go by the queue pair that the request's number names |
pub const SERVICE_VERSIONS: Versions = Versions { oldest: 3, newest: 4 };

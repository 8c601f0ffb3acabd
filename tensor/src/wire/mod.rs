//! The formats that tensor devices exchange, byte by byte: frames of requests and their answers, and the
//! metadata of a tensor.

pub mod tensor_frame;
pub mod tensor_metadata;

use tonic_rdma_verbs::unstable::Versions;

/// The versions that this side speaks of the service by which devices open links.
///
/// | version | what is new |
/// |---|---|
/// | 3 | each side tells the other one which slots and regions it has given up, so words are used again |
/// | 4 | the frames and the write of a named tensor go by the queue pair that its request's number names |
///
/// A server of version 2 accepts only its own number in `OpenRequest::version`, so callers put the oldest
/// version there that they speak.
pub(crate) const SERVICE_VERSIONS: Versions = Versions { oldest: 2, newest: 4 };

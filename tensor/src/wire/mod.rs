//! The formats that tensor devices exchange, byte by byte: frames of requests and their answers, and the
//! metadata of a tensor.

pub mod tensor_frame;
pub mod tensor_metadata;

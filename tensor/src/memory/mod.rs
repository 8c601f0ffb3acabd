//! The memory of tensors that move.

pub(crate) mod landing;
pub(crate) mod payload;

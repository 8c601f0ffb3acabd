//! The ways to hold a piece of a pool: a [`Block`] for the device, a [`RegisteredBuf`] for the application to fill, a [`Lease`], which
//! is a reference to a buffer that is frozen, and a [`Landing`], which the device fills for the application to read.

mod block;
mod buffer;
mod landing;
mod lease;

pub use block::Block;
pub use buffer::RegisteredBuf;
pub use landing::Landing;
pub use lease::Lease;

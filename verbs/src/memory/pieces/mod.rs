//! The three ways to hold a piece of a pool: a [`Block`] for the device, a [`RegisteredBuf`] for the application to fill,
//! and a [`Lease`], which is a reference to a buffer that is frozen.

mod block;
mod buffer;
mod lease;

pub use block::Block;
pub use buffer::RegisteredBuf;
pub use lease::Lease;

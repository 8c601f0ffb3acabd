//! The ways to hold a piece of a pool: a [`Block`] for the device, a [`RegisteredBuf`] for the application to fill,
//! and a [`Lease`], which is a reference to a buffer that is frozen. A [`Landing`] is for the device, and then for the application.

mod block;
mod buffer;
mod landing;
mod lease;

pub use block::Block;
pub use buffer::RegisteredBuf;
pub use landing::{Landed, Landing};
pub use lease::Lease;

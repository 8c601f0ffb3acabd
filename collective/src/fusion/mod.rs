//! Fusion of many small tensors into buckets, and reduction of the first buckets while the caller still computes the others.

mod error;
mod first;
mod flight;
mod group;
mod layout;
mod overlap;
mod size;
mod steps;
#[cfg(test)]
mod tests;
mod wait;

pub use self::error::{FusionError, Names};
pub use self::overlap::Overlap;
pub use self::size::BucketSize;

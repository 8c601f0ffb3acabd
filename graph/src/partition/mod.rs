//! Which node belongs to which part: balanced by bytes and work, or as the user says.
//!
//! ```text
//!  balanced    parts of similar work, and as few bytes between them as possible
//!  at_cuts     each part ends with nodes that the user names
//!  named       a list of `node=part`
//! ```
//!
//! A [`Partition`](crate::placement::Partition) may also be made from a list of parts, for graphs whose tensors go in any direction.
//!
//! This module never runs a node, and has no randomness: all processes get the same partition from the same graph.

mod balanced;
mod groups;
mod named;
#[cfg(test)]
mod tests;

pub use balanced::{SLACK_PERCENT, balanced, balanced_within};
pub use named::{at_cuts, named};

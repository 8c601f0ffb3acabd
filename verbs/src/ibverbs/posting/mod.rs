//! Posting requests, and tracing completions to them.
//!
//! This folder owns the device's queue pair with its state, its outstanding requests, and the lists of
//! requests that the device gets. It never creates, connects or destroys a queue pair:
//! [`queue_pair`](super::queue_pair) does. It knows no completion queue.

pub(crate) mod core;
pub(crate) mod lists;
pub(crate) mod windows;

//! What iWARP needs, and soft-iWARP in particular: connecting by librdmacm, and completions in the order of posting.

mod connecting;
pub(crate) mod id;
mod introduction;
pub(crate) mod library;
pub(crate) mod listener;
pub(crate) mod manager;
mod network;
pub(crate) mod order;

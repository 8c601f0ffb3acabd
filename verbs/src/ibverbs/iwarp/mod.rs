//! What iWARP needs, and soft-iWARP in particular: connecting by librdmacm, and completions in the order of
//! posting.

pub(crate) mod library;
pub(crate) mod manager;
pub(crate) mod order;

//! Settings of a message connection.

/// Settings of a message connection, which its session chooses.
#[derive(Clone, Debug)]
pub(crate) struct MessageSettings {
    /// Bytes that may lie in landed memory at a time: fetches under way, and memory that the application still holds.
    pub(crate) landing_budget: u64,
    /// The peer may read memory of pools for sending that this end offers, from where it lies. It then may read the whole slab of such
    /// memory. Otherwise it is copied.
    pub(crate) expose: bool,
}

//! Groups of several ranks in one process.

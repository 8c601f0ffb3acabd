//! The entry point of child processes.

use crate::endpoint;

/// Does nothing when run as a test. In a child process, plays the role that the parent gave it.
#[test]
fn role() {
    let Ok(role) = std::env::var(support::ROLE) else { return };
    if !endpoint::logs::play(&role) {
        support::play(&role);
    }
}

//! The entry point of child processes.

/// Does nothing when run as a test. In a child process, plays the role that the parent gave it.
#[test]
fn role() {
    if let Ok(role) = std::env::var(support::ROLE) {
        crate::server_end::play(&role);
    }
}

//! The entry point of child processes.

/// Does nothing when run as a test. In a child process, plays the role that the parent gave it.
#[test]
fn role() {
    match std::env::var(support::ROLE).as_deref() {
        Err(_) => {}
        Ok(role) if role.starts_with(crate::shares::ROLE) => crate::shares::play(role),
        Ok(role) => crate::server_end::play(role),
    }
}

//! The entry point of child processes.

/// Does nothing when run as a test. In a child process, plays the role that the parent gave it.
#[test]
fn role() {
    let Ok(role) = std::env::var(support::ROLE) else { return };
    match &*role {
        "waits" => crate::waits::play(),
        _ => panic!("unknown role {role}"),
    }
}

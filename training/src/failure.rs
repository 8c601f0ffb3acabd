//! Errors: of any type inside the program, and with a message for its user.

use tonic_rdma_commands::Failure;

/// An error of any type.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Returns the failure that an error is, or makes one of it.
pub(crate) fn failure(error: Error) -> Failure {
    match error.downcast::<Failure>() {
        Ok(failure) => *failure,
        Err(other) => Failure::run(other.to_string()).because(other),
    }
}

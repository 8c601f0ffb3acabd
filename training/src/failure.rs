//! Errors: of any type inside the program, and with a message for its user.

pub(crate) use tonic_rdma_commands::Failure;

/// An error of any type.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Says what failed.
pub(crate) trait Context<T> {
    /// Makes an error the cause of a failure with this message.
    fn context(self, message: impl Into<String>) -> Result<T, Failure>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn context(self, message: impl Into<String>) -> Result<T, Failure> {
        self.map_err(|cause| Failure::run(message).because(cause))
    }
}

/// Returns the failure that an error is, or makes one of it.
pub(crate) fn of(error: Error) -> Failure {
    match error.downcast::<Failure>() {
        Ok(failure) => *failure,
        Err(other) => Failure::run(other.to_string()).because(other),
    }
}

//! The error that ends the program.

use std::fmt;

pub(crate) use tonic_rdma_commands::chain;

/// An error in one line of text, for the user.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(reason: impl Into<String>) -> Self {
        Self(reason.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

impl From<tonic_rdma_commands::Failure> for Failure {
    fn from(failure: tonic_rdma_commands::Failure) -> Self {
        Self(failure.with_causes())
    }
}

/// Takes an error of a library, with its causes.
impl From<Box<dyn std::error::Error>> for Failure {
    fn from(error: Box<dyn std::error::Error>) -> Self {
        Self(chain(&*error))
    }
}

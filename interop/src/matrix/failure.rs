//! Errors of the program.

/// An error that ends the program, or all cases of one combination.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

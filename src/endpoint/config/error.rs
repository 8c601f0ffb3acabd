//! A setting with a value that can not be used.

/// An environment variable with a value that can't be used.
///
/// ```
/// use tonic_rdma::{Config, ConfigError};
///
/// let set = |name: &str| (name == "RDMA_CQS").then(|| "many".into());
/// let error: ConfigError = Config::from_variables(set).unwrap_err();
/// assert_eq!(error.to_string(), r#"RDMA_CQS="many": takes a number from 1 to 64"#);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}={value:?}: {accepted}")]
pub struct ConfigError {
    /// Name of the variable.
    pub variable: String,
    /// What it was set to.
    pub value: String,
    /// What it takes.
    pub accepted: String,
}

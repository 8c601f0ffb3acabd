//! A setting with a value that can't be used.

use std::fmt;

/// A setting with a value that can't be used, from an environment variable or from code.
///
/// ```
/// use tonic_rdma::{Config, ConfigError};
///
/// let set = |name: &str| (name == "RDMA_CQS").then(|| "many".into());
/// let error: ConfigError = Config::from_variables(set).unwrap_err();
/// assert_eq!(error.to_string(), r#"RDMA_CQS="many": takes a number from 1 to 64"#);
///
/// let error: ConfigError = Config::default().completion_queues(0).validate().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "Config::completion_queues is 0: takes a number from 1 to 64 (variable RDMA_CQS)"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub struct ConfigError {
    /// Name of the setting: the method of [`Config`](crate::Config) that sets it, such as `completion_queues`. Where a method
    /// sets several values, the name of the value follows in brackets. Limits of calls have the name of their type before it, such
    /// as `CallConfig::timeout`.
    pub setting: &'static str,
    /// Name of the variable for this setting, such as `RDMA_CQS`. Empty if the setting has no variable.
    pub variable: &'static str,
    /// The value.
    pub value: String,
    /// The values that the setting takes.
    pub accepted: String,
    /// The value came from the variable, and not from code.
    pub from_environment: bool,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, variable, value, accepted, from_environment } = self;
        if setting.contains("::") {
            write!(f, "{setting} is {value}: {accepted}")
        } else if *from_environment {
            write!(f, "{variable}={value:?}: {accepted}")
        } else if variable.is_empty() {
            write!(f, "Config::{setting} is {value}: {accepted}")
        } else {
            write!(f, "Config::{setting} is {value}: {accepted} (variable {variable})")
        }
    }
}

impl ConfigError {
    /// Makes the error for a limit of [`CallConfig`](crate::CallConfig). `setting` is the limit's name with that type before it.
    pub(crate) fn of_calls(setting: &'static str, value: String, accepted: String) -> Self {
        Self { setting, variable: "", value, accepted, from_environment: false }
    }
}

//! The cases, by name.

mod checked;
mod compressed;
mod metadata;
mod official;
mod soak;

use std::pin::Pin;

pub(crate) use soak::timeout as soak_timeout;

use super::case::{CaseResult, Session};
use tonic_rdma_commands::Failure;

type CaseFuture = Pin<Box<dyn Future<Output = CaseResult> + Send>>;

/// A test case.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) run: fn(Session) -> CaseFuture,
    /// True if the options of the soak set the case's time limit.
    pub(crate) soaks: bool,
}

/// An official case that is missing here.
#[derive(Debug)]
pub(crate) struct AbsentCase {
    pub(crate) name: &'static str,
    pub(crate) reason: &'static str,
}

/// Makes cases with the names of their functions.
macro_rules! cases {
    ($($module:ident :: { $($name:ident),* $(,)? }),* $(,)?) => {
        [$($(Case {
            name: stringify!($name),
            run: |session| Box::pin($module::$name(session)),
            soaks: matches!(stringify!($module).as_bytes(), b"soak"),
        }),*),*]
    };
}

static CASES: &[Case] = &cases![
    official::{
        empty_unary,
        cacheable_unary,
        large_unary,
        concurrent_large_unary,
        unimplemented_method,
        unimplemented_service,
    },
    compressed::{
        client_compressed_unary,
        server_compressed_unary,
        client_compressed_streaming,
        server_compressed_streaming,
    },
    official::{client_streaming, server_streaming, ping_pong, empty_stream},
    metadata::{custom_metadata},
    official::{
        status_code_and_message,
        special_status_message,
        cancel_after_begin,
        cancel_after_first_response,
        timeout_on_sleeping_server,
    },
    soak::{rpc_soak, channel_soak},
    checked::{
        checked_unary,
        checked_concurrent,
        checked_client_streaming,
        checked_server_streaming,
        checked_ping_pong,
        checked_half_close,
        checked_gzip,
        checked_zstd,
        checked_status_details,
    },
    metadata::{checked_binary_metadata, checked_large_metadata},
];

const CLOUD: &str = "it needs credentials of Google's cloud, and a server there";
const LOAD_REPORTS: &str = "tonic has no load reporting (ORCA)";

/// Official cases that are missing here.
pub(crate) static ABSENT: &[AbsentCase] = &[
    AbsentCase { name: "compute_engine_creds", reason: CLOUD },
    AbsentCase { name: "jwt_token_creds", reason: CLOUD },
    AbsentCase { name: "oauth2_auth_token", reason: CLOUD },
    AbsentCase { name: "per_rpc_creds", reason: CLOUD },
    AbsentCase { name: "google_default_credentials", reason: CLOUD },
    AbsentCase { name: "compute_engine_channel_credentials", reason: CLOUD },
    AbsentCase { name: "orca_per_rpc", reason: LOAD_REPORTS },
    AbsentCase { name: "orca_oob", reason: LOAD_REPORTS },
    AbsentCase { name: "long_lived_channel", reason: "the case differs from rpc_soak in its duration only" },
    AbsentCase {
        name: "half_duplex",
        reason: "the descriptions do not have this case any more; the server still has the method",
    },
];

/// Returns all cases, in the order in which `all` runs them.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    CASES.iter()
}

/// Returns the case with this name, or the reason why it is missing here.
///
/// # Errors
/// There is no such case.
pub(crate) fn find(name: &str) -> Result<Result<&'static Case, &'static AbsentCase>, Failure> {
    let absent = || ABSENT.iter().find(|case| case.name == name);
    let found = CASES.iter().find(|case| case.name == name).map(Ok).or_else(|| absent().map(Err));
    found.ok_or_else(|| {
        let names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        Failure::run(format!("there is no case {name:?}; cases are all, {}", names.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        let mut names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        names.extend(ABSENT.iter().map(|case| case.name));
        for name in &names {
            assert!(find(name).is_ok(), "{name}");
            assert_eq!(names.iter().filter(|other| *other == name).count(), 1, "{name}");
        }
        assert!(find("no_such_case").unwrap_err().to_string().contains("\"no_such_case\""));
        assert!(CASES.iter().all(|case| case.soaks == case.name.ends_with("_soak")));
    }
}

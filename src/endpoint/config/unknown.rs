//! A warning for variables that have the form of settings and are none, such as a misspelt one.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::Mutex;

use super::Config;
use tonic_rdma_verbs::internal::lock;

/// The beginning of all variables.
const PREFIX: &str = "RDMA_";

/// The variables that packages above this one read. A test compares them with the code.
const ABOVE: [&str; 4] =
    ["RDMA_COLLECTIVE_ADDRESS", "RDMA_COLLECTIVE_PLANS", "RDMA_COLLECTIVE_RANK", "RDMA_COLLECTIVE_SIZE"];

/// Least similarity of a name that was probably meant, from 0 to 1.
const SIMILAR: f64 = 0.8;

/// Returns the names of all variables that any package reads.
pub fn known_variables() -> BTreeSet<String> {
    let known = RefCell::new(BTreeSet::from(ABOVE.map(str::to_owned)));
    // This asks for each variable of a configuration. Without any there is no error.
    let _ = Config::from_variables(|name| {
        known.borrow_mut().insert(name.to_owned());
        None
    });
    known.into_inner()
}

/// Logs a warning for each variable of the environment that begins like a setting and is none, once for each name in a process. It
/// is no error, because other software may read the variable.
pub fn warn_of_unknown_variables() {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // A warning that no subscriber takes must not count as logged.
    if !tracing::enabled!(tracing::Level::WARN) {
        return;
    }
    let set = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let mut unknown =
        set.filter(|(name, value)| name.starts_with(PREFIX) && !is_of_others(name, value)).peekable();
    if unknown.peek().is_none() {
        return;
    }
    let known = known_variables();
    for (name, _) in unknown.filter(|(name, _)| !known.contains(name)) {
        if !lock(&SAID).insert(name.clone()) {
            continue;
        }
        match nearest(&name, &known) {
            Some(meant) => tracing::warn!("{name} is not a variable of tonic-rdma; did you mean {meant}?"),
            None => tracing::warn!("{name} is not a variable of tonic-rdma"),
        }
    }
}

/// Returns whether the variable is one that Kubernetes sets for a service named `rdma-…`, or one of this repository's tests.
fn is_of_others(name: &str, value: &OsStr) -> bool {
    let of_service =
        ["_SERVICE_HOST", "_SERVICE_PORT", "_TCP_", "_UDP_"].iter().any(|part| name.contains(part));
    let has_address =
        ["tcp://", "udp://"].iter().any(|scheme| value.as_encoded_bytes().starts_with(scheme.as_bytes()));
    of_service || has_address || name.starts_with("RDMA_TEST_")
}

/// Returns the known name that `name` was probably meant to be.
fn nearest<'a>(name: &str, known: &'a BTreeSet<String>) -> Option<&'a String> {
    let own = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).to_owned();
    let scored = known.iter().map(|each| (strsim::jaro_winkler(&own(name), &own(each)), each));
    let best = scored.max_by(|(one, _), (other, _)| one.total_cmp(other));
    best.filter(|(similarity, _)| *similarity >= SIMILAR).map(|(_, each)| each)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found() {
        let known = known_variables();
        for (name, meant) in [
            ("RDMA_POLCY", Some("RDMA_POLICY")),
            ("RDMA_PINNED_LIMITS", Some("RDMA_PINNED_LIMIT")),
            ("RDMA_EAGER", Some("RDMA_EAGER_THRESHOLD")),
            ("RDMA_POLLMODE", Some("RDMA_POLL_MODE")),
            ("RDMA_TIMEOUT", Some("RDMA_QP_TIMEOUT")),
            ("RDMA_SOFT_PEER", Some("RDMA_SOFT_PEERS")),
            ("RDMA_COLLECTIVE_RNAK", Some("RDMA_COLLECTIVE_RANK")),
            ("RDMA_FORK_SAFE", None),
            ("RDMA_XYZZY", None),
            ("RDMA_", None),
        ] {
            assert_eq!(nearest(name, &known).map(String::as_str), meant, "{name}");
        }
    }

    #[test]
    fn variables_of_services_are_left_alone() {
        let others = |name: &str, value: &str| is_of_others(name, OsStr::new(value));
        for (name, value) in [
            ("RDMA_PS_SERVICE_HOST", "10.0.0.1"),
            ("RDMA_PS_SERVICE_PORT_GRPC", "7000"),
            ("RDMA_PS_PORT", "tcp://10.0.0.1:7000"),
            ("RDMA_PS_PORT_7000_TCP_ADDR", "10.0.0.1"),
            ("RDMA_PS_PORT_4791_UDP", "udp://10.0.0.1:4791"),
            ("RDMA_TEST_DEVICE", "rxe0"),
        ] {
            assert!(others(name, value), "{name}");
        }
        assert!(!others("RDMA_POLCY", "require") && !others("RDMA_POLICIES", "tcp-only"));
    }
}

//! Prints the name that each caller sends (`user-agent`), which has the caller's library and version.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::{Arc, Mutex};

use tonic_rdma_verbs::internal::lock;

/// Maximum number of printed names, so that a client can't fill a log.
const MAX_NAMES: usize = 16;
/// Maximum number of printed characters of a name.
const MAX_LENGTH: usize = 200;

/// The names that were printed.
#[derive(Clone, Debug, Default)]
pub(super) struct Callers(Arc<Mutex<BTreeSet<String>>>);

impl Callers {
    /// Prints the caller's name to the standard error, unless it was printed already.
    pub(super) fn print(&self, headers: &http::HeaderMap) {
        if let Some(name) = self.new_name(headers) {
            // stderr may be closed.
            let _ = writeln!(std::io::stderr(), "called by {name}");
        }
    }

    /// Returns the caller's name if it was not printed yet.
    fn new_name(&self, headers: &http::HeaderMap) -> Option<String> {
        let name = headers.get(http::header::USER_AGENT)?.to_str().ok()?;
        let name: String = name.chars().take(MAX_LENGTH).collect();
        let mut printed = lock(&self.0);
        (printed.len() < MAX_NAMES && printed.insert(name.clone())).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> http::HeaderMap {
        let name = http::HeaderValue::from_str(name).unwrap();
        [(http::header::USER_AGENT, name)].into_iter().collect()
    }

    #[test]
    fn each_name_is_printed_once() {
        let callers = Callers::default();
        assert_eq!(callers.new_name(&named("tonic/0.14")), Some("tonic/0.14".to_owned()));
        assert_eq!(callers.new_name(&named("tonic/0.14")), None);
        assert_eq!(callers.new_name(&named("grpc-go/1.33.3")), Some("grpc-go/1.33.3".to_owned()));
        assert_eq!(callers.new_name(&http::HeaderMap::new()), None);
    }

    #[test]
    fn printed_names_are_bounded() {
        let callers = Callers::default();
        let printed = (0..1000).filter(|number| callers.new_name(&named(&format!("a/{number}"))).is_some());
        assert_eq!(printed.count(), MAX_NAMES);
        let long = Callers::default().new_name(&named(&"x".repeat(5000)));
        assert_eq!(long.map(|name| name.len()), Some(MAX_LENGTH));
    }
}

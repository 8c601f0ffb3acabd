//! Prints the name that each caller sends (`user-agent`), which has the caller's library and version.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tower_service::Service;

use crate::output;

/// Maximum number of printed names, so that a client can't fill a log.
const MAX_NAMES: usize = 16;
/// Maximum number of printed characters of a name.
const MAX_LENGTH: usize = 200;

/// A service that prints the name of each caller once, to the standard error.
#[derive(Clone, Debug)]
pub(super) struct Callers<S> {
    inner: S,
    printed: Arc<Mutex<BTreeSet<String>>>,
}

impl<S> Callers<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, printed: Arc::default() }
    }

    /// Returns the caller's name if it was not printed yet.
    fn new_name(&self, headers: &http::HeaderMap) -> Option<String> {
        let name = headers.get(http::header::USER_AGENT)?.to_str().ok()?;
        let name: String = name.chars().take(MAX_LENGTH).collect();
        let mut printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        (printed.len() < MAX_NAMES && printed.insert(name.clone())).then_some(name)
    }
}

impl<B, S: Service<http::Request<B>>> Service<http::Request<B>> for Callers<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        if let Some(name) = self.new_name(request.headers()) {
            output::note(&format!("called by {name}"));
        }
        self.inner.call(request)
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
        let callers = Callers::new(());
        assert_eq!(callers.new_name(&named("tonic/0.14")), Some("tonic/0.14".to_owned()));
        assert_eq!(callers.new_name(&named("tonic/0.14")), None);
        assert_eq!(callers.new_name(&named("grpc-go/1.33.3")), Some("grpc-go/1.33.3".to_owned()));
        assert_eq!(callers.new_name(&http::HeaderMap::new()), None);
    }

    #[test]
    fn printed_names_are_bounded() {
        let callers = Callers::new(());
        let printed = (0..1000).filter(|number| callers.new_name(&named(&format!("a/{number}"))).is_some());
        assert_eq!(printed.count(), MAX_NAMES);
        let long = Callers::new(()).new_name(&named(&"x".repeat(5000)));
        assert_eq!(long.map(|name| name.len()), Some(MAX_LENGTH));
    }
}

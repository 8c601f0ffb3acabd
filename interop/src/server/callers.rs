//! Says which programs call, by the name that each gives itself (`user-agent`): so is a peer's version known from the peer.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tower_service::Service;

use crate::output;

/// The most names that are said, so that a client can't fill a log with them.
const NAMES: usize = 16;
/// The most characters of a name.
const LENGTH: usize = 200;

/// A service that says the name of each caller once, on the standard error.
#[derive(Clone, Debug)]
pub(super) struct Callers<S> {
    inner: S,
    said: Arc<Mutex<BTreeSet<String>>>,
}

impl<S> Callers<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, said: Arc::default() }
    }

    /// Returns the name if it is to be said.
    fn to_say(&self, headers: &http::HeaderMap) -> Option<String> {
        let name = headers.get(http::header::USER_AGENT)?.to_str().ok()?;
        let name: String = name.chars().take(LENGTH).collect();
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        (said.len() < NAMES && said.insert(name.clone())).then_some(name)
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
        if let Some(name) = self.to_say(request.headers()) {
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
    fn each_name_is_said_once() {
        let callers = Callers::new(());
        assert_eq!(callers.to_say(&named("tonic/0.14")), Some("tonic/0.14".to_owned()));
        assert_eq!(callers.to_say(&named("tonic/0.14")), None);
        assert_eq!(callers.to_say(&named("grpc-go/1.33.3")), Some("grpc-go/1.33.3".to_owned()));
        assert_eq!(callers.to_say(&http::HeaderMap::new()), None);
    }

    #[test]
    fn names_fill_no_log() {
        let callers = Callers::new(());
        let said = (0..1000).filter(|number| callers.to_say(&named(&format!("a/{number}"))).is_some());
        assert_eq!(said.count(), NAMES);
        let long = Callers::new(()).to_say(&named(&"x".repeat(5000)));
        assert_eq!(long.map(|name| name.len()), Some(LENGTH));
    }
}

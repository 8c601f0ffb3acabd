//! The service of a device without its list of slots.

use std::future::ready;

use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Context, Poll, Service, http};
use tonic::server::NamedService;

/// A tensor device's service that does not answer `Describe`. The names of slots contain secrets, so that only
/// parts of the session can attach. `Describe` would tell every caller the names.
#[derive(Clone, Debug)]
pub(super) struct Unlisted<S> {
    service: S,
}

impl<S> Unlisted<S> {
    pub(super) fn new(service: S) -> Self {
        Self { service }
    }
}

impl<S: NamedService> NamedService for Unlisted<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for Unlisted<S>
where
    S: Service<http::Request<B>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<S::Response, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        if request.uri().path().ends_with("/Describe") {
            let refused = Status::permission_denied("a part does not list its slots");
            return Box::pin(ready(Ok(refused.into_http())));
        }
        Box::pin(self.service.call(request))
    }
}

//! The server's side of compression flags.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use super::{Flags, Received, Wanted, as_wanted, observed};

/// A service whose requests have [`Received`] among their extensions, and whose responses may have [`Wanted`].
#[derive(Clone, Debug)]
pub(crate) struct ServerCompression<S> {
    inner: S,
}

impl<S> ServerCompression<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S: NamedService> NamedService for ServerCompression<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for ServerCompression<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let received = Flags::default();
        request.extensions_mut().insert(Received(received.clone()));
        let response = self.inner.call(request.map(|body| observed(body, received)));
        Box::pin(async move {
            let mut response = response.await?;
            Ok(match response.extensions_mut().remove::<Wanted>() {
                Some(Wanted(wanted)) => response.map(|body| as_wanted(body, wanted)),
                None => response,
            })
        })
    }
}

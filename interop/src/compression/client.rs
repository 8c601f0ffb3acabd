//! The client's side of compression flags.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tower_service::Service;

use super::{Flags, Received, Sent, Wanted, as_wanted, observed};

/// A channel whose responses have [`Received`] and [`Sent`] among their extensions, and whose requests may have [`Wanted`].
#[derive(Clone, Debug)]
pub(crate) struct ClientCompression<S> {
    inner: S,
}

impl<S> ClientCompression<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S> Service<http::Request<Body>> for ClientCompression<S>
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
        if let Some(Wanted(wanted)) = request.extensions_mut().remove::<Wanted>() {
            request = request.map(|body| as_wanted(body, wanted));
        }
        let (sent, received) = (Flags::default(), Flags::default());
        let response = self.inner.call(request.map(|body| observed(body, sent.clone())));
        Box::pin(async move {
            let mut response = response.await?;
            response.extensions_mut().insert(Sent(sent));
            response.extensions_mut().insert(Received(received.clone()));
            Ok(response.map(|body| observed(body, received)))
        })
    }
}

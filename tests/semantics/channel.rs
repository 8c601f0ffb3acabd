//! One type for the channels of all columns.

use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::transport::Channel;
use tonic_rdma::RdmaChannel;
use tower::Service;

pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A channel of any column.
#[derive(Clone, Debug)]
pub(crate) enum AnyChannel {
    /// tonic's.
    Tonic(Channel),
    /// Ours.
    Native(RdmaChannel),
}

impl Service<http::Request<Body>> for AnyChannel {
    type Response = http::Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        match self {
            Self::Tonic(channel) => channel.poll_ready(context).map_err(Into::into),
            Self::Native(channel) => channel.poll_ready(context).map_err(Into::into),
        }
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self {
            Self::Tonic(channel) => {
                let response = channel.call(request);
                Box::pin(async move { response.await.map_err(Into::into) })
            }
            Self::Native(channel) => {
                let response = channel.call(request);
                Box::pin(async move { response.await.map_err(Into::into) })
            }
        }
    }
}

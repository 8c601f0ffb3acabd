//! The channel of all gRPC modes: tonic's over HTTP/2, or our own with native calls.

use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{Service, StdError};
use tonic::transport::Channel;
use tonic_rdma::RdmaChannel;
use tonic_rdma::gather::{self, GatherBoth};
use tonic_rdma_commands::Failure;
use tower::ServiceExt as _;
use tower::util::{Either, MapErr};

use crate::measure::transport::rdma::RdmaConnection;

/// A channel, whose errors have one type whatever the transport.
type Plain<S> = MapErr<S, fn(<S as Service<Request<Body>>>::Error) -> StdError>;

/// The three kinds of channels.
type AnyChannel = Either<Plain<Channel>, Either<Plain<RdmaChannel>, Plain<GatherBoth<RdmaChannel>>>>;

/// A channel for generated clients. Clones share the connection.
///
/// The choice between the kinds costs a branch. A boxed future would cost an allocation for each call.
#[derive(Clone, Debug)]
pub(crate) struct CallChannel {
    inner: AnyChannel,
    /// The channel once more if it makes native calls, for a look at its connection.
    native: Option<RdmaChannel>,
}

impl From<Channel> for CallChannel {
    fn from(channel: Channel) -> Self {
        let channel: Plain<Channel> = channel.map_err(StdError::from);
        Self { inner: Either::Left(channel), native: None }
    }
}

impl From<RdmaChannel> for CallChannel {
    fn from(channel: RdmaChannel) -> Self {
        let native = Some(channel.clone());
        let channel: Plain<RdmaChannel> = channel.map_err(StdError::from);
        Self { inner: Either::Right(Either::Left(channel)), native }
    }
}

impl CallChannel {
    /// Makes a channel with native calls, which sends payloads by reference and takes them where they land.
    pub(crate) fn gathering(channel: RdmaChannel) -> Self {
        let native = Some(channel.clone());
        let both = gather::both(channel).max_decoding_message_size(usize::MAX);
        let both: Plain<GatherBoth<RdmaChannel>> = both.map_err(StdError::from);
        Self { inner: Either::Right(Either::Right(both)), native }
    }

    /// Fails if the channel is for native calls and its last connection carries HTTP/2.
    pub(crate) fn check_native(&self) -> Result<(), NotNative> {
        match &self.native {
            Some(channel) => native_connection(channel).map(drop),
            None => Ok(()),
        }
    }
}

impl Service<Request<Body>> for CallChannel {
    type Response = Response<Body>;
    type Error = StdError;
    type Future = <AnyChannel as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.inner.call(request)
    }
}

/// The error of a channel for native calls whose connection carries HTTP/2.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the connection makes no native calls: {reason}")]
pub(crate) struct NotNative {
    reason: String,
}

impl From<NotNative> for Failure {
    fn from(error: NotNative) -> Self {
        Self::run(error.to_string())
    }
}

/// Returns the last connection of `channel`, which must make native calls.
pub(crate) fn native_connection(channel: &RdmaChannel) -> Result<RdmaConnection, NotNative> {
    let Some(info) = channel.last_connection() else {
        return Err(NotNative { reason: "no connection was made".to_owned() });
    };
    let reason = info.reason().to_owned();
    if !info.is_native() {
        return Err(NotNative { reason });
    }
    Ok(RdmaConnection { provider: info.provider().unwrap_or("none").to_owned(), reason })
}

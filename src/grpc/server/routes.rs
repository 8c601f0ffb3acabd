//! The services of a server, as its layers see them.
//!
//! A native call finds its service by the first segment of its path, in a table. That is quicker than tonic's
//! router, which matches the whole path, and puts the bodies of request and response into boxes of its own.
//! HTTP/2 peers, and servers with routes of the user, have tonic's router.

use std::any::Any;
use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use foldhash::fast::RandomState;
use http::{Request, Response};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tower::ServiceExt as _;
use tower_service::Service;

use super::BoxError;
use crate::grpc::landed::LandingSwitch;

/// What an [`RdmaServer`](super::RdmaServer) serves: a tower service that takes requests with tonic's
/// [`Body`], and answers with a body of bytes. Generated servers are such services, and layers of tower
/// around such a service are, too.
///
/// Each type that meets the bounds has this trait, so there is nothing to implement. It serves to name the
/// bounds:
///
/// ```
/// use std::convert::Infallible;
/// use tonic::server::NamedService;
/// use tonic_rdma::{GrpcService, RdmaServer};
///
/// fn server<S>(service: S) -> RdmaServer
/// where
///     S: GrpcService<Error = Infallible> + NamedService + Sync,
/// {
///     RdmaServer::new().add_service(service)
/// }
/// # let (_reporter, health) = tonic_health::server::health_reporter();
/// # drop(server(health));
/// ```
#[diagnostic::on_unimplemented(
    message = "an `RdmaServer` can't serve `{Self}`",
    note = "it serves a `Service<http::Request<tonic::body::Body>>` that is `Clone + Send + 'static`, whose response has a body of `Bytes`"
)]
pub trait GrpcService:
    Service<
        Request<Body>,
        Response = Response<<Self as GrpcService>::ResponseBody>,
        Error: Into<Box<dyn Error + Send + Sync>> + Send + 'static,
        Future: Send + 'static,
    > + Clone
    + Send
    + 'static
{
    /// The body of a response.
    type ResponseBody: http_body::Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>>
        + Send
        + 'static;
}

impl<S, B> GrpcService for S
where
    S: Service<Request<Body>, Response = Response<B>> + Clone + Send + 'static,
    S::Error: Into<BoxError> + Send + 'static,
    S::Future: Send + 'static,
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type ResponseBody = B;
}

/// A future in a box.
pub(super) type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The future of a response of [`RdmaRoutes`].
type Responding = Boxed<Result<Response<Body>, Infallible>>;

/// The services of an [`RdmaServer`](super::RdmaServer): what its [layers](super::RdmaServer::layer) wrap. It
/// answers calls of unknown services with UNIMPLEMENTED.
///
/// Most layers take any service. A function that makes a layer's service names this type:
///
/// ```
/// use std::task::{Context, Poll};
/// use tonic_rdma::{RdmaRoutes, RdmaServer};
/// use tower::layer::layer_fn;
/// use tower_service::Service;
///
/// #[derive(Clone)]
/// struct Logged<S>(S);
///
/// impl<S: Service<http::Request<B>>, B> Service<http::Request<B>> for Logged<S> {
///     type Response = S::Response;
///     type Error = S::Error;
///     type Future = S::Future;
///
///     fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
///         self.0.poll_ready(context)
///     }
///
///     fn call(&mut self, request: http::Request<B>) -> S::Future {
///         println!("{}", request.uri().path());
///         self.0.call(request)
///     }
/// }
///
/// fn logged(services: RdmaRoutes) -> Logged<RdmaRoutes> {
///     Logged(services)
/// }
///
/// let server = RdmaServer::new().layer(layer_fn(logged));
/// # drop(server);
/// ```
#[derive(Clone)]
pub struct RdmaRoutes {
    /// All services.
    routes: Routes,
    /// The services that calls find by their names.
    named: Arc<Named>,
}

/// Services by name.
#[derive(Clone, Default)]
pub(super) struct Named(HashMap<&'static str, Arc<dyn Callable>, RandomState>);

impl RdmaRoutes {
    pub(super) fn new(routes: Routes, named: Named) -> Self {
        Self { routes: routes.prepare(), named: Arc::new(named) }
    }

    /// Returns the service of a native call.
    fn find<B>(&self, request: &Request<B>) -> Option<&dyn Callable> {
        // Native requests have a switch. Calls over HTTP/2 have methods and header fields that only the
        // router knows.
        request.extensions().get::<LandingSwitch>()?;
        self.named.find(request.uri().path())
    }
}

impl fmt::Debug for RdmaRoutes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaRoutes").field("routes", &self.routes).field("named", &self.named).finish()
    }
}

impl<B> Service<Request<B>> for RdmaRoutes
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        match self.find(&request) {
            Some(service) => service.call_clone(request.map(Body::new)),
            // tonic's router is always ready, too.
            None => Box::pin(self.routes.call(request)),
        }
    }
}

impl Named {
    /// Adds a service. Returns `None` if its name is not one segment of a path: then only tonic's router can
    /// tell which service a path belongs to.
    pub(super) fn with<S: NamedService + Callable + 'static>(mut self, service: S) -> Option<Self> {
        // The router takes names with some of these characters for patterns.
        if S::NAME.is_empty() || S::NAME.contains(['/', '{', '}', '*', ':']) {
            return None;
        }
        self.0.insert(S::NAME, Arc::new(service));
        Some(self)
    }

    /// Returns the service of a path, as tonic's router does: a path without a method has none.
    fn find(&self, path: &str) -> Option<&dyn Callable> {
        let (name, method) = path.strip_prefix('/')?.split_once('/')?;
        if method.is_empty() {
            return None;
        }
        self.0.get(name).map(|service| &**service)
    }
}

impl fmt::Debug for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// A service of any type: each one that a server takes.
pub(super) trait Callable: Send + Sync {
    /// Calls a clone of the service, once the clone is ready.
    fn call_clone(&self, request: Request<Body>) -> Responding;
}

impl<S: GrpcService<Error = Infallible> + Sync> Callable for S {
    fn call_clone(&self, request: Request<Body>) -> Responding {
        let service = self.clone();
        // Called when the response is first polled, as by tonic's router: layers may have put something
        // around the future by then.
        Box::pin(async move { service.oneshot(request).await.map(|response| response.map(Body::new)) })
    }
}

/// Puts a future into a box, unless it is one.
pub(super) fn boxed<F: Future + Send + 'static>(future: F) -> Boxed<F::Output>
where
    F::Output: 'static,
{
    same(future).unwrap_or_else(|future| Box::pin(future))
}

/// Returns `value` as a `To`, if both types are the same.
fn same<From: 'static, To: 'static>(value: From) -> Result<To, From> {
    let mut value = Some(value);
    let same = (&mut value as &mut dyn Any).downcast_mut::<Option<To>>().and_then(Option::take);
    match (same, value) {
        (Some(same), _) => Ok(same),
        (None, Some(value)) => Err(value),
        (None, None) => unreachable!("a value of the same type was taken"),
    }
}

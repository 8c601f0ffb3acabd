//! Services that native calls find by their names answer as tonic's routes do.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::transport::Endpoint;
use tonic::{Request, Status};
use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::greeter::greeter_server::GreeterServer;
use tower::layer::layer_fn;
use tower::{Service, ServiceExt as _};

use crate::server_acts::{Acts, serve_as};
use support::{Runtime, config, within};

/// The name of a service.
trait Named: Clone + Send + Sync + 'static {
    const NAME: &'static str;
}

/// A name of one segment.
#[derive(Clone, Debug, Default)]
struct Plain;

impl Named for Plain {
    const NAME: &'static str = "test.Slow";
}

/// A name below the other one.
#[derive(Clone, Debug, Default)]
struct Below;

impl Named for Below {
    const NAME: &'static str = "test.Slow/Taken";
}

/// A service that is not ready when it is asked first, and whose body is not tonic's. It answers with the
/// path.
#[derive(Clone, Debug, Default)]
struct Slow<N> {
    asked: bool,
    calls: Arc<AtomicUsize>,
    name: PhantomData<N>,
}

impl<N: Named> NamedService for Slow<N> {
    const NAME: &'static str = N::NAME;
}

impl<N: Named> Service<http::Request<Body>> for Slow<N> {
    type Response = http::Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if std::mem::replace(&mut self.asked, true) {
            return Poll::Ready(Ok(()));
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        assert!(self.asked, "a service is called when it is ready");
        self.calls.fetch_add(1, Ordering::SeqCst);
        let body = Full::new(Bytes::copy_from_slice(request.uri().path().as_bytes()));
        ready(Ok(http::Response::builder().header("answered", "here").body(body).unwrap()))
    }
}

tokio::task_local! {
    /// What a layer of the server says to its services.
    static SAID: &'static str;
}

/// A layer that puts something around the future of each response.
#[derive(Clone)]
struct Saying<S>(S);

impl<S: Service<http::Request<Body>, Future: Send + 'static>> Service<http::Request<Body>> for Saying<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let response = self.0.call(request);
        Box::pin(SAID.scope("hello", response))
    }
}

/// Returns what a server answers to calls of these paths: head, body and trailers as text.
async fn answers(server: RdmaServer, paths: &[&str]) -> Vec<String> {
    let running = serve_as(server).await;
    answers_over(running.channel().await, paths).await
}

async fn answers_over(mut channel: RdmaChannel, paths: &[&str]) -> Vec<String> {
    let mut answers = Vec::new();
    for path in paths {
        let mut request = http::Request::post(*path).body(Body::empty()).unwrap();
        request.headers_mut().insert("content-type", http::HeaderValue::from_static("application/grpc"));
        let response = channel.ready().await.unwrap().call(request).await.unwrap();
        let mut head: Vec<_> =
            response.headers().iter().map(|field| format!("{}={:?}", field.0, field.1)).collect();
        head.sort();
        let body = response.into_body().collect().await.unwrap();
        let trailers = body.trailers().cloned();
        answers.push(format!("{path}: {head:?} {:?} {trailers:?}", body.to_bytes()));
    }
    answers
}

const PATHS: [&str; 10] = [
    "/test.Slow/Method",
    "/test.Slow/a/b",
    "/test.Slow/",
    "/test.Slow",
    "/test.SlowX/Method",
    "/other.Service/Method",
    "/tonic_rdma.greeter.v1.Greeter/SayHello",
    "/tonic_rdma.greeter.v1.Greeter/Unknown",
    "/",
    "//Method",
];

#[test]
fn both_ways_to_a_service_give_the_same_answers() {
    for runtime in Runtime::ALL {
        runtime.run(within(async {
            let greeter = || GreeterServer::new(Acts::default());
            let named = RdmaServer::new().add_service(Slow::<Plain>::default()).add_service(greeter());
            let routed = Routes::new(Slow::<Plain>::default()).add_service(greeter());
            let routed = RdmaServer::new().add_routes(routed);
            let (named, routed) = (answers(named, &PATHS).await, answers(routed, &PATHS).await);
            assert!(named[0].contains("answered") && named[0].contains("/test.Slow/Method"), "{}", named[0]);
            assert_eq!(named, routed);
        }));
    }
}

#[test]
fn the_longest_path_goes_before_a_name() {
    Runtime::CurrentThread.run(within(async {
        for is_added in [false, true] {
            let (slow, below) = (Slow::<Plain>::default(), Slow::<Below>::default());
            let server = RdmaServer::new().add_service(slow.clone());
            let server = match is_added {
                true => server.add_routes(Routes::new(below.clone())),
                false => server.add_service(below.clone()),
            };
            answers(server, &["/test.Slow/Taken/x", "/test.Slow/Other"]).await;
            let calls = [slow.calls, below.calls].map(|calls| calls.load(Ordering::SeqCst));
            assert_eq!(calls, [1, 1], "{is_added}");
        }
    }));
}

#[test]
fn an_interceptor_of_one_service_sees_its_calls() {
    Runtime::CurrentThread.run(within(async {
        let refuse = |_: Request<()>| Err::<Request<()>, _>(Status::permission_denied("not you"));
        let server = RdmaServer::new().add_service(GreeterServer::with_interceptor(Acts::default(), refuse));
        let answers = answers(server, &["/tonic_rdma.greeter.v1.Greeter/SayHello"]).await;
        assert!(answers[0].contains("not%20you"), "{}", answers[0]);
    }));
}

#[test]
fn a_service_runs_within_what_layers_put_around_its_future() {
    Runtime::CurrentThread.run(within(async {
        let heard = |_: Request<()>| {
            let said = SAID.try_with(|said| *said).unwrap_or("nothing");
            Err::<Request<()>, _>(Status::aborted(said))
        };
        let greeter = || GreeterServer::with_interceptor(Acts::default(), heard);
        for server in
            [RdmaServer::new().add_service(greeter()), RdmaServer::new().add_routes(Routes::new(greeter()))]
        {
            let incoming = RdmaIncoming::builder().config(config()).bind("127.0.0.1:0").await.unwrap();
            let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr())).unwrap();
            tokio::spawn(server.layer(layer_fn(Saying)).serve_with_incoming(incoming));
            let channel = RdmaChannel::builder(endpoint).config(config()).connect().await.unwrap();
            let answers = answers_over(channel, &["/tonic_rdma.greeter.v1.Greeter/SayHello"]).await;
            assert!(answers[0].contains("hello"), "{}", answers[0]);
        }
    }));
}

//! Code of the application that panics where the library runs it for all calls: drops of what was sent, and
//! wakers.

use std::convert::Infallible;
use std::future::Ready;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic_rdma::{CallConfig, RdmaChannel, RdmaServer};
use tower::{Service, ServiceExt as _};

use crate::server_acts::{Acts, in_every_runtime, serve, serve_as};
use support::{Runtime, say, until, within};

/// Memory whose owner panics when it is dropped.
struct Bomb(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Bomb {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Bomb {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
        panic!("as the test asked");
    }
}

/// A service that answers with such memory: in the place that the method names.
#[derive(Clone, Default)]
struct Bombs(Arc<AtomicUsize>);

impl NamedService for Bombs {
    const NAME: &'static str = "test.Bombs";
}

impl Service<Request<Body>> for Bombs {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let place = request.uri().path().rsplit('/').next().unwrap_or_default();
        let bomb = |length| Bytes::from_owner(Bomb(vec![b'1'; length], Arc::clone(&self.0)));
        let value = || HeaderValue::from_maybe_shared(bomb(20)).unwrap();
        let mut trailers =
            HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
        let mut head = HeaderMap::new();
        let mut data = Bytes::from_static(b"plain");
        match place {
            "head" => drop(head.insert("value", value())),
            "trailers" => drop(trailers.insert("value", value())),
            "small" => data = bomb(10),
            "large" => data = bomb(100_000),
            _ => {}
        }
        let frames = [http_body::Frame::data(data), http_body::Frame::trailers(trailers)];
        let body = StreamBody::new(tokio_stream::iter(frames.map(Ok::<_, Infallible>)));
        let mut response = Response::new(Body::new(body));
        *response.headers_mut() = head;
        std::future::ready(Ok(response))
    }
}

/// Makes a call. Returns the length of the body.
async fn call(channel: &mut RdmaChannel, place: &str) -> usize {
    let request = Request::post(format!("/test.Bombs/{place}")).body(Body::empty()).unwrap();
    let response = channel.ready().await.unwrap().call(request).await.unwrap();
    let body = response.into_body().collect().await.unwrap();
    assert_eq!(body.trailers().unwrap()["grpc-status"], "0");
    body.to_bytes().len()
}

/// The server polls in a runtime of its own, so the drops happen where it polls for all connections.
#[test]
fn memory_whose_drop_panics_ends_nothing() {
    for runtime in Runtime::ALL {
        eprintln!("{runtime:?}");
        let bombs = Bombs::default();
        let server = RdmaServer::new().add_service(bombs.clone());
        let (address, running) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            runtime.run_for_ever(async move {
                let (end, ended) = tokio::sync::oneshot::channel::<()>();
                address.send((serve_as(server).await, end)).unwrap();
                let _ = ended.await;
            });
        });
        let (running, end) = running.recv().unwrap();
        Runtime::CurrentThread.run(async {
            let (mut one, mut other) = (running.channel().await, running.channel().await);
            for (number, place) in ["small", "large", "head", "trailers"].into_iter().enumerate() {
                let length = if place == "large" { 100_000 } else { 5 + 5 * usize::from(place == "small") };
                assert_eq!(within(call(&mut one, place)).await, length, "{place}");
                assert_eq!(within(call(&mut other, "plain")).await, 5, "after {place}");
                until(|| bombs.0.load(Ordering::SeqCst) == number + 1).await;
                assert_eq!(within(call(&mut one, "plain")).await, 5, "after {place}");
            }
        });
        drop((end, running));
        thread.join().unwrap();
    }
}

/// A waker that panics from some time on.
#[derive(Default)]
struct Alarm {
    armed: AtomicBool,
    rung: AtomicBool,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        if self.armed.load(Ordering::SeqCst) {
            self.rung.store(true, Ordering::SeqCst);
            panic!("as the test asked");
        }
    }
}

#[test]
fn a_waker_that_panics_ends_nothing() {
    in_every_runtime(|| async {
        let acts = Acts::default();
        let running = serve(&acts, CallConfig::default()).await;
        let (mut client, mut other) = (running.client().await, running.client().await);
        let alarm = Arc::<Alarm>::default();
        {
            let mut held = pin!(say(&mut client, "wait"));
            let waker = Waker::from(Arc::clone(&alarm));
            until(|| {
                held.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() && acts.waiting() == 1
            })
            .await;
            assert!(held.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            alarm.armed.store(true, Ordering::SeqCst);
            acts.release(1);
            until(|| alarm.rung.load(Ordering::SeqCst)).await;
            assert_eq!(within(say(&mut other, "other")).await.unwrap(), "other");
            assert_eq!(within(held).await.unwrap(), "wait");
        }
        assert_eq!(within(say(&mut client, "same")).await.unwrap(), "same");
    });
}

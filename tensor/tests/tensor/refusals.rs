//! Wrong requests get an error with the reason, and change nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use http::{Request, Response};
use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service};
use tonic::server::NamedService;
use tonic::transport::Server;
use tonic::{Code, Status};
use tonic_rdma::memory::Pool;
use tonic_rdma::{Config, RdmaIncoming};
use tonic_rdma_tensor::{
    BlockCopy, Dtype, RdmaDevice, Rights, Shape, TensorError, TensorErrorKind, TensorMut, TensorSpec,
};

use crate::{pair, pattern};

fn code(error: TensorError) -> Code {
    error.code().unwrap_or_else(|| panic!("{error}"))
}

#[tokio::test]
async fn wrong_requests_for_regions_are_refused() {
    let (server, client, channel) = pair().await;
    let readable = server.export("readable", server.allocate(100).unwrap(), Rights::READ).unwrap();
    let taken = server.export("readable", server.allocate(100).unwrap(), Rights::READ).unwrap_err();
    assert_eq!(taken.kind(), TensorErrorKind::NameTaken, "{taken}");
    assert_eq!(code(channel.region("missing").await.unwrap_err()), Code::NotFound);
    let long = "n".repeat(10 << 20);
    assert_eq!(channel.region(&long).await.unwrap_err().kind(), TensorErrorKind::InvalidArgument);

    let remote = channel.region("readable").await.unwrap();
    let local = || client.allocate(4096).unwrap();
    let error = TensorError::from(channel.write(&remote).from(local(), ..1).await.unwrap_err());
    assert_eq!(error.kind(), TensorErrorKind::NotPermitted, "{error}");
    for (local_offset, remote_offset, length) in
        [(0, 0, 101), (0, 100, 1), (0, u64::MAX, 2), (4096, 0, 1), (4090, 0, 7), (usize::MAX - 2, 0, 2)]
    {
        let range = local_offset..local_offset + length;
        let error = channel.read(&remote).at(remote_offset).into(local(), range).await.unwrap_err();
        assert_eq!(error.error().kind(), TensorErrorKind::InvalidArgument, "{error}");
        assert_eq!(error.into_region().len(), 4096, "the region comes back");
    }
    let wraps = BlockCopy { local: u64::MAX, remote: 0, length: 2 };
    let error = channel.read(&remote).blocks_into(local(), &[wraps]).await.unwrap_err();
    assert_eq!(error.error().kind(), TensorErrorKind::InvalidArgument, "{error}");
    assert!(channel.is_open());
    channel.read(&remote).into(local(), ..100).await.unwrap();
    drop(readable);
    assert_eq!(code(channel.region("readable").await.unwrap_err()), Code::NotFound);
}

#[tokio::test]
async fn wrong_requests_for_slots_are_refused() {
    let (server, client, channel) = pair().await;
    let spec = |dims: &[u64]| TensorSpec::new(Dtype::F32, Shape::new(dims).unwrap()).unwrap();
    let _slot = server.static_receiver("weights", &spec(&[10, 10]), 1).unwrap();
    let _any = server.dynamic_receiver("any", 1).unwrap();
    let wrong =
        [spec(&[100]), spec(&[10, 11]), TensorSpec::new(Dtype::I32, Shape::new(&[10, 10]).unwrap()).unwrap()];
    for wrong in wrong {
        let error = channel.static_sender("weights", &wrong).await.unwrap_err();
        assert!(error.to_string().contains(&spec(&[10, 10]).to_string()), "{error}");
        assert_eq!(code(error), Code::InvalidArgument);
    }
    assert_eq!(code(channel.dynamic_sender("weights").await.unwrap_err()), Code::InvalidArgument);
    assert_eq!(code(channel.static_sender("any", &spec(&[1])).await.unwrap_err()), Code::InvalidArgument);
    let _sender = channel.static_sender("weights", &spec(&[10, 10])).await.unwrap();
    let other = RdmaDevice::builder().build().unwrap();
    let others = other.channel(&server.endpoint(), 0).await.unwrap();
    let error = others.static_sender("weights", &spec(&[10, 10])).await.unwrap_err();
    assert!(error.to_string().contains(&client.endpoint()), "{error}");
    assert_eq!(code(error), Code::AlreadyExists);
    assert!(server.static_receiver("none", &spec(&[1]), 0).is_err());
    assert!(server.static_receiver("many", &spec(&[1]), 1025).is_err());
}

#[tokio::test]
async fn wrong_settings_and_endpoints_are_refused() {
    for (queues, pairs) in [(0, 1), (1, 0), (65, 1), (1, 65)] {
        let builder = RdmaDevice::builder()
            .config(Config::default().completion_queues(queues))
            .queue_pairs_per_peer(pairs);
        let error = builder.bind("127.0.0.1:0").await.unwrap_err();
        let named = if pairs == 1 { "Config::completion_queues" } else { "Config::queue_pairs_per_peer" };
        assert!(error.to_string().contains(named), "{error}");
    }
    for builder in [
        RdmaDevice::builder().max_request_bytes(4095),
        RdmaDevice::builder().max_request_bytes(8192).max_outstanding_bytes(8191),
    ] {
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), TensorErrorKind::InvalidSetting, "{error}");
    }
    let device = RdmaDevice::builder().bind("127.0.0.1:0").await.unwrap();
    let unreachable = device.channel("127.0.0.1:1", 0).await.unwrap_err();
    assert_eq!(unreachable.kind(), TensorErrorKind::NoRdma, "{unreachable}");
    let malformed = device.channel("not a place", 0).await.unwrap_err();
    assert!(malformed.to_string().contains("not a place"), "{malformed}");
}

#[tokio::test]
async fn a_tensor_whose_slab_may_not_be_registered_is_copied() {
    // The first connection of the process sets the limit for all connections, also those of other tests.
    let (server, _client, _first) = pair().await;
    let config = Config::from_env().unwrap().pinned_limit(8 << 20);
    let client = RdmaDevice::builder().config(config).bind("127.0.0.1:0").await.unwrap();
    let channel = client.channel(&server.endpoint(), 0).await.unwrap();
    let spec = TensorSpec::new(Dtype::U8, Shape::new(&[100_000]).unwrap()).unwrap();
    let mut slot = server.static_receiver("weights", &spec, 1).unwrap();
    let mut sender = channel.static_sender("weights", &spec).await.unwrap();
    // What is left is enough for copies, and not for a slab of 2 MiB.
    let mut used: Vec<_> = std::iter::from_fn(|| client.allocate(256 << 10).ok()).collect();
    used.truncate(used.len() - 3);
    let pool = Pool::for_sending(64 << 20);
    for seed in 1..=3 {
        let mut weights = TensorMut::in_pool(spec, &pool).unwrap();
        weights.as_mut_slice::<u8>().unwrap().copy_from_slice(&pattern(seed, 100_000));
        sender.send(&weights.freeze()).await.unwrap();
        let arrived = slot.recv().await.unwrap().to_tensor().unwrap();
        assert_eq!(arrived.as_slice::<u8>().unwrap(), pattern(seed, 100_000));
    }
    assert_eq!((sender.sent().in_place.tensors, sender.sent().copied.tensors), (0, 3));
}

/// The service of a device, which gives up links: it answers the first confirmations as if the links were
/// gone.
#[derive(Clone)]
struct GivesUp<S> {
    service: S,
    given_up: Arc<AtomicUsize>,
}

/// The links that are given up.
const GIVEN_UP: usize = 3;

impl<S: NamedService> NamedService for GivesUp<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, E> Service<Request<Body>> for GivesUp<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = E, Future = BoxFuture<Response<Body>, E>>,
    E: Send + 'static,
{
    type Response = Response<Body>;
    type Error = E;
    type Future = BoxFuture<Response<Body>, E>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), E>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.uri().path().ends_with("/Confirm")
            && self.given_up.fetch_add(1, Ordering::Relaxed) < GIVEN_UP
        {
            let response = Status::aborted("the link was given up").into_http();
            return Box::pin(async { Ok(response) });
        }
        self.service.call(request)
    }
}

#[tokio::test]
async fn a_link_that_the_peer_gave_up_is_opened_again() {
    let device = || RdmaDevice::builder().config(Config::from_env().unwrap());
    let (server, client) = (device().build().unwrap(), device().build().unwrap());
    let incoming =
        RdmaIncoming::builder().config(Config::from_env().unwrap()).bind("127.0.0.1:0").await.unwrap();
    let endpoint = incoming.local_addr().to_string();
    let given_up = Arc::<AtomicUsize>::default();
    let service = GivesUp { service: server.service(), given_up: Arc::clone(&given_up) };
    tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    let _region = server.export("region", server.allocate(100).unwrap(), Rights::READ).unwrap();
    let channel = client.channel(&endpoint, 0).await.unwrap();
    assert_eq!(channel.region("region").await.unwrap().len(), 100);
    assert_eq!(given_up.load(Ordering::Relaxed), GIVEN_UP + 1);
}

//! The measuring end: each path in a loop.

use std::fmt;
use std::hint::black_box;
use std::time::{Duration, Instant};

use tonic::transport::{Channel, Endpoint};
use tonic_rdma::RdmaConnector;
use tonic_rdma::tensor::{Direction, RdmaDevice, Requested, TensorMut};
use tonic_rdma_proto::greeter::HelloRequest;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use super::content::{check, spec, stamp, text};
use super::runtimes::Flavour;
use super::server::{Addresses, ServerProcess};

/// A way to move bytes to the other process and to hear that they have been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Path {
    /// A call of the greeter over tonic's own transport.
    GrpcTcp,
    /// The same with the two lines changed.
    GrpcRdma,
    /// `static_sender` and `recv().await`, one buffer.
    Static,
    /// The same with two buffers, of which both are on their way.
    Static2,
    Dynamic,
    /// `Channel::request`.
    Rendezvous,
    /// `memcpy` into a region.
    Memcpy,
}

impl Path {
    pub(crate) const ALL: [Self; 7] = [
        Self::GrpcTcp,
        Self::GrpcRdma,
        Self::Static,
        Self::Static2,
        Self::Dynamic,
        Self::Rendezvous,
        Self::Memcpy,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::GrpcTcp => "grpc-tcp",
            Self::GrpcRdma => "grpc-rdma",
            Self::Static => "static",
            Self::Static2 => "static-2",
            Self::Dynamic => "dynamic",
            Self::Rendezvous => "rendezvous",
            Self::Memcpy => "memcpy",
        }
    }

    pub(crate) fn from_name(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|path| path.name() == name);
        found.unwrap_or_else(|| panic!("no path {name:?}: {}", Self::ALL.map(Self::name).join(", ")))
    }

    pub(crate) fn is_grpc(self) -> bool {
        matches!(self, Self::GrpcTcp | Self::GrpcRdma)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// What is measured at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Cell {
    pub(crate) runtime: Flavour,
    pub(crate) bytes: usize,
    pub(crate) inflight: usize,
    pub(crate) path: Path,
}

impl Cell {
    /// What it is compared with.
    pub(crate) fn over_tcp(self) -> Self {
        Self { path: Path::GrpcTcp, ..self }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// Time for each operation: the loop's, divided by its turns.
    pub(crate) micros: f64,
    /// Waits that only the safety net ended, in this process.
    pub(crate) naps: u64,
}

/// Turns before the clock starts.
const WARM: u64 = 100;

/// Measures `cell` for `duration`, at least a thousand turns where that takes no longer than a second or two.
pub(crate) fn run(cell: Cell, duration: Duration) -> Measured {
    let server = ServerProcess::start(cell);
    let addresses = server.addresses();
    let naps = super::server::naps();
    let micros = cell.runtime.run(async {
        match cell.path {
            Path::GrpcTcp | Path::GrpcRdma => greeter(cell, &addresses, duration).await,
            Path::Static | Path::Static2 => fixed(cell, &addresses, duration).await,
            Path::Dynamic => dynamic(cell, &addresses, duration).await,
            Path::Rendezvous => rendezvous(&addresses, duration).await,
            Path::Memcpy => memcpy(cell, &addresses, duration).await,
        }
    });
    Measured { micros, naps: super::server::naps() - naps + server.end() }
}

/// Calls `turn` with one step after the other for as long as is asked; microseconds a turn.
async fn repeat(duration: Duration, mut turn: impl AsyncFnMut(u64)) -> f64 {
    let mut step = 0;
    while step < WARM {
        turn(step).await;
        step += 1;
    }
    let start = Instant::now();
    while start.elapsed() < duration {
        turn(step).await;
        step += 1;
    }
    start.elapsed().as_secs_f64() * 1e6 / (step - WARM) as f64
}

async fn greeter(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let channel: Channel = if cell.path == Path::GrpcRdma {
        let endpoint = Endpoint::from_shared(format!("http://{}", addresses.rdma)).unwrap();
        endpoint.connect_with_connector(RdmaConnector::new()).await.unwrap()
    } else {
        let endpoint = Endpoint::from_shared(format!("http://{}", addresses.tcp)).unwrap();
        endpoint.connect().await.unwrap()
    };
    if cell.inflight == 1 {
        let mut client = GreeterClient::new(channel);
        return repeat(duration, async |step| {
            let request = HelloRequest { name: text(cell.bytes, step) };
            let reply = client.say_hello(request).await.unwrap().into_inner();
            assert_eq!(reply.message, format!("Hello {step:08}"));
        })
        .await;
    }
    let start = Instant::now();
    let tasks: Vec<_> = (0..cell.inflight)
        .map(|_| {
            let mut client = GreeterClient::new(channel.clone());
            tokio::spawn(async move {
                let mut calls = 0_u64;
                while start.elapsed() < duration {
                    let request = HelloRequest { name: text(cell.bytes, calls) };
                    let reply = client.say_hello(request).await.unwrap().into_inner();
                    assert_eq!(reply.message, format!("Hello {calls:08}"));
                    calls += 1;
                }
                calls
            })
        })
        .collect();
    let mut calls = 0;
    for task in tasks {
        calls += task.await.unwrap();
    }
    start.elapsed().as_secs_f64() * 1e6 / calls as f64
}

async fn device(addresses: &Addresses) -> (RdmaDevice, tonic_rdma::tensor::Channel) {
    let device = RdmaDevice::new(1, 2, "127.0.0.1:0").await.unwrap();
    let channel = device.channel(&addresses.device, 0).await.unwrap();
    (device, channel)
}

async fn fixed(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let (device, channel) = device(addresses).await;
    let mut sender = channel.static_sender("slot", &spec(cell.bytes)).await.unwrap();
    let mut region = Some(device.allocate(cell.bytes).unwrap());
    let micros = repeat(duration, async |step| {
        let mut filled = region.take().unwrap();
        stamp(&mut filled[..cell.bytes], step);
        let (back, sent) = sender.send_region(filled).await;
        sent.unwrap();
        region = Some(back);
    })
    .await;
    sender.flush().await.unwrap();
    micros
}

async fn dynamic(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let (_device, channel) = device(addresses).await;
    let mut sender = channel.dynamic_sender("slot").await.unwrap();
    let pool = tonic_rdma::memory::Pool::for_sending(1 << 28);
    let micros = repeat(duration, async |step| {
        let mut tensor = TensorMut::in_pool(spec(cell.bytes), &pool).unwrap();
        stamp(tensor.bytes_mut(), step);
        sender.send(&tensor.freeze()).await.unwrap();
    })
    .await;
    sender.flush().await.unwrap();
    micros
}

async fn rendezvous(addresses: &Addresses, duration: Duration) -> f64 {
    let (_device, channel) = device(addresses).await;
    repeat(duration, async |step| {
        let Requested::Tensor(tensor) = channel.request("tensor", step).await.unwrap() else {
            panic!("a dead tensor")
        };
        let bytes = tensor.bytes().unwrap();
        check(bytes, bytes, step);
        black_box(tensor);
    })
    .await
}

async fn memcpy(cell: Cell, addresses: &Addresses, duration: Duration) -> f64 {
    let (device, channel) = device(addresses).await;
    let remote = channel.region("region").await.unwrap();
    let mut region = Some(device.allocate(cell.bytes).unwrap());
    repeat(duration, async |step| {
        let mut filled = region.take().unwrap();
        stamp(&mut filled[..cell.bytes], step);
        let length = cell.bytes as u64;
        let (back, result) = channel.memcpy(filled, 0, &remote, 0, length, Direction::LocalToRemote).await;
        result.unwrap();
        region = Some(back);
    })
    .await
}

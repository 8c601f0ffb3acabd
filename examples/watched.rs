//! A server, or a client that calls it, with metrics for Prometheus. Lines on stdin make it misbehave, so that
//! `docs/deploy/watch/check` can see each alert.
//!
//! ```text
//! watched server 127.0.0.1:50051 127.0.0.1:9464
//! watched client 127.0.0.1:50051 127.0.0.1:9465 connections=2 rate=100
//! ```
//!
//! The second address serves the metrics. Further arguments, and the words of a line on stdin, are
//! `NAME=NUMBER`; [`Settings`] has the names. The process ends with its stdin. `RDMA_HISTOGRAMS=yes` adds the
//! histograms of calls.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints its results")]

use std::collections::VecDeque;
use std::error::Error;
use std::io::{self, Read as _, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_rdma::gather::{GatherBoth, GatherBothLayer};
use tonic_rdma::memory::Pool;
use tonic_rdma::{RdmaChannel, RdmaIncoming, RdmaServer};
use tonic_rdma_proto::transfer::transfer_client::TransferClient;
use tonic_rdma_proto::transfer::transfer_server::{Transfer, TransferServer};
use tonic_rdma_proto::transfer::{PutReply, PutRequest};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [role, address, metrics, words @ ..] = &arguments[..] else {
        return Err("accepted: server|client ADDRESS METRICS [NAME=NUMBER...]".into());
    };
    let mut settings = Settings::default();
    words.iter().try_for_each(|word| settings.set(word))?;
    tracing_subscriber::fmt().with_writer(io::stderr).with_ansi(false).init();

    let handle = PrometheusBuilder::new().install_recorder()?;
    let listener = TcpListener::bind(metrics)?;
    println!("metrics at http://{}/metrics", listener.local_addr()?);
    // A thread of its own, because a handler may block the runtime's.
    thread::spawn(move || serve_metrics(&listener, &handle));

    let (sender, lines) = mpsc::unbounded_channel();
    thread::spawn(move || io::stdin().lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    match &**role {
        "server" => serve(address, settings, lines).await,
        "client" => call(address, settings, lines).await,
        role => Err(format!("{role:?}: accepted: server, client").into()),
    }
}

/// What the process does, as numbers. 0 and 1 are no and yes.
#[derive(Clone, Copy, Debug)]
struct Settings {
    /// Client: connections.
    connections: u64,
    /// Client: tasks of each connection that make calls.
    callers: u64,
    /// Client: calls of each task in a second, or, with `stream`, messages; 0: without a pause.
    rate: u64,
    /// Client: bytes of a payload.
    length: u64,
    /// Client: its payload is in registered memory, so it is sent in place.
    registered: u64,
    /// Client: sends its payloads in one call without an end.
    stream: u64,
    /// Server, at its start: takes native calls.
    native: u64,
    /// Server: milliseconds that a handler waits.
    delay: u64,
    /// Server: handlers answer together, once in so many milliseconds.
    batch: u64,
    /// Server: milliseconds for which a handler blocks its thread, which is the only one.
    block: u64,
    /// Server: the status of calls, such as 13 for INTERNAL.
    fail: u64,
    /// Server: the number of payloads that it keeps.
    keep: u64,
    /// Server: reads the streams of clients.
    read: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            connections: 1,
            callers: 1,
            rate: 20,
            length: 64,
            registered: 0,
            stream: 0,
            native: 1,
            delay: 0,
            batch: 0,
            block: 0,
            fail: 0,
            keep: 0,
            read: 1,
        }
    }
}

impl Settings {
    /// Sets what the words of a line name.
    fn set(&mut self, line: &str) -> Result<(), String> {
        for word in line.split_whitespace() {
            let parts = word.split_once('=').and_then(|(name, value)| Some((name, value.parse().ok()?)));
            let (name, value) = parts.ok_or_else(|| format!("{word:?}: accepted: NAME=NUMBER"))?;
            let setting = match name {
                "connections" => &mut self.connections,
                "callers" => &mut self.callers,
                "rate" => &mut self.rate,
                "length" => &mut self.length,
                "registered" => &mut self.registered,
                "stream" => &mut self.stream,
                "native" => &mut self.native,
                "delay" => &mut self.delay,
                "batch" => &mut self.batch,
                "block" => &mut self.block,
                "fail" => &mut self.fail,
                "keep" => &mut self.keep,
                "read" => &mut self.read,
                _ => return Err(format!("{name:?} is no setting; accepted: the fields of {self:?}")),
            };
            *setting = value;
        }
        Ok(())
    }
}

async fn serve(
    address: &str,
    settings: Settings,
    mut lines: mpsc::UnboundedReceiver<String>,
) -> Result<(), Box<dyn Error>> {
    let incoming = RdmaIncoming::bind(address).await?;
    println!("listening on {}", incoming.local_addr());
    let now = Arc::new(Mutex::new(settings));
    let service = TransferServer::new(Watched {
        start: Instant::now(),
        settings: Arc::clone(&now),
        kept: Mutex::default(),
    })
    .max_decoding_message_size(1 << 30);
    let layer = GatherBothLayer::new().max_decoding_message_size(1 << 30);
    let ended = async move {
        while let Some(line) = lines.recv().await {
            let mut settings = now.lock().unwrap_or_else(PoisonError::into_inner);
            match settings.set(&line) {
                Ok(()) => println!("{settings:?}"),
                Err(error) => eprintln!("{error}"),
            }
        }
    };
    if settings.native == 1 {
        RdmaServer::new()
            .layer(layer)
            .add_service(service)
            .serve_with_incoming_shutdown(incoming, ended)
            .await?;
    } else {
        Server::builder().add_service(service).serve_with_incoming_shutdown(incoming, ended).await?;
    }
    Ok(())
}

/// A service that misbehaves as the settings say.
#[derive(Debug)]
struct Watched {
    start: Instant,
    settings: Arc<Mutex<Settings>>,
    kept: Mutex<VecDeque<Bytes>>,
}

impl Watched {
    fn settings(&self) -> Settings {
        *self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl Transfer for Watched {
    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutReply>, Status> {
        let settings = self.settings();
        thread::sleep(Duration::from_millis(settings.block));
        if settings.delay > 0 {
            sleep(Duration::from_millis(settings.delay)).await;
        }
        if let Some(batch) = self.start.elapsed().as_millis().checked_div(settings.batch.into()) {
            sleep_until(self.start + Duration::from_millis(settings.batch * (batch as u64 + 1))).await;
        }
        match i32::try_from(settings.fail).map(Code::from_i32) {
            Ok(Code::Ok) => {}
            code => return Err(Status::new(code.unwrap_or(Code::Unknown), "this server was told to fail")),
        }
        let payload = request.into_inner().payload;
        let reply = PutReply { bytes: payload.len() as u64, ..Default::default() };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back(payload);
        while kept.len() as u64 > settings.keep {
            kept.pop_front();
        }
        Ok(Response::new(reply))
    }

    async fn echo(
        &self,
        request: Request<Streaming<PutRequest>>,
    ) -> Result<Response<BoxStream<PutRequest>>, Status> {
        while self.settings().read == 0 {
            sleep(Duration::from_millis(100)).await;
        }
        Ok(Response::new(Box::pin(request.into_inner())))
    }
}

async fn call(
    address: &str,
    mut settings: Settings,
    mut lines: mpsc::UnboundedReceiver<String>,
) -> Result<(), Box<dyn Error>> {
    let pool = Pool::for_sending(1 << 30);
    loop {
        let mut callers = JoinSet::new();
        let payload = if settings.registered == 1 {
            pool.allocate(settings.length as usize)?.freeze()
        } else {
            Bytes::from(vec![1; settings.length as usize])
        };
        for _ in 0..settings.connections {
            let channel = GatherBoth::new(RdmaChannel::connect_lazy(format!("http://{address}"))?);
            for _ in 0..settings.callers {
                callers.spawn(make_calls(TransferClient::new(channel.clone()), payload.clone(), settings));
            }
        }
        println!("{settings:?}");
        let Some(line) = lines.recv().await else { break };
        settings.set(&line).unwrap_or_else(|error| eprintln!("{error}"));
    }
    // The connections say goodbye meanwhile.
    sleep(Duration::from_millis(200)).await;
    Ok(())
}

/// Makes calls until the task is dropped, and prints those that fail.
async fn make_calls(mut client: TransferClient<GatherBoth<RdmaChannel>>, payload: Bytes, settings: Settings) {
    let mut ticks =
        interval(Duration::from_secs(1) / u32::try_from(settings.rate.max(1)).unwrap_or(u32::MAX));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let paced = settings.rate > 0;
    loop {
        let request = PutRequest { payload: payload.clone(), ..Default::default() };
        let result = if settings.stream == 1 {
            let (sender, messages) = mpsc::channel(1);
            let send = async {
                while sender.send(request.clone()).await.is_ok() {
                    if paced {
                        ticks.tick().await;
                    }
                }
            };
            let read = async {
                let mut replies = client.echo(ReceiverStream::new(messages)).await?.into_inner();
                while replies.next().await.transpose()?.is_some() {}
                Ok(())
            };
            tokio::select! { result = read => result, () = send => Ok(()) }
        } else {
            client.put(request).await.map(drop)
        };
        if let Err(status) = result {
            eprintln!("a call failed: {:?}, {}", status.code(), status.message());
            sleep(Duration::from_millis(100)).await;
        }
        if paced {
            ticks.tick().await;
        }
    }
}

/// Answers each request with the metrics.
fn serve_metrics(listener: &TcpListener, handle: &PrometheusHandle) {
    for stream in listener.incoming() {
        let answer = || {
            let mut stream = stream?;
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            let _request = stream.read(&mut [0; 4096])?;
            handle.run_upkeep();
            let (text, kind) = (handle.render(), "text/plain; version=0.0.4");
            let length = text.len();
            write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{text}"
            )
        };
        answer().unwrap_or_else(|error: io::Error| eprintln!("a request for metrics: {error}"));
    }
}

//! A greeter whose answer depends on the name in the request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Semaphore;
use tokio_stream::StreamExt as _;
use tonic::codegen::BoxStream;
use tonic::{Request, Response, Status, Streaming};
use tonic_rdma::RdmaConnectInfo;
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;
use tonic_rdma_proto::greeter::greeter_server::Greeter;
use tonic_rdma_proto::greeter::{HelloReply, HelloRequest};

/// The service, and the counts that a test reads.
#[derive(Clone, Debug, Default)]
pub struct ScriptedGreeter {
    calls: Arc<Calls>,
}

#[derive(Debug)]
struct Calls {
    arrived: AtomicUsize,
    held: AtomicUsize,
    most_held: AtomicUsize,
    dropped: AtomicUsize,
    releases: Semaphore,
}

impl Default for Calls {
    fn default() -> Self {
        let [arrived, held, most_held, dropped] = [const { AtomicUsize::new(0) }; 4];
        Self { arrived, held, most_held, dropped, releases: Semaphore::new(0) }
    }
}

impl ScriptedGreeter {
    /// Creates a service with all counts at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of calls that have arrived so far.
    pub fn calls(&self) -> usize {
        self.calls.arrived.load(Ordering::SeqCst)
    }

    /// Returns the number of calls that are held now.
    pub fn held(&self) -> usize {
        self.calls.held.load(Ordering::SeqCst)
    }

    /// Returns the largest number of calls that were held at one time.
    pub fn most_held(&self) -> usize {
        self.calls.most_held.load(Ordering::SeqCst)
    }

    /// Returns the number of held calls that were cancelled before their release.
    pub fn dropped(&self) -> usize {
        self.calls.dropped.load(Ordering::SeqCst)
    }

    /// Releases `calls` held calls. If fewer are held, the next calls to arrive are released at once.
    pub fn release(&self, calls: usize) {
        self.calls.releases.add_permits(calls);
    }

    async fn hold(&self) {
        let mut held = Held { calls: &self.calls, released: false };
        let now = self.calls.held.fetch_add(1, Ordering::SeqCst) + 1;
        self.calls.most_held.fetch_max(now, Ordering::SeqCst);
        self.calls.releases.acquire().await.unwrap().forget();
        held.released = true;
    }
}

struct Held<'a> {
    calls: &'a Calls,
    released: bool,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.calls.held.fetch_sub(1, Ordering::SeqCst);
        self.calls.dropped.fetch_add(usize::from(!self.released), Ordering::SeqCst);
    }
}

#[tonic::async_trait]
impl Greeter for ScriptedGreeter {
    /// Answers `hold` when the test releases the call. Answers `over` with the transport, `peer` with the
    /// client's address, `header NAME` with this header of the request, and `process` with the number of the
    /// process. Sends every other name back.
    async fn say_hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        self.calls.arrived.fetch_add(1, Ordering::SeqCst);
        let message = match &*request.get_ref().name {
            "hold" => {
                self.hold().await;
                "held".into()
            }
            "over" => over(&request),
            "peer" => peer(&request),
            "process" => std::process::id().to_string(),
            name => match name.strip_prefix("header ") {
                Some(name) => format!("{:?}", request.metadata().get(name)),
                None => name.into(),
            },
        };
        Ok(Response::new(HelloReply { message }))
    }

    /// Sends every name back when it arrives.
    async fn chat(
        &self,
        request: Request<Streaming<HelloRequest>>,
    ) -> Result<Response<BoxStream<HelloReply>>, Status> {
        self.calls.arrived.fetch_add(1, Ordering::SeqCst);
        let replies = request.into_inner().map(|name| name.map(|name| HelloReply { message: name.name }));
        Ok(Response::new(Box::pin(replies)))
    }
}

fn over(request: &Request<HelloRequest>) -> String {
    let info = request.extensions().get::<RdmaConnectInfo>();
    info.map_or("stock".into(), |info| info.verdict().to_string())
}

fn peer(request: &Request<HelloRequest>) -> String {
    let info = request.extensions().get::<RdmaConnectInfo>();
    format!("{:?}", info.map(RdmaConnectInfo::peer_addr).or(request.remote_addr()))
}

/// Calls a greeter with `name`, over any channel, and returns the answer.
pub async fn say<T>(client: &mut GreeterClient<T>, name: impl Into<String>) -> Result<String, Status>
where
    T: tonic::client::GrpcService<tonic::body::Body>,
    T::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    T::ResponseBody: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send,
{
    Ok(client.say_hello(HelloRequest { name: name.into() }).await?.into_inner().message)
}

/// Reduces the result of a call to the parts that tests compare: the answer, or the code and the message.
pub fn outcome(result: Result<String, Status>) -> Result<String, (tonic::Code, String)> {
    result.map_err(|status| (status.code(), status.message().to_owned()))
}
